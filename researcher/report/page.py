"""The content of a report: claims and quotations by section. Templates only arrange them.

Quotations (a question, a reason, an arm's name) are printed as recorded. Every number is a claim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from researcher.analysis.knowledge import trained_models
from researcher.analysis.metrics import censored
from researcher.analysis.race import left_behind
from researcher.analysis.samples import NotEnoughTrials, deciding_stage
from researcher.instruments.instrument import HELDOUT_REWARD, UNTIL, Metric
from researcher.models import Claim, Effect, StudyData, TrialRecord, TrialStatus
from researcher.report.claims import Ledger, Style, decimals_of
from researcher.report.drawing import Interval, Line, effects, learning_curves, sparkline
from researcher.report.expressions import call
from researcher.report.parts import (
    ArmPart,
    CensoredPart,
    Claims,
    HypothesisPart,
    KnownPart,
    Losses,
    SentinelPart,
    StepPart,
    TrialPart,
    budget_claims,
    known_part,
    losses,
    stage_claims,
    study_claims,
)
from researcher.report.records import ENDED, Ending, Records, ending_of, outcome_of, rule_of
from researcher.report.samples import SamplePart, samples_of
from researcher.study.plan import Arm, Hypothesis, Known, Plan, Stage

_CURVE = "reward_mean"


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """The content of a report, without its wording."""

    data: StudyData
    plan: Plan
    outcome: str
    """One of the values that `outcome_of` returns."""
    ending: Ending | None
    """Why the study ended, if its outcome is `ended`."""
    rule: str | None
    """Result, in words, of the plan's rule that orders the arms or picks what continues; None without such a rule."""
    study: Claims
    budget: Claims
    stages: list[tuple[Stage, Claims]]
    known: list[KnownPart]
    hypotheses: list[HypothesisPart]
    arms: list[ArmPart]
    trials: list[TrialPart]
    failed: list[TrialPart]
    losses: Losses
    noise: list[tuple[Metric, Claims]]
    sentinels: list[SentinelPart]
    path: list[StepPart]
    samples: list[SamplePart]
    cost: Claims
    censored: list[CensoredPart]
    metrics: list[Metric]
    """All metrics; those of the hypotheses come first."""
    curves: str
    effects: str
    claims: list[Claim]

    @property
    def in_sequence(self) -> bool:
        """True if comparisons follow one another, because several stages decide hypotheses."""
        return len({part.stage.id for part in self.hypotheses}) > 1

    @property
    def raced(self) -> bool:
        """True if exploratory stages choose the hypotheses to test."""
        return any(part.stage.keep is not None for part in self.hypotheses)

    @property
    def screened(self) -> bool:
        """True if the study only explores effects and tests nothing."""
        return any(part.explored for part in self.hypotheses)

    @property
    def screens_factors(self) -> bool:
        """True if a screen estimates main effects of several factors, instead of comparing arms with the first one."""
        return any(part.explored and part.hypothesis.treatment_arms for part in self.hypotheses)

    @property
    def secondary(self) -> list[str]:
        """Names of secondary metrics, which decide nothing and are shown with intervals."""
        return list(dict.fromkeys(name for part in self.hypotheses for name in part.secondary))

    @property
    def ranked(self) -> list[HypothesisPart]:
        """Hypotheses in the plan's order; in a screen, by size of the effect, largest first."""
        return _ranked(self.hypotheses)

    @property
    def looked(self) -> bool:
        """True if several stages look at the same comparison as more seeds finish."""
        return any(stage.spends is not None for stage in self.plan.stages)

    @property
    def only(self) -> HypothesisPart | None:
        """The plan's hypothesis, if it has exactly one."""
        return self.hypotheses[0] if len(self.hypotheses) == 1 else None

    @property
    def advised(self) -> list[HypothesisPart]:
        """Hypotheses for which the report suggests what to ask next.

        In a screen, only the one with the largest effect; in an underpowered study, one for each number of seeds needed.
        """
        if self.outcome == "ended":
            return []
        if self.outcome == "underpowered":
            return list({part.claims["seeds_needed"].value: part for part in reversed(self.hypotheses)}.values())[::-1]
        return self.ranked[:1] if self.screened else self.hypotheses

    @property
    def amendments(self) -> list[dict[str, Any]]:
        """Amendments of the plan, from the journal, in order."""
        return [event.detail for event in self.data.events if event.kind == "amended"]

    @property
    def stood_in(self) -> list[str]:
        """Models that were trained in place of the plan's models, such as the echo engine."""
        planned = {model.title for model in self.plan.hosted}
        trained = trained_models(self.plan, [arm.name for arm in self.plan.arms], self.data.trials)
        return [name for name in trained if name not in planned]

    @property
    def computed_in(self) -> list[str]:
        """Dtypes recorded for the trials' models, such as `float32`."""
        models = [trial.evidence.model for trial in self.data.trials if trial.evidence is not None]
        return sorted({model.dtype for model in models if model is not None and model.dtype is not None})

    @property
    def interim(self) -> bool:
        """True if held-out tasks were played during training."""
        return any(part.held for part in self.trials)

    @property
    def with_own_seeds(self) -> list[ArmPart]:
        """Arms that have the same settings as another arm but use different seeds."""
        return [part for part in self.arms if part.arm.seed_offset]

    def without_noise(self, part: HypothesisPart) -> bool:
        """True if the noise floor's trials are all equal, so that it gives neither a number of seeds nor power."""
        bounds = {metric.name: claims["sigma_upper"].value for metric, claims in self.noise}
        return bounds[part.hypothesis.metric] == 0

    @property
    def still(self) -> bool:
        """True if the noise floor has no spread on the metric of any hypothesis."""
        return all(map(self.without_noise, self.hypotheses))

    def with_state(self, severity: str) -> list[SentinelPart]:
        return [part for part in self.sentinels if severity in str(part.state.value)]


