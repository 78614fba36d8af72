"""Batches recorded from real runs, token by token, for the trainer's benches. Imports only the standard library and the protocol.

A file holds one batch: its groups of episodes, each with its reward and its calls. The files are written by
`bench.record_workloads`.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from swarm.engine.seam import Sampled, TrainBatch, TrainCall, TrainEpisode, TrainGroup
from swarm.protocol.episodes import EpisodeTrace, VersionSpan, WeightsVersion
from swarm.protocol.runspec import RunSpec

NAMES = ("groups", "turns", "fork")
_DIGITS = 4
"""Decimals of recorded log-probabilities and rewards."""


@dataclass(frozen=True, slots=True)
class Call:
    agent: str | None
    prompt_ids: list[int]
    sampled_ids: list[int]
    logprobs: list[float]


@dataclass(frozen=True, slots=True)
class Episode:
    reward: float
    calls: list[Call]


@dataclass(frozen=True, slots=True)
class Workload:
    """A recorded batch. All calls were sampled at temperature 1 from the model's initial weights."""

    name: str
    model: str
    groups: list[list[Episode]]

    @classmethod
    def load(cls, path: Path) -> Self:
        kept = json.loads(gzip.decompress(path.read_bytes()))
        groups = [
            [Episode(some["reward"], [Call(**call) for call in some["calls"]]) for some in group]
            for group in kept["groups"]
        ]
        return cls(kept["name"], kept["model"], groups)

    def save(self, path: Path) -> None:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(gzip.compress(json.dumps(asdict(self), separators=(",", ":")).encode(), mtime=0))

    def batch(self, **spec: Any) -> TrainBatch:
        """The batch in the trainer's format."""
        groups = [
            TrainGroup(
                group_id=f"{self.name}-{at}",
                task_id=f"{self.name}-{at}",
                episodes=[self._episode(f"{at}-{slot}", some) for slot, some in enumerate(group)],
            )
            for at, group in enumerate(self.groups)
        ]
        return TrainBatch(step=1, spec=RunSpec.model_validate(spec), groups=groups)

    def _episode(self, name: str, kept: Episode) -> TrainEpisode:
        calls = [
            TrainCall(
                call_id=f"{name}-{number}",
                agent=call.agent,
                prompt_ids=call.prompt_ids,
                sampled_ids=call.sampled_ids,
                logprobs=[min(0.0, logprob) for logprob in call.logprobs],
                temperature=1.0,
                versions=[VersionSpan(start=0, end=len(call.sampled_ids), version=WeightsVersion(run_id="recorded"))],
            )
            for number, call in enumerate(kept.calls)
        ]
        return TrainEpisode(episode_id=name, reward=kept.reward, agent_rewards=None, calls=calls)

    @property
    def lengths(self) -> dict[str, int]:
        """Shortest and longest prompt and answer, and the number of calls."""
        calls = [call for group in self.groups for episode in group for call in episode.calls]
        prompts, answers = [len(call.prompt_ids) for call in calls], [len(call.sampled_ids) for call in calls]
        return {
            "episodes": sum(len(group) for group in self.groups),
            "calls": len(calls),
            "prompt_min": min(prompts),
            "prompt_max": max(prompts),
            "answer_min": min(answers),
            "answer_max": max(answers),
        }


def episode_of(name: str, sampled: Sampled, reward: float) -> TrainEpisode:
    """A rewarded episode of one call, sampled at temperature 1."""
    choice = sampled.choices[0]
    call = TrainCall(
        call_id=name,
        agent=None,
        prompt_ids=sampled.prompt_ids,
        sampled_ids=choice.sampled_ids,
        logprobs=choice.logprobs,
        temperature=1.0,
        versions=choice.versions,
        truncated=choice.finish_reason == "length",
    )
    return TrainEpisode(episode_id=name, reward=reward, agent_rewards=None, calls=[call])


def path_of(name: str) -> Path:
    return Path(__file__).parent / f"{name}.json.gz"


def of_traces(name: str, model: str, groups: Sequence[Sequence[EpisodeTrace]]) -> Workload:
    """The workload from a server's traces of these groups of episodes."""
    return Workload(name, model, [[_of_trace(trace) for trace in group] for group in groups])


def of_groups(name: str, model: str, groups: Sequence[TrainGroup]) -> Workload:
    """The workload from a trainer's groups. Their calls must have been sampled at temperature 1."""
    made = [
        [
            Episode(
                episode.reward,
                [Call(call.agent, call.prompt_ids, call.sampled_ids, call.logprobs) for call in episode.calls],
            )
            for episode in group.episodes
        ]
        for group in groups
    ]
    return Workload(name, model, made)


def _of_trace(trace: EpisodeTrace) -> Episode:
    calls = [
        Call(call.agent, call.prompt_ids, call.sampled_ids, [round(logprob, _DIGITS) for logprob in call.logprobs])
        for call in sorted(trace.calls, key=lambda call: call.index)
    ]
    return Episode(round(trace.entry.reward or 0.0, _DIGITS), calls)
