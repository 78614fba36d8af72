"""Power analysis: σ and its upper confidence bound, the seeds needed, and the effect that n seeds can show.

Uses statsmodels' power of the t-test for two independent arms of equal size (imported when needed). σ is scaled up for
interquartile means, since they vary more than means.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from researcher.analysis.comparisons import BOOTSTRAP_FROM, places
from researcher.analysis.race import family_size, is_raced, most_rung_seeds, rung_seeds, winning_chance
from researcher.analysis.samples import NotEnoughTrials, deciding_stage, sample, seeds_of
from researcher.instruments.instrument import Metric
from researcher.models import TrialRecord
from researcher.study.plan import Hypothesis, Plan, Stage, StageKind

MOST_SEEDS = 10_000
"""Largest seed count to compute; beyond it, "too many" is a good enough answer."""
IQM_VARIANCE = 1.195
"""Ratio of the variance of the interquartile mean to that of the mean, for normal values and many seeds (1.19 for 20 seeds).

Source: Huber 1981, Robust Statistics (trimmed means): 4 (1/2 - 2 z φ(z) + z²/2) with z = Φ⁻¹(3/4), for the 25 % trimmed mean.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseFloor:
    """Spread between trials of one arm that only differ in their seed."""

    metric: str
    n: int
    sigma: float
    upper: float
    """One-sided upper confidence bound on σ. If the plan sets `sampling_floor`, it is at least `sampling_sigma`."""
    confidence: float


def noise_floor(samples: Sequence[Sequence[float]], *, metric: str, confidence: float) -> NoiseFloor:
    """Pool σ over arms, each around its own mean.

    Raises: NotEnoughTrials when no arm has two values.
    """
    used = [np.array(values) for values in samples if len(values) >= 2]
    freedom = sum(len(values) - 1 for values in used)
    if not freedom:
        raise NotEnoughTrials("no arm of the noise floor has two finished trials")
    from scipy import stats

    squares = sum(float(np.sum((values - values.mean()) ** 2)) for values in used)
    return NoiseFloor(
        metric=metric,
        n=sum(len(values) for values in used),
        sigma=math.sqrt(squares / freedom),
        upper=math.sqrt(squares / float(stats.chi2.ppf(1 - confidence, freedom))),
        confidence=confidence,
    )


def measured_noise(plan: Plan, trials: Sequence[TrialRecord], metric: str) -> NoiseFloor:
    """Return the noise floor that the plan's own noise-floor stage measured.

    Raises: NotEnoughTrials as `noise_floor` does, or when the plan has no such stage.
    """
    floors = [stage for stage in plan.stages if stage.kind is StageKind.NOISE_FLOOR]
    if not floors:
        raise NotEnoughTrials("the plan has no noise-floor stage")
    within = [trial for stage in floors for trial in seeds_of(plan, stage, trials)]
    arms = sorted({arm for stage in floors for arm in stage.arms})
    values = [list(sample(within, arm, metric).values.values()) for arm in arms]
    noise = noise_floor(values, metric=metric, confidence=plan.sigma_confidence)
    if not plan.sampling_floor:
        return noise
    sampling = max(sampling_sigma(plan, plan.metric(metric), own) for own in values)
    return replace(noise, upper=max(noise.upper, sampling))


def sampling_sigma(plan: Plan, metric: Metric, values: Sequence[float]) -> float:
    """Return the largest σ that sampling held-out answers can cause on its own: sqrt(m (1 - m) / n), for n answers per trial worth
    0 to 1 with mean m. Returns 0 for other metrics and answer values.

    A few trials can agree by chance, and their own spread would then suggest that there is no noise.
    """
    if not metric.kind.startswith("heldout") or metric.when == "gain" or not values:
        return 0.0
    mean = math.fsum(values) / len(values)
    answers = plan.heldout_tasks * plan.heldout_episodes
    return math.sqrt(mean * (1 - mean) / answers) if 0 <= mean <= 1 and answers else 0.0


def planning_alpha(plan: Plan, hypothesis: Hypothesis) -> float:
    """Return the lowest level at which Holm may test the hypothesis. In a sequential design, this is for the last look."""
    spends = deciding_stage(plan, hypothesis).spends
    return (hypothesis.alpha if spends is None else spends) / family_size(plan, hypothesis)


def power_of(seeds: int, *, sigma: float, effect: float, alpha: float) -> float:
    """Return the probability that `seeds` per arm show `effect` at two-sided level `alpha`.

    It drops where the bootstrap of interquartile means begins: 20 seeds have slightly less power than 19.
    """
    from statsmodels.stats.power import TTestIndPower

    if seeds < 2:
        return 0.0
    if sigma == 0:
        return 1.0
    # Far out statsmodels' noncentral t runs out of digits; an effect of 40 σ is as certain as one of 100 σ.
    spread = sigma * math.sqrt(IQM_VARIANCE) if seeds >= BOOTSTRAP_FROM else sigma
    size = min(effect / spread, 40.0)
    return min(1.0, float(TTestIndPower().power(effect_size=size, nobs1=seeds, alpha=alpha, ratio=1.0)))


