"""Drafting and starting studies for the web page, by the same steps as `researcher draft` and `start --detach`."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from foundation.commandline import UsageError
from foundation.nearest import nearest
from researcher.cli.request import Knowledge, Wanted, check_addresses, checked_topic, planner_of
from researcher.cli.resume import hand_over
from researcher.cli.start import common_options, keep_calls, planned, recorded, with_tasks
from researcher.describe import plan_lines
from researcher.design.pricing import Price, price_of
from researcher.home import Home
from researcher.instruments.catalogue import InstrumentFolder, available, open_instrument
from researcher.models import LlmCall, StudyOptions
from researcher.planner.outcome import Asked, Declined, NeedsEdit, TopicRequest
from researcher.refusals import PlanningRefused, SpecRefused
from researcher.schedule.timetable import Timetable
from researcher.study.draft import Draft, marked, study_text
from researcher.study.file import Lines, read_study_text
from researcher.study.plan import Plan
from researcher.study.spec import StudySpec
from researcher.view import duration
from researcher.web.drafting import Checked, Drafted, Places, Problem

_REMEMBERED = 32


@dataclass(frozen=True, slots=True)
class _Ready:
    """A text that can be carried out."""

    draft: Draft
    spec: StudySpec
    timetable: Timetable
    folder: InstrumentFolder
    plan: Plan
    calls: list[LlmCall]


@dataclass(slots=True)
class PageDrafting:
    """`researcher.web.drafting.Drafting` over one home. A text that begins as the planner's draft keeps its author and sources."""

    home: Home
    _drafts: OrderedDict[str, tuple[Draft, list[LlmCall]]] = field(default_factory=OrderedDict)
    """The planner's newest drafts, by their questions."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def instruments(self) -> list[str]:
        return [each.instrument.name for each in available()]

    def draft(self, topic: str, instrument: str | None, answers: Sequence[str]) -> Drafted:
        topic, calls = checked_topic(topic), list[LlmCall]()
        if instrument is not None and instrument not in self.instruments():
            raise UsageError(f"there is no instrument {instrument!r} here; there are {', '.join(self.instruments())}")
        folders = available() if instrument is None else [open_instrument(instrument)]
        knowledge = Knowledge.of(self.home, [], "local")
        request = TopicRequest(
            topic=topic,
            instruments=folders,
            given={} if instrument is None else {"instrument": instrument},
            known=knowledge.known,
            paces=knowledge.paces,
            servers=1,
            kept=knowledge.kept,
            answers=list(answers),
        )
        try:
            outcome = asyncio.run(planner_of(None, calls, lambda _: None, durable=True).propose(request))
        finally:
            keep_calls(calls)
        if isinstance(outcome, Asked):
            return Drafted(asks=outcome.question)
        if isinstance(outcome, Declined):
            nearest = f" Nearest: {', '.join(outcome.nearest)}." if outcome.nearest else ""
            raise PlanningRefused(f"{outcome.reason.rstrip('.')}.{nearest}", outcome.nearest)
        problems = outcome.problems if isinstance(outcome, NeedsEdit) else ()
        with self._lock:
            self._drafts[str(outcome.draft.fields.get("question"))] = (outcome.draft, calls)
            while len(self._drafts) > _REMEMBERED:
                self._drafts.popitem(last=False)
        return Drafted(text=study_text(outcome.draft, problems), problems=problems)

    def check(self, text: str, places: Places) -> Checked:
        found = self._ready(text, places, runs=False)
        if isinstance(found, Checked):
            return found
        price = price_of(found.plan, found.folder.instrument, servers=max(1, len(places.servers)))
        return Checked(plan=tuple(plan_lines(found.plan)), price=_price_text(price, found.plan))

    def start(self, text: str, places: Places) -> str | Checked:
        found = self._ready(text, places, runs=True)
        if isinstance(found, Checked):
            return found
        options = StudyOptions(
            **common_options(found.draft, found.spec, found.folder), servers=places.servers, engine=places.engine
        )
        study_id = recorded(self.home, found.spec, found.plan, options, found.timetable, found.calls, carried=True)
        hand_over(self.home, study_id, found.plan)
        return study_id

    def _ready(self, text: str, places: Places, *, runs: bool) -> _Ready | Checked:
        """The plan of the text, or what is wrong with it. Raises: UsageError for its servers."""
        check_addresses(list(places.servers))
        lines = Lines("the text")
        try:
            fields, lines = read_study_text(text, self.home.root)
            self._check_instrument(fields.get("instrument"))
            draft, calls = self._author(fields)
            knowledge = Knowledge.of(self.home, list(places.servers), places.engine)
            servers = max(1, len(places.servers))
            spec, timetable, folder, plan = planned(Wanted(draft), knowledge, None, servers=servers, runs=runs)
            plan = with_tasks(plan, folder, self.home, dry_run=not runs)
        except SpecRefused as error:
            return Checked(problems=tuple(_problem(name, said, lines) for name, said in error.problems))
        except PlanningRefused as error:
            return Checked(problems=(Problem(field="", line=None, text=str(error)),))
        return _Ready(draft, spec, timetable, folder, plan, calls)

    def _check_instrument(self, name: object) -> None:
        """A folder of anybody's would run its code here for whoever reaches the page. Raises: SpecRefused."""
        names = self.instruments()
        if isinstance(name, str) and name not in names:
            guess = nearest(name, names)
            hint = f"did you mean {guess}?" if guess else f"there are {', '.join(names)}"
            said = f"the page starts installed instruments only ({hint}); `researcher start` runs one in a folder"
            raise SpecRefused("instrument", said, [guess] if guess else [])

    def _author(self, fields: dict[str, Any]) -> tuple[Draft, list[LlmCall]]:
        """A draft of these fields: the planner's, where a person has left or changed some of it."""
        with self._lock:
            draft, calls = self._drafts.get(str(fields.get("question")), (None, []))
        if draft is None:
            return Draft(fields=fields, sources=marked(fields, "file"), author="file"), []
        kept = {path: source for path, source in draft.sources.items() if _at(fields, path) == _at(draft.fields, path)}
        sources = {path: kept.get(path, each) for path, each in marked(fields, "file").items()}
        return replace(draft, fields=fields, sources=sources), calls


def _at(fields: Mapping[str, Any], path: str) -> Any:
    """What stands at a dotted path; None where nothing does."""
    value: Any = fields
    for name in path.split(".", 1):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _problem(name: str, said: str, lines: Lines) -> Problem:
    line = lines.at(name).rpartition(":")[2]
    return Problem(field=name, line=int(line) if line.isdecimal() else None, text=said)


def _price_text(price: Price, plan: Plan) -> str:
    (few, many), (least_s, most_s) = price.trials, price.wall_s
    trials = f"{few}" if few == many else f"{few} to {many}"
    budget = f"at most {plan.budget.trials} trials and {duration(plan.budget.wall_s)} are spent"
    least, most = duration(least_s), duration(most_s)
    return f"{trials} trials, {least if least == most else f'{least} to {most}'}; {budget}"
