"""Which checkpoint of a run does best on its eval episodes: those are what nothing was trained on."""

from __future__ import annotations

from collections.abc import Sequence

from swarm.protocol.status import CheckpointReport
from swarm.server.state.rows import HeldOutRow

EVALUATED_ENOUGH = 0.9
"""Of the eval episodes of the step that has most: fewer could be a lucky part of the tasks."""


def best_of(kept: Sequence[int], evaluated: Sequence[HeldOutRow]) -> HeldOutRow | None:
    """The kept step with the highest mean reward over its eval episodes, the newer of equals; None before any ended."""
    steps = [row for row in evaluated if row.step in kept]
    most = max((row.episodes for row in steps), default=0)
    enough = [row for row in steps if row.episodes >= EVALUATED_ENOUGH * most]
    return max(enough, key=lambda row: (row.reward, row.step), default=None)


def kept_steps(made: Sequence[int], keep: int, best: int | None) -> list[int]:
    """What the rule keeps of these checkpoints: the newest `keep`, and the best."""
    ordered = sorted(set(made))
    return [step for step in ordered if step in ordered[-keep:] or step == best]


def reports(kept: Sequence[int], evaluated: Sequence[HeldOutRow]) -> list[CheckpointReport]:
    """In the protocol's words."""
    best, by_step = best_of(kept, evaluated), {row.step: row for row in evaluated}
    return [
        CheckpointReport(
            step=step,
            held_out=by_step[step].reward if step in by_step else None,
            held_out_episodes=by_step[step].episodes if step in by_step else 0,
            best=best is not None and step == best.step,
        )
        for step in kept
    ]
