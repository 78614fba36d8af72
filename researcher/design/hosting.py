"""Which models a plan's servers have to host, and what changing from one to the other costs on one machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from researcher.instruments.instrument import STUDY_MODEL, Factor
from researcher.study.plan import Arm, Plan, PlanModel

BOOT_S = 45.0
"""Until a server that starts on two cores takes runs."""


def models_of(arms: Sequence[Arm], factors: Sequence[Factor], named: Mapping[str, PlanModel]) -> tuple[PlanModel, ...]:
    """The models in which arms differ, in the arms' order; empty where they do not. named: those that the spec names."""
    names = [factor.name for factor in factors if factor.target == STUDY_MODEL]
    found = dict.fromkeys(str(arm.levels[name]) for arm in arms for name in names if name in arm.levels)
    return tuple(named.get(model) or PlanModel(name=model) for model in found)


def model_factor(models: Sequence[str]) -> Factor:
    """The models in which arms differ, as a factor. models: their names (`with_models`), the default first."""
    return Factor(name="model", target=STUDY_MODEL, type="choice", default=models[0], choices=tuple(models))


def boots_s(plan: Plan, *, at_most: bool) -> float:
    """Seconds for all boots where one server runs at a time, as the executor takes turns: each stage goes through its seeds
    in order, and begins a seed with the model that is hosted. All arms of a stage count: who comes through a race is not known
    yet, and may be of either model."""
    if not plan.models:
        return 0.0
    boots, hosted, ran = 0, None, set[tuple[str, int]]()
    for stage in plan.stages:
        for seed in range(stage.first_seed, stage.first_seed + (stage.max_seeds if at_most else stage.seeds)):
            left = dict.fromkeys(plan.model_of(arm).name for arm in stage.arms if (arm, seed) not in ran)
            ran |= {(arm, seed) for arm in stage.arms}
            boots += len(left) - (hosted in left)
            hosted = _last(list(left), hosted)
    return boots * BOOT_S


def _last(models: Sequence[str], hosted: str | None) -> str | None:
    """What is hosted after these have had their turn."""
    others = [model for model in models if model != hosted]
    return others[-1] if others else hosted
