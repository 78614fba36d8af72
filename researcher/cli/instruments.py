"""`researcher instruments`: list the instruments, check one, or install its packages."""

from __future__ import annotations

import argparse
import asyncio
import textwrap
from collections.abc import Iterable, Iterator, Sequence

from foundation.paths import user_data_dir
from researcher.cli import DONE, answer, say, say_json
from researcher.environments import install, interpreter, rehearsed
from researcher.home import data_dir
from researcher.instruments.catalogue import (
    OWN_STUDIES,
    InstrumentFolder,
    available,
    open_instrument,
)
from researcher.instruments.declaration import shared_factors, shared_metrics
from researcher.instruments.instrument import LEARNING_RATE, STUDY_MODEL, Factor, Instrument, Metric, Scalar, leaves
from researcher.instruments.levels import level_text, number_text
from researcher.refusals import PlanningRefused
from researcher.repair.code import Unfit
from researcher.repair.rehearsal import RehearsalRequest, rehearse

_WIDTH = 100
_MOST_CHOICES = 8


def instruments_command(args: argparse.Namespace) -> int:
    """List all instruments, one per line, then what they share. With a name or folder, describe that instrument."""
    if args.check or args.install:
        return _tend(open_instrument(args.check or args.install), args)
    found, lines = shown(args.name)
    return answer(args.json, [instrument.model_dump(mode="json") for instrument in found], *lines)


def shown(name: str | None) -> tuple[list[Instrument], Iterator[str]]:
    """Return the instrument with this name or folder, or all of them, and a description. Raises: PlanningRefused."""
    if name is not None:
        instrument = open_instrument(name).instrument
        return [instrument], _one(instrument, name)
    found = [each.instrument for each in available()]
    return found, _all(found)


def _tend(folder: InstrumentFolder, args: argparse.Namespace) -> int:
    """Install the instrument's packages, or draw its tasks. Its declaration has already been checked."""
    if args.install:
        python = install(folder, data_dir())
        document = {"instrument": folder.instrument.name, "python": python}
        return answer(args.json, document, f"{folder.instrument.name} runs under {python}")
    defaults = folder.instrument.defaults
    python = interpreter(folder, user_data_dir())
    names = _task_parameters(folder.instrument)
    (found,) = rehearsed(folder, python, [defaults.task], defaults.heldout_tasks, thorough=True, names=names)
    reported = asyncio.run(check_reported(folder, python))
    if args.json:
        said = {} if reported is None else {"reported": reported}
        say_json({"instrument": folder.instrument.name, "python": python, **found, **said})
        return DONE
    say(
        f"{folder.instrument.name}: sound. Drew {found['train']} train and {found['heldout']} held-out tasks; no task is in both"
    )
    for what, task in zip(("train", "held out"), found["examples"], strict=True):
        say(f"    {what:9} {task['id']}: {task['query']}")
    if reported is not None:
        say(f"    reports   {reported}")
    say(f"    ask       {example(folder.instrument, args.check)}")
    return DONE


def _task_parameters(instrument: Instrument) -> list[str]:
    """List the parameters of `tasks` that factors set."""
    targets = [target for factor in instrument.factors for target in factor.targets]
    return [target.removeprefix("task.") for target in targets if target.startswith("task.")]


def example(instrument: Instrument, called: str) -> str:
    """Return a command line that starts a study of the instrument. `called` is its name or folder."""
    usual = next(factor.default for factor in instrument.factors if factor.target == LEARNING_RATE)
    rate = float(usual) or 1e-5
    data = [
        f"--set {factor.name}=train.jsonl"
        for factor in instrument.factors
        if factor.type == "data" and not factor.default
    ]
    vary = f"--vary learning_rate={number_text(rate / 4)},{number_text(rate)}"
    return " ".join(["researcher start --instrument", called, *data, vary])


def _all(instruments: Sequence[Instrument]) -> Iterator[str]:
    if not instruments:
        yield f"{OWN_STUDIES} has no instruments; set RESEARCHER_STUDIES to folders that have some."
    for instrument in instruments:
        yield _cut(f"{instrument.name:{_widest(instruments)}}  {instrument.title}")
    yield ""
    yield "Every study can vary these factors; each instrument adds its own:"
    yield from _whole(_factor_lines([factor for factor in shared_factors() if factor.target != STUDY_MODEL]))
    yield ""
    yield "and measure these metrics:"
    yield from _whole(_metric_lines(shared_metrics()))
    yield ""
    yield "`researcher instruments NAME` shows one instrument: its own factors, its defaults, and how to start."


