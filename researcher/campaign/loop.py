"""Runs a campaign from its goal to its answer: decide, run the study, read its results, decide again.

Each round reads its position from the records, so a loop that was killed at any instruction continues where it was. A decision
and the study it starts are written in one transaction, and a study continues from its own records.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from foundation.clock import Clock
from foundation.logs import redact
from researcher.campaign.deciding import written
from researcher.campaign.goal import CampaignGoal
from researcher.campaign.graph import Decided, decide
from researcher.campaign.judging import StudyPlanner, chosen, judged
from researcher.campaign.new_instrument import InstrumentWriter, Making, carry_on
from researcher.campaign.people import PAUSED, RESUMED, STOPPED, ask, is_answered, waits_for_a_person
from researcher.campaign.proposals import Judged, Proposal
from researcher.campaign.records import JOINED, UNDECIDED, folders_of, observe
from researcher.campaign.report import campaign_page, write_campaign_report
from researcher.campaign.requests import requested
from researcher.campaign.seen import Seen
from researcher.campaign.strategist import IdeasSpent, Strategist, StrategistAway, StrategistFailed
from researcher.models import (
    CONFIRMING,
    PERSON,
    RULES,
    CampaignRecord,
    CampaignStatus,
    DecisionRecord,
    Notice,
    StudyStatus,
)
from researcher.notify.campaign import campaign_conclusion, campaign_failure, campaign_gate, campaign_stuck
from researcher.schedule.timetable import Timetable
from researcher.store.errors import LeaseHeld
from researcher.store.store import Store
from researcher.study.plan import Plan

_MOST_FAILED = 2
"""Number of failed studies in a row after which a person has to look."""


@dataclass(frozen=True, slots=True)
class Rest:
    """Result of working on a study. If `ended`, the study is over; otherwise it waits, for the given reason."""

    ended: bool
    reason: str


class StudyRunner(Protocol):
    """Runs one study of the campaign, from wherever it stopped."""

    def __call__(self, study_id: str, plan: Plan) -> Awaitable[Rest]:
        """Run the study. Raises: any error that keeps it from continuing here (no server, no disk); it is tried again later."""


@dataclass(frozen=True, slots=True)
class CampaignOutcome:
    """The campaign's state when work on it ended. `report` is the folder with report.md and report.html."""

    status: CampaignStatus
    reason: str
    report: Path | None = None


def _how(record: CampaignRecord) -> str:
    """Return the commands with which a person can answer."""
    return f"`researcher campaign approve {record.id}`, or `researcher campaign veto {record.id} --because TEXT`"


def _newest_study(decisions: list[DecisionRecord]) -> DecisionRecord | None:
    """Return the newest decision that began a study."""
    return next((each for each in reversed(decisions) if each.study_id is not None), None)


