"""A study's records with the results computed from them, and how the study ended."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from researcher.analysis.attrition import LossTest, loss_tests
from researcher.analysis.decide import Decision, decide
from researcher.analysis.durations import Rests, rests
from researcher.analysis.effects import secondary_effect
from researcher.analysis.metrics import MetricMissing, finals
from researcher.analysis.race import due
from researcher.analysis.samples import NotEnoughTrials, same_number
from researcher.analysis.sentinel_findings import SentinelFinding
from researcher.analysis.sentinels import inspect
from researcher.analysis.verdicts import Conclusions, conclude
from researcher.instruments.instrument import HELDOUT_REWARD
from researcher.models import OVER_BUDGET, Effect, StudyData, StudyStatus, TrialRecord, TrialStatus
from researcher.refusals import RecordsDisagree
from researcher.study.plan import Hypothesis, Stage, StageKind

ENDED = (TrialStatus.DONE, TrialStatus.FAILED)


class Records:
    """A study's records and the results computed from them, each computed once.

    `believe_finals` trusts stored finals without recomputing them; use it only to show what they would give, never for a report.

    Raises: RecordsDisagree for a trial whose arm is not in the plan.
    """

    def __init__(self, data: StudyData, *, believe_finals: bool = False) -> None:
        self.data = data
        self.plan = data.plan
        self._believe = believe_finals
        self._checked: dict[tuple[str, str], RecordsDisagree | None] = {}
        self._secondary: dict[tuple[str, str], Effect | None] = {}
        known = {arm.name for arm in data.plan.arms}
        for trial in data.trials:
            if trial.arm not in known:
                raise RecordsDisagree(f"trial {trial.key}: the plan has no arm {trial.arm!r}")

    @cached_property
    def done(self) -> list[TrialRecord]:
        return [trial for trial in self.data.trials if trial.status is TrialStatus.DONE]

    @cached_property
    def rests(self) -> Rests:
        return rests(self.data.events)

    @cached_property
    def conclusions(self) -> Conclusions:
        """Effects, findings and verdicts. Raises: RecordsDisagree when a final behind a verdict differs from its series."""
        self.check_all()
        return conclude(self.plan, self.data.trials)

    @cached_property
    def findings(self) -> list[SentinelFinding]:
        """Findings of the sentinels, which read series and evidence but no finals."""
        return inspect(self.plan, self.data.trials)

    @cached_property
    def loss_tests(self) -> list[LossTest]:
        """The tests of lost attempts that the sentinel `attrition` runs."""
        return loss_tests(self.plan, self.done)

    @cached_property
    def path(self) -> tuple[Decision, ...]:
        """Decisions along the plan's branches, from the first stage on. Each is based on the trials of its stage and earlier ones.

        Raises: RecordsDisagree as `conclusions` does, or when no branch of the plan applies.
        """
        self.check_all()
        stages = {stage.id: stage for stage in self.plan.stages}
        stage, seeds = self.plan.stages[0], self.plan.stages[0].seeds
        seen: list[str] = []
        decisions: list[Decision] = []
        while stage.id not in seen and self._over(stage, seeds, [*seen, stage.id]):
            seen.append(stage.id)
            try:
                decision = decide(self.plan, stage.id, [trial for trial in self.data.trials if trial.stage in seen])
            except ValueError as error:
                raise RecordsDisagree(str(error)) from error
            decisions.append(decision)
            if decision.action != "stage" or decision.to is None:
                break
            stage = stages[decision.to]
            seeds = decision.seeds or stage.seeds
        return tuple(decisions)

    def secondary(self, hypothesis: Hypothesis, metric: str) -> Effect | None:
        """Return the effect of a hypothesis on a secondary metric; None if too few trials have ended.

        Raises: RecordsDisagree as `check` does.
        """
        key = (hypothesis.id, metric)
        if key not in self._secondary:
            self.check_all()  # the finals decided which arms continued after a race
            self.check(metric, self.done)
            found = secondary_effect(self.plan, hypothesis, metric, self.data.trials)
            self._secondary[key] = found if isinstance(found, Effect) else None
        return self._secondary[key]

    def trial(self, arm: str, seed: int) -> TrialRecord | None:
        return next((trial for trial in self.data.trials if trial.arm == arm and trial.seed == seed), None)

    def check(self, metric: str, trials: Iterable[TrialRecord]) -> None:
        """Recompute `metric` for each finished trial and compare it with the stored final.

        Raises: RecordsDisagree for the first trial whose stored final differs, is missing, or cannot be computed.
        """
        for trial in trials:
            if trial.status is TrialStatus.DONE:
                key = (metric, trial.key)
                if key not in self._checked:
                    self._checked[key] = self._disagreement(metric, trial)
                found = self._checked[key]
                if found is not None:
                    raise found

    def check_all(self) -> None:
        """Run `check` for the metrics of all hypotheses."""
        for hypothesis in self.plan.hypotheses:
            self.check(hypothesis.metric, [trial for trial in self.done if trial.arm in hypothesis.sides])
        for stage in self.plan.stages:
            if stage.kind is StageKind.NOISE_FLOOR or stage.explores:
                for hypothesis in self.plan.hypotheses:
                    self.check(hypothesis.metric, [trial for trial in self.done if trial.arm in stage.arms])

    def _disagreement(self, name: str, trial: TrialRecord) -> RecordsDisagree | None:
        stored = trial.finals.get(name)
        if stored is None or not math.isfinite(stored):
            return RecordsDisagree(f"trial {trial.key} is done, but its stored {name!r} is {stored!r}")
        if self._believe:
            return None
        try:
            computed = finals([self.plan.metric(name)], trial.series)[name]
        except MetricMissing as missing:
            return RecordsDisagree(f"trial {trial.key}: {missing}")
        if same_number(stored, computed):
            return None
        return RecordsDisagree(f"trial {trial.key}: stored {name!r} is {stored!r}, but its series give {computed!r}")

    def _over(self, stage: Stage, seeds: int, seen: Sequence[str]) -> bool:
        """True if all trials of the stage have ended. `seen` lists the stages up to this one; their trials determine what this stage
        runs.
        """
        try:
            pairs = due(self.plan, stage, seeds, [trial for trial in self.data.trials if trial.stage in seen])
        except NotEnoughTrials:
            return False
        found = [self.trial(arm, seed) for arm, seed in pairs]
        return all(trial is not None and trial.status in ENDED for trial in found)


def fingerprint(trial: TrialRecord) -> str:
    """Return the SHA-256 of everything recorded for a trial. Any changed value changes it."""
    fields = trial.model_dump(mode="json")
    fields["series"] = {name: sorted(points) for name, points in trial.series.items()}
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def mean_curve(lines: Sequence[Sequence[tuple[int, float]]]) -> list[tuple[int, float]]:
    """Average several curves at each step that all of them have."""
    curves = [dict(line) for line in lines]
    if not curves:
        return []
    shared = sorted(set.intersection(*(set(curve) for curve in curves)))
    return [(step, math.fsum(curve[step] for curve in curves) / len(curves)) for step in shared]


def held_out_curve(trial: TrialRecord) -> list[tuple[int, float]]:
    """Return (step, mean held-out reward): from interim evaluations or, without any, from the evaluations before and after training."""
    if interim := trial.series.get(HELDOUT_REWARD):
        return sorted(interim)
    ends = [[value for _, value in trial.series.get(f"eval_reward_{when}", ())] for when in ("before", "after")]
    steps = [step for step, _ in trial.series.get("reward_mean", ())]
    if not steps or not all(ends):
        return []
    return [(step, math.fsum(end) / len(end)) for step, end in zip((0, max(steps)), ends, strict=True)]


_ANSWERED = ("answered", "answer_given")
_WITHOUT_ANSWER = (StudyStatus.STOPPED, StudyStatus.FAILED)


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a study ended.

    `kind` is `budget`, `rejected`, `failed` (a person has to repair it), `repeated` (it only reran one trial of another study), or
    `stopped`.
    """

    kind: str
    reason: str


