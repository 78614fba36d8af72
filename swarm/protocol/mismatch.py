"""Check from a run's step metrics that the sampler uses the trained weights."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median

MISMATCH = "logprob_mismatch_mean"
STALENESS = "staleness_max"
GROWN = 10.0
"""If only rounding differs, later steps have at most this many times the mismatch of the first."""
HARMLESS = 1e-3
"""Nats per token. A smaller mismatch is rounding, however much it has grown."""


def outgrown(steps: Iterable[tuple[float, float]]) -> float | None:
    """The median mismatch after the first step if it far exceeds that of the first step; else None.

    In a run's first step sampler and trainer hold the same weights and differ only by rounding. If they differ more later,
    new weights did not fully reach the sampler. Steps with episodes sampled by older weights are ignored.

    steps: (mean mismatch in nats per token, largest staleness in versions) of each step, in order.
    """
    fresh = [mismatch for mismatch, staleness in steps if staleness == 0 and mismatch > 0]
    if len(fresh) < 2:
        return None
    first, later = fresh[0], median(fresh[1:])
    return later if later > max(GROWN * first, HARMLESS) else None
