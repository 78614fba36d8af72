"""Levels of factors: as a topic names them, at which a factor does nothing or something, and of a factor's own type."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from researcher.instruments.catalogue import level_problem
from researcher.instruments.instrument import Factor, Scalar
from researcher.planner.wording import Token, number_text

LIMITS = ("seeds", "min_seeds", "max_seeds", "budget_s")
"""What a topic says of how often and how long; fields of `Placed` and of a reading alike."""


@dataclass(frozen=True, slots=True)
class Level:
    """A level of `factor`, named at token `at`."""

    at: int
    factor: Factor
    value: Scalar


@dataclass(slots=True)
class Placed:
    """Where every number of a topic went."""

    levels: list[Level] = field(default_factory=list)
    seeds: int | None = None
    min_seeds: int | None = None
    max_seeds: int | None = None
    """`at least 4 seeds`, `up to 8 seeds`."""
    budget_s: float | None = None
    threshold: float | None = None
    """Of a metric, in `reach a reward of 0.5`."""
    effects: list[Token] = field(default_factory=list)
    """Sizes of an effect, in `improve accuracy by 0.1`."""
    shifts: list[tuple[Token, Factor]] = field(default_factory=list)
    """`raise the group size by 4`: a change, and no level."""
    unplaced: list[Token] = field(default_factory=list)

    @property
    def limits(self) -> dict[str, Any]:
        """As a reading has them."""
        return {name: getattr(self, name) for name in LIMITS}

    def of(self, factor: Factor) -> list[Level]:
        return sorted((level for level in self.levels if level.factor == factor), key=lambda level: level.at)


def off_level(factor: Factor) -> Scalar | None:
    """The level at which the factor does nothing; None when it has none."""
    if factor.type == "bool":
        return False
    if factor.off is not None:
        return factor.off
    if factor.type in ("int", "float") and level_problem(factor, 0) is None:
        return as_level(factor, 0.0)
    return None


def on_level(factor: Factor) -> Scalar:
    """A level at which it does something: the default, another choice, or a tenth of its range."""
    if factor.type == "bool":
        return True
    if factor.default != off_level(factor):
        return factor.default
    if factor.type == "choice":
        return next(choice for choice in factor.choices if choice != factor.off)
    tenth = rounded((factor.high if factor.high is not None else 1.0) / 10)
    return as_level(factor, max(1.0, round(tenth)) if factor.type == "int" else tenth)


def rounded(value: float) -> float:
    """Two significant digits."""
    return float(f"{value:.1e}")


def as_level(factor: Factor, value: float | None) -> Scalar:
    """A number as a level of the factor's type, where it is one."""
    if value is None:
        raise ValueError(f"no level of {factor.name}")
    if factor.type == "int" and value == int(value):
        return int(value)
    if factor.type == "bool" and value in (0, 1):
        return bool(value)
    return float(value)


def level_text(level: Scalar) -> str:
    """A level as people write it."""
    if isinstance(level, bool):
        return "on" if level else "off"
    return level if isinstance(level, str) else number_text(level)
