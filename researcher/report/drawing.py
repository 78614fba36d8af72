"""Draws two figures as SVG text: learning curves, and effects against their margins. They need no scripts, fonts or network.

Every position comes from a series or a claim; `claims` formats every printed number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Self

from researcher.models import Claim, TrialRecord
from researcher.report.claims import Style, printed
from researcher.report.records import held_out_curve, mean_curve

Line = Sequence[tuple[int, float]]

# Distinct for colour-blind readers; the dashes distinguish arms on paper without colour.
_COLOURS = ("#0b62a4", "#c8500a", "#00795c", "#8a3d8f", "#8c6a00", "#3d3d3d")
_DASHES = ("", "7 3", "2 3", "9 3 2 3", "12 4", "4 2")
_INK, _GRID = "#3a3f45", "#e3e6ea"
_WIDTH, _HEIGHT = 760, 340
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 20, 14, 52
_ROW = 22
_LABELS = 250
"""Minimum width of the labels of effects."""
_LETTER = 7.2
"""Average width of a letter, rounded up."""
_SPARKS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class Interval:
    """One effect to draw. `margin` makes effects on different metrics comparable."""

    label: str
    verdict: str
    diff: Claim
    low: Claim
    high: Claim
    margin: float


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps values to pixels."""

    low: float
    high: float
    start: float
    end: float

    @classmethod
    def over(cls, values: Sequence[float], start: float, end: float) -> Self:
        """Return the scale that covers these values; a single value lies in the middle."""
        low, high = min(values), max(values)
        return cls(low, high, start, end) if high > low else cls(low - 0.5, low + 0.5, start, end)

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def learning_curves(arms: Sequence[tuple[str, Sequence[TrialRecord]]], series: str, y_label: str) -> str:
    """Draw thin lines for seeds, bold lines for an arm's mean, and rings for an arm's mean held-out reward. Returns an empty
    string if no trial recorded the series."""
    lines = [(name, [sorted(t.series[series]) for t in trials if t.series.get(series)]) for name, trials in arms]
    held = [mean_curve([line for trial in trials if (line := held_out_curve(trial))]) for _, trials in arms]
    points = [point for _, seeds in lines for line in seeds for point in line]
    if not points:
        return ""
    points += [point for line in held for point in line]
    steps, values = [step for step, _ in points], [value for _, value in points]
    x_ticks = [tick for tick in ticks(min(steps), max(steps), 8) if tick == int(tick)]
    y_ticks = ticks(min(values), max(values), 6)
    x = Scale.over([*steps, *x_ticks], _LEFT, _WIDTH - _RIGHT)
    y = Scale.over([*values, *y_ticks], _HEIGHT - _BOTTOM, _TOP)
    body = _frame(x, y, x_ticks, y_ticks, "optimiser step", y_label)
    for number, (_, seeds) in enumerate(lines):
        body += [_path(line, x, y, number, bold=False) for line in seeds]
    body += [_path(mean_curve(seeds), x, y, number, bold=True) for number, (_, seeds) in enumerate(lines)]
    for number, line in enumerate(held):
        body += _rings(line, x, y, number)
    legend, rows = _legend([name for name, _ in arms], ringed=any(held))
    body += legend
    return _svg(_HEIGHT + rows * _ROW, f"Learning curves: {y_label} by optimiser step, one bold line per arm", body)


def effects(intervals: Sequence[Interval]) -> str:
    """Draw estimates and intervals in units of each hypothesis's margin; the band between the margins is shaded."""
    known = [one for one in intervals if all(isinstance(c.value, float | int) for c in (one.diff, one.low, one.high))]
    if not known:
        return ""
    top, row = 18, 44
    left = max(_LABELS, 24 + _LETTER * max(len(text) for one in known for text in (one.label, one.verdict)))
    right = left + _WIDTH - _LABELS - _RIGHT
    bottom = top + row * len(known)
    reach = [_units(claim, one) for one in known for claim in (one.low, one.diff, one.high)]
    x_ticks = ticks(min(-1.0, *reach), max(1.0, *reach), 7)
    x = Scale.over([*x_ticks, -1.2, 1.2, *reach], left, right)
    body = [_rect(x(-1), top, x(1) - x(-1), bottom - top, "#eef2f6")]
    body += [_text(x(tick), bottom + 18, printed(tick, Style.PLAIN), "middle") for tick in x_ticks]
    body += [_rule(x(tick), top, x(tick), bottom, _INK if tick == 0 else _GRID) for tick in x_ticks]
    body.append(
        _text(
            (left + right) / 2, bottom + 38, "difference, in units of the margin (shaded: within the margin)", "middle"
        )
    )
    for number, one in enumerate(known):
        at = top + row * (number + 0.5)
        low, diff, high = (x(_units(claim, one)) for claim in (one.low, one.diff, one.high))
        body += [
            _text(left - 12, at - 3, one.label, "end", weight="600"),
            _text(left - 12, at + 12, one.verdict, "end"),
            _rule(low, at, high, at, _COLOURS[0], 2.5),
            _rule(low, at - 5, low, at + 5, _COLOURS[0], 2),
            _rule(high, at - 5, high, at + 5, _COLOURS[0], 2),
            f'<circle cx="{diff:.1f}" cy="{at:.1f}" r="4.5" fill="{_COLOURS[0]}"/>',
            _text(diff, at - 10, one.diff.text, "middle", weight="600"),
        ]
    return _svg(bottom + 48, "Effects with their intervals, in units of the margin", body, right + _RIGHT)


def standalone(svg: str) -> str:
    """Turn the drawing into a standalone file. The namespace is only a name; nothing is fetched from it."""
    return svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1) + "\n"


