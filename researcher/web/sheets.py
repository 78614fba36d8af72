"""Content of the page: the list of studies, and one study.

Concurrent requests share one reading of the store, which is at most a second old.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from foundation.clock import Clock
from foundation.logs import redact
from researcher.analysis.sentinel_findings import SentinelFinding
from researcher.analysis.sentinels import inspect
from researcher.attendance import carrier, unattended
from researcher.describe import event_text, when
from researcher.gates import answer_text, waits_for_an_answer
from researcher.home import Home
from researcher.models import (
    KINDS,
    Answer,
    AttemptRecord,
    EpisodeAttempts,
    Event,
    Kind,
    StudyRecord,
    StudyStatus,
    TrialRecord,
    TrialStatus,
    VerdictRecord,
)
from researcher.report.samples import SamplePart, shown_samples
from researcher.store.errors import NotFound, owner_text
from researcher.store.journal import JournalReader
from researcher.study.plan import Hypothesis, Plan, Stage
from researcher.view import duration, losses_by_arm, losses_text
from researcher.web import curves
from swarm.protocol.episodes import Cause

_FRESH_S = 1.0
_PAGE = 50
_JOURNAL = 40
_KEPT = 64
"""Maximum number of cached readings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatePart:
    """An open gate. `answer` is a person's answer that no worker has seen yet."""

    name: str
    question: list[tuple[str, str]]
    answer: Answer | None
    told: str
    """The answer in words, and what happens next."""
    can_amend: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyLine:
    """A study's line in the list."""

    record: StudyRecord
    verdicts: list[VerdictRecord]
    done: int
    failed: int
    trials: int
    waits: bool
    """True if the study waits for a person's answer."""
    unattended: str
    """Who will continue a study that has no worker; else ""."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListSheet:
    studies: list[StudyLine]
    page: int
    pages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialPart:
    record: TrialRecord
    server: str
    step: int
    steps: int
    reward: float | None
    """Mean reward of the newest step."""
    held_out: float | None
    """Held-out reward of the newest interim evaluation."""
    spark: str
    colour: int
    finals: list[tuple[str, float]]

    @property
    def rank(self) -> int:
        """Sort key that puts running and paused trials first."""
        return int(self.record.status.ended or self.record.status is TrialStatus.PLANNED)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictPart:
    record: VerdictRecord
    hypothesis: Hypothesis | None
    """Hypothesis of the verdict; None if it is not in the newest plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpendingPart:
    """One kind of spending, in words. `share` is the part of the limit that is used; None without a limit."""

    name: str
    text: str
    share: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SentinelPart:
    name: str
    state: str
    """`invalid`, `warning`, `unchecked`, `quiet`, or `waiting` before any trial is done."""
    findings: list[SentinelFinding]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossPart:
    """Attempts at episodes of one kind, over the finished trials of one arm."""

    arm: str
    kind: Kind
    counts: EpisodeAttempts
    first: dict[Cause, str]
    """The arm's first loss by cause, over episodes of both kinds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StudySheet:
    """Everything that one study's page shows. `plan` is None while the study is being planned."""

    record: StudyRecord
    worker: str
    gate: GatePart | None
    plan: Plan | None
    digest: str
    whole: bool
    """True if the plan still matches the hash with which it was frozen."""
    stages: list[tuple[Stage, str]]
    verdicts: list[VerdictPart]
    trials: list[TrialPart]
    arms: dict[str, int]
    """Colour number of each arm, in the plan's order."""
    losses: list[LossPart]
    curves: str
    samples: list[SamplePart]
    """Sample answers of each arm, from a finished trial if it has one, else from one in training."""
    spending: list[SpendingPart]
    sentinels: list[SentinelPart]
    decisions: list[str]
    journal: list[tuple[str, str]]
    """Time and sentence of each event, newest first."""
    events: int
    reported: bool

    @property
    def done(self) -> int:
        return sum(part.record.status is TrialStatus.DONE for part in self.trials)


