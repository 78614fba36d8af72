"""Draws two figures of a campaign as inline SVG: its studies along the budget, and its effects. Colours come from the style sheet.

Explorations and confirmations differ in colour and in shape, so that readers can distinguish them without colour.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from researcher.report.drawing import Scale, ticks
from researcher.view import duration

_WIDTH = 720
_LEFT, _RIGHT = 118, 12
_ROW, _AXIS = 24, 30
_EFFECT_ROW = 40
_LONGEST = 58
"""Maximum length of a label, in characters, so that it also fits on a narrow screen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A study on the timeline. `spent` is in seconds or trials."""

    seq: int
    action: str
    confirms: bool
    spent: float
    status: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectRow:
    """An effect with its interval. `verdict` is set for a confirmation, else ""."""

    seq: int
    text: str
    diff: float
    low: float
    high: float
    confirms: bool
    verdict: str


def timeline(bars: Sequence[Bar], *, left: float, reserved: float, in_seconds: bool) -> str:
    """Draw one bar per study, in sequence, as wide as what it spent; then the rest of the budget, with its reserved part at the end."""
    spent = sum(bar.spent for bar in bars)
    end = spent + left
    if end <= 0:
        return ""
    unit, name = _unit(end) if in_seconds else (1.0, "trials")
    x = Scale.over([0.0, end], _LEFT, _WIDTH - _RIGHT)
    bottom = 8 + _ROW * (len(bars) + 1)
    marks = [tick for tick in ticks(0, end / unit, 7) if tick * unit <= end * 1.0001]
    body = [f'<path class="grid" d="M{x(mark * unit):.1f} 4V{bottom}"/>' for mark in marks]
    body += [_text(x(mark * unit), bottom + 14, f"{mark:g}", "middle") for mark in marks]
    body.append(f'<g class="axis">{_text((_LEFT + _WIDTH - _RIGHT) / 2, bottom + _AXIS, name, "middle")}</g>')
    at = 0.0
    for number, bar in enumerate(bars):
        y = 8 + _ROW * number
        said = f"decision {bar.seq}, {bar.action}: {_amount(bar.spent, in_seconds)}, {bar.status}"
        body.append(_text(_LEFT - 8, y + 14, f"{bar.seq}. {bar.action}", "end"))
        body.append(_box(x(at), y + 3, x(at + bar.spent) - x(at), _role(bar.confirms), said))
        at += bar.spent
    y = 8 + _ROW * len(bars)
    body.append(_text(_LEFT - 8, y + 14, "left", "end"))
    free = left - reserved
    if free > 0:
        body.append(_box(x(spent), y + 3, x(spent + free) - x(spent), "left", f"left: {_amount(free, in_seconds)}"))
    if reserved > 0:
        said = f"reserved for confirmations: {_amount(reserved, in_seconds)}"
        body.append(_box(x(spent + free), y + 3, x(end) - x(spent + free), "reserved", said))
    title = "Studies along the budget: " + ", ".join(
        [f"{bar.seq} {bar.action} {_amount(bar.spent, in_seconds)}" for bar in bars]
        + [f"{_amount(left, in_seconds)} left, of which {_amount(reserved, in_seconds)} reserved for confirmations"]
    )
    return _svg("timeline", bottom + _AXIS + 6, title, body)


def effects(rows: Sequence[EffectRow], margin: float, metric: str) -> str:
    """Draw one row per effect: treatment minus baseline with its interval. The band within the margin is shaded. Returns an
    empty string without effects."""
    if not rows:
        return ""
    reach = [value for row in rows for value in (row.low, row.diff, row.high)]
    low, high = min(-margin, *reach), max(margin, *reach)
    x = Scale.over([low, high], 14, _WIDTH - 14)
    bottom = 6 + _EFFECT_ROW * len(rows)
    marks = [tick for tick in ticks(low, high, 8) if low <= tick <= high]
    body = [
        f'<rect class="band" x="{x(-margin):.1f}" y="4" width="{x(margin) - x(-margin):.1f}" height="{bottom - 4}"/>'
    ]
    body += [f'<path class="{"zero" if mark == 0 else "grid"}" d="M{x(mark):.1f} 4V{bottom}"/>' for mark in marks]
    body += [_text(x(mark), bottom + 14, f"{mark:g}", "middle") for mark in marks]
    title = f"difference in {metric}; shaded: within the margin of {margin:g}"
    body.append(f'<g class="axis">{_text(_WIDTH / 2, bottom + _AXIS, title, "middle")}</g>')
    body += [part for number, row in enumerate(rows) for part in _effect(row, 6 + _EFFECT_ROW * number, x)]
    return _svg("intervals", bottom + _AXIS + 6, f"Effects on {metric} with their intervals", body)


def _effect(row: EffectRow, top: float, x: Scale) -> list[str]:
    """Draw one row. A confirmation is a filled dot on a solid line, an exploration a hollow dot on a dashed line."""
    at, said = top + 27, f"{row.seq}. {row.text}"
    words = row.verdict or ("no verdict" if row.confirms else "explored")
    numbers = f"{said}: {row.diff:+.3g} [{row.low:+.3g}, {row.high:+.3g}], {words}"
    short = said if len(said) <= _LONGEST else f"{said[: _LONGEST - 1]}…"
    return [
        f'<g class="{_role(row.confirms)}"><title>{escape(numbers)}</title>',
        f'<path d="M{x(row.low):.1f} {at}H{x(row.high):.1f}"/>',
        f'<circle cx="{x(row.diff):.1f}" cy="{at}" r="5"/></g>',
        _text(14, top + 14, f"{short}: {words}", "start"),
    ]


def _role(confirms: bool) -> str:
    return "confirm" if confirms else "explore"


def _unit(seconds: float) -> tuple[float, str]:
    """Choose the unit for an axis of this length. Returns the unit's seconds and its name."""
    if seconds >= 2 * 86_400:
        return 86_400.0, "days of trials"
    if seconds >= 2 * 3600:
        return 3600.0, "hours of trials"
    return (60.0, "minutes of trials") if seconds >= 120 else (1.0, "seconds of trials")


def _amount(value: float, in_seconds: bool) -> str:
    return duration(value) if in_seconds else f"{value:g} trials"


def _box(x: float, y: float, width: float, kind: str, said: str) -> str:
    """Draw a bar that is at least wide enough to be seen."""
    place = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 1.5):.1f}" height="{_ROW - 8}"'
    return f'<rect class="{kind}" {place}><title>{escape(said)}</title></rect>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(kind: str, height: float, title: str, body: Sequence[str]) -> str:
    head = f'<svg class="curves {kind}" viewBox="0 0 {_WIDTH} {height:.0f}" role="img">'
    return f"{head}<title>{escape(title)}</title>{''.join(body)}</svg>"
