"""Batches made by hand, for tests of trainers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from swarm.engine.seam import TrainBatch, TrainCall, TrainEpisode, TrainGroup
from swarm.protocol.episodes import VersionSpan, WeightsVersion
from swarm.protocol.runspec import RunSpec

PROMPT = [1, 30, 31, 32, 33, 34]


def call(call_id: str, prompt: Sequence[int], sampled: Sequence[int], **fields: Any) -> TrainCall:
    values: dict[str, Any] = {
        "agent": None,
        "logprobs": [-2.0 - 0.1 * position for position in range(len(sampled))],
        "temperature": 1.0,
        "versions": [VersionSpan(start=0, end=len(sampled), version=WeightsVersion(run_id="run-1"))],
    }
    return TrainCall(call_id=call_id, prompt_ids=list(prompt), sampled_ids=list(sampled), **(values | fields))


def episode(episode_id: str, reward: float, *calls: TrainCall, **agent_rewards: float) -> TrainEpisode:
    return TrainEpisode(episode_id=episode_id, reward=reward, agent_rewards=agent_rewards or None, calls=list(calls))


def conversation(episode_id: str, reward: float, turns: Sequence[Sequence[int]], **fields: Any) -> TrainEpisode:
    """Several turns, each prompt being what was said before and an observation of two tokens."""
    calls, said = [], list(PROMPT)
    for number, sampled in enumerate(turns):
        said += [50 + number, 60 + number]
        calls.append(call(f"{episode_id}/{number}", said, sampled, **fields))
        said = [*said, *sampled]
    return episode(episode_id, reward, *calls)


def group(group_id: str, *episodes: TrainEpisode) -> TrainGroup:
    return TrainGroup(group_id=group_id, task_id=f"task-{group_id}", episodes=list(episodes))


def batch(*groups: TrainGroup, step: int = 1, **spec: Any) -> TrainBatch:
    fields: dict[str, Any] = {"dtype": "float32", "optimizer": {"learning_rate": 1e-3}} | spec
    return TrainBatch(step=step, spec=RunSpec(**fields), groups=list(groups))


def branching_batch(**spec: Any) -> TrainBatch:
    """Multi-turn, branching and duplicate timelines, equal tokens with different advantages, two temperatures."""
    first = group(
        "a",
        conversation("a1", 1.0, [[70, 71, 2], [80, 81, 82, 2]]),
        conversation("a2", 0.0, [[70, 71, 2], [80, 85, 2]]),
        conversation("a3", 0.5, [[70, 75, 76, 2]], temperature=0.7),
        conversation("a4", 0.0, [[70, 71, 2], [80, 81, 82, 2], [90, 2]]),
    )
    second = group(
        "b",
        episode("b1", 0.0, call("b1/0", [1, 30, 31, 40], [70, 71, 2])),
        episode("b2", 2.0, call("b2/0", [1, 30, 31, 40], [70, 71, 2]), call("b2/1", [9, 8], [7, 2])),
    )
    return batch(first, second, **spec)


def big_batch(step: int, **spec: Any) -> TrainBatch:
    """Takes a tiny model long enough to be killed in."""
    groups = [
        group(
            f"g{number}",
            *(
                episode(f"{number}-{slot}", float(slot % 2), call(f"{number}/{slot}", range(1, 300), [slot, 3] * 120))
                for slot in range(8)
            ),
        )
        for number in range(4)
    ]
    return batch(*groups, step=step, **spec)
