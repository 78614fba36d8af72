"""Relates findings: which ask the same question, which contradict each other, and what study would settle it.

Pure: no SQL, no clock. Findings without recorded levels, or with equal sides, are not compared.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from researcher.analysis.durations import rests, took_s
from researcher.analysis.samples import deciding_stage, reaches
from researcher.instruments.instrument import Direction, Scalar
from researcher.models import Effect, Event, Finding, TrialRecord, VerdictRecord
from researcher.study.plan import Hypothesis, Known, Plan, Verdict, trial_key

MOST_KNOWN = 50
"""Maximum number of findings that a plan quotes: those on the same question first, then the newest."""
SEEDS_APART = 1000
"""A replication's first seed is a multiple of this number."""
_CROSSED = " x "


# -- from a study to its findings ---------------------------------------------------------------------------------------


def trained_models(plan: Plan, arms: Iterable[str], trials: Sequence[TrialRecord]) -> list[str]:
    """List the models that the trials of these arms trained, as their servers reported (an engine may replace the plan's model).

    If no trial reports one, the plan's own model is listed.
    """
    found: list[str] = []
    for arm in arms:
        planned = plan.model_of(arm)
        told = [t.evidence.model for t in trials if t.arm == arm and t.evidence and t.evidence.model]
        found += [planned.title if one.is_of(planned) else one.trained for one in told] or [planned.title]
    return list(dict.fromkeys(found))


def findings_of(
    study_id: str,
    plan: Plan,
    verdicts: Sequence[VerdictRecord],
    at: float,
    trials: Sequence[TrialRecord] = (),
    events: Iterable[Event] = (),
) -> list[Finding]:
    """Return a finding for each hypothesis with a verdict.

    Skips invalid and explored hypotheses, because later studies may only use tested claims. `events` is the study's journal, which
    tells when trials rested.
    """
    plan_hash = plan.digest()
    own = {trial.seed for trial in trials if trial.key == trial_key(plan_hash, trial.arm, trial.seed)}
    seeds = tuple(sorted(own)) or None
    given = {record.hypothesis: record for record in verdicts if record.verdict is not Verdict.INVALID}
    rested = rests(events)
    return [
        Finding(
            id=f"{study_id}/{hypothesis.id}",
            study_id=study_id,
            plan_hash=plan_hash,
            question=plan.question,
            instrument=plan.instrument,
            instrument_version=plan.instrument_version,
            model=", ".join(trained_models(plan, (*hypothesis.baselines, *hypothesis.treatments), trials)),
            factor=hypothesis.factor,
            metric=hypothesis.metric,
            statement=hypothesis.statement,
            direction=hypothesis.direction,
            margin=hypothesis.margin,
            baseline=_levels(plan, hypothesis.baselines),
            treatment=_levels(plan, hypothesis.treatments),
            verdict=given[hypothesis.id].verdict,
            effect=_with_cost(
                given[hypothesis.id].effect, [took_s(t, rested) for t in trials if t.arm in hypothesis.sides]
            ),
            scope=scope_of(plan, hypothesis),
            seeds=seeds,
            at=at,
        )
        for hypothesis in plan.hypotheses
        if hypothesis.id in given and not deciding_stage(plan, hypothesis).explores
    ]


def _with_cost(effect: Effect | None, seconds: Iterable[float | None]) -> Effect | None:
    took = [each for each in seconds if each is not None]
    return effect.model_copy(update={"trial_s": sum(took) / len(took)}) if effect is not None and took else effect