@dataclass(slots=True)
class _Kept:
    """Cached content, with a lock so that only one request renews it."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    at: float = -_FRESH_S
    sheet: Any = None


Sheet = TypeVar("Sheet")


class Sheets:
    """Reads what the pages show. Thread-safe."""

    def __init__(self, home: Home, clock: Clock) -> None:
        self._home = home
        self._store = home.store
        self._clock = clock
        self._lock = threading.Lock()
        self._kept: dict[str, _Kept] = {}
        self._journals: dict[str, JournalReader] = {}
        self._sentinels: dict[str, tuple[tuple[str, int], list[SentinelPart]]] = {}

    def studies(self, page: int) -> ListSheet:
        """Return the list of studies, newest first. `page` counts from 1; a number beyond the last page gives the last page."""
        return self.shared(f"list {page}", lambda: self._list(page))

    def study(self, study_id: str) -> StudySheet:
        """Return one study. Raises: NotFound."""
        return self.shared(study_id, lambda: self._study(study_id))

    def forget(self, study_id: str) -> None:
        """Drop the cached content of this study after changing it."""
        with self._lock:
            for name in [name for name in self._kept if name == study_id or name.startswith("list ")]:
                del self._kept[name]

    def shared(self, name: str, make: Callable[[], Sheet]) -> Sheet:
        """Return the result of `make`, cached under this name for a second and shared by all requests."""
        with self._lock:
            if len(self._kept) > _KEPT:
                self._kept.clear()
            kept = self._kept.setdefault(name, _Kept())
        with kept.lock:
            if self._clock.monotonic() - kept.at >= _FRESH_S:
                kept.sheet = make()
                kept.at = self._clock.monotonic()
            found: Sheet = kept.sheet
            return found

    # -- the list -----------------------------------------------------------------------------------------------------

    def _list(self, page: int) -> ListSheet:
        studies = self._store.studies.all()
        pages = max(1, -(-len(studies) // _PAGE))
        page = min(max(page, 1), pages)
        shown = studies[(page - 1) * _PAGE : page * _PAGE]
        return ListSheet(studies=[self._line(study) for study in shown], page=page, pages=pages)

    def _line(self, study: StudyRecord) -> StudyLine:
        trials = self._store.trials.all(study.id, series=())
        return StudyLine(
            record=study,
            verdicts=self._store.verdicts.all(study.id),
            done=sum(trial.status is TrialStatus.DONE for trial in trials),
            failed=sum(trial.status is TrialStatus.FAILED for trial in trials),
            trials=len(trials),
            waits=study.status is not StudyStatus.DONE and waits_for_an_answer(self._store, study.id),
            unattended="" if study.status.ended or self._home.worker(study.id) else unattended(self._home, study),
        )

    # -- one study ----------------------------------------------------------------------------------------------------

    def _study(self, study_id: str) -> StudySheet:
        store, record = self._store, self._store.studies.get(study_id)
        try:
            plan, digest = store.plans.frozen(study_id)
        except NotFound:
            plan, digest = None, ""
        trials = store.trials.all(study_id, series=(curves.CURVE, curves.HELD_OUT))
        attempts = store.trials.attempts_of_study(study_id)
        events = self._journal(study_id)
        arms = {arm.name: number for number, arm in enumerate(plan.arms)} if plan else {}
        for trial in trials:  # of an earlier version of the plan
            arms.setdefault(trial.arm, len(arms))
        known = {} if plan is None else {one.id: one for one in plan.hypotheses}
        stages = store.plans.stage_status(study_id)
        return StudySheet(
            record=record,
            worker=self._worker(record),
            gate=self._gate(record, plan, bool(trials)),
            plan=plan,
            digest=digest,
            whole=plan is None or plan.digest() == digest,
            stages=[] if plan is None else [(stage, stages.get(stage.id, "planned")) for stage in plan.stages],
            verdicts=[
                VerdictPart(record=one, hypothesis=known.get(one.hypothesis)) for one in store.verdicts.all(study_id)
            ],
            trials=[_trial(trial, attempts.get(trial.key, []), plan, arms) for trial in trials],
            arms=arms,
            losses=_losses(trials),
            curves=curves.large(trials, arms, 0 if plan is None else plan.steps),
            samples=[] if plan is None else shown_samples(plan, trials, store.trials.samples(study_id)),
            spending=self._spending(study_id),
            sentinels=self._watch(study_id, plan, trials),
            decisions=[redact(event_text(event)) for event in events if event.kind == "decision"],
            journal=[(when(event.at), redact(event_text(event))) for event in events[: -_JOURNAL - 1 : -1]],
            events=len(events),
            reported=(self._home.studies / study_id / "report.html").is_file(),
        )

    def _journal(self, study_id: str) -> list[Event]:
        journal = self._journals.setdefault(study_id, JournalReader(self._store.journal, study_id))
        journal.look()
        return journal.events

    def _worker(self, study: StudyRecord) -> str:
        if study.status.ended:
            return ""
        owner = self._home.worker(study.id)
        return f"worked on by {owner_text(owner)}" if owner else unattended(self._home, study)

    def _gate(self, study: StudyRecord, plan: Plan | None, begun: bool) -> GatePart | None:
        gate = None if study.status is StudyStatus.DONE else self._store.gates.open(study.id)
        if gate is None:
            return None
        answer = gate.answer
        carried = (self._store.studies.schedule(study.id) or {}).get("carried")
        then = carrier() if carried else f"`researcher resume {study.id}` continues it"
        if study.status is StudyStatus.STOPPED:
            then = "the study is stopped"
        return GatePart(
            name=gate.name,
            question=[(key, _told(value)) for key, value in gate.question.items()],
            answer=answer,
            told="" if answer is None else f"{redact(answer_text(answer))}; {then}",
            can_amend=plan is not None and not begun and not study.status.ended,
        )

    def _spending(self, study_id: str) -> list[SpendingPart]:
        parts = []
        for state in self._store.budgets.all(study_id):
            timed = state.kind == "wall_s"
            amount: Callable[[float], str] = duration if timed else "{:,.0f}".format
            reserved = f", {amount(state.reserved)} reserved" if state.reserved else ""
            used = min(1.0, (state.spent + state.reserved) / state.limit) if state.limit else None
            text = f"{amount(state.spent)} of {amount(state.limit)}{reserved}"
            name = "wall time" if timed else state.kind.replace("_", " ")
            parts.append(SpendingPart(name=name, text=text, share=used))
        calls = self._store.journal.llm_calls(study_id)
        if calls:
            tokens = sum(call.prompt_tokens + call.completion_tokens for call in calls)
            text = f"{len(calls)} calls, {tokens} tokens"
            parts.append(SpendingPart(name="planner LLM", text=text, share=None))
        return parts

    def _watch(self, study_id: str, plan: Plan | None, trials: Sequence[TrialRecord]) -> list[SentinelPart]:
        """Run the plan's sentinels over the finished trials, only after another trial has finished, because they read every series."""
        done = sum(trial.status is TrialStatus.DONE for trial in trials)
        if plan is None or not done:
            names = () if plan is None else plan.sentinels
            return [SentinelPart(name=name, state="waiting", findings=[]) for name in names]
        key = (plan.digest(), done)
        known = self._sentinels.get(study_id)
        if known is None or known[0] != key:
            found = _inspected(plan, self._store.trials.all(study_id, plan_version=plan.version))
            known = self._sentinels[study_id] = (key, [_sentinel(name, found) for name in plan.sentinels])
        return known[1]


