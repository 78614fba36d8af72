"""The words of the expression language, with which claims query the records. `WORDS` lists each public word.

A word returns a number, a text, named fields, or None if there are too few trials or nothing was recorded. It raises for names that
the plan does not have, and for stored numbers that disagree with their series.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from researcher.analysis.comparisons import iqm
from researcher.analysis.durations import took_s
from researcher.analysis.knowledge import agreement
from researcher.analysis.metrics import count_censored
from researcher.analysis.power import (
    NoiseFloor,
    detectable_effect,
    hypothesis_power,
    hypothesis_seeds,
    measured_noise,
    planning_alpha,
    side_sigma,
)
from researcher.analysis.race import in_the_running
from researcher.analysis.samples import NotEnoughTrials, deciding_stage, seeds_of
from researcher.instruments.instrument import Metric
from researcher.models import Effect, TrialRecord, TrialStatus
from researcher.refusals import UnknownName
from researcher.report.loss_words import LossWords
from researcher.report.records import ENDED, Records, fingerprint
from researcher.study.plan import Hypothesis, Known, Stage, StageKind, Verdict

Value = float | int | str | None
Fields = Mapping[str, Value]
Answer = Value | Fields
_VERDICTS = [verdict.value for verdict in Verdict]
_STATES = [*(status.value for status in TrialStatus), "open"]


class Vocabulary(LossWords):
    """All words, for one study."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._plan = records.plan

    # -- hypotheses ---------------------------------------------------------------------------------------------------

    def effect(self, hypothesis: str) -> Answer:
        """Return the fields of the effect (researcher.models.Effect), or None."""
        self._check(hypothesis)
        found = self._records.conclusions.effects[hypothesis]
        return _fields(found) if isinstance(found, Effect) else None

    def secondary(self, metric: str, hypothesis: str) -> Answer:
        """Return the fields of the effect on a secondary metric, or None. Its interval is not adjusted for other tests or looks."""
        asked = self._hypothesis(hypothesis)
        found = self._records.secondary(asked, self._metric(metric).name)
        return None if found is None else _fields(found)

    def verdict(self, hypothesis: str) -> Value:
        self._check(hypothesis)
        return self._records.conclusions.verdict(hypothesis).verdict.value

    def verdict_reason(self, hypothesis: str) -> Value:
        self._check(hypothesis)
        return self._records.conclusions.verdict(hypothesis).reason

    def count_verdicts(self, verdict: str) -> Value:
        """Count the hypotheses with this verdict."""
        if verdict not in _VERDICTS:
            raise UnknownName(f"unknown verdict {verdict!r}; known: {_VERDICTS}")
        return sum(record.verdict.value == verdict for record in self._records.conclusions.verdicts)

    def margin(self, hypothesis: str) -> Value:
        return self._hypothesis(hypothesis).margin

    def alpha(self, hypothesis: str) -> Value:
        return self._hypothesis(hypothesis).alpha

    def most_seeds(self, hypothesis: str) -> Value:
        """Return the maximum seeds per arm in the stage that decides."""
        return deciding_stage(self._plan, self._hypothesis(hypothesis)).max_seeds

    def seeds_needed(self, hypothesis: str) -> Value:
        """Return the seeds per arm needed to detect the planned effect with the planned power, at the upper bound of σ."""
        self._check(hypothesis)
        return _or_none(lambda: hypothesis_seeds(self._plan, self._hypothesis(hypothesis), self._records.data.trials))

    def power(self, hypothesis: str) -> Value:
        """Return the power for the planned effect with the seeds that the plan allows, at the upper bound of σ."""
        self._check(hypothesis)
        return _or_none(lambda: hypothesis_power(self._plan, self._hypothesis(hypothesis), self._records.data.trials))

    def detectable(self, hypothesis: str) -> Value:
        """Return the smallest effect that the finished trials could detect with the planned power, at the level of their look.
        None without a measured noise floor."""
        self._check(hypothesis)
        asked = self._hypothesis(hypothesis)
        noise, found = self._noise(asked.metric), self._records.conclusions.effects[hypothesis]
        if noise is None or not isinstance(found, Effect):
            return None
        seeds = min(found.n_baseline, found.n_treatment)
        alpha = min(planning_alpha(self._plan, asked), 1 - found.level)
        sigma = side_sigma(self._plan, asked, noise.upper)
        if sigma == 0:
            return None
        size = detectable_effect(seeds, sigma=sigma, alpha=alpha, power=self._plan.power)
        return size if math.isfinite(size) else None

    # -- metrics ------------------------------------------------------------------------------------------------------

    def final(self, metric: str, *, arm: str, seed: int) -> Value:
        """Return one trial's metric; None when the trial is not done."""
        self._metric(metric)
        self._arm(arm)
        trial = self._records.trial(arm, seed)
        if trial is None or trial.status is not TrialStatus.DONE:
            return None
        self._records.check(metric, [trial])
        return trial.finals[metric]

    def mean(self, metric: str, *, arm: str, stage: str | None = None) -> Value:
        """Average over the arm's finished trials, or over those on the seeds of one stage."""
        values = self._finals(metric, arm, stage)
        return float(np.mean(values)) if values else None

    def sd(self, metric: str, *, arm: str, stage: str | None = None) -> Value:
        """Return the sample standard deviation."""
        values = self._finals(metric, arm, stage)
        return float(np.std(values, ddof=1)) if len(values) > 1 else None

    def iqm(self, metric: str, *, arm: str, stage: str | None = None) -> Value:
        """Return the interquartile mean."""
        values = self._finals(metric, arm, stage)
        return iqm(np.array(values)) if values else None

    def never_reached(self, metric: str, *, arm: str | None = None) -> Value:
        """Count the finished trials that never reached the metric's threshold."""
        asked = self._metric(metric)
        trials = self._trials(arm)
        self._records.check(metric, trials)
        return count_censored(asked, trials)

    def sigma(self, metric: str) -> Value:
        """Return σ, the standard deviation between seeds, as measured by the noise-floor stage."""
        noise = self._noise(metric)
        return None if noise is None else noise.sigma

    def sigma_upper(self, metric: str) -> Value:
        """Return the one-sided upper confidence bound of σ, at the plan's confidence level."""
        noise = self._noise(metric)
        return None if noise is None else noise.upper

    def sigma_n(self, metric: str) -> Value:
        """Return the number of trials from which σ was measured."""
        noise = self._noise(metric)
        return None if noise is None else noise.n

    # -- trials -------------------------------------------------------------------------------------------------------

    def count_trials(self, *, arm: str | None = None, stage: str | None = None, status: str | None = None) -> Value:
        """Count trials.

        `stage` is the stage that created them. `status` is a researcher.models.TrialStatus, or `open` for all that have not ended.
        """
        trials = self._trials(arm)
        if stage is not None:
            trials = [trial for trial in trials if trial.stage == self._stage(stage).id]
        if status is None:
            return len(trials)
        if status not in _STATES:
            raise UnknownName(f"unknown status {status!r}; known: {_STATES}")
        if status == "open":
            return sum(trial.status not in ENDED for trial in trials)
        return sum(trial.status.value == status for trial in trials)

    def attempts(self, *, arm: str | None = None) -> Value:
        return sum(trial.attempt for trial in self._trials(arm))

    def tries(self, *, arm: str, seed: int) -> Value:
        """Return the number of attempts at one trial."""
        trial = self._records.trial(arm, seed)
        return None if trial is None else trial.attempt

    def total(self, series: str, *, arm: str | None = None) -> Value:
        """Sum a series over steps and finished trials; None when a finished trial did not record it."""
        lines = [trial.series.get(series) for trial in self._trials(arm) if trial.status is TrialStatus.DONE]
        if not all(lines):
            return None
        return math.fsum(value for line in lines for _, value in line or ())

    def sampled_tokens(self, *, arm: str | None = None) -> Value:
        """Count the tokens sampled in the training episodes of finished trials; None if a trial did not record them."""
        tokens = 0.0
        for trial in self._trials(arm):
            if trial.status is TrialStatus.DONE:
                episodes, each = trial.series.get("episodes"), dict(trial.series.get("sampled_tokens_mean", ()))
                if not episodes or any(step not in each for step, _ in episodes):
                    return None
                tokens += math.fsum(count * each[step] for step, count in episodes)
        return tokens

    def trial_s(self, *, arm: str | None = None) -> Value:
        """Return the total wall time of ended trials in seconds, from the first attempt to the end, without rests
        (researcher.analysis.durations)."""
        spans = [took_s(trial, self._records.rests) for trial in self._trials(arm)]
        return math.fsum(span for span in spans if span is not None)

    def span_s(self) -> Value:
        """Return the wall time in seconds from the start of the first trial to the end of the last one."""
        starts = [trial.started_at for trial in self._records.data.trials if trial.started_at is not None]
        ends = [trial.ended_at for trial in self._records.data.trials if trial.ended_at is not None]
        return max(ends) - min(starts) if starts and ends else None

    def count_llm_calls(self) -> Value:
        """Count the calls to the planner LLM, answered or not, for plan, instrument and repairs."""
        return len(self._records.data.llm_calls)

    def llm_tokens(self) -> Value:
        """Count the tokens of the planner LLM's calls, prompts and answers together."""
        return sum(call.prompt_tokens + call.completion_tokens for call in self._records.data.llm_calls)

    def llm_cost(self) -> Value:
        """Return the cost of the planner LLM's calls; None if an answered call has neither cost nor price."""
        costs = [call.cost for call in self._records.data.llm_calls if call.answer is not None]
        return None if None in costs else math.fsum(cost for cost in costs if cost is not None)

    def fingerprint(self, *, arm: str, seed: int) -> Value:
        """Return the SHA-256 of everything recorded for a trial."""
        trial = self._records.trial(arm, seed)
        return None if trial is None else fingerprint(trial)

    # -- sentinels and decisions --------------------------------------------------------------------------------------

    def sentinel(self, name: str) -> Value:
        """Return `quiet` or the severities of the sentinel's findings; `unchecked` if no trial has finished."""
        if name not in self._plan.sentinels:
            raise UnknownName(f"the plan has no sentinel {name!r}; it has {list(self._plan.sentinels)}")
        if not self._records.done:
            return "unchecked"
        seen = [finding.severity for finding in self._records.findings if finding.name == name]
        return ", ".join(dict.fromkeys(seen)) or "quiet"

    def finding(self, number: int) -> Answer:
        """Return the severity, text and value of one finding. Findings are numbered from 0."""
        findings = self._records.findings
        if not 0 <= number < len(findings):
            raise UnknownName(f"there are {len(findings)} findings, numbered from 0; there is no number {number}")
        found = findings[number]
        return {"name": found.name, "severity": found.severity, "text": found.text, "value": found.value}

    def count_findings(self, severity: str) -> Value:
        return sum(finding.severity == severity for finding in self._records.findings)

    def decision(self, stage: str) -> Answer:
        """Return the decision after a stage (researcher.analysis.decide.Decision); None if the stage is not over."""
        self._stage(stage)
        found = next((decision for decision in self._records.path if decision.after == stage), None)
        if found is None:
            return None
        names = ("after", "action", "to", "seeds", "seeds_needed", "power", "reason")
        return {name: getattr(found, name) for name in names}

    # -- what was known beforehand ------------------------------------------------------------------------------------

    def known(self, id: str) -> Answer:
        """Return the fields of an earlier finding (researcher.models.Known), as quoted by the frozen plan."""
        return self._known(id).model_dump(exclude={"same_as"})

    def agreement(self, id: str, hypothesis: str) -> Value:
        """Say how the verdict relates to an earlier finding (researcher.analysis.knowledge.agreement)."""
        self._check(hypothesis)
        record = self._records.conclusions.verdict(hypothesis)
        return agreement(self._known(id), self._hypothesis(hypothesis), record)

    # -- the plan -----------------------------------------------------------------------------------------------------

    def plan(self, field: str) -> Value:
        """Return a field of the plan, which must be a number or a text."""
        found = self._plan.model_dump().get(field)
        if not isinstance(found, int | float | str):
            raise UnknownName(f"the plan has no number or text {field!r}")
        return found

    def plan_hash(self) -> Value:
        """Return the plan's hash, computed from the plan itself."""
        return self._plan.digest()

    def budget(self, kind: str) -> Value:
        limits = self._plan.budget.model_dump()
        if kind not in limits:
            raise UnknownName(f"the plan has no budget {kind!r}; it has {sorted(limits)}")
        found: float | int | None = limits[kind]
        return found

    def stage(self, id: str) -> Answer:
        stage = self._stage(id)
        names = ("seeds", "max_seeds", "first_seed", "spends")
        return {name: getattr(stage, name) for name in names}

    def level(self, arm: str, factor: str) -> Value:
        """Return the level that an arm sets for a factor."""
        levels = self._arm(arm)
        if factor not in levels:
            raise UnknownName(f"arm {arm!r} does not set {factor!r}; it sets {sorted(levels)}")
        found = levels[factor]
        return str(found).lower() if isinstance(found, bool) else found

    def seed_offset(self, arm: str) -> Value:
        """Return the offset added to the arm's seeds; above 0 if another arm has the same settings."""
        self._arm(arm)
        return self._plan.arm(arm).seed_offset

    def count_hypotheses(self) -> Value:
        return len(self._plan.hypotheses)

    def count_tested(self) -> Value:
        """Count the hypotheses that are tested in some stage. Leaves out those that the plan's rules dropped or that still race."""
        self._records.check_all()
        return sum(self._is_tested(hypothesis) for hypothesis in self._plan.hypotheses)

    def _is_tested(self, hypothesis: Hypothesis) -> bool:
        try:
            return in_the_running(self._plan, hypothesis, self._records.data.trials)
        except NotEnoughTrials:
            return False

    # -- by name ------------------------------------------------------------------------------------------------------

    def _hypothesis(self, id: str) -> Hypothesis:
        known = {hypothesis.id: hypothesis for hypothesis in self._plan.hypotheses}
        if id not in known:
            raise UnknownName(f"the plan has no hypothesis {id!r}; it has {sorted(known)}")
        return known[id]

    def _check(self, hypothesis: str) -> None:
        """Check that the hypothesis exists, and check all hypotheses' finals: Holm's adjustment makes each effect depend on all."""
        self._hypothesis(hypothesis)
        self._records.check_all()

    def _known(self, id: str) -> Known:
        quoted = {known.id: known for known in self._plan.known if isinstance(known, Known)}
        if id not in quoted:
            raise UnknownName(f"the plan quotes no finding {id!r}; it quotes {sorted(quoted)}")
        return quoted[id]

    def _metric(self, name: str) -> Metric:
        known = {metric.name: metric for metric in self._plan.metrics}
        if name not in known:
            raise UnknownName(f"the plan has no metric {name!r}; it has {sorted(known)}")
        return known[name]

    def _arm(self, name: str) -> Mapping[str, bool | int | float | str]:
        known = {arm.name: arm for arm in self._plan.arms}
        if name not in known:
            raise UnknownName(f"the plan has no arm {name!r}; it has {sorted(known)}")
        return known[name].levels

    def _stage(self, id: str) -> Stage:
        known = {stage.id: stage for stage in self._plan.stages}
        if id not in known:
            raise UnknownName(f"the plan has no stage {id!r}; it has {sorted(known)}")
        return known[id]

    def _trials(self, arm: str | None) -> list[TrialRecord]:
        if arm is not None:
            self._arm(arm)
        return [trial for trial in self._records.data.trials if arm in (None, trial.arm)]

    def _finals(self, metric: str, arm: str, stage: str | None) -> list[float]:
        self._metric(metric)
        trials = self._trials(arm)
        within = trials if stage is None else seeds_of(self._plan, self._stage(stage), trials)
        self._records.check(metric, within)
        return [trial.finals[metric] for trial in within if trial.status is TrialStatus.DONE]

    def _noise(self, metric: str) -> NoiseFloor | None:
        self._metric(metric)
        for stage in self._plan.stages:
            if stage.kind is StageKind.NOISE_FLOOR:
                self._records.check(metric, seeds_of(self._plan, stage, self._records.data.trials))
        try:
            return measured_noise(self._plan, self._records.data.trials, metric)
        except NotEnoughTrials:
            return None


WORDS = frozenset(name for name in dir(Vocabulary) if not name.startswith("_"))


def _fields(effect: Effect) -> Fields:
    return {name: getattr(effect, name) for name in Effect.model_fields}


def _or_none(compute: Callable[[], float | int]) -> float | int | None:
    try:
        return compute()
    except NotEnoughTrials:
        return None
