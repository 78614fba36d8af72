"""Trials and their attempts: intent, progress and results.

The intent is written before a run is submitted. Results, finals and the end of the attempt are written in one transaction.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

from sqlalchemy import delete, func, insert, select
from sqlalchemy.orm import Session

from researcher.models import AttemptRecord, Attrition, SampledEpisode, TrialEvidence, TrialRecord, TrialStatus
from researcher.store.errors import NotFound, WrongState
from researcher.store.journal import newest
from researcher.store.retries import retried
from researcher.store.tables import AttemptRow, AttritionRow, EpisodeRow, MetricRow, PlanRow, TrialRow
from researcher.store.transactions import Part
from researcher.study.plan import trial_key

Point = tuple[str, int, float]
"""A metric's name, its step (or the episode's index), and its value."""
_Point = tuple[str, int | None, float]
"""A recorded value of a metric: name, step and value. The step of a final is None."""
_OPEN = (TrialStatus.SUBMITTED, TrialStatus.RUNNING, TrialStatus.PAUSED)


class Trials(Part):
    """The trials of studies. Only a study's owner may write. A trial is addressed by study and key; writes go to its newest attempt."""

    @retried
    def ensure(self, study_id: str, stage: str, pairs: Iterable[tuple[str, int]]) -> list[TrialRecord]:
        """Return the trials of the (arm, seed) `pairs` under the newest plan, in the same order. Create those that are missing.

        A trial that an earlier stage created is returned unchanged.
        """
        with self._db.owning(study_id) as session:
            plan = session.scalar(
                select(PlanRow).where(PlanRow.study_id == study_id).order_by(PlanRow.version.desc()).limit(1)
            )
            if plan is None:
                raise NotFound(f"study {study_id} has no plan yet; freeze a plan before creating trials")
            position = session.scalar(select(func.count()).where(TrialRow.study_id == study_id)) or 0
            keys = []
            for arm, seed in pairs:
                key = trial_key(plan.digest, arm, seed)
                keys.append(key)
                if session.get(TrialRow, (study_id, key)) is None:
                    made = TrialRecord(
                        key=key, study_id=study_id, stage=stage, arm=arm, seed=seed, status=TrialStatus.PLANNED
                    )
                    fields = made.model_dump(exclude={"finals", "series"})
                    session.add(TrialRow(**fields, plan_version=plan.version, position=position))
                    session.flush()
                    position += 1
        return [self.get(study_id, key) for key in keys]

    @retried
    def all(
        self,
        study_id: str,
        stage: str | None = None,
        plan_version: int | None = None,
        series: Collection[str] | None = None,
    ) -> list[TrialRecord]:
        """Return the trials of a study in the order of creation, with finals and series.

        `stage` and `plan_version` restrict them to one stage or plan. `series` names the series to load, by default all.
        """
        with self._db.reading() as session:
            chosen = select(TrialRow).where(TrialRow.study_id == study_id).order_by(TrialRow.position)
            if stage is not None:
                chosen = chosen.where(TrialRow.stage == stage)
            if plan_version is not None:
                chosen = chosen.where(TrialRow.plan_version == plan_version)
            rows = session.scalars(chosen).all()
            metrics = _metrics(session, study_id, None, series)
            return [_record(row, metrics.get((row.key, row.attempt), [])) for row in rows]

    @retried
    def get(self, study_id: str, key: str) -> TrialRecord:
        with self._db.reading() as session:
            row = _trial_row(session, study_id, key)
            return _record(row, _metrics(session, study_id, key).get((key, row.attempt), []))

    @retried
    def attempts(self, study_id: str, key: str) -> list[AttemptRecord]:
        """Return every attempt at a trial, oldest first."""
        with self._db.reading() as session:
            rows = session.scalars(
                select(AttemptRow)
                .where(AttemptRow.study_id == study_id, AttemptRow.trial_key == key)
                .order_by(AttemptRow.number)
            )
            return [_attempt(row) for row in rows]

    @retried
    def attempts_of_study(self, study_id: str) -> dict[str, list[AttemptRecord]]:
        """Return all attempts at each trial, by the trial's key, oldest first."""
        found: dict[str, list[AttemptRecord]] = defaultdict(list)
        with self._db.reading() as session:
            chosen = select(AttemptRow).where(AttemptRow.study_id == study_id)
            for row in session.scalars(chosen.order_by(AttemptRow.trial_key, AttemptRow.number)):
                found[row.trial_key].append(_attempt(row))
        return dict(found)

    # -- one attempt, from intent to end ------------------------------------------------------------------------------

    @retried
    def record_intent(
        self, study_id: str, key: str, attempt: int, server_url: str, idempotency_key: str, spec: Mapping[str, Any]
    ) -> AttemptRecord:
        """Record that this attempt is about to be submitted. An attempt may begin only after the previous one has ended.

        Raises: WrongState when the trial is over, another attempt is open, or the attempt's number is not the next one.
        """
        now = self._db.clock.now()
        with self._db.owning(study_id) as session:
            trial = _trial_row(session, study_id, key)
            if trial.status != TrialStatus.PLANNED or attempt != trial.attempt + 1:
                raise WrongState(f"{key} is {trial.status} at attempt {trial.attempt}; attempt {attempt} cannot begin")
            row = AttemptRow(
                study_id=study_id,
                trial_key=key,
                number=attempt,
                server_url=server_url,
                idempotency_key=idempotency_key,
                spec=dict(spec),
                step=0,
                outcome="open",
                intent_at=now,
                heartbeat_at=now,
            )
            session.add(row)
            trial.status, trial.attempt, trial.reason = TrialStatus.SUBMITTED, attempt, None
            trial.started_at = trial.started_at or now
            self._db.note(session, study_id, "trial_begun", trial=key, attempt=attempt, server=server_url)
            session.flush()
            return _attempt(row)

    @retried
    def record_submitted(self, study_id: str, key: str, run_id: str, blueprint: Mapping[str, Any]) -> None:
        """Record that the server has accepted the run."""
        with self._db.owning(study_id) as session:
            trial, attempt = _open_attempt(session, study_id, key)
            attempt.run_id, attempt.blueprint = run_id, dict(blueprint)
            attempt.heartbeat_at = self._db.clock.now()
            trial.status = TrialStatus.RUNNING

    @retried
    def pause_attempt(self, study_id: str, key: str, reason: str) -> None:
        """Record that the attempt is about to pause: its run stops with a checkpoint and can continue later."""
        with self._db.owning(study_id) as session:
            trial, attempt = _open_attempt(session, study_id, key)
            attempt.heartbeat_at = self._db.clock.now()
            trial.status, trial.reason = TrialStatus.PAUSED, reason

    @retried
    def record_rest(self, study_id: str, key: str, reason: str, since: float | None = None) -> None:
        """Record that work on the attempt has stopped for now.

        If it was interrupted, `since` is the Unix time at which work on it stopped. If it was paused, with a checkpoint saved and
        its server free, leave out `since`.
        """
        rested = {} if since is None else {"rested_s": max(0.0, self._db.clock.now() - since)}
        with self._db.owning(study_id) as session:
            _, attempt = _open_attempt(session, study_id, key)
            detail = {"trial": key, "attempt": attempt.number, "step": attempt.step, "because": reason}
            self._db.note(session, study_id, "trial_paused", **detail, **rested)

    @retried
    def rests(self, study_id: str, key: str) -> bool:
        """Return whether the newest attempt is paused or interrupted, according to the journal."""
        with self._db.reading() as session:
            last = newest(session, study_id, "trial_begun", "trial_paused", "trial_continued", trial=key)
            return last is not None and last.kind == "trial_paused"

    @retried
    def continue_attempt(self, study_id: str, key: str, step: int) -> None:
        """Record that the attempt continues in the same run, from this step."""
        with self._db.owning(study_id) as session:
            trial, attempt = _open_attempt(session, study_id, key)
            attempt.heartbeat_at = self._db.clock.now()
            trial.status, trial.reason = TrialStatus.RUNNING, None
            detail = {"trial": key, "attempt": attempt.number, "step": step, "server": attempt.server_url}
            self._db.note(session, study_id, "trial_continued", **detail)

    @retried
    def record_client(self, study_id: str, key: str, pid: int, started: float) -> None:
        """Record the client process that runs the trial."""
        with self._db.owning(study_id) as session:
            _, attempt = _open_attempt(session, study_id, key)
            attempt.client_pid, attempt.client_started = pid, started
            attempt.heartbeat_at = self._db.clock.now()

    @retried
    def record_progress(
        self,
        study_id: str,
        key: str,
        step: int,
        points: Sequence[Point] = (),
        episodes: Sequence[SampledEpisode] = (),
    ) -> None:
        """Record a heartbeat at `step`.

        `points` extend the series that viewers see; points that are already stored are ignored. `episodes`, if any, replace the
        stored sample of episodes.
        """
        with self._db.owning(study_id) as session:
            trial, attempt = _open_attempt(session, study_id, key)
            attempt.step, attempt.heartbeat_at = max(step, attempt.step), self._db.clock.now()
            if episodes:
                _keep_episodes(session, study_id, key, episodes)
            if not points:
                return
            of_attempt = (
                MetricRow.study_id == study_id,
                MetricRow.trial_key == key,
                MetricRow.attempt == trial.attempt,
                MetricRow.step.is_not(None),
            )
            last = select(MetricRow.name, func.max(MetricRow.step)).where(*of_attempt).group_by(MetricRow.name)
            known = {name: newest for name, newest in session.execute(last) if newest is not None}
            fresh = [point for point in points if point[1] > known.get(point[0], -1)]
            _add_metrics(session, trial, fresh)

    @retried
    def finish(
        self,
        study_id: str,
        key: str,
        finals: Mapping[str, float],
        series: Mapping[str, Sequence[tuple[int, float]]],
        evidence: TrialEvidence | None = None,
        episodes: Sequence[SampledEpisode] = (),
    ) -> None:
        """Record all results of a trial in one transaction. They replace the values recorded while it ran.

        Raises: ValueError for a value that is not finite; WrongState when no attempt is open.
        """
        with self._db.owning(study_id) as session:
            trial, attempt = _open_attempt(session, study_id, key)
            session.execute(
                delete(MetricRow).where(
                    MetricRow.study_id == study_id, MetricRow.trial_key == key, MetricRow.attempt == trial.attempt
                )
            )
            points: list[tuple[str, int | None, float]] = [(name, None, value) for name, value in finals.items()]
            points += [(name, step, value) for name, line in series.items() for step, value in line]
            _add_metrics(session, trial, points)
            _keep_episodes(session, study_id, key, episodes)
            _keep_attrition(session, trial, evidence.attrition if evidence is not None else None)
            now = self._db.clock.now()
            attempt.outcome, attempt.ended_at, attempt.heartbeat_at = "done", now, now
            trial.status, trial.reason, trial.ended_at = TrialStatus.DONE, None, now
            trial.evidence = None if evidence is None else evidence.model_dump(mode="json")
            self._db.note(session, study_id, "trial_done", trial=key, attempt=attempt.number)
            self._db.announce(session, study_id, "trial", key)

    @retried
    def attrition(self, study_id: str) -> dict[str, dict[tuple[str, str, str], int]]:
        """Count the attempts at episodes, by the trial's key and then by (arm, kind, cause).

        The kind is `train` or `eval`. The cause says why the episode was lost; `none` means that it ended with a reward.
        """
        found: dict[str, dict[tuple[str, str, str], int]] = defaultdict(dict)
        with self._db.reading() as session:
            for row in session.scalars(select(AttritionRow).where(AttritionRow.study_id == study_id)):
                found[row.trial_key][row.arm, row.kind, row.cause] = row.attempts
        return dict(found)

    @retried
    def sampled_episodes(self, study_id: str, key: str) -> list[SampledEpisode]:
        """Return the sampled episodes of a trial, in stored order. A running trial has those up to its newest interim evaluation."""
        with self._db.reading() as session:
            chosen = select(EpisodeRow).where(EpisodeRow.study_id == study_id, EpisodeRow.trial_key == key)
            rows = session.scalars(chosen.order_by(EpisodeRow.position))
            return [SampledEpisode.model_validate(row.detail) for row in rows]

    @retried
    def samples(self, study_id: str) -> dict[str, list[SampledEpisode]]:
        """Return the sampled episodes of all trials, by the trial's key."""
        with self._db.reading() as session:
            chosen = select(EpisodeRow).where(EpisodeRow.study_id == study_id)
            found: dict[str, list[SampledEpisode]] = {}
            for row in session.scalars(chosen.order_by(EpisodeRow.trial_key, EpisodeRow.position)):
                found.setdefault(row.trial_key, []).append(SampledEpisode.model_validate(row.detail))
            return found

    @retried
    def fail_attempt(self, study_id: str, key: str, reason: str) -> None:
        """Record that the attempt failed. The executor may retry the trial."""
        self._end_attempt(study_id, key, "failed", reason)

    @retried
    def withdraw_attempt(self, study_id: str, key: str, reason: str) -> None:
        """Record that the attempt ended through no fault of the trial (a stop, a lost server), so it does not count as a failure."""
        self._end_attempt(study_id, key, "withdrawn", reason)

    def _end_attempt(self, study_id: str, key: str, outcome: Literal["failed", "withdrawn"], reason: str) -> None:
        with self._db.owning(study_id) as session:
            trial, attempt = _open_attempt(session, study_id, key)
            attempt.outcome, attempt.reason, attempt.ended_at = outcome, reason, self._db.clock.now()
            trial.status, trial.reason = TrialStatus.PLANNED, reason
            self._db.note(session, study_id, f"attempt_{outcome}", trial=key, attempt=attempt.number, because=reason)

    @retried
    def fail(self, study_id: str, key: str, reason: str) -> None:
        """Give up the trial. Its seed will be missing from the statistics."""
        with self._db.owning(study_id) as session:
            trial = _trial_row(session, study_id, key)
            if trial.status != TrialStatus.PLANNED:
                raise WrongState(f"{key} is {trial.status}; end its attempt before giving the trial up")
            trial.status, trial.reason, trial.ended_at = TrialStatus.FAILED, reason, self._db.clock.now()
            self._db.note(session, study_id, "trial_failed", trial=key, because=reason)
            self._db.announce(session, study_id, "trial", key)


