"""Shares of a mix, and the ratios that correspond to them.

Ratios in a server's `batch.mix` are relative to each other. A share is a part of the whole.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from researcher.instruments.instrument import Factor, Instrument, Scalar, leaf_at
from swarm.protocol.runspec import merge_patch

_RATIO = re.compile(r"(?:run|roles\.[a-z][a-z0-9_]*)\.batch\.mix\.(?P<family>.+)\.ratio")
_WORDS = ("share", "fraction", "percent", "proportion")
_DIGITS = 12
"""Decimal places of ratios, so that 0.3 does not become 0.30000000000000004."""


def family_of(target: str) -> str | None:
    """Return the family whose ratio a target sets, or None."""
    found = _RATIO.fullmatch(target)
    return found["family"] if found else None


def with_shares(mix: Mapping[str, Any], shares: Mapping[str, float]) -> dict[str, Any]:
    """Return the mix with these families' shares. The other families share the rest in the same proportions as before. Ratios sum
    to 1.

    Raises: ValueError if the shares leave nothing for the other families, or leave a rest and there are none.
    """
    others = {name: float(each["ratio"]) for name, each in mix.items() if name not in shares}
    rest = 1.0 - math.fsum(shares.values())
    named = ", ".join(f"{name} {share:g}" for name, share in shares.items())
    if others and rest <= 0:
        raise ValueError(f"shares of {named} leave nothing for {', '.join(others)}")
    if not others and not math.isclose(rest, 0.0, abs_tol=1e-9):
        raise ValueError(f"shares of {named} do not sum to 1, and there is no other family to take the rest")
    ratios = {name: ratio * rest / math.fsum(others.values()) for name, ratio in others.items()} | dict(shares)
    return {name: {**mix.get(name, {}), "ratio": round(ratio, _DIGITS)} for name, ratio in ratios.items()}


def with_shares_of(
    run: Mapping[str, Any], levels: Mapping[str, Scalar], factors: Iterable[Factor], *rooms: str
) -> dict[str, Any]:
    """Return a partial RunSpec whose mix gives each family its share, if these levels set a share.

    `levels` maps targets to levels; only targets that start with one of the prefixes `rooms` count. Raises: ValueError as `with_shares`
    does.
    """
    shared = {target for factor in factors if factor.share for target in factor.targets if target.startswith(rooms)}
    shares = {family: float(levels[target]) for target in levels if target in shared and (family := family_of(target))}
    return merge_patch(run, {"batch": {"mix": with_shares(mix_of(run), shares)}}) if shares else dict(run)


def with_shares_marked(instrument: Instrument) -> Instrument:
    """Mark the instrument's shares: a factor that sets a family's ratio is a share if its name, aliases or description say so."""
    return instrument.model_copy(update={"factors": tuple(_marked(each, instrument) for each in instrument.factors)})


def _marked(factor: Factor, instrument: Instrument) -> Factor:
    family = family_of(factor.target)
    said = " ".join((factor.name, *factor.aliases, factor.description)).casefold()
    if factor.type != "float" or family is None or factor.share is False:
        return factor
    if not factor.share and not any(word in said for word in _WORDS):
        return factor
    mix = mix_of(instrument.defaults.run)
    changes: dict[str, object] = {"share": True}
    if family in mix and factor.default == mix[family]["ratio"]:
        changes["default"] = round(mix[family]["ratio"] / math.fsum(each["ratio"] for each in mix.values()), _DIGITS)
    if factor.high is not None and factor.high >= 1:
        changes["high"] = None
    return factor.model_copy(update=changes)


def share_problem(factor: Factor, run: Mapping[str, Any]) -> str | None:
    """Explain why a factor cannot be a share; None if it can."""
    families = [family_of(target) for target in factor.targets]
    if None in families or factor.type != "float":
        return "only a float whose targets are ratios of families (run.batch.mix.NAME.ratio) can be a share"
    if not set(mix_of(run)) - set(families):
        return "defaults.run.batch.mix must also name the other families, which share the rest"
    return None


def mix_of(run: Mapping[str, Any]) -> Mapping[str, Any]:
    return leaf_at(run, ("batch", "mix")) or {}