class CampaignLoop:
    """Runs one campaign for its owner.

    `store` is fenced by the campaign's lease. `wind_up` finishes what a killed worker left undone for an ended study. `write` has
    an LLM write instruments; if it is None, the campaign gets no new instruments.
    """

    def __init__(
        self,
        store: Store,
        strategist: Strategist,
        planner: StudyPlanner,
        run_study: StudyRunner,
        wind_up: Callable[[str], Awaitable[object]],
        clock: Clock,
        reports: Path,
        tell: Callable[[str], None],
        notify: Callable[[Notice], None] = lambda notice: None,
        write: InstrumentWriter | None = None,
    ) -> None:
        self._store = store
        self._strategist = strategist
        self._planner = planner
        self._run_study = run_study
        self._wind_up = wind_up
        self._clock = clock
        self._reports = reports
        self._tell = tell
        self._notify = notify
        self._write = write

    async def carry_out(self, campaign_id: str) -> CampaignOutcome:
        """Run the rest of the campaign. Return when it is done, is asked to stop, or waits for a person or a time window."""
        while True:
            record = await asyncio.to_thread(self._store.campaigns.get, campaign_id)
            if record.status.ended:
                return self._rest(record, record.status, record.reason or "")
            if record.stop_requested:
                await self._halt_study(record)
                return self._rest(record, CampaignStatus.STOPPED, STOPPED)
            if record.pause_requested:
                await self._halt_study(record)
                return self._rest(record, CampaignStatus.WAITING, PAUSED)
            outcome = await self._next(record)
            if outcome is not None:
                return outcome

    def cannot_go_on(self, campaign_id: str, reason: str, said: str) -> None:
        """Record why the campaign waits, and notify people, after an error that keeps it from continuing here.

        `said` is the reason for the notice, as a sentence. A campaign that has ended keeps its status.
        """
        record = self._store.campaigns.get(campaign_id)
        if not record.status.ended:
            self._notify(campaign_stuck(record, said, self._clock.now()))
            self._rest(record, CampaignStatus.WAITING, redact(reason))

    async def _next(self, record: CampaignRecord) -> CampaignOutcome | None:
        """Take one step: continue the open study, or decide. Return None if there is more to do now."""
        decisions = self._store.campaigns.decisions(record.id)
        last = decisions[-1] if decisions else None
        await self._wind_up_ended(decisions)
        if last is not None and last.action == "conclude":
            return self._rest(record, CampaignStatus.DONE, last.because)
        if last is not None and Timetable.of_record(record.schedule).over(self._clock.now()):
            self._end_unanswered(record, last, decisions)
        elif last is not None:
            if last.action == "new_instrument":
                try:
                    await carry_on(self._store, record, last, self._write)
                except StrategistAway as error:
                    return self._rest(record, CampaignStatus.WAITING, str(error))
            if waits := self._waits(record, last, decisions):
                return self._rest(record, CampaignStatus.WAITING, waits)
        if last is not None and last.study_id is not None and not self._ended(last.study_id):
            self._set(record, CampaignStatus.RUNNING, f"study {last.study_id}: {last.because}")
            rest = await self._run_study(last.study_id, Plan.model_validate_json(last.plan or ""))
            write_campaign_report(self._store, record.id, self._reports)
            if rest.ended or self._store.campaigns.get(record.id).pause_requested:
                return None  # the next step finds out what the campaign waits for
            return self._rest(record, CampaignStatus.WAITING, rest.reason)
        if reason := self._keeps_failing(record, decisions):
            return self._rest(record, CampaignStatus.FAILED, reason)
        return await self._decide(record)

    async def _halt_study(self, record: CampaignRecord) -> None:
        """Have the newest study stop or pause as requested, which ends what a dead worker left running."""
        decisions = self._store.campaigns.decisions(record.id)
        await self._wind_up_ended(decisions)
        last = _newest_study(decisions)
        if last is None or last.study_id is None:
            return
        study = self._store.studies.get(last.study_id)
        begun = study.plan_version is not None and not study.status.ended
        if begun and (study.stop_requested or study.pause_requested):  # else it would run
            await self._run_study(study.id, Plan.model_validate_json(last.plan or ""))

    async def _wind_up_ended(self, decisions: list[DecisionRecord]) -> None:
        """If the newest study has ended, but its worker was killed before it released the study, finish what is left to do."""
        last = _newest_study(decisions)
        if last is None or last.study_id is None or not self._ended(last.study_id):
            return
        if self._store.leases.holder(last.study_id) is not None:
            with suppress(LeaseHeld):  # not yet expired on a machine that died: the lease stays, so it is tried again
                await self._wind_up(last.study_id)

    async def _decide(self, record: CampaignRecord) -> CampaignOutcome | None:
        seen = observe(self._store, record.id)
        hypotheses = self._store.campaigns.hypotheses(record.id, before=seen.seq)
        timetable = Timetable.of_record(record.schedule)
        asked = await asyncio.to_thread(self._asked, record, seen)  # may rehearse for minutes
        if timetable.over(self._clock.now()):
            step = Judged(proposal=Proposal(action="conclude", because="its days are over", words=self._days_over()))
            decided, author = Decided(step, (step,), ()), RULES
        elif (first := chosen(asked)) is not None:
            decided, author = Decided(first, (), ()), PERSON
        else:
            self._set(record, CampaignStatus.RUNNING, "deciding what to ask next")
            try:
                decided, author = await self._proposed(seen), self._strategist.name
            except IdeasSpent as spent:
                step = Judged(proposal=Proposal(action="conclude", because=str(spent), words=str(spent)))
                decided, author = Decided(step, (step,), ()), RULES
            except StrategistAway as error:
                return self._undecided(record, CampaignStatus.WAITING, str(error))
            except StrategistFailed as error:
                return self._undecided(record, CampaignStatus.FAILED, str(error))
        if decided.step is None:
            reason = f"no proposal of {author} could be carried out: {'; '.join(decided.problems)[:1000]}"
            hint = f"`researcher campaign tell {record.id} TEXT` gives it something new to go by"
            return self._undecided(record, CampaignStatus.FAILED, f"{reason}; {hint}")
        calls = self._strategist.calls()
        decided = replace(decided, judgements=(*asked, *decided.judgements))
        folders = folders_of(record, self._store.campaigns.events(record.id, JOINED))
        add = written(record, seen, decided, author, calls, hypotheses, folders)
        made = self._store.campaigns.decide(record.id, add.decision, add.hypotheses, add.study)
        self._tell(f"decision {made.seq}: {made.action}. {made.because}")
        return None

    async def _proposed(self, seen: Seen) -> Decided:
        return await decide(seen, self._strategist, self._planner, writes=self._write is not None)

    def _undecided(self, record: CampaignRecord, status: CampaignStatus, reason: str) -> CampaignOutcome:
        """Stop without a decision. The journal keeps the LLM's requests and answers."""
        if calls := self._strategist.calls():
            detail = {"because": reason, "llm_calls": [call.model_dump(mode="json") for call in calls]}
            self._store.campaigns.record(record.id, UNDECIDED, detail)
        return self._rest(record, status, reason)

    def _asked(self, record: CampaignRecord, seen: Seen) -> tuple[Judged, ...]:
        """Judge, like any proposal, the studies that people requested and that no decision has answered yet."""
        store = self._store.campaigns
        waiting = requested(store.events(record.id, "told"), store.decisions(record.id))
        found = [(each, judged(each.proposal, seen, self._planner)) for each in waiting]
        return tuple(judgement.model_copy(update={"asked": each.line}) for each, judgement in found)

    def _days_over(self) -> str:
        return "The campaign's days are over: the report says what was found by then."

    def _waits(self, record: CampaignRecord, last: DecisionRecord, decisions: list[DecisionRecord]) -> str:
        """Return what the campaign waits for a person to answer, or an empty string. Record the question if it is new."""
        if last.action == "new_instrument":
            return self._waits_with(record, last)
        if last.action == "ask":
            ask(self._store, record.id, last, "words")
            return self._waited(record, last, f"asks: {last.because}", f"`researcher campaign tell {record.id} TEXT`")
        if last.study_id is None or self._ended(last.study_id) or not self._gated(record, last, decisions):
            return ""
        ask(self._store, record.id, last, "approval")
        return self._waited(record, last, f"waits for a person's word on {last.action} {last.study_id}", _how(record))

    def _gated(self, record: CampaignRecord, last: DecisionRecord, decisions: list[DecisionRecord]) -> bool:
        """Return whether the newest decision's study needs a person's approval."""
        approve = CampaignGoal.model_validate(record.goal).approve
        if approve == "campaign":
            return not self._one_is_approved(record, decisions)
        return approve == "study" or (approve == "confirm" and last.action in CONFIRMING)

    def _one_is_approved(self, record: CampaignRecord, decisions: list[DecisionRecord]) -> bool:
        """Return whether a person has approved a study of the campaign.

        Studies with trials count too: earlier versions only asked about the campaign's first decision, and that may be no study.
        """
        approved = {event.detail["decision"] for event in self._store.campaigns.events(record.id, "approved")}
        studies = [(each.seq, each.study_id) for each in decisions if each.study_id is not None]
        return any(seq in approved or self._store.trials.all(study_id, series=()) for seq, study_id in studies)

    def _end_unanswered(self, record: CampaignRecord, last: DecisionRecord, decisions: list[DecisionRecord]) -> None:
        """Once the campaign's days are over, stop a study that no person approved in time."""
        study_id = last.study_id
        if study_id is None or self._ended(study_id) or not self._gated(record, last, decisions):
            return
        if not is_answered(self._store.campaigns.events(record.id), last.seq):
            self._store.studies.set_status(
                study_id, StudyStatus.STOPPED, "its days are over, and nobody had approved it"
            )

    def _waits_with(self, record: CampaignRecord, last: DecisionRecord) -> str:
        """Do what `_waits` does, for an instrument that an LLM wrote."""
        making = Making.of(self._store.campaigns.events(record.id), last.seq)
        if not making.waits or making.outcome is None:
            return ""
        ask(self._store, record.id, last, "approval")
        made = making.outcome.detail
        name = f"the instrument {made['aim']['instrument']}, which {made['by']} wrote to {made['folder']}"
        return self._waited(record, last, f"waits for a person's word on {name}", f"read it, then {_how(record)}")

    def _waited(self, record: CampaignRecord, last: DecisionRecord, said: str, how: str) -> str:
        """Notify people of the open question and return its text. Once it is answered, return an empty string."""
        if not waits_for_a_person(self._store, record):
            return ""
        self._notify(campaign_gate(record, last.seq, f"It {said}.", how))
        return f"{said}: {how}"

    def _ended(self, study_id: str) -> bool:
        return self._store.studies.get(study_id).status.ended

    def _keeps_failing(self, record: CampaignRecord, decisions: list[DecisionRecord]) -> str:
        """Return a reason to stop if the last `_MOST_FAILED` studies since a person last resumed the campaign all failed; else an
        empty string."""
        told = self._store.campaigns.events(record.id, "status")
        since = max((event.at for event in told if event.detail.get("because") == RESUMED), default=0.0)
        studies = [self._store.studies.get(each.study_id) for each in decisions if each.study_id and each.at > since]
        studies = studies[-_MOST_FAILED:]
        if len(studies) == _MOST_FAILED and all(study.status is StudyStatus.FAILED for study in studies):
            return f"the last {_MOST_FAILED} studies failed; the last: {studies[-1].reason}"
        return ""

    def _rest(self, record: CampaignRecord, status: CampaignStatus, reason: str) -> CampaignOutcome:
        folder = write_campaign_report(self._store, record.id, self._reports, status=status, reason=reason)
        if status is CampaignStatus.DONE:
            answer = campaign_page(self._store, record.id, status=status).answer
            self._notify(campaign_conclusion(record, answer, folder / "report.md"))
        elif status is CampaignStatus.FAILED:
            decisions = len(self._store.campaigns.decisions(record.id))
            self._notify(campaign_failure(record, decisions, self._clock.now()))
        if record.status is not status or record.reason != reason:
            self._store.campaigns.set_status(record.id, status, reason)
        return CampaignOutcome(status, reason, folder)

    def _set(self, record: CampaignRecord, status: CampaignStatus, reason: str) -> None:
        if (record.status, record.reason) != (status, reason):
            self._store.campaigns.set_status(record.id, status, reason)
