"""Whether an instrument's episodes report what its metrics are made of: a few are played against fixed answers, in the sandbox."""

from __future__ import annotations

from researcher.instruments.catalogue import InstrumentFolder
from researcher.refusals import PlanningRefused
from researcher.workshop.checks import Unfit
from researcher.workshop.rehearsal import RehearsalRequest, rehearse

_ANSWERS = ["", "7", "I think the answer is 42."]


async def check_reported(folder: InstrumentFolder, python: str) -> str | None:
    """In words, what was seen; None where no metric is made of what episodes report.

    Raises: PlanningRefused where an episode that came to a reward lacks one of them.
    """
    instrument = folder.instrument
    names = sorted({metric.reported_as for metric in instrument.metrics if metric.kind == "outcome"})
    if not names:
        return None
    if instrument.roles:
        return f"not checked whether its episodes report {', '.join(names)}: a rehearsal cannot stand in for a team"
    request = RehearsalRequest(
        folder=str(folder.path), workflow=instrument.workflow, parameters=instrument.defaults.task, answers=_ANSWERS
    )
    try:
        found = await rehearse(request, python=python)
    except Unfit as error:
        raise PlanningRefused(f"{instrument.name}: {error}") from error
    ended = [each for each in found.played if each.ended]
    if not ended:
        why = found.error or next((each.error for each in found.played if each.error), "none came to a reward")
        raise PlanningRefused(
            f"{instrument.name}: no rehearsed episode ended, so it is unknown what they report: "
            f"{why.strip().rpartition(chr(10))[2]}"
        )
    for name in names:
        lacking = sum(name not in each.metrics for each in ended)
        if lacking:
            raise PlanningRefused(
                f"{instrument.name} has a metric of {name!r}, and {lacking} of {len(ended)} rehearsed episodes do not report it: "
                f"have every rollout return Outcome(…, metrics={{{name!r}: …}}), or take the metric out of the declaration",
                [name],
            )
    return f"{len(ended)} rehearsed episodes report {', '.join(names)}"