def page(records: Records) -> Page:
    """Compute the entire content of the report.

    Raises: RecordsDisagree when a stored number differs from its series.
    """
    ledger, plan = Ledger(records), records.plan
    metrics = _metrics(plan)
    study = study_claims(ledger, plan)
    hypotheses = [_hypothesis(ledger, records, one, metrics) for one in plan.hypotheses]
    curves = [trial.series.get(_CURVE, ()) for trial in records.data.trials if trial.status in ENDED]
    trials = [_trial(ledger, trial, metrics, curves) for trial in records.data.trials]
    decided = [metric for metric in metrics if any(h.metric == metric.name for h in plan.hypotheses)]
    by_arm = [(arm.name, [trial for trial in records.done if trial.arm == arm.name]) for arm in plan.arms]
    outcome = outcome_of(records)
    return Page(
        data=records.data,
        plan=plan,
        outcome=outcome,
        ending=ending_of(records.data) if outcome == "ended" else None,
        rule=rule_of(records),
        study=study,
        budget=budget_claims(ledger, tokens=records.plan.budget.tokens is not None),
        stages=[(stage, stage_claims(ledger, stage)) for stage in plan.stages],
        known=[known_part(ledger, known) for known in plan.known if isinstance(known, Known)],
        hypotheses=hypotheses,
        arms=[_arm(ledger, arm, metrics) for arm in plan.arms],
        trials=trials,
        failed=[part for part in trials if part.trial.status is TrialStatus.FAILED],
        losses=losses(ledger, records),
        noise=[(metric, _noise(ledger, metric)) for metric in decided],
        sentinels=_sentinels(ledger, records),
        path=[_step(ledger, decision.after, records) for decision in records.path],
        samples=samples_of(plan, records.data.trials, records.data.samples),
        cost=_cost(ledger, asked_llm=bool(records.data.llm_calls)),
        censored=_censored(ledger, plan, metrics),
        metrics=metrics,
        curves=learning_curves(by_arm, _CURVE, "mean training reward"),
        effects=effects([_interval(part) for part in _ranked(hypotheses) if part.measured]),
        claims=ledger.claims,
    )


def _ranked(parts: list[HypothesisPart]) -> list[HypothesisPart]:
    return sorted(parts, key=lambda part: -part.size) if any(part.explored for part in parts) else parts


def _metrics(plan: Plan) -> list[Metric]:
    first = list(dict.fromkeys(hypothesis.metric for hypothesis in plan.hypotheses))
    return [plan.metric(name) for name in first] + [metric for metric in plan.metrics if metric.name not in first]


# -- sections -----------------------------------------------------------------------------------------------------------


_EFFECT = {
    "diff": Style.DIFF,
    "low": Style.DIFF,
    "high": Style.DIFF,
    "mean_baseline": Style.VALUE,
    "mean_treatment": Style.VALUE,
    "level": Style.LEVEL,
    "method": Style.WORD,
    "n_baseline": Style.COUNT,
    "n_treatment": Style.COUNT,
    "failed_baseline": Style.COUNT,
    "failed_treatment": Style.COUNT,
    "p_value": Style.P,
    "p_adjusted": Style.P,
    "p_equivalence": Style.P,
}


