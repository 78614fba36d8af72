"""A study's learning curves as a PNG, for services that do not show SVG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from researcher.models import TrialRecord
from researcher.report.records import held_out_curve, mean_curve

SERIES = "reward_mean"
_SIZE_INCHES, _DPI = (7.6, 3.8), 120


def curves_png(trials: Sequence[TrialRecord], file: Path) -> Path | None:
    """Draw mean training reward by optimizer step: thin lines for seeds, bold for an arm's mean, rings for held-out tasks.

    Before the first step, returns None and writes no file.
    """
    drawn = [trial for trial in trials if trial.series.get(SERIES)]
    if not drawn:
        return None
    from matplotlib.figure import Figure  # not pyplot, whose state is global to the process

    figure = Figure(figsize=_SIZE_INCHES, dpi=_DPI, layout="constrained")
    axes = figure.add_subplot()
    for number, arm in enumerate(dict.fromkeys(trial.arm for trial in drawn)):
        own, colour = [trial for trial in drawn if trial.arm == arm], f"C{number % 10}"
        for trial in own:
            axes.plot(*zip(*sorted(trial.series[SERIES]), strict=True), color=colour, linewidth=0.8, alpha=0.4)
        mean = mean_curve([trial.series[SERIES] for trial in own])
        if mean:
            axes.plot(*zip(*mean, strict=True), color=colour, linewidth=2.4, label=arm.replace("$", r"\$"))
        held_out = mean_curve([line for trial in own if (line := held_out_curve(trial))])
        if held_out:
            axes.plot(
                *zip(*held_out, strict=True), ":o", color=colour, linewidth=1, markersize=5, markerfacecolor="white"
            )
    axes.set(xlabel="optimiser step", ylabel="mean training reward")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, format="png")
    return file