def _trial_row(session: Session, study_id: str, key: str) -> TrialRow:
    row = session.get(TrialRow, (study_id, key))
    if row is None:
        raise NotFound(f"study {study_id} has no trial {key!r}")
    return row


def _open_attempt(session: Session, study_id: str, key: str) -> tuple[TrialRow, AttemptRow]:
    trial = _trial_row(session, study_id, key)
    attempt = session.get(AttemptRow, (study_id, key, trial.attempt))
    if trial.status not in _OPEN or attempt is None or attempt.outcome != "open":
        raise WrongState(f"{key} is {trial.status} and has no open attempt")
    return trial, attempt


def _add_metrics(session: Session, trial: TrialRow, points: Sequence[tuple[str, int | None, float]]) -> None:
    wrong = [f"{name}@{step}={value}" for name, step, value in points if not math.isfinite(value)]
    if wrong:
        raise ValueError(f"metrics of {trial.key} are not finite: {', '.join(wrong[:5])}")
    of_trial = {"study_id": trial.study_id, "trial_key": trial.key, "attempt": trial.attempt}
    rows = [{**of_trial, "name": name, "step": step, "value": float(value)} for name, step, value in points]
    if rows:
        session.execute(insert(MetricRow), rows)


def _keep_episodes(session: Session, study_id: str, key: str, episodes: Sequence[SampledEpisode]) -> None:
    session.execute(delete(EpisodeRow).where(EpisodeRow.study_id == study_id, EpisodeRow.trial_key == key))
    for position, episode in enumerate(episodes):
        detail = episode.model_dump(mode="json")
        session.add(EpisodeRow(study_id=study_id, trial_key=key, id=episode.id, position=position, detail=detail))