_SECONDARY = {"diff": Style.DIFF, "low": Style.DIFF, "high": Style.DIFF, "level": Style.LEVEL}


def _hypothesis(ledger: Ledger, records: Records, hypothesis: Hypothesis, metrics: Sequence[Metric]) -> HypothesisPart:
    id, decimals = hypothesis.id, decimals_of(records.plan.metric(hypothesis.metric))
    asked = {
        "verdict": (call("verdict", id), Style.WORD),
        "reason": (call("verdict_reason", id), Style.WORD),
        "margin": (call("margin", id), Style.VALUE),
        "alpha": (call("alpha", id), Style.PLAIN),
        "planned_effect": (call("plan", "planned_effect"), Style.VALUE),
        "power": (call("power", id), Style.PERCENT),
        "seeds_needed": (call("seeds_needed", id), Style.SEEDS),
        "most_seeds": (call("most_seeds", id), Style.COUNT),
        "detectable": (call("detectable", id), Style.VALUE),
    }
    effect = call("effect", id)
    asked |= {field: (f"{effect}.{field}", style) for field, style in _EFFECT.items()}
    if hypothesis.between_arms:
        counts = " + ".join(f"{effect}.{side}" for side in ("n_baseline", "n_between", "n_treatment"))
        asked |= {
            "from": (call("level", hypothesis.baseline, hypothesis.factor), Style.PLAIN),
            "to": (call("level", hypothesis.treatment, hypothesis.factor), Style.PLAIN),
            "trials": (counts, Style.COUNT),
            "n_between": (f"{effect}.n_between", Style.COUNT),
            "failed_between": (f"{effect}.failed_between", Style.COUNT),
            "p_lack_of_fit": (f"{effect}.p_lack_of_fit", Style.P),
        }
    record = records.conclusions.verdict(id)
    return HypothesisPart(
        hypothesis=hypothesis,
        stage=deciding_stage(records.plan, hypothesis),
        verdict=record.verdict.value,
        reason=record.reason,
        measured=isinstance(records.conclusions.effects[id], Effect),
        censored=censored(records.plan, hypothesis, records.data.trials).any,
        left_behind=_left_behind(records, hypothesis),
        crossed=bool(hypothesis.treatment_arms)
        and hypothesis.factor not in {each.name for each in records.plan.factors},
        log_scale=any(each.name == hypothesis.factor and each.scale == "log" for each in records.plan.factors),
        claims=ledger.claims_of(id, asked, decimals),
        secondary={
            metric.name: ledger.fields(
                f"{id}.{metric.name}", call("secondary", metric.name, id), _SECONDARY, decimals_of(metric)
            )
            for metric in metrics
            if metric.name != hypothesis.metric
        },
    )


def _left_behind(records: Records, hypothesis: Hypothesis) -> str | None:
    try:
        return left_behind(records.plan, hypothesis, records.data.trials)
    except NotEnoughTrials:
        return None


def _arm(ledger: Ledger, arm: Arm, metrics: Sequence[Metric]) -> ArmPart:
    name = f"arm.{arm.name}"
    asked = {
        status: (call("count_trials", arm=arm.name, status=status), Style.COUNT)
        for status in ("done", "failed", "open")
    }
    if arm.seed_offset:
        asked["seed_offset"] = (call("seed_offset", arm.name), Style.COUNT)
    asked["trials"] = (call("count_trials", arm=arm.name), Style.COUNT)
    counts = ledger.claims_of(name, asked)
    summaries = {}
    for metric in metrics:
        words = {word: (call(word, metric.name, arm=arm.name), Style.VALUE) for word in ("mean", "sd", "iqm")}
        summaries[metric.name] = ledger.claims_of(f"{name}.{metric.name}", words, decimals_of(metric))
    levels = {factor: (call("level", arm.name, factor), Style.PLAIN) for factor in arm.levels}
    return ArmPart(arm=arm, claims=counts, levels=ledger.claims_of(name, levels), summaries=summaries)


