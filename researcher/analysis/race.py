"""Runs the fine stage: Optuna picks one frozen arm after another.

The arms are a grid that the plan fixed and hashed. The sampler's seed follows from the plan, and its history is replayed from the
recorded trials, so the same records give the same picks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from foundation.ids import derived_seed
from researcher.analysis.samples import NotEnoughTrials, deciding_stage, sample, seeds_of
from researcher.models import TrialRecord
from researcher.study.plan import Hypothesis, Plan, Stage, StageKind

if TYPE_CHECKING:
    from optuna import Study

_FIRST = 3
"""Number of random picks before the sampler uses what it has seen."""


def picked(plan: Plan, stage: Stage, trials: Sequence[TrialRecord]) -> tuple[str, ...]:
    """List the arms picked so far, in order; the last one's trials may still be running.

    Once an arm has run its minimum number of seeds, Optuna learns the mean of its finished trials, or that all failed. No arm is
    picked twice.
    """
    within = seeds_of(plan, stage, trials)
    study = _study(plan, stage)
    arms: list[str] = []
    wanted = min(stage.picks or len(stage.arms), len(stage.arms))
    while len(arms) < wanted:
        arm = _next(study, stage, arms)
        arms.append(arm)
        found = sample(within, arm, plan.hypotheses[0].metric)
        if found.open or len(found.values) + found.failed < stage.seeds:
            break
        _tell(study, stage.arms.index(arm), list(found.values.values()), len(stage.arms))
    return tuple(arms)


def _study(plan: Plan, stage: Stage) -> Study:
    # Imported here because optuna takes most of a second to load, and few plans have a fine stage.
    import optuna
    from optuna.study import StudyDirection

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = optuna.samplers.TPESampler(
        seed=derived_seed("fine", plan.digest(), stage.id) % 2**32, n_startup_trials=_FIRST
    )
    way = StudyDirection.MAXIMIZE if plan.hypotheses[0].direction == "increase" else StudyDirection.MINIMIZE
    return optuna.create_study(sampler=sampler, direction=way)


def _next(study: Study, stage: Stage, arms: Sequence[str]) -> str:
    """Return Optuna's next pick, or the nearest arm that has not been tried."""
    last = len(stage.arms) - 1
    place = study.ask().suggest_int("arm", 0, last)
    free = [index for index in range(last + 1) if stage.arms[index] not in arms]
    return stage.arms[min(free, key=lambda index: (abs(index - place), index))]


def _tell(study: Study, place: int, values: Sequence[float], count: int) -> None:
    """Report an arm's result to Optuna under the arm that actually ran."""
    from optuna.distributions import IntDistribution
    from optuna.trial import TrialState, create_trial

    answered = create_trial(
        state=TrialState.COMPLETE if values else TrialState.FAIL,
        value=sum(values) / len(values) if values else None,
        params={"arm": place},
        distributions={"arm": IntDistribution(0, count - 1)},
    )
    study.add_trial(answered)


def contenders(plan: Plan, stage: Stage, trials: Sequence[TrialRecord]) -> tuple[str, ...]:
    """Return the arms that `stage` runs: its baselines, and the best `keep` of the others so far.

    Raises: NotEnoughTrials when no arm that could continue has a finished trial.
    """
    if stage.kind is StageKind.FINE:
        return picked(plan, stage, trials)
    if stage.keep is None:
        return stage.arms
    baselines = {arm for hypothesis in plan.hypotheses for arm in hypothesis.baselines}
    rivals = [arm for arm in stage.arms if arm not in baselines]
    ranked = _ranked(plan, stage, _still_in(plan, stage, rivals, trials), trials)
    if not ranked:
        raise NotEnoughTrials(f"stage {stage.id!r} can take no arm from the race, because none has a finished trial")
    best = set(ranked[: stage.keep])
    return tuple(arm for arm in stage.arms if arm in baselines or arm in best)


def due(plan: Plan, stage: Stage, seeds: int, trials: Sequence[TrialRecord]) -> list[tuple[str, int]]:
    """Return the arm and seed of each trial of the stage. Arms alternate, so that they meet the same conditions.

    A fine stage adds trials as earlier ones end. Raises: NotEnoughTrials as `contenders` does.
    """
    arms = contenders(plan, stage, trials)
    return [(arm, plan.seed_of(arm, stage, place)) for place in range(seeds) for arm in arms]


def in_the_running(plan: Plan, hypothesis: Hypothesis, trials: Sequence[TrialRecord]) -> bool:
    """True if the hypothesis is one that gets tested. Raises: NotEnoughTrials as `left_behind` does."""
    return left_behind(plan, hypothesis, trials) is None


