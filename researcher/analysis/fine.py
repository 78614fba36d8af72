"""The fine stage: Optuna picks, one after the other, which of the frozen arms of an interval to try next.

The arms are a grid that the plan fixed and hashed; Optuna only chooses among them. The sampler's seed follows from the plan,
and the whole conversation is repeated from the recorded trials, so that the same records give the same picks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from foundation.ids import derived_seed
from researcher.analysis.samples import sample, seeds_of
from researcher.models import TrialRecord
from researcher.study.plan import Plan, Stage

if TYPE_CHECKING:
    from optuna import Study

_FIRST = 3
"""Picks before the sampler trusts what it has seen."""


def picked(plan: Plan, stage: Stage, trials: Sequence[TrialRecord]) -> tuple[str, ...]:
    """Arms picked so far, in their order; the last one may have trials that have not ended.

    A pick is answered by the mean of its finished trials on all of the stage's least seeds; an arm whose trials all failed
    is answered as failed. An arm is picked once.
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
    # Here and not above: importing optuna takes most of a second, and few plans have a fine stage.
    import optuna
    from optuna.study import StudyDirection

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = optuna.samplers.TPESampler(
        seed=derived_seed("fine", plan.digest(), stage.id) % 2**32, n_startup_trials=_FIRST
    )
    way = StudyDirection.MAXIMIZE if plan.hypotheses[0].direction == "increase" else StudyDirection.MINIMIZE
    return optuna.create_study(sampler=sampler, direction=way)


def _next(study: Study, stage: Stage, arms: Sequence[str]) -> str:
    """What Optuna would try; where it has been tried, the nearest arm that has not."""
    last = len(stage.arms) - 1
    place = study.ask().suggest_int("arm", 0, last)
    free = [index for index in range(last + 1) if stage.arms[index] not in arms]
    return stage.arms[min(free, key=lambda index: (abs(index - place), index))]


def _tell(study: Study, place: int, values: Sequence[float], count: int) -> None:
    """The answer, under the arm that was run."""
    from optuna.distributions import IntDistribution
    from optuna.trial import TrialState, create_trial

    answered = create_trial(
        state=TrialState.COMPLETE if values else TrialState.FAIL,
        value=sum(values) / len(values) if values else None,
        params={"arm": place},
        distributions={"arm": IntDistribution(0, count - 1)},
    )
    study.add_trial(answered)
