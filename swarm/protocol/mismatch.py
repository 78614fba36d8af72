"""Does the sampler use the weights that are trained? Judged by the metrics of a run's steps."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median

MISMATCH = "logprob_mismatch_mean"
STALENESS = "staleness_max"
GROWN = 10.0
"""Rounding alone keeps the mismatch of later steps within this many times that of the first."""
HARMLESS = 1e-3
"""Nats per token. Anything below is rounding, however much it grew."""


def outgrown(steps: Iterable[tuple[float, float]]) -> float | None:
    """The median mismatch after the first step if it is far above that of the first step; else None.

    In the first step of a run sampler and trainer hold the same weights and differ by rounding only. If they differ more later,
    new weights did not fully reach the sampler. Steps with episodes sampled by older weights are ignored.

    steps: (mean mismatch in nats per token, versions between sampling and training at most), in their order.
    """
    fresh = [mismatch for mismatch, staleness in steps if staleness == 0 and mismatch > 0]
    if len(fresh) < 2:
        return None
    first, later = fresh[0], median(fresh[1:])
    return later if later > max(GROWN * first, HARMLESS) else None