def left_behind(plan: Plan, hypothesis: Hypothesis, trials: Sequence[TrialRecord]) -> str | None:
    """Say why the hypothesis is not tested: exploration left its arms behind, or the plan's branch led elsewhere; else None.

    Raises: NotEnoughTrials before exploration has ended.
    """
    stage = deciding_stage(plan, hypothesis)
    others = set(plan.alternatives(stage.id)) - {stage.id}
    instead = next((trial.stage for trial in trials if trial.stage in others), None)
    if instead is not None:
        return f"{hypothesis.factor} was compared by stage {instead!r} instead, because the plan's branch led there"
    if stage.keep is None:
        return None
    exploring = [each for each in plan.stages if each.explores]
    for each in exploring:
        for arm in contenders(plan, each, trials):
            found = sample(seeds_of(plan, each, trials), arm, hypothesis.metric)
            if found.open or len(found.values) + found.failed < each.seeds:
                left = "is not over" if any(trial.stage == each.id for trial in trials) else "was not run"
                raise NotEnoughTrials(f"stage {each.id!r}, which helps to choose the arm to confirm, {left}")
    if hypothesis.sides <= set(contenders(plan, stage, trials)):
        return None
    if any(each.kind is StageKind.FINE and set(each.arms) & hypothesis.sides for each in exploring):
        return "the fine stage tried other levels or found a better one, and a fine stage gives no verdict"
    return "the race left its arms behind, and a race gives no verdict"


def family_size(plan: Plan, hypothesis: Hypothesis) -> int:
    """Return the maximum number of hypotheses in the same family: those that one stage decides. After a race, no more than the stage
    keeps.
    """
    stage = deciding_stage(plan, hypothesis)
    family = [each for each in plan.hypotheses if deciding_stage(plan, each) == stage]
    return len(family) if stage.keep is None else min(stage.keep, len(family))


def is_raced(plan: Plan, hypothesis: Hypothesis) -> bool:
    return deciding_stage(plan, hypothesis).keep is not None and bool(_rungs(plan))


def winning_chance(plan: Plan, *, first_rung_seeds: int, sigma: float, effect: float) -> float:
    """Return a lower bound of the probability that an arm better by `effect` survives every rung.

    Uses Markov's inequality: the arm is only dropped if at least as many rivals look better as survive.
    """
    from scipy import stats

    if sigma == 0:
        return 1.0
    rungs = _rungs(plan)
    lost = 0.0
    for rung, after in zip(rungs, _kept_after(plan, rungs), strict=True):
        seeds = first_rung_seeds * rung.seeds / rungs[0].seeds
        rivals = (rung.keep or len(rung.arms)) - 1
        lost += min(1.0, rivals / after * float(stats.norm.sf(effect / sigma * math.sqrt(seeds / 2))))
    return max(0.0, 1 - lost)


def rung_seeds(plan: Plan, stage: Stage, *, sigma: float) -> int:
    """Return the seeds per arm of a rung, within its bounds.

    With enough seeds, an arm with the planned effect survives all rungs with at least the square root of the planned power.
    """
    first = _rungs(plan)[0]
    seeds = first.seeds
    while seeds < first.max_seeds and not _enough(plan, seeds, sigma):
        seeds += 1
    return min(stage.max_seeds, seeds * stage.seeds // first.seeds)


def _enough(plan: Plan, seeds: int, sigma: float) -> bool:
    chance = winning_chance(plan, first_rung_seeds=seeds, sigma=sigma, effect=plan.planned_effect)
    return chance >= math.sqrt(plan.power)


def most_rung_seeds(plan: Plan) -> int:
    """Return the maximum number of seeds for the first rung."""
    return _rungs(plan)[0].max_seeds


def _rungs(plan: Plan) -> list[Stage]:
    return [stage for stage in plan.stages if stage.kind is StageKind.COARSE]


def _kept_after(plan: Plan, rungs: Sequence[Stage]) -> list[int]:
    """Return the number of raced arms that survive each rung, not counting fine stages."""
    stages = [stage for stage in plan.stages if stage.kind is not StageKind.FINE]
    following = [stages[stages.index(rung) + 1] for rung in rungs]
    return [stage.keep or len(stage.arms) for stage in following]


def _still_in(plan: Plan, stage: Stage, arms: Sequence[str], trials: Sequence[TrialRecord]) -> list[str]:
    """Return the arms that are still in the running before `stage`: those that ran in the latest exploring stage that lists them, and
    those that no exploring stage lists.
    """
    before = [each for each in plan.stages[: plan.stages.index(stage)] if each.explores]
    last = {arm: each for each in before for arm in each.arms}
    ran = {each.id: contenders(plan, each, trials) for each in before if each in last.values()}
    return [arm for arm in arms if arm not in last or arm in ran[last[arm].id]]


def _ranked(plan: Plan, stage: Stage, arms: Sequence[str], trials: Sequence[TrialRecord]) -> list[str]:
    """Return the arms with a finished trial, best first; ties keep the plan's order."""
    asked = plan.hypotheses[0]
    sign = -1 if asked.direction == "increase" else 1
    before = {each.id for each in plan.stages[: plan.stages.index(stage)] if each.explores}
    # Select by the stage that ran the trial: a later rung extends an earlier rung's seeds and must not change its survivors.
    explored = [trial for trial in trials if trial.stage in before]
    means: dict[str, float] = {}
    for arm in arms:
        values = list(sample(explored, arm, asked.metric).values.values())
        if values:
            means[arm] = sign * sum(values) / len(values)
    return sorted(means, key=means.__getitem__)