def _keep_attrition(session: Session, trial: TrialRow, found: Attrition | None) -> None:
    of_trial = {"study_id": trial.study_id, "trial_key": trial.key}
    session.execute(delete(AttritionRow).filter_by(**of_trial))
    for kind, cause, attempts in found.rows() if found is not None else ():
        session.add(AttritionRow(**of_trial, arm=trial.arm, kind=kind, cause=cause, attempts=attempts))


def _metrics(
    session: Session, study_id: str, key: str | None, series: Collection[str] | None = None
) -> dict[tuple[str, int], list[_Point]]:
    """Return the recorded metrics by trial and attempt.

    Selects columns instead of objects, because a study can have hundreds of thousands of rows.
    """
    columns = (MetricRow.trial_key, MetricRow.attempt, MetricRow.name, MetricRow.step, MetricRow.value)
    chosen = select(*columns).where(MetricRow.study_id == study_id).order_by(MetricRow.name, MetricRow.step)
    if key is not None:
        chosen = chosen.where(MetricRow.trial_key == key)
    if series is not None:
        chosen = chosen.where(MetricRow.step.is_(None) | MetricRow.name.in_(series))
    found: dict[tuple[str, int], list[_Point]] = defaultdict(list)
    for trial, attempt, name, step, value in session.execute(chosen):
        found[trial, attempt].append((name, step, value))
    return found


def _record(row: TrialRow, metrics: list[_Point]) -> TrialRecord:
    series: dict[str, list[tuple[int, float]]] = defaultdict(list)
    finals = {}
    for name, step, value in metrics:
        if step is None:
            finals[name] = value
        else:
            series[name].append((step, value))
    columns = {name: getattr(row, name) for name in TrialRecord.model_fields if name not in ("finals", "series")}
    return TrialRecord.model_validate({**columns, "finals": finals, "series": dict(series)})


def _attempt(row: AttemptRow) -> AttemptRecord:
    return AttemptRecord.model_validate(row, from_attributes=True)
