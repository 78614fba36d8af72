"""The stages of each design, and their cost in trials.

noise floor → compare                                    two arms, or a few
noise floor → look → … → look                            the same, with alpha spent over several looks
noise floor → race → … → race → [fine →] confirm         many arms: successive halving, then the best arm on fresh seeds
noise floor → compare → fine → confirm                   a few arms, then the best level between them on fresh seeds
noise floor → compare A → compare B at one level of A    two factors in sequence
screen                                                   many factors, levels or bundles; there is no test that could lack power
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from researcher.design.arms import groups_of, names_of
from researcher.design.question import Question
from researcher.refusals import PlanningRefused
from researcher.study.plan import Plan, Stage, StageKind

POWER = 0.8
NOISE_FLOOR, COMPARE, CONFIRM, FINE, SCREEN = "noise-floor", "compare", "confirm", "fine", "screen"
SCREEN_SEEDS = 2
"""Seeds per arm unless the spec says otherwise. Few are enough, because a screen pools the noise of all its trials."""
LAST_SEED = 2**31 - 1
"""The largest seed that a run accepts (swarm.protocol.runspec.RunSpec)."""
_RUNG_SEEDS = 2
Seeds = tuple[int, int]
"""Minimum and maximum seeds per arm."""


def stage(name: str, kind: StageKind, arms: Iterable[str], seeds: Seeds, **more: Any) -> Stage:
    return Stage(id=name, kind=kind, arms=tuple(arms), seeds=seeds[0], max_seeds=seeds[1], **more)


def compared(arms: Sequence[str], noisy: str, seeds: Seeds, looks: int, alpha: float) -> tuple[Stage, ...]:
    """Return the stages of a comparison: a noise floor on one arm, then all arms, in one or more looks.

    The comparison starts on the noise floor's seeds and may add more. `alpha` is the total over all looks.
    """
    floor = _floor(noisy, seeds)
    if looks == 1:
        return floor, stage(COMPARE, StageKind.COMPARE, arms, seeds)
    shares = [number / looks for number in range(1, looks + 1)]
    looked = []
    for number, (share, spends) in enumerate(zip(shares, spending(shares, alpha), strict=True), start=1):
        least, most = (max(2, math.ceil(share * count)) for count in seeds)
        looked.append(stage(f"look-{number}", StageKind.COMPARE, arms, (least, most), share=share, spends=spends))
    return floor, *looked


def spending(shares: Sequence[float], alpha: float) -> list[float]:
    """Return the alpha of each look by the O'Brien-Fleming-like spending function: little early, most at the end.

    The parts sum to alpha, so the union bound holds however the looks depend on each other. Source: Lan and DeMets 1983, Biometrika 70.
    """
    from scipy import stats

    quantile = float(stats.norm.isf(alpha / 2))
    spent = [2 * float(stats.norm.sf(quantile / math.sqrt(share))) for share in shares]
    return [now - before for before, now in zip([0.0, *spent], spent, strict=False)]


def raced(
    treatments: Sequence[str], between: Sequence[str], baseline: str, seeds: Seeds, fine: int, *, racing: bool
) -> tuple[Stage, ...]:
    """Return the stages of a race: a noise floor, rungs, a fine stage if requested, and the confirmation of the best arm.

    Each rung has half the arms of the previous one and twice its seeds. If `racing` is false, one comparison of all treatments replaces
    the rungs, and the confirmation tests only the best fine arm. In the fine stage, Optuna picks from the arms `between`. The
    confirmation uses fresh seeds.
    """
    stages = [_floor(baseline, seeds)]
    if racing:
        left, rung = len(treatments), 0
        while left > 1:
            own = _RUNG_SEEDS * 2**rung, max(_RUNG_SEEDS, seeds[1]) * 2**rung
            keep = left if rung else None
            stages.append(stage(f"race-{rung + 1}", StageKind.COARSE, treatments, own, keep=keep))
            left, rung = math.ceil(left / 2), rung + 1
    else:
        stages.append(stage(COMPARE, StageKind.COMPARE, (baseline, *treatments), seeds))
    if fine:
        picks = min(fine, len(between))
        stages.append(stage(FINE, StageKind.FINE, between, (_RUNG_SEEDS, _RUNG_SEEDS), picks=picks))
    fresh = max(each.first_seed + each.max_seeds for each in stages)
    arms = (baseline, *(treatments if racing else ()), *between)
    return *stages, stage(CONFIRM, StageKind.CONFIRM, arms, seeds, first_seed=fresh, keep=1)


def in_sequence(question: Question, seeds: Seeds) -> tuple[Stage, ...]:
    """Return the stages of a sequence: a noise floor, a comparison of the first factor, and for each of its levels a comparison of the
    second factor, of which only one runs.

    All arms of the second comparison run on fresh seeds, even the arm that ran in the first comparison. That arm was chosen because it
    looked best on its seeds: on the same seeds again, it would look too good, and the second factor's other levels too bad.
    """
    first, *following = [tuple(arm.name for arm in arms) for _, arms in groups_of(question)]
    one, second = question.varied
    found = [_floor(first[0], seeds), stage(f"{COMPARE}-{one.factor.name}", StageKind.COMPARE, first, seeds)]
    for level, arms in zip(names_of(one.factor, one.levels), following, strict=True):
        name = f"{COMPARE}-{second.factor.name}-at-{level}"
        found.append(stage(name, StageKind.COMPARE, arms, seeds, first_seed=max(seeds)))
    return tuple(found)


def _floor(arm: str, seeds: Seeds) -> Stage:
    return stage(NOISE_FLOOR, StageKind.NOISE_FLOOR, (arm,), (seeds[0], seeds[0]))


# -- seeds and cost -------------------------------------------------------------------------------------------------


def with_most(stages: Sequence[Stage], most: int) -> tuple[Stage, ...]:
    """Limit deciding stages to `most` seeds per arm, and move stages with fresh seeds so that they start above all earlier seeds."""
    sized: list[Stage] = []
    for each in stages:
        before = [mine for own, mine in zip(stages, sized, strict=False) if own.first_seed < each.first_seed]
        changes: dict[str, int] = {}
        if before:
            changes["first_seed"] = max(mine.first_seed + mine.max_seeds for mine in before)
        if each.kind is not StageKind.NOISE_FLOOR and not each.explores:
            changes["max_seeds"] = max(each.seeds, math.ceil(most * (each.share or 1.0)))
        sized.append(each.model_copy(update=changes))
    return tuple(sized)


def with_seeds(stages: Sequence[Stage], seeds: int) -> tuple[Stage, ...]:
    """Return the stages for exactly `seeds` per arm.

    A look gets its share of the seeds. A rung keeps its minimum, and its maximum grows from rung to rung as before. A fine stage keeps
    its own seeds.
    """
    first_rung = next((each.seeds for each in stages if each.kind is StageKind.COARSE), 1)

    def sized(each: Stage) -> Stage:
        if each.kind is StageKind.FINE:
            return each
        if each.kind is StageKind.COARSE:
            return each.model_copy(update={"max_seeds": max(_RUNG_SEEDS, seeds) * (each.seeds // first_rung)})
        own = seeds if each.share is None else max(2, math.ceil(each.share * seeds))
        return each.model_copy(update={"seeds": own, "max_seeds": own})

    return with_most([sized(each) for each in stages], seeds)


def check_seeds(plan: Plan) -> None:
    """Raise PlanningRefused if an arm could need seeds above `LAST_SEED`."""
    over = plan.last_seed - LAST_SEED
    if over > 0:
        first = min(each.first_seed for each in plan.stages)
        raise PlanningRefused(
            f"the largest seed is {LAST_SEED}; starting at {first}, this plan may need {over} more seeds than remain: give "
            f"--first-seed {max(0, first - over)} or less, or fewer --seeds"
        )


def cost(plan: Plan, seconds: Mapping[str, float], *, at_most: bool) -> tuple[int, float]:
    """Return the number of trials and their total seconds. A trial that several stages use counts once.

    Counts each stage's maximum number of seeds if `at_most`, else its minimum. Of alternative stages, only one of which runs, the most
    expensive counts.
    """
    baselines = {arm for hypothesis in plan.hypotheses for arm in hypothesis.baselines}
    run: dict[tuple[str, int], int] = {}
    """Largest number of seeds run so far, by arm and first seed."""
    prices: dict[tuple[str, ...], tuple[float, int]] = {}
    for each in plan.stages:
        seeds, chosen = each.max_seeds if at_most else each.seeds, each.keep or each.picks
        others = sorted((arm for arm in each.arms if arm not in baselines), key=lambda arm: -seconds[arm])
        arms = [arm for arm in each.arms if arm in baselines] + others[:chosen]
        new = {arm: max(0, seeds - run.get((arm, each.first_seed), 0)) for arm in arms}
        price = sum(count * seconds[arm] for arm, count in new.items()), sum(new.values())
        alike = plan.alternatives(each.id)
        prices[alike] = max(price, prices.get(alike, price))
        # The survivors ran in the previous rung, so their seeds there are not new, whichever arms they are.
        for arm in each.arms if chosen else arms:
            run[arm, each.first_seed] = max(seeds, run.get((arm, each.first_seed), 0))
    return sum(trials for _, trials in prices.values()), math.fsum(total for total, _ in prices.values())
