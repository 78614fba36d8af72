"""How a design is laid out in stages, with the branches between them, and what stages cost in trials.

noise floor → compare                                    two arms, or a few
noise floor → look → … → look                            the same with alpha spent over several looks
noise floor → race → … → race → [fine →] confirm         many arms: successive halving, the best on fresh seeds
noise floor → compare → fine → confirm                   a few, and the best of the levels between them on fresh seeds
noise floor → compare → compare                          two factors in sequence: see `succession`
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from researcher.refusals import PlanningRefused
from researcher.study.plan import Branch, Condition, Hypothesis, Plan, Stage, StageKind

ALPHA, POWER = 0.05, 0.8
NOISE_FLOOR, COMPARE, CONFIRM, FINE, SCREEN = "noise-floor", "compare", "confirm", "fine", "screen"
SCREEN_SEEDS = 2
"""Seeds per arm unless the spec says otherwise: each effect of a screen is over half of all its trials."""
LAST_SEED = 2**31 - 1
"""The greatest seed that a run takes (swarm.protocol.runspec.RunSpec)."""
_RUNG_SEEDS = 2
_DECIDED = ("supported", "refuted", "equivalent")


def compared(arms: Sequence[str], noisy: str, seeds: tuple[int, int], looks: int) -> tuple[Stage, ...]:
    """A noise floor on one of the arms, and all arms on the same seeds and more, looked at once or several times."""
    least, most = seeds
    floor = Stage(id=NOISE_FLOOR, kind=StageKind.NOISE_FLOOR, arms=(noisy,), seeds=least, max_seeds=least)
    if looks == 1:
        return floor, Stage(id=COMPARE, kind=StageKind.COMPARE, arms=tuple(arms), seeds=least, max_seeds=most)
    shares = [number / looks for number in range(1, looks + 1)]
    return floor, *(
        Stage(
            id=f"look-{number}",
            kind=StageKind.COMPARE,
            arms=tuple(arms),
            seeds=max(2, math.ceil(share * least)),
            max_seeds=max(2, math.ceil(share * most)),
            share=share,
            spends=spends,
        )
        for number, (share, spends) in enumerate(zip(shares, spending(shares), strict=True), start=1)
    )


def screened(arms: Sequence[str], seeds: int) -> tuple[Stage, ...]:
    """All arms at once, without a noise floor: a screen tests nothing that could lack power."""
    return (Stage(id=SCREEN, kind=StageKind.SCREEN, arms=tuple(arms), seeds=seeds, max_seeds=seeds),)


def spending(shares: Sequence[float], alpha: float = ALPHA) -> list[float]:
    """What each look may spend, by the O'Brien-Fleming-like spending function: little early, nearly all at the end.

    The looks' parts add up to alpha, so that they hold together whatever the looks' dependence (a union bound).
    Source: Lan and DeMets 1983, Biometrika 70.
    """
    from scipy import stats

    quantile = float(stats.norm.isf(alpha / 2))
    spent = [2 * float(stats.norm.sf(quantile / math.sqrt(share))) for share in shares]
    return [now - before for before, now in zip([0.0, *spent], spent, strict=False)]


def raced(
    treatments: Sequence[str],
    between: Sequence[str],
    baseline: str,
    seeds: tuple[int, int],
    fine: int,
    *,
    racing: bool,
) -> tuple[Stage, ...]:
    """Rungs of a race, each with half the arms and twice the seeds; a fine stage where asked for; the best, confirmed.

    Where treatments do not race, all of them are compared first: what is confirmed is then the best of those between.
    between: arms among which Optuna picks. Seeds of the confirmation are fresh ones.
    """
    least, most = seeds
    stages = [Stage(id=NOISE_FLOOR, kind=StageKind.NOISE_FLOOR, arms=(baseline,), seeds=least, max_seeds=least)]
    if racing:
        stages += _rungs(treatments, most)
    else:
        named = (baseline, *treatments)
        stages.append(Stage(id=COMPARE, kind=StageKind.COMPARE, arms=named, seeds=least, max_seeds=most))
    if fine:
        picks = min(fine, len(between))
        seeds_each = _RUNG_SEEDS
        stages.append(
            Stage(
                id=FINE, kind=StageKind.FINE, arms=tuple(between), seeds=seeds_each, max_seeds=seeds_each, picks=picks
            )
        )
    fresh = max(stage.first_seed + stage.max_seeds for stage in stages)
    arms = (baseline, *(treatments if racing else ()), *between)
    stages.append(
        Stage(id=CONFIRM, kind=StageKind.CONFIRM, arms=arms, seeds=least, max_seeds=most, first_seed=fresh, keep=1)
    )
    return tuple(stages)


def _rungs(treatments: Sequence[str], most: int) -> Iterator[Stage]:
    """most: seeds per arm of the first, at the most."""
    left, rung = len(treatments), 0
    while left > 1:
        yield Stage(
            id=f"race-{rung + 1}",
            kind=StageKind.COARSE,
            arms=tuple(treatments),
            seeds=_RUNG_SEEDS * 2**rung,
            max_seeds=max(_RUNG_SEEDS, most) * 2**rung,
            keep=left if rung else None,
        )
        left, rung = math.ceil(left / 2), rung + 1


def branches(
    stages: Sequence[Stage],
    hypotheses: Sequence[Hypothesis],
    *,
    allow_underpowered: bool,
    at_end: Sequence[Branch] = (),
) -> tuple[Branch, ...]:
    """From each stage to the next; out where the noise is too loud, or a look decides.

    at_end: what else the last stage may decide, before anything but a sentinel that fired.
    """
    if stages[-1].kind is StageKind.SCREEN:
        reason = "every planned trial has ended; a screen explores and gives no verdict"
        return (Branch(stage=stages[-1].id, when=Condition(kind="always"), then="stop", reason=reason),)
    found = [] if allow_underpowered else [too_loud()]
    found.append(
        onward(
            stages[0],
            stages[1],
            "the noise floor is known: all arms run on as many seeds as it asks for"
            if not stages[1].explores
            else "the noise floor is known: the arms race on as many seeds as it asks for",
        )
    )
    for stage, after in itertools.pairwise(stages[1:]):
        if stage.explores:
            found.append(onward(stage, after, "exploring gives no verdict: the best go on"))
        elif after.explores:
            found += worthless(stage, hypotheses)
            found.append(onward(stage, after, "whatever was found of them, levels between those compared are tried"))
        else:
            found += _decided(stage, hypotheses)
            found.append(onward(stage, after, "not decided at this look, and alpha is left for the next"))
    return (*found, *ending(stages[-1], hypotheses, at_end))


def with_most(stages: Sequence[Stage], most: int) -> tuple[Stage, ...]:
    """The stages with `most` seeds per arm at the most where they decide. Fresh seeds stay behind all others."""
    sized: list[Stage] = []
    for stage in stages:
        before = [mine for own, mine in zip(stages, sized, strict=False) if own.first_seed < stage.first_seed]
        changes: dict[str, int] = {}
        if before:
            changes["first_seed"] = max(each.first_seed + each.max_seeds for each in before)
        if stage.kind is not StageKind.NOISE_FLOOR and not stage.explores:
            changes["max_seeds"] = max(stage.seeds, math.ceil(most * (stage.share or 1.0)))
        sized.append(stage.model_copy(update=changes))
    return tuple(sized)


def with_seeds(stages: Sequence[Stage], seeds: int) -> tuple[Stage, ...]:
    """The stages as `compared`, `raced` and their like lay them out for `seeds` per arm, no more and no fewer.

    A look keeps its share of them, a rung its least and its lead over the rung before, a fine stage its own.
    """
    rungs = [stage for stage in stages if stage.kind is StageKind.COARSE]

    def sized(stage: Stage) -> Stage:
        if stage.kind is StageKind.FINE:
            return stage
        if stage.kind is StageKind.COARSE:
            most = max(_RUNG_SEEDS, seeds) * (stage.seeds // rungs[0].seeds)
            return stage.model_copy(update={"max_seeds": most})
        own = seeds if stage.share is None else max(2, math.ceil(stage.share * seeds))
        return stage.model_copy(update={"seeds": own, "max_seeds": own})

    return with_most([sized(stage) for stage in stages], seeds)


def check_seeds(plan: Plan) -> None:
    """Raises: PlanningRefused where an arm would, at the most, take seeds that no run takes."""
    over = plan.last_seed - LAST_SEED
    if over > 0:
        first = min(stage.first_seed for stage in plan.stages)
        raise PlanningRefused(
            f"seeds go up to {LAST_SEED}, and from {first} on this plan may need {over} more than there are: give "
            f"--first-seed {max(0, first - over)} or less, or fewer --seeds"
        )


def cost(plan: Plan, seconds: Mapping[str, float], *, at_most: bool) -> tuple[int, float]:
    """Trials and their seconds, one after the other, with each stage's least or most seeds; a trial counts once.

    Of stages of which one alone will run, the dearest counts.
    """
    each: dict[tuple[str, ...], list[tuple[float, int]]] = {}
    for stage, new in _new_seeds(plan, seconds, at_most=at_most):
        price = sum(seeds * seconds[arm] for arm, seeds in new), sum(seeds for _, seeds in new)
        each.setdefault(plan.alternatives(stage), []).append(price)
    dearest = [max(prices) for prices in each.values()]
    return sum(trials for _, trials in dearest), math.fsum(total for total, _ in dearest)


def _new_seeds(
    plan: Plan, seconds: Mapping[str, float], *, at_most: bool
) -> Iterator[tuple[str, list[tuple[str, int]]]]:
    """Each stage, and for the arms that it runs how many seeds no stage before has run."""
    run: dict[tuple[str, int], int] = {}
    baselines = {arm for hypothesis in plan.hypotheses for arm in hypothesis.baselines}
    for stage in plan.stages:
        seeds = stage.max_seeds if at_most else stage.seeds
        chosen = stage.keep or stage.picks
        others = sorted((arm for arm in stage.arms if arm not in baselines), key=lambda arm: -seconds[arm])
        runs = [arm for arm in stage.arms if arm in baselines] + others[:chosen]
        yield stage.id, [(arm, max(0, seeds - run.get((arm, stage.first_seed), 0))) for arm in runs]
        for arm in stage.arms:
            if arm in runs or chosen:
                # Whoever is kept ran in the rung before: its seeds there are no new ones, whichever arm it will be.
                run[arm, stage.first_seed] = max(seeds, run.get((arm, stage.first_seed), 0))


# -- branches -------------------------------------------------------------------------------------------------------


def too_loud() -> Branch:
    """Out, before anything is compared."""
    return Branch(
        stage=NOISE_FLOOR,
        when=Condition(kind="power_below", value=POWER),
        then="underpowered",
        reason="the noise is too loud for the planned effect, even with the most seeds that the plan allows",
    )


def onward(stage: Stage, after: Stage, reason: str) -> Branch:
    """To the next stage, whatever else holds."""
    return Branch(stage=stage.id, when=Condition(kind="always"), then="stage", to=after.id, reason=reason)


def _decided(stage: Stage, hypotheses: Sequence[Hypothesis]) -> list[Branch]:
    """A look that answers everything, or finds the numbers worthless, is the last."""
    return [
        *worthless(stage, hypotheses),
        Branch(
            stage=stage.id,
            when=Condition(kind="verdict_in", verdicts=_DECIDED),
            then="stop",
            reason="the question is answered, within the alpha that this look may spend",
        ),
    ]


def worthless(stage: Stage, hypotheses: Sequence[Hypothesis]) -> list[Branch]:
    """Out, where a sentinel says that the numbers mean nothing."""
    return [
        _stop(stage, each, ("invalid",), "a sentinel fired: the numbers do not answer the question")
        for each in hypotheses
    ]


def ending(stage: Stage, hypotheses: Sequence[Hypothesis], at_end: Sequence[Branch] = ()) -> list[Branch]:
    """Of the last stage."""
    found = [*worthless(stage, hypotheses), *at_end]
    if len(hypotheses) == 1:
        found.append(_stop(stage, hypotheses[0], _DECIDED, "the question is answered"))
        reason = "every planned trial has ended; what is not decided now stays open"
    else:  # some, all or none of them may be decided
        reason = "every planned trial has ended"
    return [*found, Branch(stage=stage.id, when=Condition(kind="always"), then="stop", reason=reason)]


def _stop(stage: Stage, hypothesis: Hypothesis, verdicts: tuple[str, ...], reason: str) -> Branch:
    when = Condition(kind="verdict_in", hypothesis=hypothesis.id, verdicts=verdicts)
    return Branch(stage=stage.id, when=when, then="stop", reason=reason)
