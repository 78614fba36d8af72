"""Checks, from a run's step metrics, that the sampler uses the trained weights."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median

MISMATCH = "logprob_mismatch_mean"
STALENESS = "staleness_max"
GROWN = 10.0
"""Maximum ratio of later mismatches to the first one that rounding alone can explain."""
HARMLESS = 1e-3
"""A mismatch below this, in nats per token, is rounding, however much it has grown."""


def outgrown(steps: Iterable[tuple[float, float]]) -> float | None:
    """Return the median mismatch after the first step if it far exceeds that of the first step, else None.

    In a run's first step, the sampler and the trainer have the same weights and differ only by rounding. If they differ more later,
    the new weights did not fully reach the sampler. Steps with episodes sampled by older weights are ignored.

    `steps` holds, for each step in order, the mean mismatch in nats per token and the largest staleness in versions.
    """
    fresh = [mismatch for mismatch, staleness in steps if staleness == 0 and mismatch > 0]
    if len(fresh) < 2:
        return None
    first, later = fresh[0], median(fresh[1:])
    return later if later > max(GROWN * first, HARMLESS) else None
