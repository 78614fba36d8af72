"""Does the sampler draw from the weights that are trained? What a run's steps say of it."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median

MISMATCH = "logprob_mismatch_mean"
STALENESS = "staleness_max"
GROWN = 10.0
"""Rounding alone keeps the mismatch of later steps within this many times that of the first."""
HARMLESS = 1e-3
"""Nats per token. What is below it is rounding, however it grew."""


def outgrown(steps: Iterable[tuple[float, float]]) -> float | None:
    """The usual mismatch after the first step where it has left that of the first far behind; None where it has not.

    In a run's first step sampler and trainer hold the same weights, so that only rounding parts them. Where they part later,
    new weights did not reach the sampler whole. Episodes that were sampled by older weights differ by rights and are passed over.

    steps: (mean mismatch in nats per token, versions between sampling and training at most), in their order.
    """
    fresh = [mismatch for mismatch, staleness in steps if staleness == 0 and mismatch > 0]
    if len(fresh) < 2:
        return None
    first, later = fresh[0], median(fresh[1:])
    return later if later > max(GROWN * first, HARMLESS) else None
