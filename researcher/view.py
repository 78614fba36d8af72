"""Views of a running study: its phase, trials with curves, the next stage, and the time left.

`LiveView` redraws in place on a terminal (rich). `PlainView` prints a line per change, for logs and pipes. `JsonView` prints the
same as JSON lines. Callers push changes to a view; it never queries anything.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from foundation.streams import one_line, silence
from researcher.models import KINDS, Attrition, TrialRecord, together

_BLOCKS = "▁▂▃▄▅▆▇█"


@dataclass(slots=True, kw_only=True)
class TrialLine:
    """One trial on display.

    `curve` is the mean reward per step so far. `held_out` is the newest interim evaluation, as (step, reward).
    """

    arm: str
    seed: int
    status: str = "planned"
    step: int = 0
    steps: int = 0
    curve: list[float] = field(default_factory=list)
    held_out: tuple[int, float] | None = None
    note: str = ""


@dataclass(slots=True, kw_only=True)
class StudyPicture:
    """Everything that a view shows. Times are in seconds."""

    study_id: str
    topic: str
    phase: str = "planning"
    planner: str = ""
    next: str = ""
    left_s: float | None = None
    left_measured: bool = False
    """Whether `left_s` is based on this study's own trials on these servers, not on the plan's estimate."""
    spent_s: float = 0.0
    budget_s: float | None = None
    trials: dict[str, TrialLine] = field(default_factory=dict)


class View(Protocol):
    """Receives a picture after each change. `say` prints a permanent line."""

    def show(self, picture: StudyPicture) -> None: ...

    def say(self, line: str) -> None: ...

    def close(self) -> None: ...


def sparkline(values: Iterable[float], *, low: float = 0.0, high: float = 1.0) -> str:
    """Draw values as a row of block characters. Values outside [low, high] widen the range."""
    numbers = list(values)
    if not numbers:
        return ""
    low, high = min(low, *numbers), max(high, *numbers)
    width = (high - low) or 1.0
    return "".join(_BLOCKS[min(7, int((value - low) / width * 8))] for value in numbers)


def duration(seconds: float | None) -> str:
    """Format a duration: `1 h 05 min`, `12 min`, `40 s`; a dash for None."""
    if seconds is None:
        return "—"
    whole = max(0, round(seconds))
    if whole < 90:
        return f"{whole} s"
    minutes = round(whole / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def left_text(picture: StudyPicture) -> str:
    """Format the time left: `12 min (measured here)` or `12 min (estimated)`; a dash if unknown."""
    if not picture.left_s:
        return duration(picture.left_s)
    return f"{duration(picture.left_s)} ({'measured here' if picture.left_measured else 'estimated'})"


def losses_by_arm(trials: Iterable[TrialRecord]) -> dict[str, Attrition]:
    """Return the attempts at episodes and the causes of lost ones, by arm, over trials that recorded them."""
    found: dict[str, list[Attrition]] = {}
    for trial in trials:
        if trial.evidence is not None and trial.evidence.attrition is not None:
            found.setdefault(trial.arm, []).append(trial.evidence.attrition)
    return {arm: together(parts) for arm, parts in found.items()}


def losses_text(found: Attrition) -> str:
    """Format losses: `12 of 268 training attempts lost (rollout 10, server 2), 1 task set aside`; empty without losses."""
    said = []
    for kind in KINDS:
        own = found.of(kind)
        if own.lost:
            causes = ", ".join(f"{cause} {count}" for cause, count in own.lost.items())
            aside = f", {own.set_aside} task{'s' if own.set_aside > 1 else ''} set aside" if own.set_aside else ""
            name = "training" if kind == "train" else "held-out"
            said.append(f"{sum(own.lost.values())} of {own.attempts} {name} attempts lost ({causes}){aside}")
    return "; ".join(said)


class LiveView:
    """Redraws one table in place."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._console = Console(file=stream or sys.stderr)
        self._live = Live(console=self._console, auto_refresh=False, transient=False)
        self._live.start()

    def show(self, picture: StudyPicture) -> None:
        self._live.update(_drawing(picture), refresh=True)

    def say(self, line: str) -> None:
        self._live.console.print(line, markup=False, highlight=False)

    def close(self) -> None:
        self._live.stop()


