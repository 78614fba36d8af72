"""`researcher instruments`: what can be asked; whether an instrument is sound; its packages."""

from __future__ import annotations

import argparse
import asyncio

from foundation.paths import user_data_dir
from researcher.commands import DONE
from researcher.commands.home import data_dir, say, say_json
from researcher.environments import install, interpreter, rehearsed
from researcher.instruments.catalogue import OWN_STUDIES, InstrumentFolder, available, open_instrument
from researcher.instruments.instrument import Factor, Instrument
from researcher.planner.levels import level_text
from researcher.planner.matching import example
from researcher.workshop.reported import check_reported

_MOST_CHOICES = 8


def instruments_command(args: argparse.Namespace) -> int:
    """What can be asked; with a name or folder, of this one alone."""
    if args.check or args.install:
        return _tend(open_instrument(args.check or args.install), args)
    found = [open_instrument(args.name).instrument] if args.name else [each.instrument for each in available()]
    if args.json:
        say_json([instrument.model_dump(mode="json") for instrument in found])
        return DONE
    if not found:
        say(f"no instruments in {OWN_STUDIES}: name folders of them in RESEARCHER_STUDIES")
    for instrument in found:
        _say(instrument)
    return DONE


def _tend(folder: InstrumentFolder, args: argparse.Namespace) -> int:
    """Install its packages, or draw its tasks. The declaration was read already."""
    if args.install:
        python = install(folder, data_dir())
        say_json({"instrument": folder.instrument.name, "python": python}) if args.json else say(
            f"{folder.instrument.name} runs under {python}"
        )
        return DONE
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
        f"{folder.instrument.name}: sound. {found['train']} train and {found['heldout']} held-out tasks drawn, none in both"
    )
    for what, task in zip(("train", "held out"), found["examples"], strict=True):
        say(f"    {what:9} {task['id']}: {task['query']}")
    if reported is not None:
        say(f"    reports   {reported}")
    say(f"    ask       {example(folder.instrument)}")
    return DONE


def _task_parameters(instrument: Instrument) -> list[str]:
    """What factors give to `tasks`."""
    targets = [target for factor in instrument.factors for target in factor.targets]
    return [target.removeprefix("task.") for target in targets if target.startswith("task.")]


def _say(instrument: Instrument) -> None:
    say(f"{instrument.name} {instrument.version}: {instrument.title} ({instrument.model})")
    for name, role in instrument.roles.items():
        say(f"    role    {name:18} {role.model or instrument.model}, on a server of its own")
    for factor in instrument.factors:
        say(
            f"    factor  {factor.name:18} {_range(factor):18} default {level_text(factor.default) or 'none':8} {factor.description}"
        )
    for metric in instrument.metrics:
        say(f"    metric  {metric.name:18} {metric.direction:18} margin {metric.margin:<9g} {metric.description}")


def _range(factor: Factor) -> str:
    """Which levels it may take."""
    if factor.low is not None and factor.high is not None:
        return f"{factor.low:g} to {factor.high:g}"
    if len(factor.choices) > _MOST_CHOICES:
        return f"{len(factor.choices)} names"
    return ", ".join(map(str, factor.choices)) or {
        "bool": "on or off",
        "data": "FILE or hf:NAME",
        "text": "'TEXT'",
    }.get(factor.type, "")