def outcome_of(records: Records) -> str:
    """Classify how the study came out: `decided`, `underpowered`, `halted` (a rule could not be evaluated), `ended` (without an
    answer), or `open` (stages are left)."""
    last = records.path[-1] if records.path else None
    if last is None or last.action == "stage":
        return "open" if records.data.status not in _WITHOUT_ANSWER else "ended"
    if last.action == "underpowered":
        return "underpowered"
    return "decided" if last.by_plan else "halted"


def ending_of(data: StudyData) -> Ending | None:
    """Say why the study stopped or failed; None if it did neither."""
    if data.status not in _WITHOUT_ANSWER:
        return None
    reason = data.reason or "no reason was recorded"
    if data.status is StudyStatus.FAILED:
        return Ending("failed", reason)
    spent = [event.detail.get("because") for event in data.events if event.kind == OVER_BUDGET]
    answers = [event.detail.get("verdict") for event in data.events if event.kind in _ANSWERED]
    if spent and spent[-1] == data.reason:
        return Ending("budget", reason)
    if answers and answers[-1] == "reject":
        return Ending("rejected", reason)
    return Ending("repeated" if any(event.kind == "reproduces" for event in data.events) else "stopped", reason)


def ended_or_went_on(data: StudyData) -> bool:
    """True if, since its newest report, the study stopped, failed, or continued after stopping or failing."""
    reports = [event.seq for event in data.events if event.kind == "report"]
    told = [event for event in data.events if event.kind == "study"]
    if not reports:
        return False
    before = [event for event in told if event.seq < reports[-1]][-1:]
    since = [event for event in told if event.seq > reports[-1]]
    return bool(since) and any(event.detail.get("status") in _WITHOUT_ANSWER for event in (*before, *since))


def rule_of(records: Records) -> str | None:
    """Return, in words, the result of the plan's rule that orders the arms or picks what continues; None without such a rule."""
    chosen = [one for one in records.path if one.to is not None and len(records.plan.alternatives(one.to)) > 1]
    if chosen:
        return chosen[-1].reason
    asked = [branch for branch in records.plan.branches if branch.when.kind == "order"]
    if not asked or outcome_of(records) != "decided":
        return None
    last = records.path[-1]
    held = any((branch.stage, branch.reason) == (last.after, last.reason) for branch in asked)
    return last.reason if held else "these trials do not establish a ranking of the arms"
