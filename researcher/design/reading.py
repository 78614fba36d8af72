"""What a topic asks, in an instrument's terms: between reading or choosing it and laying the study out."""

from __future__ import annotations

from foundation.strict import StrictModel
from researcher.instruments.instrument import Direction, Factor, Metric, Scalar


class Crossed(StrictModel):
    """One of several factors that are varied together, with its baseline level first."""

    factor: Factor
    levels: tuple[Scalar, Scalar]


class Following(StrictModel):
    """The factor that is compared next, at the level of the first that goes on. levels: the baseline first."""

    factor: Factor
    levels: tuple[Scalar, ...]
    meanwhile: Scalar
    """At which it stands while the first is compared."""


class Reading(StrictModel):
    """What a topic asks, in the instrument's terms. levels: of all arms; pairs: (treatment, baseline) as indices into it.

    crossed: two or more factors, varied together so that their interaction is seen; `levels` and `pairs` are then empty.
    following: a second factor, compared after `factor`; the first of `levels` is then the baseline.
    """

    factor: Factor
    levels: tuple[Scalar, ...]
    pairs: tuple[tuple[int, int], ...]
    crossed: tuple[Crossed, ...] = ()
    following: Following | None = None
    metric: Metric
    balance: bool = False
    """The levels stand in order, each is paired with the next, and the best balance of gain and cost is asked for."""
    direction: Direction
    direction_assumed: bool = False
    settings: tuple[tuple[Factor, Scalar], ...] = ()
    seeds: int | None = None
    min_seeds: int | None = None
    max_seeds: int | None = None
    budget_s: float | None = None
    assumptions: tuple[str, ...] = ()

    @property
    def factors(self) -> tuple[Factor, ...]:
        """All that arms vary."""
        if self.following is not None:
            return self.factor, self.following.factor
        return tuple(each.factor for each in self.crossed) or (self.factor,)
