"""Drafts and starts studies and campaigns for the web page and MCP, with the same steps as `researcher draft`, `start --detach`
and `campaign start --detach`."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from foundation.commandline import UsageError
from foundation.nearest import nearest
from researcher.campaign.goal import CampaignGoal, goal_in
from researcher.campaign.topic import goal_text
from researcher.cli.goals import ReadyGoal, check_not_pursued, price_text, ready_goal, record_campaign
from researcher.cli.request import (
    ECHO_APART,
    Knowledge,
    Wanted,
    check_addresses,
    checked_topic,
    planner_of,
    without_engine,
)
from researcher.cli.resume import hand_over
from researcher.cli.start import check_not_asked, common_options, keep_calls, planned, recorded, same_spec, with_tasks
from researcher.describe import engine_lines, plan_lines
from researcher.design.pricing import Price, price_of
from researcher.home import Home
from researcher.instruments.catalogue import InstrumentFolder, available, open_instrument
from researcher.models import LlmCall, StudyOptions, StudyRecord
from researcher.planner.outcome import Asked, Declined, NeedsEdit, Proposed, TopicRequest
from researcher.refusals import PlanningRefused, SpecRefused
from researcher.schedule.timetable import Timetable
from researcher.study.draft import Draft, marked, study_text
from researcher.study.file import Lines, read_study_text
from researcher.study.plan import Plan
from researcher.study.spec import StudySpec
from researcher.view import duration
from researcher.web.drafting import Checked, Drafted, Places, Problem
from swarm.client.own_algorithms import names_file

_REMEMBERED = 32


@dataclass(frozen=True, slots=True)
class Ready:
    """A validated text with its plan, ready to run."""

    draft: Draft
    spec: StudySpec
    timetable: Timetable
    folder: InstrumentFolder
    plan: Plan
    places: Places
    calls: list[LlmCall]

    @property
    def price(self) -> Price:
        return price_of(self.plan, self.folder.instrument, servers=max(1, len(self.places.servers)))


@dataclass(slots=True)
class TextDrafting:
    """Implements `researcher.web.drafting.Drafting` for one home. A text based on the planner's draft keeps its author and
    sources.

    `folder` is the base of a text's relative paths. None: texts may come from anyone who reaches the page, so they may only start
    installed instruments.
    """

    home: Home
    folder: Path | None = None
    _drafts: OrderedDict[str, tuple[Draft, list[LlmCall]]] = field(default_factory=OrderedDict)
    """The planner's newest drafts, by question."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _starting: threading.Lock = field(default_factory=threading.Lock)
    """Serializes starts, so that the second of two simultaneous equal texts finds the first one's study."""

    def instruments(self) -> list[str]:
        return [each.instrument.name for each in available()]

    def draft(self, topic: str, instrument: str | None, answers: Sequence[str]) -> Drafted:
        outcome, calls = self.outcome(topic, instrument, answers)
        if not isinstance(outcome, Asked):
            with self._lock:
                self._drafts[str(outcome.draft.fields.get("question"))] = (outcome.draft, calls)
                while len(self._drafts) > _REMEMBERED:
                    self._drafts.popitem(last=False)
        return _drafted(outcome, study_text)

    def outcome(
        self, topic: str, instrument: str | None, answers: Sequence[str]
    ) -> tuple[Proposed | NeedsEdit | Asked, list[LlmCall]]:
        """Return the planner's outcome for a topic, and its LLM calls. Raises: PlanningRefused, UsageError."""
        topic, calls = checked_topic(topic), list[LlmCall]()
        asked = without_engine(topic)
        if instrument is not None:
            self.check_installed(instrument)
        folders = available() if instrument is None else [open_instrument(instrument)]
        knowledge = Knowledge.of(self.home, [], "local")
        request = TopicRequest(
            topic=asked,
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
        if isinstance(outcome, Declined):
            nearest = f" Nearest: {', '.join(outcome.nearest)}." if outcome.nearest else ""
            raise PlanningRefused(f"{outcome.reason.rstrip('.')}.{nearest}", outcome.nearest)
        if asked != topic and not isinstance(outcome, Asked):
            outcome = replace(outcome, draft=replace(outcome.draft, uncovered=(*outcome.draft.uncovered, ECHO_APART)))
        return outcome, calls

    def check(self, text: str, places: Places) -> Checked:
        try:
            ready = self.ready(text, places, runs=False)
        except PlanningRefused as error:
            return _checked(error, text)
        return Checked(
            plan=(*engine_lines(ready.plan, places.engine), *plan_lines(ready.plan)),
            price=_price_text(ready.price, ready.plan),
        )

    def start(self, text: str, places: Places) -> str | Checked:
        try:
            return self.begin(self.ready(text, places, runs=True), "stop it first, or ask something else")
        except PlanningRefused as error:
            return _checked(error, text)

    def ready(self, text: str, places: Places, *, runs: bool) -> Ready:
        """Plan the study of the text. Records nothing.

        `runs`: whether the study runs here, so that notices are sent from here.

        Raises: PlanningRefused, with the line of each wrong setting; UsageError for its servers.
        """
        _check_places(places)
        fields, lines = read_study_text(text, self.folder or self.home.root)
        if isinstance(fields.get("instrument"), str):
            self.check_installed(fields["instrument"])
        if self.folder is None:
            _check_no_files(fields, ("compare", "arms", "set"))
        draft, calls = self._author(fields)
        knowledge = Knowledge.of(self.home, list(places.servers), places.engine)
        servers = max(1, len(places.servers))
        spec, timetable, folder, plan = planned(Wanted(draft, lines), knowledge, None, servers=servers, runs=runs)
        plan = with_tasks(plan, folder, self.home, dry_run=not runs)
        return Ready(draft, spec, timetable, folder, plan, places, calls)

    def begin(self, ready: Ready, again: str | None = None) -> str:
        """Record the study and hand it to the daemon; returns its id.

        `again` is the advice in the error if an unfinished study has the same spec; None: start it anyway.

        Raises: UsageError for its servers, and if a study with the same spec has not ended.
        """
        options = StudyOptions(
            **common_options(ready.draft, ready.spec, ready.folder),
            servers=ready.places.servers,
            engine=ready.places.engine,
        )
        with self._starting:
            if again is not None:
                check_not_asked(self.home, self.same(ready), again)
            study_id = recorded(self.home, ready.spec, ready.plan, options, ready.timetable, ready.calls, carried=True)
            hand_over(self.home, study_id, ready.plan)
        return study_id

    def same(self, ready: Ready) -> list[StudyRecord]:
        """Return the studies with this spec on this engine."""
        return same_spec(self.home, ready.spec, ready.places.engine)

    def check_installed(self, name: str, field: str = "instrument") -> None:
        """Without a folder, refuse instruments that are not installed, since anyone who reaches the page could run code here.
        Raises: SpecRefused."""
        names = self.instruments()
        if self.folder is None and name not in names:
            guess = nearest(name, names)
            hint = f"did you mean {guess}?" if guess else f"there are {', '.join(names)}"
            said = f"only installed instruments can be started from here ({hint}); `researcher start` runs one from a folder"
            raise SpecRefused(field, said, [guess] if guess else [])

    def _author(self, fields: dict[str, Any]) -> tuple[Draft, list[LlmCall]]:
        """Turn these fields into a draft.

        If the question is that of a planner's draft, the planner stays the author and unchanged fields keep their sources; else the
        author is `file`.
        """
        with self._lock:
            draft, calls = self._drafts.get(str(fields.get("question")), (None, []))
        if draft is None:
            return Draft(fields=fields, sources=marked(fields, "file"), author="file"), []
        kept = {path: source for path, source in draft.sources.items() if _at(fields, path) == _at(draft.fields, path)}
        sources = {path: kept.get(path, each) for path, each in marked(fields, "file").items()}
        return replace(draft, fields=fields, sources=sources), calls


@dataclass(slots=True)
class GoalDrafting:
    """Like `TextDrafting`, for goal files of campaigns. `studies` drafts topics with its planner; `ensure_daemon` starts a
    missing daemon."""

    studies: TextDrafting
    ensure_daemon: Callable[[], None]
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def instruments(self) -> list[str]:
        return self.studies.instruments()

    def draft(self, topic: str, instrument: str | None, answers: Sequence[str]) -> Drafted:
        outcome, _ = self.studies.outcome(topic, instrument, answers)
        return _drafted(outcome, goal_text)

    def check(self, text: str, places: Places) -> Checked:
        try:
            ready = self._ready(text, places, runs=False)
        except PlanningRefused as error:
            return _checked(error, text)
        return Checked(plan=tuple(ready.lines()), price=_goal_price(ready))

    def start(self, text: str, places: Places) -> str | Checked:
        """Record the campaign and hand it to the daemon; returns its id, or its problems. Raises: UsageError."""
        try:
            ready = self._ready(text, places, runs=True)
            with self._lock:  # the second of two simultaneous equal texts finds the first one's campaign
                self._check_not_pursued(ready.goal, places)
                campaign_id = record_campaign(self.studies.home, ready, carried=True)
        except PlanningRefused as error:
            return _checked(error, text)
        self.ensure_daemon()
        return campaign_id

    def _ready(self, text: str, places: Places, *, runs: bool) -> ReadyGoal:
        _check_places(places)
        fields, _ = read_study_text(text, self.studies.home.root, "a goal file")
        goal = goal_in(fields)
        for name in goal.instruments:
            self.studies.check_installed(name, "instruments")
        _check_no_files(fields, ("factors", "set"))
        self._check_not_pursued(goal, places)
        return ready_goal(goal, self.studies.home, places.servers, places.engine, runs=runs)

    def _check_not_pursued(self, goal: CampaignGoal, places: Places) -> None:
        """Refuse a goal that an unfinished campaign already pursues. Raises: SpecRefused."""
        how = "stop it first, or add to the goal what this one should find out"
        check_not_pursued(self.studies.home, goal, places.engine, how)


def _drafted(outcome: Proposed | NeedsEdit | Asked, text: Callable[[Draft, tuple[str, ...]], str]) -> Drafted:
    """Turn a planner's outcome into a draft for the page. `text` renders a draft as a file that starts with the problems to
    settle."""
    if isinstance(outcome, Asked):
        return Drafted(asks=outcome.question)
    problems = outcome.problems if isinstance(outcome, NeedsEdit) else ()
    return Drafted(text=text(outcome.draft, problems), problems=problems)


def _check_places(places: Places) -> None:
    """Check the servers and the engine. Raises: UsageError."""
    check_addresses(list(places.servers))
    if places.servers and places.engine == "echo":
        raise UsageError(
            "the engine only applies to a server started here, and servers are named: leave one of them out"
        )


def _check_no_files(fields: Mapping[str, Any], names: Sequence[str]) -> None:
    """Keep people who only reach the page from reading files on this machine or running code in them. Raises: SpecRefused."""
    for name in names:
        for text in _texts(fields.get(name)):
            if names_file(text):
                said = f"{text!r} is a function in a file; only `researcher start` can start studies with those"
                raise SpecRefused(name, said, [text])


def _texts(value: Any) -> Iterator[str]:
    """Yield every string within a nested value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(each)


def _at(fields: Mapping[str, Any], path: str) -> Any:
    """Return the value at a dotted path; None if there is no such value."""
    value: Any = fields
    for name in path.split(".", 1):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _checked(error: PlanningRefused, text: str) -> Checked:
    """List the problems, each with its field if it has one."""
    if not isinstance(error, SpecRefused):
        return Checked(problems=(Problem(field="", line=None, text=str(error)),))
    _, lines = read_study_text(text, Path())
    return Checked(problems=tuple(_problem(name, said, lines) for name, said in error.problems))


def _problem(name: str, said: str, lines: Lines) -> Problem:
    line = lines.at(name).rpartition(":")[2]
    return Problem(field=name, line=int(line) if line.isdecimal() else None, text=said)


def _goal_price(ready: ReadyGoal) -> str:
    limits = ", ".join(f"{name.replace('_', ' ')} {limit}" for name, limit in ready.document["goal"]["budget"].items())
    first = "" if ready.first is None else f"first study: {price_text(ready.first)}; "
    return f"{first}the campaign spends at most: {limits}"


def _price_text(price: Price, plan: Plan) -> str:
    (few, many), (least_s, most_s) = price.trials, price.wall_s
    trials = f"{few}" if few == many else f"{few} to {many}"
    budget = f"it spends at most {plan.budget.trials} trials and {duration(plan.budget.wall_s)}"
    least, most = duration(least_s), duration(most_s)
    return f"{trials} trials, {least if least == most else f'{least} to {most}'}; {budget}"