def _trial(trial: TrialRecord, attempts: Sequence[AttemptRecord], plan: Plan | None, arms: dict[str, int]) -> TrialPart:
    newest = attempts[-1] if attempts else None
    line = trial.series.get(curves.CURVE, [])
    held_out = trial.series.get(curves.HELD_OUT, [])
    limits = {} if newest is None else newest.spec.get("limits", {})
    wanted = [] if plan is None else list(dict.fromkeys(one.metric for one in plan.hypotheses))
    return TrialPart(
        record=trial.model_copy(update={"reason": redact(trial.reason) if trial.reason else None}),
        server=redact(newest.server_url) if newest else "",
        step=max(len(line), newest.step if newest else 0),
        steps=int(limits.get("steps") or (0 if plan is None else plan.steps)),
        reward=line[-1][1] if line else None,
        held_out=held_out[-1][1] if held_out else None,
        spark=curves.small(line, arms[trial.arm]),
        colour=arms[trial.arm] % curves.COLOURS,
        finals=[(name, trial.finals[name]) for name in wanted if name in trial.finals],
    )


def _losses(trials: Sequence[TrialRecord]) -> list[LossPart]:
    """Collect the attempts of every arm over finished trials, by kind of episode; empty if no arm lost any."""
    found = losses_by_arm(trials)
    if not any(losses_text(each) for each in found.values()):
        return []
    return [
        LossPart(arm=arm, kind=kind, counts=each.of(kind), first={c: redact(words) for c, words in each.first.items()})
        for arm, each in found.items()
        for kind in KINDS
    ]


def _inspected(plan: Plan, trials: Sequence[TrialRecord]) -> list[SentinelFinding]:
    try:
        return inspect(plan, trials)
    except ValueError as error:  # a plan that names a sentinel which this version does not have
        return [SentinelFinding(name=name, severity="unchecked", text=str(error)) for name in plan.sentinels]


def _sentinel(name: str, found: Sequence[SentinelFinding]) -> SentinelPart:
    own = [finding for finding in found if finding.name == name]
    worst = next((s for s in ("invalid", "warning", "unchecked") if any(f.severity == s for f in own)), "quiet")
    return SentinelPart(name=name, state=worst, findings=own)


def _told(value: object) -> str:
    return redact(", ".join(map(str, value)) if isinstance(value, list) else str(value))
