"""Shares in a plan: those that all arms have, and the whole mix of each arm, stated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from researcher.instruments.instrument import Factor, Scalar
from researcher.instruments.shares import family_of, mix_of, with_shares
from researcher.refusals import PlanningRefused
from researcher.study.plan import Plan
from swarm.protocol.runspec import merge_patch


def refuse_held_share(varied: Sequence[Factor], held: Sequence[Factor]) -> None:
    """Raises: PlanningRefused where one share is set in all arms and another is varied: what is left for the first would vary."""
    fixed, moved = [each.name for each in held if each.share], [each.name for each in varied if each.share]
    if fixed and moved:
        raise PlanningRefused(
            f"{moved[0]} is varied and {fixed[0]} is set in all arms, but the one changes what is left for the other; drop one",
            fixed,
        )


def with_held_shares(run: dict[str, Any], held: Sequence[tuple[Factor, Scalar]]) -> dict[str, Any]:
    """A run in which the shares that all arms have are shares. Raises: PlanningRefused where they leave nothing for the others."""
    shares = {
        family: float(level)
        for factor, level in held
        if factor.share
        for target in factor.targets
        if target.startswith("run.") and (family := family_of(target))
    }
    if not shares:
        return run
    try:
        return dict(merge_patch(run, {"batch": {"mix": with_shares(mix_of(run), shares)}}))
    except ValueError as error:
        raise PlanningRefused(str(error)) from error


def with_mixes_stated(plan: Plan) -> Plan:
    """The plan that states the whole mix of each arm with a share."""
    said = []
    for arm in plan.arms:
        if any(factor.share and factor.name in arm.levels for factor in plan.factors):
            mix = plan.run_fields(plan.levels_of(arm))["batch"]["mix"]
            families = ", ".join(f"{family} {100 * each['ratio']:.4g} %" for family, each in mix.items())
            said.append(f"The mix of {arm.name} is {families}.")
    return plan.model_copy(
        update={"assumptions": (*plan.assumptions, *(text for text in said if text not in plan.assumptions))}
    )
