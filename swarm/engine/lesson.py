"""What a batch has to teach: which episodes are trained, with which advantages and weights, and why the others are not.

Pure arithmetic on rewards; knows neither tokens' meaning nor tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev

from swarm.engine.seam import TrainBatch, TrainCall, TrainEpisode, TrainGroup
from swarm.engine.tree import Branch, merged_tokens
from swarm.protocol.episodes import DropReason
from swarm.protocol.runspec import AlgorithmSpec

_STD_FLOOR = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """One trained episode: its trainable calls, each with the advantage of its agent."""

    episode_id: str
    group: int
    """Which of the batch's groups it belongs to."""
    calls: list[TrainCall]
    advantages: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """A batch, sorted into what is trained and what is not (episode id → the ledger's reason)."""

    lessons: list[Lesson]
    untrained: dict[str, str]


def group_advantages(rewards: Sequence[float], norm: str) -> list[float]:
    """Rewards relative to their group: zero mean, and with norm "std" unit standard deviation.

    All zero when the rewards are equal. Source: Shao et al. 2024, DeepSeekMath (arXiv 2402.03300), section 4.1.2.
    """
    if max(rewards) == min(rewards):
        return [0.0] * len(rewards)
    mean = fmean(rewards)
    scale = pstdev(rewards) + _STD_FLOOR if norm == "std" else 1.0
    return [(reward - mean) / scale for reward in rewards]


def select(batch: TrainBatch) -> Selection:
    """What this batch trains.

    A group without differences teaches nothing by its rewards; it is trained all the same where the loss has other terms.
    """
    algorithm = batch.spec.algorithm
    lessons: list[Lesson] = []
    untrained: dict[str, str] = {}
    for number, group in enumerate(batch.groups):
        advantages = _agent_advantages(group, algorithm.advantage_norm)
        for index, episode in enumerate(group.episodes):
            calls = trainable_calls(episode, algorithm)
            if not calls:
                untrained[episode.episode_id] = _why_not(episode, algorithm)
            elif rewards_alone_count(algorithm) and is_flat(group):
                untrained[episode.episode_id] = DropReason.ZERO_VARIANCE.value
            else:
                own = [advantages[call.agent][index] for call in calls]
                lessons.append(Lesson(episode_id=episode.episode_id, group=number, calls=calls, advantages=own))
    return Selection(lessons=lessons, untrained=untrained)


def rewards_alone_count(algorithm: AlgorithmSpec) -> bool:
    """Whether a token with advantage 0 has no part in the loss."""
    return algorithm.kl == 0 and algorithm.entropy == 0


def is_flat(group: TrainGroup) -> bool:
    """Whether no agent of the group has anything to compare."""
    return all(len(set(_rewards(group, agent))) == 1 for agent in _agents(group))


def trainable_calls(episode: TrainEpisode, algorithm: AlgorithmSpec) -> list[TrainCall]:
    """Calls whose distribution can be recomputed; truncated ones by the spec."""
    return [
        call
        for call in episode.calls
        if call.sampled_ids and _reproducible(call) and (algorithm.train_truncated or not call.truncated)
    ]


def branches(lessons: Sequence[Lesson], algorithm: AlgorithmSpec) -> list[Branch]:
    """The calls of the lessons, weighted so that the weights of all their tokens add up to one.

    Calls that cannot move the weights are left out; the others keep the weight that they have among all.
    """
    tokens = sum(len(call.sampled_ids) for lesson in lessons for call in lesson.calls)
    calls = sum(len(lesson.calls) for lesson in lessons)
    made = []
    for lesson in lessons:
        own_tokens = sum(len(call.sampled_ids) for call in lesson.calls)
        for call, advantage in zip(lesson.calls, lesson.advantages, strict=True):
            per_token = {
                "token": 1.0 / tokens,
                "call": 1.0 / (calls * len(call.sampled_ids)),
                "episode": 1.0 / (len(lessons) * own_tokens),
            }[algorithm.loss_agg]
            if advantage or not rewards_alone_count(algorithm):
                made.append(Branch(call=call, advantage=advantage, weight=per_token))
    return made


def reward_metrics(batch: TrainBatch) -> dict[str, float]:
    rewards = [episode.reward for group in batch.groups for episode in group.episodes]
    flat = [float(is_flat(group)) for group in batch.groups]
    return {
        "reward_mean": fmean(rewards) if rewards else 0.0,
        "reward_std": pstdev(rewards) if rewards else 0.0,
        "zero_variance_share": fmean(flat) if flat else 0.0,
    }


def token_metrics(batch: TrainBatch) -> dict[str, float]:
    calls = [call for group in batch.groups for episode in group.episodes for call in episode.calls]
    called = sum(len(call.prompt_ids) + len(call.sampled_ids) for call in calls)
    merged = merged_tokens(calls)
    return {
        "tokens_called": float(called),
        "tokens_merged": float(merged),
        "token_ratio": called / merged if merged else 1.0,
    }


def _agent_advantages(group: TrainGroup, norm: str) -> dict[str | None, list[float]]:
    return {agent: group_advantages(_rewards(group, agent), norm) for agent in _agents(group)}


def _agents(group: TrainGroup) -> Iterable[str | None]:
    """In the order of their first call, so that nothing depends on hashing."""
    return dict.fromkeys(call.agent for episode in group.episodes for call in episode.calls) or [None]


def _rewards(group: TrainGroup, agent: str | None) -> list[float]:
    """The group's rewards as one agent got them: its own where an episode states it, else the episode's."""
    return [(episode.agent_rewards or {}).get(agent or "", episode.reward) for episode in group.episodes]


def _reproducible(call: TrainCall) -> bool:
    """At temperature 0 nothing was drawn from a distribution."""
    return call.reproducible and call.temperature > 0


def _why_not(episode: TrainEpisode, algorithm: AlgorithmSpec) -> str:
    sampled = [call for call in episode.calls if call.sampled_ids]
    if not sampled:
        return DropReason.NO_CALLS.value
    if any(_reproducible(call) for call in sampled):
        return DropReason.TRUNCATED.value
    return DropReason.UNREPRODUCIBLE_SAMPLING.value