def seeds_needed(*, sigma: float, effect: float, alpha: float, power: float) -> int:
    """Return the smallest number of seeds per arm that reaches `power`; `MOST_SEEDS` if no number below that does."""

    def enough(seeds: int) -> bool:
        return power_of(seeds, sigma=sigma, effect=effect, alpha=alpha) >= power

    if enough(BOOTSTRAP_FROM - 1):
        return _first(enough, 2, BOOTSTRAP_FROM - 1)
    high = BOOTSTRAP_FROM
    while not enough(high) and high < MOST_SEEDS:
        high = min(2 * high, MOST_SEEDS)
    return _first(enough, max(BOOTSTRAP_FROM, high // 2), high)


def _first(enough: Callable[[int], bool], low: int, high: int) -> int:
    """Find the smallest number from `low` to `high` that is enough, by bisection; `high` if none below it is. Assumes that all
    larger numbers are enough too."""
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle + 1, high)
    return high


def detectable_effect(seeds: int, *, sigma: float, alpha: float, power: float) -> float:
    """Return the smallest effect, in the metric's unit, that `seeds` per arm show with `power`."""
    from scipy import optimize

    if seeds < 2:
        return math.inf
    if sigma == 0:
        return 0.0

    def lack(size: float) -> float:
        return power_of(seeds, sigma=1.0, effect=size, alpha=alpha) - power

    return float(optimize.brentq(lack, 1e-6, 40.0)) * sigma if lack(40.0) > 0 else math.inf


def hypothesis_power(plan: Plan, hypothesis: Hypothesis, trials: Sequence[TrialRecord]) -> float:
    """Return the power to show the planned effect with the seeds that the plan allows, at the noise floor's upper bound.

    For a raced hypothesis, this is the probability that its arm wins the race and is then confirmed.
    """
    noise = measured_noise(plan, trials, hypothesis.metric)
    sigma, alpha = side_sigma(plan, hypothesis, noise.upper), planning_alpha(plan, hypothesis)
    power = max(
        power_of(seeds, sigma=sigma, effect=plan.planned_effect, alpha=alpha)
        for seeds in _strongest(deciding_stage(plan, hypothesis))
    )
    if is_raced(plan, hypothesis):
        seeds = most_rung_seeds(plan)
        power *= winning_chance(plan, first_rung_seeds=seeds, sigma=noise.upper, effect=plan.planned_effect)
    return power


def _strongest(stage: Stage) -> list[int]:
    """Return the seed counts per arm that may have the highest power: the maximum, and the largest one below the bootstrap."""
    means = BOOTSTRAP_FROM - 1
    return [stage.max_seeds, *([means] if stage.seeds <= means < stage.max_seeds else [])]


def hypothesis_seeds(plan: Plan, hypothesis: Hypothesis, trials: Sequence[TrialRecord]) -> int:
    """Return the seeds per arm that the planned effect needs, at the noise floor's upper bound."""
    noise = measured_noise(plan, trials, hypothesis.metric)
    sigma = side_sigma(plan, hypothesis, noise.upper)
    alpha = planning_alpha(plan, hypothesis)
    return seeds_needed(sigma=sigma, effect=plan.planned_effect, alpha=alpha, power=wanted_power(plan, hypothesis))


def seeds_for(plan: Plan, stage: Stage, trials: Sequence[TrialRecord]) -> int:
    """Return the seeds per arm of a stage: the number that the noise floor calls for, within the stage's bounds. A look gets its share
    of that number.
    """
    wanted = [stage.seeds]
    try:
        if stage.kind is StageKind.COARSE:
            noise = measured_noise(plan, trials, plan.hypotheses[0].metric)
            return rung_seeds(plan, stage, sigma=noise.upper)
        if stage.kind is StageKind.FINE:
            return stage.seeds
        for hypothesis in plan.hypotheses:
            if hypothesis.sides <= set(stage.arms):
                seeds = hypothesis_seeds(plan, hypothesis, trials)
                wanted.append(math.ceil(seeds * (stage.share or 1.0)))
    except NotEnoughTrials:
        pass  # the plan's power branch handles this; a plan without one runs the stage's own seeds
    return min(max(wanted), stage.max_seeds)


def may_spend(plan: Plan, look: Stage, trials: Sequence[TrialRecord]) -> float:
    """Return the alpha that a look of a sequential design may spend: its own part, plus the parts of later looks that add no seeds."""
    if look.spends is None:
        raise ValueError(f"stage {look.id!r} is not a look of a sequential design")
    if not plan.merged_looks:
        return look.spends
    after = plan.stages[plan.stages.index(look) + 1 :]
    had = seeds_for(plan, look, trials)
    return look.spends + math.fsum(
        each.spends for each in after if each.spends is not None and seeds_for(plan, each, trials) <= had
    )


def wanted_power(plan: Plan, hypothesis: Hypothesis) -> float:
    """Return the power that the comparison must have. After a race, it is the square root of the plan's power, because the race itself
    must be won with that probability too.
    """
    return math.sqrt(plan.power) if is_raced(plan, hypothesis) else plan.power


def side_sigma(plan: Plan, hypothesis: Hypothesis, sigma: float) -> float:
    """Return σ between the seeds of one side. A mean over several arms varies less than one arm.

    For a trend, this is sqrt(σ² / (2 Σ (x - mean x)²)), where x are the levels' positions from 0 to 1: the difference of two arms with
    this σ varies as much as the fitted change. Three equally spaced levels are as informative as their two ends; more levels add
    information.
    """
    if hypothesis.between_arms:
        return sigma / math.sqrt(2 * len(hypothesis.sides) * float(np.var([*places(plan, hypothesis).values()])))
    return sigma / math.sqrt(min(len(hypothesis.baselines), len(hypothesis.treatments)))
