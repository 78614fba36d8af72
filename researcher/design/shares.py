"""Factors that are a family's share of a mix: recognised by their words, validated, and stated in the plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from researcher.instruments.instrument import Factor, Instrument, Scalar
from researcher.refusals import PlanningRefused
from researcher.study.plan import Plan, leaf_at
from researcher.study.shares import family_of, share_in, with_shares
from swarm.protocol.runspec import merge_patch

_WORDS = ("share", "fraction", "percent", "proportion")


def with_shares_marked(instrument: Instrument) -> Instrument:
    """The instrument with its shares marked: a factor that sets a family's ratio is a share if its words say so."""
    return instrument.model_copy(update={"factors": tuple(_marked(each, instrument) for each in instrument.factors)})


def _marked(factor: Factor, instrument: Instrument) -> Factor:
    family = family_of(factor.target)
    said = " ".join((factor.name, *factor.aliases, factor.description)).casefold()
    if factor.type != "float" or family is None or factor.share is False:
        return factor
    if not factor.share and not any(word in said for word in _WORDS):
        return factor
    mix = _mix(instrument.defaults.run)
    changes: dict[str, object] = {"share": True}
    if family in mix and factor.default == mix[family]["ratio"]:
        changes["default"] = round(share_in(mix, family), 12)
    if factor.high is not None and factor.high >= 1:
        changes["high"] = None
    return factor.model_copy(update=changes)


def share_problem(factor: Factor, run: Mapping[str, Any]) -> str | None:
    """Why a factor cannot be a share, in words."""
    families = [family_of(target) for target in factor.targets]
    if None in families or factor.type != "float":
        return "only a float whose targets are ratios of families (run.batch.mix.NAME.ratio) can be a share"
    if not set(_mix(run)) - set(families):
        return "defaults.run.batch.mix has to name the other families too, which share the rest"
    return None


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
        return dict(merge_patch(run, {"batch": {"mix": with_shares(_mix(run), shares)}}))
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


def _mix(run: Mapping[str, Any]) -> Mapping[str, Any]:
    return leaf_at(run, ("batch", "mix")) or {}
