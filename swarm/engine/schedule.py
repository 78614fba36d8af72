"""The learning rate of each step."""

from __future__ import annotations

import math

from swarm.protocol.runspec import OptimizerSpec


def learning_rate_at(optimizer: OptimizerSpec, step: int, total_steps: int | None) -> float:
    """Linear warm-up, then the schedule; the first step is 1.

    Decaying schedules end at `limits.steps` (total_steps); in a run without that limit the rate stays constant.
    """
    rate = optimizer.learning_rate
    if step <= optimizer.warmup:
        return rate * step / optimizer.warmup
    if optimizer.schedule == "constant" or total_steps is None:
        return rate
    done = min(1.0, (step - 1 - optimizer.warmup) / max(1, total_steps - optimizer.warmup))
    if optimizer.schedule == "linear":
        return rate * (1.0 - done)
    return rate * 0.5 * (1.0 + math.cos(math.pi * done))