def scope_of(plan: Plan, hypothesis: Hypothesis) -> dict[str, Any]:
    """Return the conditions of a finding: fixed settings, the evaluation, and the inner levels of a trend."""
    fitted = {"fitted_over": list(_levels(plan, hypothesis.between_arms))} if hypothesis.between_arms else {}
    skipped = {"heldout_from": plan.heldout_from} if plan.heldout_from else {}
    return (
        fitted
        | skipped
        | {
            "steps": plan.steps,
            "run": dict(plan.run),
            "task": dict(plan.task),
            "roles": {name: role.model_dump(mode="json") for name, role in plan.roles.items()},
            "heldout_tasks": plan.heldout_tasks,
            "heldout_episodes": plan.heldout_episodes,
            "heldout_temperature": plan.heldout_temperature,
        }
    )


def _levels(plan: Plan, arms: Iterable[str]) -> tuple[dict[str, Scalar], ...]:
    return tuple(dict(plan.arm(name).levels) for name in arms)


# -- which findings ask the same question ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Scope:
    """Identifies what a finding compares.

    `key` is equal if two findings compare the same two sides under the same conditions. `way` is -1 if the sides are swapped.
    """

    key: str
    way: Literal[1, -1]


def scope(finding: Finding) -> Scope | None:
    """Return the finding's scope; None if the finding cannot be compared."""
    sides = [sorted(_canonical(levels) for levels in side) for side in (finding.baseline, finding.treatment)]
    if not all(sides) or sides[0] == sides[1]:
        return None
    fixed = {
        "instrument": [finding.instrument, finding.instrument_version],
        "model": finding.model,
        "metric": finding.metric,
        "sides": sorted(sides),
        "scope": finding.scope,
    }
    return Scope(_canonical(fixed), 1 if sides[0] < sides[1] else -1)


def _canonical(value: Any) -> str:
    return json.dumps(_plain(value), sort_keys=True, ensure_ascii=False)


def _plain(value: Any) -> Any:
    """Normalize a level, so that 8 and 8.0 are equal."""
    if isinstance(value, dict):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return int(value) if isinstance(value, float) and math.isfinite(value) and value == int(value) else value


# -- which contradict each other ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A verdict with its interval, oriented so that answers to the same question can be compared."""

    verdict: Verdict
    sign: Literal[-1, 0, 1]
    """Sign of the claimed effect; 0 if the verdict claims none."""
    size: float
    margin: float | None
    low: float
    high: float

    @classmethod
    def of(
        cls, verdict: Verdict, direction: Direction, margin: float | None, effect: Effect | None, way: int
    ) -> Self | None:
        """Orient a verdict by its measured effect; None if no effect was measured."""
        if effect is None:
            return None
        return cls.from_interval(verdict, direction, margin, (effect.low, effect.diff, effect.high), way)

    @classmethod
    def from_interval(
        cls,
        verdict: Verdict,
        direction: Direction,
        margin: float | None,
        interval: tuple[float, float, float],
        way: int,
    ) -> Self:
        """Orient a verdict by its interval, given as (low, difference, high)."""
        claimed = {Verdict.SUPPORTED: 1, Verdict.REFUTED: -1}.get(verdict, 0)
        sign = claimed * (1 if direction == "increase" else -1) * way
        low, diff, high = interval if way == 1 else (-interval[2], -interval[1], -interval[0])
        turned: Literal[-1, 0, 1] = 0 if sign == 0 else 1 if sign > 0 else -1
        return cls(verdict=verdict, sign=turned, size=abs(diff), margin=margin, low=low, high=high)

    def rules_out(self, other: Answer) -> bool:
        """True if this answer excludes a difference as large as the other answer claims."""
        small = self.verdict is Verdict.EQUIVALENT and self.margin is not None
        return small and other.sign != 0 and self.margin is not None and reaches(other.size, self.margin)


def disagreement(one: Answer, other: Answer) -> str | None:
    """Say why two answers to the same question cannot both be right; None if they can."""
    if one.sign * other.sign < 0:
        return "their verdicts are opposite"
    if one.rules_out(other) or other.rules_out(one):
        return "one finds a difference that the other rules out"
    if one.high < other.low or other.high < one.low:
        return "their intervals do not overlap"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Replication:
    """A proposed study of the same question, with as many seeds per arm as both earlier studies together. Its seeds were never used for
    this question, and no study in this data directory plans to use them.
    """

    topic: str
    instrument: str
    seeds: int
    first_seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Contradiction:
    """Two findings that cannot both be right. `settled_by` is a later finding with enough seeds."""

    one: Finding
    other: Finding
    why: str
    replication: Replication
    settled_by: Finding | None = None