def _trial(ledger: Ledger, trial: TrialRecord, metrics: Sequence[Metric], beside: Sequence[Line]) -> TrialPart:
    name = f"trial.{trial.arm}.{trial.seed}"
    finals = {
        metric.name: ledger.claim(
            f"{name}.{metric.name}",
            call("final", metric.name, arm=trial.arm, seed=trial.seed),
            Style.VALUE,
            decimals_of(metric),
        )
        for metric in metrics
    }
    claims = {"tries": ledger.claim(f"{name}.tries", call("tries", arm=trial.arm, seed=trial.seed), Style.COUNT)}
    ended = trial.status in ENDED
    if ended:  # an unfinished trial's records still grow, so its fingerprint would soon be stale
        asked = call("fingerprint", arm=trial.arm, seed=trial.seed)
        claims["fingerprint"] = ledger.claim(f"{name}.fingerprint", asked, Style.SHORT)
    line = trial.series.get(_CURVE, ()) if ended else ()
    held = trial.series.get(HELDOUT_REWARD, ()) if ended else ()
    return TrialPart(
        trial=trial, claims=claims, finals=finals, spark=sparkline(line, beside), held=sparkline(held, beside)
    )


def _noise(ledger: Ledger, metric: Metric) -> Claims:
    styles = {"sigma": Style.VALUE, "sigma_upper": Style.VALUE, "sigma_n": Style.COUNT}
    asked = {word: (call(word, metric.name), style) for word, style in styles.items()}
    return ledger.claims_of(f"noise.{metric.name}", asked, decimals_of(metric))


def _sentinels(ledger: Ledger, records: Records) -> list[SentinelPart]:
    found = list(enumerate(records.findings))
    parts = []
    for name in records.plan.sentinels:
        own = [
            (
                finding.severity,
                finding.text,
                ledger.claim(f"finding.{number}", f"{call('finding', number)}.value", Style.PLAIN),
                finding.arms,
            )
            for number, finding in found
            if finding.name == name
        ]
        state = ledger.claim(f"sentinel.{name}", call("sentinel", name), Style.WORD)
        parts.append(SentinelPart(name=name, state=state, findings=own))
    return parts


def _step(ledger: Ledger, after: str, records: Records) -> StepPart:
    decision = next(one for one in records.path if one.after == after)
    styles = {"seeds": Style.COUNT, "seeds_needed": Style.SEEDS, "power": Style.PERCENT, "action": Style.WORD}
    claims = ledger.fields(f"decision.{after}", call("decision", after), styles)
    return StepPart(after=after, action=decision.action, to=decision.to, reason=decision.reason, claims=claims)


def _cost(ledger: Ledger, *, asked_llm: bool) -> Claims:
    """Make the claims about cost. `asked_llm`: whether a planner LLM was used; only then is its cost shown."""
    llm = {
        "llm_calls": (call("count_llm_calls"), Style.COUNT),
        "llm_tokens": (call("llm_tokens"), Style.COUNT),
        "llm_cost": (call("llm_cost"), Style.PLAIN),
    }
    asked = {
        "span_s": (call("span_s"), Style.SECONDS),
        "trial_s": (call("trial_s"), Style.SECONDS),
        "step_s": (call("total", "step_s"), Style.SECONDS),
        "attempts": (call("attempts"), Style.COUNT),
        "sampled_tokens": (call("sampled_tokens"), Style.COUNT),
        "tokens_called": (call("total", "tokens_called"), Style.COUNT),
        "tokens_merged": (call("total", "tokens_merged"), Style.COUNT),
        "tokens_trained": (call("total", "tokens_trained"), Style.COUNT),
        **(llm if asked_llm else {}),
    }
    return ledger.claims_of("cost", asked)


def _censored(ledger: Ledger, plan: Plan, metrics: Sequence[Metric]) -> list[CensoredPart]:
    """List the metrics with trials that never reached their threshold."""
    parts = []
    for metric in metrics:
        if metric.kind in UNTIL:
            name = f"censored.{metric.name}"
            whole = ledger.claim(name, call("never_reached", metric.name), Style.COUNT)
            asked = {arm.name: (call("never_reached", metric.name, arm=arm.name), Style.COUNT) for arm in plan.arms}
            decides = any(hypothesis.metric == metric.name for hypothesis in plan.hypotheses)
            arms = ledger.claims_of(name, asked)
            parts.append(CensoredPart(metric=metric, trials=whole, arms=arms, decides=decides))
    return [part for part in parts if part.trials.value]


def _interval(part: HypothesisPart) -> Interval:
    return Interval(
        label=f"{part.hypothesis.id}  {part.hypothesis.factor if part.crossed else part.hypothesis.treatment}",
        verdict=part.verdict,
        diff=part.claims["diff"],
        low=part.claims["low"],
        high=part.claims["high"],
        margin=part.hypothesis.margin,
    )