def _one(instrument: Instrument, called: str) -> Iterator[str]:
    """Describe the instrument: its features, its defaults, and how to start. Fits on one screen."""
    shared = {factor.name for factor in shared_factors()}
    own = [factor for factor in instrument.factors if factor.name not in shared]
    yield _cut(f"{instrument.name} {instrument.version}: {instrument.title}")
    yield from textwrap.wrap(
        instrument.description, _WIDTH - 2, initial_indent="  ", subsequent_indent="  ", max_lines=4
    )
    yield f"  Trains {instrument.model} unless --model names another."
    for name, role in instrument.roles.items():
        yield f"  Also trains {role.model or instrument.model} as {name}, on a separate server."
    yield "Its own factors"
    yield from map(_cut, _factor_lines(own)) if own else ["  none"]
    yield "Metrics"
    yield from map(_cut, _metric_lines([metric for metric in instrument.metrics if not metric.on_request]))
    if asked := [metric.name for metric in instrument.metrics if metric.on_request]:
        yield _cut(f"  on request: {', '.join(asked)}")
    yield "Defaults"
    yield from _wrapped(_defaults(instrument))
    yield "Every run can vary (`researcher instruments` explains these)"
    yield from _wrapped(", ".join(f.name for f in instrument.factors if f.name in shared and f.target != STUDY_MODEL))
    yield "Start"
    yield f"  {example(instrument, called)}"


def _defaults(instrument: Instrument) -> str:
    usual = instrument.defaults
    seeds = f"{usual.seeds}" if usual.seeds == usual.max_seeds else f"{usual.seeds} to {usual.max_seeds}"
    run = [f"{path}={level_text(value) if isinstance(value, Scalar) else value}" for path, value in leaves(usual.run)]
    return (
        f"{usual.metric} decides; {usual.steps} steps, {seeds} seeds per arm, {usual.heldout_tasks} held-out tasks with "
        f"{usual.heldout_episodes} episodes each, about {usual.trial_s:g} s per trial on two cores; {', '.join(run)}"
    )


def _factor_lines(factors: Sequence[Factor]) -> Iterator[str]:
    width = _widest(factors)
    for factor in factors:
        usual = level_text(factor.default) or "none"
        yield f"  {factor.name:{width}}  {_range(factor):16} [{usual}] {_choices(factor)}{factor.description}"


def _metric_lines(metrics: Sequence[Metric]) -> Iterator[str]:
    width = _widest(metrics)
    for metric in metrics:
        better = "higher" if metric.direction == "increase" else "lower"
        yield f"  {metric.name:{width}}  {better:6} margin {metric.margin:<5g} {metric.description}"


def _widest(named: Sequence[Instrument] | Sequence[Factor] | Sequence[Metric]) -> int:
    return max((len(each.name) for each in named), default=0)


def _whole(lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        yield from _wrapped(line, " " * 8)


def _wrapped(text: str, after: str = "  ") -> list[str]:
    return textwrap.wrap(text.strip(), _WIDTH, initial_indent="  ", subsequent_indent=after, break_on_hyphens=False)


def _cut(line: str) -> str:
    return line if len(line) <= _WIDTH else f"{line[: _WIDTH - 1].rstrip()}…"


def _range(factor: Factor) -> str:
    """Describe the levels that a factor may take."""
    if factor.low is not None and factor.high is not None:
        return f"{number_text(factor.low)} to {number_text(factor.high)}"
    if factor.choices:
        return f"one of {len(factor.choices)}"
    return {"bool": "on or off", "data": "FILE or hf:NAME", "text": "TEXT"}.get(factor.type, "any number")


def _choices(factor: Factor) -> str:
    return f"{', '.join(map(str, factor.choices))}. " if 0 < len(factor.choices) <= _MOST_CHOICES else ""


_ANSWERS = ["", "7", "I think the answer is 42."]


async def check_reported(folder: InstrumentFolder, python: str) -> str | None:
    """Describe the values that rehearsed episodes report; None if no metric uses reported values.

    Raises: PlanningRefused if a rewarded episode lacks one.
    """
    instrument = folder.instrument
    names = sorted({metric.reported_as for metric in instrument.metrics if metric.kind == "outcome"})
    if not names:
        return None
    if instrument.roles:
        return f"not checked whether its episodes report {', '.join(names)}: a rehearsal cannot play a team's episodes"
    request = RehearsalRequest(
        folder=str(folder.path), workflow=instrument.workflow, parameters=instrument.defaults.task, answers=_ANSWERS
    )
    try:
        found = await rehearse(request, python=python)
    except Unfit as error:
        raise PlanningRefused(f"{instrument.name}: {error}") from error
    ended = [each for each in found.played if each.ended]
    if not ended:
        why = found.error or next((each.error for each in found.played if each.error), "none reached a reward")
        raise PlanningRefused(
            f"{instrument.name}: no rehearsed episode ended, so it is unknown what they report: "
            f"{why.strip().rpartition(chr(10))[2]}"
        )
    for name in names:
        lacking = sum(name not in each.metrics for each in ended)
        if lacking:
            raise PlanningRefused(
                f"{instrument.name} has a metric of {name!r}, but {lacking} of {len(ended)} rehearsed episodes do not report it: "
                f"have every rollout return Outcome(…, metrics={{{name!r}: …}}), or remove the metric from the declaration",
                [name],
            )
    return f"{len(ended)} rehearsed episodes report {', '.join(names)}"
