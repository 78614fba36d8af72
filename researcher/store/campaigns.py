"""Campaigns with their hypotheses, decisions and messages from people. Append-only, except for a campaign's status, requests and
schedule."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from researcher.models import (
    CampaignEvent,
    CampaignRecord,
    CampaignStatus,
    DecisionRecord,
    HypothesisRecord,
    StudyOptions,
    StudyRecord,
    StudyStatus,
)
from researcher.store.errors import NotFound, WrongState
from researcher.store.retries import retried
from researcher.store.tables import (
    CampaignEventRow,
    CampaignHypothesisRow,
    CampaignRow,
    DecisionRow,
    ScheduleRow,
    StudyRow,
)
from researcher.store.transactions import CAMPAIGN, Part, readable, resolved


class Campaigns(Part):
    """The campaigns in the store. Only a campaign's owner may write its decisions, hypotheses and status. Anyone may write
    requests and messages."""

    @retried
    def create(
        self,
        goal: Mapping[str, Any],
        aim: Mapping[str, Any],
        options: StudyOptions,
        schedule: Mapping[str, Any],
        joined: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """Create a campaign and return its id.

        `schedule` holds its timetable and whether the daemon runs it, as for a study. `joined` has one journal entry for each
        instrument after the first (see `researcher.campaign.records.joining`).
        """
        campaign_id, now = self._db.ids.new(CAMPAIGN), self._db.clock.now()
        made = CampaignRecord(
            id=campaign_id,
            goal=dict(goal),
            aim=dict(aim),
            options=options,
            schedule=dict(schedule),
            status=CampaignStatus.RUNNING,
            created_at=now,
            updated_at=now,
        )
        with self._db.writing() as session:
            session.add(CampaignRow(**made.model_dump(mode="json")))
            session.flush()
            for each in joined:
                self._note(session, campaign_id, "joined", each)
                session.flush()
        return campaign_id

    @retried
    def get(self, campaign_id: str) -> CampaignRecord:
        """Return the campaign's record. Raises: NotFound."""
        with readable("the row of the campaign"), self._db.reading() as session:
            return CampaignRecord.model_validate(_row(session, campaign_id), from_attributes=True)

    @retried
    def all(self) -> list[CampaignRecord]:
        """Return all campaigns, newest first."""
        with readable("the rows of campaigns"), self._db.reading() as session:
            rows = session.scalars(select(CampaignRow).order_by(CampaignRow.created_at.desc(), CampaignRow.id))
            return [CampaignRecord.model_validate(row, from_attributes=True) for row in rows]

    @retried
    def resolve(self, reference: str) -> str:
        """Return the campaign id that `reference` stands for: `latest`, an id, or the beginning of one, with or without `ca-`.

        Raises: NotFound, Ambiguous.
        """
        known = [each.id for each in self.all()]
        if not known:
            raise NotFound("there are no campaigns yet; start one with `researcher campaign start GOAL.yaml`")
        return resolved(reference, known, f"{CAMPAIGN}-", "campaign", "researcher campaign list")

    @retried
    def set_status(self, campaign_id: str, status: CampaignStatus, reason: str | None = None) -> None:
        with self._db.owning(campaign_id) as session:
            row = _row(session, campaign_id)
            if (row.status, row.reason) != (status, reason):
                self._note(session, campaign_id, "status", {"status": status, "because": reason})
            row.status, row.reason, row.updated_at = status, reason, self._db.clock.now()
            row.ended_at = self._db.clock.now() if status.ended else None

    # -- decisions --------------------------------------------------------------------------------------------------------

    @retried
    def decide(
        self,
        campaign_id: str,
        decision: DecisionRecord,
        hypotheses: Sequence[HypothesisRecord],
        study: StudyRecord | None,
    ) -> DecisionRecord:
        """Write a decision, the hypotheses it registers or changes, and the study it starts, in one transaction.

        `study` has no id yet: the store assigns one and puts it into the returned decision. If a decision with this number
        already exists, nothing is written and the existing one is returned.
        """
        now = self._db.clock.now()
        with self._db.owning(campaign_id) as session:
            there = session.get(DecisionRow, (campaign_id, decision.seq))
            if there is not None:
                return _decision(there)
            schedule = dict(_row(session, campaign_id, lock=True).schedule)  # serialised with people's answers
            made = decision.model_copy(update={"at": now})
            if study is not None:
                study_id = self._db.ids.new("st")
                made = made.model_copy(update={"study_id": study_id})
                kept = study.model_copy(update={"id": study_id, "created_at": now, "updated_at": now})
                session.add(StudyRow(**kept.model_dump(mode="json", exclude={"plan_version"})))
                session.flush()
                timetable = {**schedule, "carried": False}
                session.add(ScheduleRow(study_id=study_id, detail=timetable, updated_at=now))
                self._db.announce(session, study_id, "study", study_id)
            session.add(DecisionRow(campaign_id=campaign_id, **made.model_dump(mode="json")))
            for each in hypotheses:
                session.add(CampaignHypothesisRow(campaign_id=campaign_id, **each.model_dump(mode="json")))
        return made

    @retried
    def decisions(self, campaign_id: str) -> list[DecisionRecord]:
        """Return the campaign's decisions, in order."""
        with readable("the rows of decisions"), self._db.reading() as session:
            chosen = select(DecisionRow).where(DecisionRow.campaign_id == campaign_id).order_by(DecisionRow.seq)
            return [_decision(row) for row in session.scalars(chosen)]

    @retried
    def hypotheses(self, campaign_id: str, *, before: int | None = None) -> list[HypothesisRecord]:
        """Return the newest version of each hypothesis, in the order of registration. If `before` is given, ignore the versions
        written by the decision with that number and by later ones."""
        with readable("the rows of campaign_hypotheses"), self._db.reading() as session:
            chosen = select(CampaignHypothesisRow).where(CampaignHypothesisRow.campaign_id == campaign_id)
            if before is not None:
                chosen = chosen.where(CampaignHypothesisRow.seq < before)
            found: dict[str, HypothesisRecord] = {}
            rows = session.scalars(chosen).all()
            for row in sorted(rows, key=lambda row: (int(row.id[1:]), row.version)):
                found[row.id] = HypothesisRecord.model_validate(row, from_attributes=True)
            return list(found.values())

    # -- people -------------------------------------------------------------------------------------------------------------

    @retried
    def record(self, campaign_id: str, kind: str, detail: Mapping[str, Any]) -> int:
        """Append an entry to the campaign's journal and return its number. This needs no lease."""
        with self._db.writing() as session:
            _row(session, campaign_id)
            row = self._note(session, campaign_id, kind, detail)
            session.flush()
            return row.seq

    @retried
    def answer(
        self,
        campaign_id: str,
        kind: str,
        said: Callable[[Sequence[CampaignEvent]], Mapping[str, Any]],
        *,
        decision: int | None = None,
    ) -> Mapping[str, Any]:
        """Append a person's message to the journal and return its detail.

        The campaign stays locked meanwhile, so no other answer or decision can come in between.

        Args:
            said: builds the detail from the journal's entries, oldest first. If it raises, nothing is written.
            decision: number of the decision that the person was shown, by default the newest.
        Raises: WrongState if that decision is no longer the newest.
        """
        with self._db.writing() as session:
            _row(session, campaign_id, lock=True)
            _newest(session, campaign_id, decision)
            detail = said(_events(session, campaign_id))
            self._note(session, campaign_id, kind, detail)
            return detail

    @retried
    def veto(self, campaign_id: str, because: str, by: str, *, decision: int | None = None) -> DecisionRecord:
        """Veto the study of the newest decision and return that decision. `decision` is as in `answer`.

        Raises: WrongState if the study has ended or was already vetoed, or if a newer decision exists.
        """
        with self._db.writing() as session:
            _row(session, campaign_id, lock=True)
            newest = _newest(session, campaign_id, decision)
            study = None if newest is None or newest.study_id is None else session.get(StudyRow, newest.study_id)
            if newest is None or study is None or StudyStatus(study.status).ended:
                raise WrongState(
                    f"{campaign_id} has no waiting or running study; `researcher campaign status` shows what is next"
                )
            if study.id in self._vetoed(session, campaign_id):
                raise WrongState(f"decision {newest.seq} of {campaign_id} is already vetoed; {study.id} is stopping")
            study.stop_requested = True
            about = {} if newest.plan is None else {"instrument": json.loads(newest.plan)["instrument"]}
            self._note(session, campaign_id, "vetoed", {"words": because, "by": by, "decision": newest.seq, **about})
            return _decision(newest)

    @retried
    def events(self, campaign_id: str, *kinds: str) -> list[CampaignEvent]:
        """Return the journal's entries, oldest first. If `kinds` are given, return only entries of these kinds."""
        with readable("the rows of campaign_events"), self._db.reading() as session:
            return _events(session, campaign_id, *kinds)

    @retried
    def request(self, campaign_id: str, *, stop: bool | None = None, pause: bool | None = None) -> None:
        """Request or withdraw a stop or a pause, for the campaign and its unfinished studies. A vetoed study stays stopped.

        None leaves a request as it is.
        """
        with self._db.writing() as session:
            row = _row(session, campaign_id, lock=True)
            row.stop_requested = row.stop_requested if stop is None else stop
            row.pause_requested = row.pause_requested if pause is None else pause
            row.updated_at = self._db.clock.now()
            chosen = select(StudyRow).where(StudyRow.campaign_id == campaign_id)
            vetoed = self._vetoed(session, campaign_id)
            for study in session.scalars(chosen):
                if not StudyStatus(study.status).ended and study.id not in vetoed:
                    study.stop_requested = study.stop_requested if stop is None else stop
                    study.pause_requested = study.pause_requested if pause is None else pause

    def _vetoed(self, session: Session, campaign_id: str) -> set[str]:
        """Return the ids of the campaign's vetoed studies."""
        chosen = select(CampaignEventRow).where(
            CampaignEventRow.campaign_id == campaign_id, CampaignEventRow.kind == "vetoed"
        )
        numbers = {row.detail.get("decision") for row in session.scalars(chosen)}
        decided = select(DecisionRow).where(DecisionRow.campaign_id == campaign_id)
        return {row.study_id for row in session.scalars(decided) if row.study_id and row.seq in numbers}

    @retried
    def hand_over(self, campaign_id: str) -> None:
        """Hand the campaign to the daemon."""
        with self._db.writing() as session:
            row = _row(session, campaign_id, lock=True)
            row.schedule = {**row.schedule, "carried": True}

    @retried
    def studies(self, campaign_id: str) -> int:
        """Return the number of studies that the campaign has started."""
        with self._db.reading() as session:
            counted = select(func.count()).select_from(StudyRow).where(StudyRow.campaign_id == campaign_id)
            return int(session.execute(counted).scalar_one())

    def _note(self, session: Session, campaign_id: str, kind: str, detail: Mapping[str, Any]) -> CampaignEventRow:
        row = CampaignEventRow(campaign_id=campaign_id, at=self._db.clock.now(), kind=kind, detail=dict(detail))
        session.add(row)
        return row