def sparkline(line: Line, beside: Iterable[Line] = ()) -> str:
    """Draw a curve as one row of block characters. `beside` lists other curves that share its scale."""
    values = [value for _, value in sorted(line)]
    if not values:
        return ""
    shown = [*values, *(value for other in beside for _, value in other)]
    low, spread = min(shown), max(shown) - min(shown)
    top = len(_SPARKS) - 1
    return "".join(_SPARKS[round((value - low) / spread * top) if spread else 0] for value in values)


def ticks(low: float, high: float, most: int) -> list[float]:
    """Return at most `most` round numbers that cover `low` to `high`, which may be equal."""
    if high <= low:
        reach = abs(low) / 10 or 0.5
        low, high = low - reach, high + reach
    for exponent in range(math.floor(math.log10((high - low) / most)), 400):
        for step in (1, 2, 5):
            size = step * 10.0**exponent
            first, last = math.floor(low / size), math.ceil(high / size)
            if last - first < most:
                digits = max(0, -exponent)
                return [round(number * size, digits) for number in range(first, last + 1)]
    raise ValueError(f"found no ticks between {low} and {high}")


def _units(claim: Claim, of: Interval) -> float:
    if not isinstance(claim.value, float | int):
        raise ValueError(f"claim {claim.name} is not a number")
    return claim.value / of.margin


def _frame(
    x: Scale, y: Scale, x_ticks: Sequence[float], y_ticks: Sequence[float], x_label: str, y_label: str
) -> list[str]:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    body = [_rule(_LEFT, y(tick), right, y(tick), _GRID) for tick in y_ticks]
    body += [_text(_LEFT - 8, y(tick) + 4, printed(tick, Style.PLAIN), "end") for tick in y_ticks]
    body += [_rule(x(tick), bottom, x(tick), bottom + 5, _INK) for tick in x_ticks]
    body += [_text(x(tick), bottom + 19, printed(tick, Style.PLAIN), "middle") for tick in x_ticks]
    body += [_rule(_LEFT, bottom, right, bottom, _INK), _rule(_LEFT, _TOP, _LEFT, bottom, _INK)]
    middle = (_TOP + bottom) / 2
    turned = f'transform="rotate(-90 14 {middle:.1f})"'
    body += [_text((_LEFT + right) / 2, bottom + 38, x_label, "middle"), _text(14, middle, y_label, "middle", turned)]
    return body


def _path(line: Line, x: Scale, y: Scale, number: int, *, bold: bool) -> str:
    colour, dash = _look(number)
    if len(line) == 1:
        (step, value), radius = line[0], 4 if bold else 2
        return f'<circle cx="{x(step):.1f}" cy="{y(value):.1f}" r="{radius}" fill="{colour}"/>'
    points = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in line)
    width, opacity = (2.8, 1) if bold else (1, 0.4)
    dashes = f' stroke-dasharray="{dash}"' if bold and dash else ""
    return (
        f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{width}" '
        f'stroke-opacity="{opacity}" stroke-linejoin="round"{dashes}/>'
    )


def _rings(line: Line, x: Scale, y: Scale, number: int) -> list[str]:
    """Draw held-out points as rings. The dotted line between them only shows that they belong together; it is not a measurement."""
    if not line:
        return []
    colour, _ = _look(number)
    points = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in line)
    dotted = f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.2" stroke-dasharray="1 4"/>'
    rings = [_ring(x(step), y(value), colour) for step, value in line]
    return [dotted, *rings] if len(line) > 1 else rings


def _ring(x: float, y: float, colour: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.2" fill="#fff" stroke="{colour}" stroke-width="1.8"/>'


def _legend(names: Sequence[str], *, ringed: bool) -> tuple[list[str], int]:
    """Draw a legend below the axis, in as many rows as the names need. `ringed`: whether there are held-out points."""
    body: list[str] = []
    at, row = float(_LEFT), 0
    if ringed:
        body += [_ring(at + 8, _HEIGHT + 4, _INK), _text(at + 20, _HEIGHT + 8, "on held-out tasks", "start")]
        at += 44 + _LETTER * len("on held-out tasks")
    for number, name in enumerate(names):
        room = 56 + _LETTER * len(name)
        if at + room > _WIDTH and at > _LEFT:
            at, row = float(_LEFT), row + 1
        (colour, dash), y = _look(number), _HEIGHT + row * _ROW + 8
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        body.append(f'<path d="M{at:.1f} {y - 4}h26" stroke="{colour}" stroke-width="2.8"{dashes}/>')
        body.append(_text(at + 32, y, name, "start"))
        at += room
    return body, row + 1


def _look(number: int) -> tuple[str, str]:
    return _COLOURS[number % len(_COLOURS)], _DASHES[number % len(_DASHES)]


def _text(x: float, y: float, text: str, anchor: str, extra: str = "", weight: str = "400") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}"'
    return f"<text {place} {extra}>{escape(text)}</text>" if extra else f"<text {place}>{escape(text)}</text>"


def _rule(x1: float, y1: float, x2: float, y2: float, colour: str, width: float = 1) -> str:
    return f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" stroke="{colour}" stroke-width="{width}"/>'


def _rect(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"/>'


def _svg(height: float, title: str, body: Sequence[str], width: float = _WIDTH) -> str:
    head = (
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" role="img" '
        f'font-family="system-ui, sans-serif" font-size="12.5" fill="{_INK}"><title>{escape(title)}</title>'
    )
    return "\n".join([head, f'<rect width="{width:.0f}" height="{height:.0f}" fill="#fff"/>', *body, "</svg>"])
