"""Draws learning curves as inline SVG: a small one for each trial, and a large one for all trials. Colours come from the style
sheet.

The input is numbers; the only text is an arm's name, which is escaped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from researcher.instruments.instrument import HELDOUT_REWARD
from researcher.models import TrialRecord, TrialStatus
from researcher.report.drawing import Line, Scale, ticks
from researcher.report.records import mean_curve

CURVE, HELD_OUT = "reward_mean", HELDOUT_REWARD
COLOURS = 6
"""Number of colours in the style sheet. If there are more arms, colours repeat."""
_MOST_POINTS = 120
_SMALL = (120, 26)
_WIDTH, _HEIGHT = 720, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 10, 10, 36


def small(line: Line, colour: int) -> str:
    """Draw one small curve, with a dot at its newest point. Returns an empty string before the first point."""
    if not line:
        return ""
    points = _thinned(line)
    width, height = _SMALL
    x = Scale.over([step for step, _ in points], 3, width - 4)
    y = Scale.over([value for _, value in points], height - 4, 4)
    end = f'<circle cx="{x(points[-1][0]):.1f}" cy="{y(points[-1][1]):.1f}" r="2.4"/>'
    drawn = _polyline(points, x, y) if len(points) > 1 else ""
    label = f"{len(line)} steps, from {line[0][1]:.3g} to {line[-1][1]:.3g}"
    return (
        f'<svg class="spark arm{colour % COLOURS}" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img"><title>{label}</title>{drawn}{end}</svg>'
    )


def large(trials: Sequence[TrialRecord], colours: Mapping[str, int], steps: int) -> str:
    """Draw thin lines for seeds, bold lines for the mean of an arm's finished trials, and rings for interim evaluations.

    Returns an empty string before the first point. `steps` is the minimum length of the axis.
    """
    lines = [(trial.arm, trial.series[CURVE]) for trial in trials if trial.series.get(CURVE)]
    if not lines:
        return ""
    held = [(trial.arm, trial.series[HELD_OUT]) for trial in trials if trial.series.get(HELD_OUT)]
    values = [value for _, line in (*lines, *held) for _, value in line]
    y_ticks = ticks(min(values), max(values), 6)
    last = max(steps, *(step for _, line in lines for step, _ in line))
    x_ticks = [tick for tick in ticks(0, last, 9) if tick == int(tick) and tick <= last]
    x, y = Scale.over([0, last], _LEFT, _WIDTH - _RIGHT), Scale.over(y_ticks, _HEIGHT - _BOTTOM, _TOP)
    body = [f'<path class="grid" d="M{_LEFT} {y(tick):.1f}H{_WIDTH - _RIGHT}"/>' for tick in y_ticks]
    body += [_label(_LEFT - 6, y(tick) + 4, f"{tick:g}", "end") for tick in y_ticks]
    body += [_label(x(tick), _HEIGHT - _BOTTOM + 16, f"{tick:g}", "middle") for tick in x_ticks]
    title = _label((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 3, "optimiser step", "middle")
    body.append(f'<g class="axis">{title}</g>')
    for arm, line in lines:
        body.append(f'<g class="seed arm{colours[arm] % COLOURS}">{_line(line, x, y)}</g>')
    for arm, colour in colours.items():
        ended = [trial for trial in trials if trial.arm == arm and trial.status is TrialStatus.DONE]
        done = [trial.series[CURVE] for trial in ended if CURVE in trial.series]
        if len(done) > 1 and (mean := mean_curve(done)):
            body.append(
                f'<g class="mean arm{colour % COLOURS}"><title>mean of {escape(arm)}</title>{_line(mean, x, y)}</g>'
            )
    for arm, line in held:
        rings = "".join(f'<circle cx="{x(step):.1f}" cy="{y(value):.1f}" r="3.4"/>' for step, value in _thinned(line))
        body.append(f'<g class="held arm{colours[arm] % COLOURS}">{rings}</g>')
    return (
        f'<svg class="curves" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">'
        f"<title>Mean reward by optimiser step</title>{''.join(body)}</svg>"
    )


def _thinned(line: Line) -> Line:
    """Thin out the points evenly, keeping the newest."""
    stride = -(-len(line) // _MOST_POINTS)
    return list(line[::-1][::stride][::-1])


def _line(line: Line, x: Scale, y: Scale) -> str:
    if len(line) == 1:
        return f'<circle cx="{x(line[0][0]):.1f}" cy="{y(line[0][1]):.1f}" r="3"/>'
    return _polyline(_thinned(line), x, y)


def _polyline(line: Line, x: Scale, y: Scale) -> str:
    points = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in line)
    return f'<polyline points="{points}"/>'


def _label(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