def _row(session: Session, campaign_id: str, *, lock: bool = False) -> CampaignRow:
    row = session.get(CampaignRow, campaign_id, with_for_update=lock or None)
    if row is None:
        raise NotFound(f"there is no campaign {campaign_id!r}; `researcher campaign list` shows all")
    return row


def _newest(session: Session, campaign_id: str, shown: int | None) -> DecisionRow | None:
    """Return the newest decision. `shown` is the number of the decision that a person is answering, if any.

    Raises: WrongState if that is not the newest.
    """
    chosen = select(DecisionRow).where(DecisionRow.campaign_id == campaign_id)
    newest = session.scalar(chosen.order_by(DecisionRow.seq.desc()).limit(1))
    if shown is not None and (newest is None or newest.seq != shown):
        raise WrongState(
            "you answered an earlier decision, but the campaign has decided again: look at the new decision"
        )
    return newest


def _events(session: Session, campaign_id: str, *kinds: str) -> list[CampaignEvent]:
    chosen = select(CampaignEventRow).where(CampaignEventRow.campaign_id == campaign_id)
    if kinds:
        chosen = chosen.where(CampaignEventRow.kind.in_(kinds))
    rows = session.scalars(chosen.order_by(CampaignEventRow.seq))
    return [CampaignEvent.model_validate(row, from_attributes=True) for row in rows]


def _decision(row: DecisionRow) -> DecisionRecord:
    return DecisionRecord.model_validate(row, from_attributes=True)