def contradictions(findings: Sequence[Finding], *, largest_seed: int = -1) -> list[Contradiction]:
    """List every contradicting pair, oldest first.

    `largest_seed` is the largest seed of the studies in this data directory; replications start above it.
    """
    alike: dict[str, list[tuple[Finding, Answer]]] = defaultdict(list)
    for finding in sorted(findings, key=lambda each: (each.at, each.id)):
        where, answer = scope(finding), None
        if where is not None:
            answer = Answer.of(finding.verdict, finding.direction, finding.margin, finding.effect, where.way)
        if where is not None and answer is not None:
            alike[where.key].append((finding, answer))
    return [found for group in alike.values() for found in _within(group, largest_seed)]


def _within(group: Sequence[tuple[Finding, Answer]], largest_seed: int) -> Iterator[Contradiction]:
    largest = max([largest_seed, *(seed for finding, _ in group for seed in finding.seeds or ())])
    for (one, first), (other, second) in itertools.combinations(group, 2):
        why = None if one.study_id == other.study_id else disagreement(first, second)
        if why is not None:
            proposed = Replication(
                topic=one.question or one.statement,
                instrument=one.instrument,
                seeds=seeds_of(one) + seeds_of(other),
                first_seed=SEEDS_APART
                * max(len({finding.study_id for finding, _ in group}), largest // SEEDS_APART + 1),
            )
            yield Contradiction(
                one=one, other=other, why=why, replication=proposed, settled_by=_settled(group, other, proposed.seeds)
            )


def _settled(group: Sequence[tuple[Finding, Answer]], after: Finding, seeds: int) -> Finding | None:
    later = [finding for finding, _ in group if finding.at > after.at and finding.study_id != after.study_id]
    return next((each for each in later if seeds_of(each) >= seeds and each.verdict is not Verdict.INCONCLUSIVE), None)


def seeds_of(finding: Finding) -> int:
    """Return the finding's seeds per arm; the larger number if the two sides differ, and 0 without an effect."""
    return 0 if finding.effect is None else max(finding.effect.n_baseline, finding.effect.n_treatment)


# -- what a new plan quotes --------------------------------------------------------------------------------------------


def known_to(plan: Plan, findings: Sequence[Finding]) -> tuple[Known, ...]:
    """List earlier findings on the plan's instrument that are about a factor that the plan varies. At most `MOST_KNOWN`."""
    varied = {factor.name for factor in plan.factors}
    asked = [(hypothesis, _asked(plan, hypothesis)) for hypothesis in plan.hypotheses]
    found = [
        _known(finding, asked)
        for finding in sorted(findings, key=lambda each: (-each.at, each.id))
        if finding.instrument == plan.instrument and varied & set(finding.factor.split(_CROSSED))
    ]
    return tuple(sorted(found, key=lambda known: not known.same_as)[:MOST_KNOWN])


def _asked(plan: Plan, hypothesis: Hypothesis) -> Scope | None:
    record = VerdictRecord(hypothesis=hypothesis.id, verdict=Verdict.INCONCLUSIVE, reason="", effect=None)
    found = findings_of("", plan.model_copy(update={"hypotheses": (hypothesis,)}), [record], 0.0)
    return scope(found[0]) if found else None


_QUOTED = ("diff", "low", "high", "level", "n_baseline", "n_treatment")
"""Fields of an effect that plans quote."""


def _known(finding: Finding, asked: Sequence[tuple[Hypothesis, Scope | None]]) -> Known:
    own, effect = scope(finding), finding.effect
    same: dict[str, Literal[1, -1]] = {}
    for hypothesis, where in asked:
        if own is not None and where is not None and own.key == where.key:
            same[hypothesis.id] = 1 if own.way == where.way else -1
    return Known(
        id=finding.id,
        statement=finding.statement,
        verdict=finding.verdict,
        direction=finding.direction,
        margin=finding.margin,
        **{name: getattr(effect, name, None) for name in _QUOTED},
        plan_hash=finding.plan_hash,
        origin=finding.origin,
        engine="echo" if "echo" in finding.models else None,
        same_as=same,
    )


def agreement(known: Known, hypothesis: Hypothesis, record: VerdictRecord) -> str:
    """Say how a verdict relates to a known finding: `agrees`, `contradicts: …`, or why the two cannot be compared."""
    if hypothesis.id not in known.same_as:
        return "asks something else"
    if known.low is None or known.diff is None or known.high is None or record.effect is None:
        return "not measured"
    interval = (known.low, known.diff, known.high)
    way = known.same_as[hypothesis.id]
    before = Answer.from_interval(known.verdict, known.direction, known.margin, interval, way)
    effect = record.effect
    now = Answer.from_interval(
        record.verdict, hypothesis.direction, hypothesis.margin, (effect.low, effect.diff, effect.high), 1
    )
    if record.verdict is Verdict.INVALID:
        return "not measured"
    why = disagreement(before, now)
    return f"contradicts: {why}" if why else "agrees"


def told(known: Known) -> str:
    """Quote a known finding in a line such as `lr=4e-05 beats lr=1e-05: supported, +0.3 [+0.2, +0.4] at 95 % confidence, n = 3
    against 3 (st-1/H1)`."""
    numbers = "nothing was measured"
    if known.diff is not None and known.low is not None and known.high is not None and known.level is not None:
        numbers = (
            f"{known.diff:+.3g} [{known.low:+.3g}, {known.high:+.3g}] at {_percent(known.level)} % confidence, "
            f"n = {known.n_treatment} against {known.n_baseline}"
        )
    whose = "" if known.origin is None else f", by {known.origin}; cannot be recomputed here"
    echo = "; on the echo engine, which trains no model, so this says nothing about training" if known.engine else ""
    return f"{known.statement}: {known.verdict}, {numbers} ({known.id}{whose}){echo}"


def _percent(level: float) -> str:
    """Format a confidence level as reports do: `95`, `98.4`. Values that would round to 100 keep their digits."""
    share = 100 * level
    return f"{share:g}" if share >= 99.95 else f"{round(share, 1):g}"


def told_of(finding: Finding) -> str:
    """Quote a finding in one line with its scope: instrument, model, steps, means, and time per trial."""
    effect, steps = finding.effect, finding.scope.get("steps")
    parts = [
        f"{finding.instrument} {finding.instrument_version}".strip(),
        "" if "echo" in finding.models else finding.model,
        f"{steps} steps" if steps is not None else "",
    ]
    if effect is not None:
        parts.append(f"{finding.metric} {effect.mean_treatment:.3g} against {effect.mean_baseline:.3g}")
        parts.append("" if effect.trial_s is None else f"{effect.trial_s:.0f} s per trial")
    return f"{told(_known(finding, ()))}; {', '.join(part for part in parts if part)}"


def spread(effect: Effect) -> float | None:
    """Estimate the standard deviation between seeds from the effect's interval; None unless the effect comes from Welch's t-test."""
    freedom = effect.n_baseline + effect.n_treatment - 2
    if effect.method != "welch" or freedom < 1:
        return None
    # Imported here because scipy takes half a second to load, and most callers never need it.
    from scipy import stats

    error = (effect.high - effect.low) / 2 / float(stats.t.ppf((1 + effect.level) / 2, freedom))
    return error / math.sqrt(1 / effect.n_baseline + 1 / effect.n_treatment)
