"""Sentinel for lost attempts: a side that loses more attempts is left with a biased sample.

Two rules. Difference: a test over trials finds that the two sides of a comparison lost different shares of their attempts to
rollout, grader, client or limit. Share: an arm lost so many attempts that its rewards mean nothing, even if every arm did. Neither
rule counts losses to the server, the network or a person, because those do not depend on the arm.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from foundation.ids import derived_seed
from researcher.analysis.effects import holm_p_values
from researcher.analysis.samples import judged_stage, seeds_of
from researcher.analysis.sentinel_findings import SentinelFinding, finding, unchecked
from researcher.models import KINDS, EpisodeAttempts, Kind, TrialRecord, TrialStatus
from researcher.study.plan import Hypothesis, Plan

ALPHA = 0.05
"""Familywise level of a study's difference tests: over its hypotheses, both kinds of episodes and all looks."""
MOST_LOST = 0.40
"""Share of lost attempts above which an arm's rewards mean nothing, whatever the other arms lost."""
RESAMPLES = 9999
"""Number of permutations to draw when there are too many to enumerate."""
_WORDS: dict[Kind, str] = {"train": "training", "eval": "held-out"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTest:
    """Tests whether the two sides of a hypothesis lost different shares of their attempts at one kind of episode."""

    hypothesis: str
    kind: Kind
    baseline: float
    """Share of the attempts of the baseline's trials that were lost; `treatment` is the same for the other side."""
    treatment: float
    method: Literal["permutation", "welch"]
    """`welch` if there are too few trials for a permutation test to reach the level."""
    p_value: float
    p_adjusted: float
    """Holm-adjusted p-value over all tests of the study."""
    level: float
    trials: tuple[TrialRecord, ...]

    @property
    def differs(self) -> bool:
        return self.p_adjusted <= self.level


def attrition(name: str, plan: Plan, done: Sequence[TrialRecord]) -> list[SentinelFinding]:
    """Return findings for hypotheses whose trials lost too many attempts, or more on one side than on the other."""
    found = [_difference(name, test) for test in loss_tests(plan, done) if test.differs]
    found += [each for kind in KINDS if (each := _too_many(name, plan, done, kind)) is not None]
    compared = {trial.key: trial for one in plan.hypotheses for trial in _judged(plan, one, done)}
    blind = [trial for trial in compared.values() if trial.evidence is None or trial.evidence.attrition is None]
    return [*found, unchecked(name, blind)] if blind else found


def loss_tests(plan: Plan, trials: Sequence[TrialRecord]) -> list[LossTest]:
    """Test each hypothesis and kind of episode that has two finished trials per side and any lost attempt.

    The selection ignores which side lost the attempt. Tests that cannot reach significance do not use up any of the level.
    """
    pairs = [
        (hypothesis, kind, sides)
        for hypothesis in plan.hypotheses
        for kind in KINDS
        if (sides := _sides(plan, hypothesis, trials, kind)) is not None
    ]
    found = [_tested(plan, hypothesis, kind, sides, trials, len(pairs)) for hypothesis, kind, sides in pairs]
    adjusted = holm_p_values([test.p_value for test in found])
    return [replace(test, p_adjusted=p) for test, p in zip(found, adjusted, strict=True)]


def arm_share(trials: Iterable[TrialRecord], kind: Kind) -> float | None:
    """Return the share of these trials' attempts lost to rollout, grader, client or limit; None if no attempts were counted."""
    counts = [own for trial in trials if (own := _counts(trial, kind)) is not None]
    eligible = sum(own.eligible for own in counts)
    return sum(own.counted for own in counts) / eligible if eligible else None


# -- the difference rule --------------------------------------------------------------------------------------------

_Side = list[EpisodeAttempts]
"""Attempts of one side of a hypothesis, one entry per trial."""


def _sides(plan: Plan, hypothesis: Hypothesis, trials: Sequence[TrialRecord], kind: Kind) -> tuple[_Side, _Side] | None:
    judged = _judged(plan, hypothesis, trials)
    baseline, treatment = (
        [own for trial in judged if trial.arm in arms and (own := _counts(trial, kind)) is not None and own.eligible]
        for arms in (hypothesis.baselines, hypothesis.treatments)
    )
    if min(len(baseline), len(treatment)) < 2 or not any(own.counted for own in (*baseline, *treatment)):
        return None
    return baseline, treatment


def _tested(
    plan: Plan,
    hypothesis: Hypothesis,
    kind: Kind,
    sides: tuple[_Side, _Side],
    trials: Sequence[TrialRecord],
    tests: int,
) -> LossTest:
    level = _level(plan, hypothesis, trials)
    ways = math.comb(sum(map(len, sides)), len(sides[0]))
    permutes = 2 / min(ways, RESAMPLES + 1) <= level / tests
    p_value = _by_permutation(*sides) if permutes else _by_welch(*sides)
    baseline, treatment = (sum(own.counted for own in side) / sum(own.eligible for own in side) for side in sides)
    return LossTest(
        hypothesis=hypothesis.id,
        kind=kind,
        baseline=baseline,
        treatment=treatment,
        method="permutation" if permutes else "welch",
        p_value=p_value,
        p_adjusted=p_value,
        level=level,
        trials=tuple(_judged(plan, hypothesis, trials)),
    )


def _by_permutation(baseline: _Side, treatment: _Side) -> float:
    """Return the p-value of a permutation test on the difference of the sides' mean shares.

    The test is unpaired, because with six pairs no p-value could fall below 0.03. Shared seeds only make it more conservative.
    """
    shares = [tuple(own.counted / own.eligible for own in side) for side in (treatment, baseline)]
    return 1.0 if len({*shares[0], *shares[1]}) == 1 else _permuted(*shares)


@lru_cache(maxsize=1024)
def _permuted(treatment: tuple[float, ...], baseline: tuple[float, ...]) -> float:
    """Run the permutation test. Cached, because decisions, verdicts and reports repeat the same test many times."""
    from scipy import stats

    seed = derived_seed("attrition", *treatment, "against", *baseline)
    samples = (np.array(treatment), np.array(baseline))
    found = stats.permutation_test(samples, _mean_difference, n_resamples=RESAMPLES, vectorized=True, rng=seed)
    return float(found.pvalue)


def _mean_difference(treatment: np.ndarray, baseline: np.ndarray, axis: int = -1) -> Any:
    return np.mean(treatment, axis=axis) - np.mean(baseline, axis=axis)


def _by_welch(baseline: _Side, treatment: _Side) -> float:
    """Return the p-value of Welch's t-test on the arcsine of the root of each trial's share (Anscombe 1948).

    The transform makes the variance nearly independent of the share. A side's variance is at least the sampling variance of its
    attempts, because a few trials that agree by luck prove nothing.
    """
    from scipy import stats

    means, spreads = [], []
    for side in (treatment, baseline):
        lost, tried = (np.array([float(getattr(own, name)) for own in side]) for name in ("counted", "eligible"))
        angles = np.arcsin(np.sqrt((lost + 0.375) / (tried + 0.75)))
        means.append(float(np.mean(angles)))
        spreads.append(math.sqrt(max(float(np.var(angles, ddof=1)), float(np.mean(1 / (4 * tried + 2))))))
    sizes = (len(treatment), len(baseline))
    found = stats.ttest_ind_from_stats(means[0], spreads[0], sizes[0], means[1], spreads[1], sizes[1], equal_var=False)
    return float(found.pvalue)


def _level(plan: Plan, hypothesis: Hypothesis, trials: Sequence[TrialRecord]) -> float:
    """Return the level of the tests: `ALPHA` or, at a look of a sequential design, a part in proportion to the look's alpha."""
    spends = judged_stage(plan, hypothesis, trials).spends
    whole = math.fsum(stage.spends for stage in plan.stages if stage.spends is not None)
    return ALPHA if spends is None else ALPHA * spends / whole


def _difference(name: str, test: LossTest) -> SentinelFinding:
    text = (
        f"attempts at {_WORDS[test.kind]} episodes were lost more often on one side of the comparison than on the other: "
        "the remaining rewards are not a fair sample"
    )
    hits = [(trial, abs(test.treatment - test.baseline)) for trial in test.trials]
    return finding(name, "invalid", text, hits).model_copy(update={"hypotheses": (test.hypothesis,)})


# -- the share rule -------------------------------------------------------------------------------------------------


def _too_many(name: str, plan: Plan, done: Sequence[TrialRecord], kind: Kind) -> SentinelFinding | None:
    hits: dict[str, tuple[TrialRecord, float]] = {}
    concerned = []
    for hypothesis in plan.hypotheses:
        judged = _judged(plan, hypothesis, done)
        by_arm = {arm: [trial for trial in judged if trial.arm == arm] for arm in sorted(hypothesis.sides)}
        shares = {arm: arm_share(own, kind) for arm, own in by_arm.items()}
        heavy = {arm: share for arm, share in shares.items() if share is not None and share > MOST_LOST}
        if heavy:
            concerned.append(hypothesis.id)
            hits |= {trial.key: (trial, share) for arm, share in heavy.items() for trial in by_arm[arm]}
    if not hits:
        return None
    text = f"too many attempts at {_WORDS[kind]} episodes were lost for the remaining rewards to mean much"
    return finding(name, "invalid", text, [*hits.values()]).model_copy(update={"hypotheses": tuple(concerned)})


# -- counts ---------------------------------------------------------------------------------------------------------


def _judged(plan: Plan, hypothesis: Hypothesis, trials: Sequence[TrialRecord]) -> list[TrialRecord]:
    """List the finished trials that the hypothesis's verdict is based on."""
    within = seeds_of(plan, judged_stage(plan, hypothesis, trials), trials)
    return [trial for trial in within if trial.arm in hypothesis.sides and trial.status is TrialStatus.DONE]


def _counts(trial: TrialRecord, kind: Kind) -> EpisodeAttempts | None:
    found = trial.evidence.attrition if trial.evidence is not None else None
    return None if found is None else found.of(kind)
