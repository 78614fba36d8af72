"""Checks goals and records their campaigns, for `researcher campaign start` and the web page."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foundation.paths import user_data_dir
from researcher.campaign.goal import Aim, CampaignGoal, aims_of
from researcher.campaign.proposals import Judged
from researcher.campaign.records import joining
from researcher.cli.request import campaign_llm
from researcher.cli.start import instrument_of, timetable_of
from researcher.describe import engine_lines
from researcher.home import Home
from researcher.instruments.catalogue import OWN_STUDIES, InstrumentFolder
from researcher.instruments.levels import level_text
from researcher.models import StudyOptions
from researcher.notify.services import check_names
from researcher.refusals import Refusals, SpecRefused
from researcher.schedule.timetable import Timetable
from researcher.study.plan import Plan


@dataclass(frozen=True, slots=True)
class ReadyGoal:
    """A goal whose campaign can start.

    `aims` and `folders` have an entry for each instrument, in order; a folder is None for an instrument of this repository. `first`
    is the first study; None if an LLM leads, because it proposes the first study later.
    """

    goal: CampaignGoal
    aims: tuple[Aim, ...]
    folders: tuple[str | None, ...]
    timetable: Timetable
    options: StudyOptions
    first: Judged | None

    @property
    def document(self) -> dict[str, Any]:
        """The goal and its aims as they are recorded. `others` holds the aims on further instruments."""
        aim, *others = (aim.model_dump(mode="json") for aim in self.aims)
        return {"goal": self.goal.document(), "aim": aim, "others": others}

    def lines(self) -> list[str]:
        """List the levels to try and the first study, as lines for people."""
        plan = None if self.first is None else Plan.model_validate_json(self.first.plan or "")
        lines = [*engine_lines(plan, self.options.engine), f"goal: {self.goal.goal}"]
        for aim in self.aims:
            lines.append(f"{aim.metric} of {aim.instrument} should {aim.direction} by {aim.margin:g} or more")
            for factor in aim.factors:
                levels = ", ".join(map(level_text, factor.levels))
                lines.append(f"  {factor.name}: {levels} (default {level_text(factor.default)})")
        return lines + _first_lines(self.first)


def _first_lines(first: Judged | None) -> list[str]:
    if first is None:
        return ["first study: the LLM proposes it when the campaign begins"]
    return [f"first study: {first.proposal.because}", f"  {price_text(first)}"]


def price_text(first: Judged) -> str:
    """Describe the cost of the first study."""
    least, most = first.trials
    trials = str(least) if least == most else f"{least} to {most}"
    return f"{trials} trials, about {first.cost_s / 60:.0f} min of trials"


def ready_goal(
    goal: CampaignGoal,
    home: Home | None,
    servers: Sequence[str],
    engine: str,
    *,
    max_parallel: int | None = None,
    runs: bool,
) -> ReadyGoal:
    """Check a goal. Records nothing.

    Args:
        home: None if there is no database yet.
        runs: whether the campaign runs here, so that its notices are sent from here.

    Raises: PlanningRefused; SpecRefused for all wrong fields, or if the budget is too small for a first study.
    """
    own_ideas = campaign_llm(goal) is None  # refuse bad LLM settings here, not in the worker
    refusals, timetable, folders, aims = Refusals(), None, list[InstrumentFolder](), tuple[Aim, ...]()
    with refusals.kept():
        timetable = timetable_of(goal.schedule)
    if runs and goal.notify:
        with refusals.kept():
            check_names(goal.notify, os.environ)
    for name in goal.instruments:
        with refusals.kept():
            folders.append(instrument_of("instruments", name))
    with refusals.kept():
        aims = aims_of(goal, [folder.instrument for folder in folders])
    refusals.raise_any()
    assert timetable is not None
    places = tuple(None if folder.path.parent == OWN_STUDIES else str(folder.path) for folder in folders)
    options = StudyOptions(
        instrument=places[0],
        servers=tuple(servers),
        engine=engine,
        machine=socket.gethostname(),
        max_parallel=max_parallel,
    )
    first = _first(home, options, folders, goal, aims) if own_ideas else None
    return ReadyGoal(goal, aims, places, timetable, options, first)


def _first(
    home: Home | None,
    options: StudyOptions,
    folders: Sequence[InstrumentFolder],
    goal: CampaignGoal,
    aims: Sequence[Aim],
) -> Judged:
    """Plan the study that would begin the campaign."""
    from researcher.campaign.planning import CampaignPlanner, first_step
    from researcher.cli.campaign_worker import planner_of
    from researcher.environments import drawn_once, rehearsed

    root, store = (user_data_dir(), None) if home is None else (home.root, home.store)
    by_name = {folder.instrument.name: folder for folder in folders}
    draw = drawn_once(rehearsed)  # a small budget prices many plans over few distinct tasks
    planner = CampaignPlanner(lambda name: planner_of(root, store, options, by_name[name], draw))
    decided = asyncio.run(first_step(goal, aims, planner))
    assert decided.step is not None
    return decided.step


def check_not_pursued(home: Home, goal: CampaignGoal, engine: str, how: str) -> None:
    """Refuse a goal that an unfinished campaign already pursues. `how` says how to start another one anyway. Raises: SpecRefused."""
    for other in home.store.campaigns.all():
        if not other.status.ended and _is_same(goal.document(), other.goal) and other.options.engine == engine:
            raise SpecRefused("goal", f"{other.id} already pursues this goal; {how}")


def _is_same(wanted: Mapping[str, Any], recorded: Mapping[str, Any]) -> bool:
    """Return whether this is the recorded goal. A goal that leaves the strategist open is the same whoever leads."""
    return wanted == recorded or wanted == {name: part for name, part in recorded.items() if name != "strategist"}


def record_campaign(home: Home, ready: ReadyGoal, *, carried: bool) -> str:
    """Record the campaign; returns its id. `carried`: whether the daemon runs it.

    The recorded goal names the strategist, since the campaign's workers may run in other environments than this one.
    """
    goal = {**ready.document["goal"], "strategist": "llm" if ready.first is None else "builtin"}
    schedule = {"timetable": ready.timetable.model_dump(mode="json"), "carried": carried}
    joined = [joining(aim, folder) for aim, folder in zip(ready.aims[1:], ready.folders[1:], strict=True)]
    return home.store.campaigns.create(goal, ready.document["aim"], ready.options, schedule, joined)