class Lines:
    """Writes lines to a stream. If the reader closes the pipe, as `head` does, output stops and the study continues."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._read = True

    def write(self, line: str) -> None:
        if self._read:
            try:
                self._stream.write(line + "\n")
                self._stream.flush()
            except BrokenPipeError:
                self._read = False
                silence(self._stream)


class PlainView:
    """Prints one line per important change: a new phase, and each trial's start, quarters and end."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._lines = Lines(stream or sys.stderr)
        self._phase = ""
        self._seen: dict[str, tuple[str, int]] = {}

    def show(self, picture: StudyPicture) -> None:
        if picture.phase != self._phase:
            self._phase = picture.phase
            self.say(
                f"{picture.study_id}  {picture.phase}; next: {picture.next or '—'}; left in this stage: {left_text(picture)}"
            )
        for key, trial in picture.trials.items():
            quarter = 4 * trial.step // trial.steps if trial.steps else 0
            if self._seen.get(key, ("planned", 0)) == (trial.status, quarter):
                continue
            self._seen[key] = (trial.status, quarter)
            self.say(f"  {_trial_text(trial)}  stage: {left_text(picture)} left")

    def say(self, line: str) -> None:
        self._lines.write(line)

    def close(self) -> None:
        """Do nothing: every line is written immediately."""


class JsonView:
    """Prints the same as `PlainView`, as JSON lines on standard output."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._lines = Lines(stream or sys.stdout)
        self._last = ""

    def show(self, picture: StudyPicture) -> None:
        trials = [
            {
                "trial": key,
                "status": t.status,
                "step": t.step,
                "steps": t.steps,
                "reward": t.curve[-1] if t.curve else None,
                "held_out": t.held_out,
            }
            for key, t in picture.trials.items()
        ]
        line = json.dumps({"study": picture.study_id, "phase": picture.phase, "next": picture.next, "trials": trials})
        if line != self._last:
            self._last = line
            self._lines.write(line)

    def say(self, line: str) -> None:
        self._lines.write(json.dumps({"message": line}))

    def close(self) -> None:
        """Do nothing: every line is written immediately."""


def view_for(*, as_json: bool, stream: TextIO | None = None) -> View:
    """Return the view that fits: JSON when asked for, live on a terminal that can redraw (`TERM=dumb` cannot), else plain lines."""
    if as_json:
        return JsonView()
    target = stream or sys.stderr
    redraws = target.isatty() and not Console(file=target).is_dumb_terminal
    return LiveView(target) if redraws else PlainView(target)


def _trial_text(trial: TrialLine) -> str:
    reward = f"reward {trial.curve[-1]:.2f}" if trial.curve else ""
    if trial.held_out is not None:
        reward += f", held out {trial.held_out[1]:.2f} at step {trial.held_out[0]}"
    text = f"{trial.arm} seed {trial.seed}: {trial.status} {trial.step}/{trial.steps} {sparkline(trial.curve)} {reward} {trial.note}"
    return " ".join(text.split())


def _drawing(picture: StudyPicture) -> RenderableType:
    head = Text.assemble((f"{picture.study_id}  ", "bold"), one_line(picture.topic))
    table = Table(box=None, pad_edge=False)
    for column in ("arm", "seed", "status", "step", "reward per step", "now", "held out"):
        table.add_column(column, justify="right" if column in ("seed", "step", "now", "held out") else "left")
    for trial in picture.trials.values():
        now = f"{trial.curve[-1]:.2f}" if trial.curve else ""
        held_out = f"{trial.held_out[1]:.2f}" if trial.held_out is not None else ""
        status = f"{trial.status} {trial.note}".strip()
        step = f"{trial.step}/{trial.steps}"
        table.add_row(trial.arm, str(trial.seed), status, step, sparkline(trial.curve), now, held_out)
    budget = f" of {duration(picture.budget_s)}" if picture.budget_s else ""
    foot = Text(
        f"{picture.phase}   next: {picture.next or '—'}   stage: {left_text(picture)} left   "
        f"spent: {duration(picture.spent_s)}{budget}   planner: {picture.planner or '—'}"
    )
    return Group(head, table, foot)
