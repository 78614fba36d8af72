"""What a batch has to teach: which episodes are trained, with which advantages and weights, and why the others are not.

Pure arithmetic on rewards; knows neither tokens' meaning nor tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean, pstdev

from swarm.engine.algorithms import algorithm_of
from swarm.engine.algorithms.base import Algorithm
from swarm.engine.algorithms.rewards import Credit, Trajectory
from swarm.engine.seam import TrainBatch, TrainCall, TrainEpisode, TrainGroup
from swarm.engine.tree import Branch, merged_tokens, timeline_numbers
from swarm.protocol.episodes import DropReason
from swarm.protocol.runspec import AlgorithmSpec


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


@dataclass(frozen=True, slots=True, kw_only=True)
class CallNotes:
    """What the trainer read of a call, per sampled token: what it loses of the reward, and the critic's value before it."""

    penalties: Sequence[float] = ()
    values: Sequence[float] = ()


def select(batch: TrainBatch) -> Selection:
    """What this batch trains.

    Where nothing is to be compared (a group's rewards are equal; for algorithms that compare over the batch, the batch's)
    nothing is taught by rewards; it is trained all the same where the loss has other terms. Advantages of algorithms that
    credit tokens come from `credit`; those here stand for them until then.
    """
    algorithm = algorithm_of(batch.spec.algorithm)
    actors = _actors(batch, algorithm)
    advantages = dict(zip(actors, algorithm.outcomes(list(actors.values())), strict=True))
    flat = _flat_groups(advantages, algorithm) if algorithm.rewards_alone else set()
    lessons: list[Lesson] = []
    untrained: dict[str, str] = {}
    for number, group in enumerate(batch.groups):
        for index, episode in enumerate(group.episodes):
            calls = trainable_calls(episode, algorithm.spec)
            if not calls:
                untrained[episode.episode_id] = _why_not(episode, algorithm.spec)
            elif number in flat:
                untrained[episode.episode_id] = DropReason.ZERO_VARIANCE.value
            else:
                own = [advantages[number, index, call.agent] for call in calls]
                lessons.append(Lesson(episode_id=episode.episode_id, group=number, calls=calls, advantages=own))
    return Selection(lessons=lessons, untrained=untrained)


def credit(batch: TrainBatch, notes: Mapping[str, CallNotes]) -> dict[str, Credit]:
    """By call, the advantage of each of its tokens; notes: of every trained call.

    An agent's calls of an episode are one trajectory, in their order; the reward stands at its last token.
    """
    algorithm = algorithm_of(batch.spec.algorithm)
    actors = _actors(batch, algorithm, notes)
    earned = dict(zip(actors, algorithm.credit(list(actors.values())), strict=True))
    shares: dict[str, Credit] = {}
    for number, group in enumerate(batch.groups):
        for index, episode in enumerate(group.episodes):
            begun: dict[str | None, int] = {}
            for call in trainable_calls(episode, algorithm.spec):
                whole, first = earned[number, index, call.agent], begun.get(call.agent, 0)
                begun[call.agent] = last = first + len(call.sampled_ids)
                shares[call.call_id] = Credit(
                    advantages=whole.advantages[first:last], targets=whole.targets[first:last]
                )
    return shares


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


def branches(lessons: Sequence[Lesson], spec: AlgorithmSpec) -> list[Branch]:
    """The calls of the lessons, weighted so that the weights of all their tokens add up to one, except for `constant`.

    Calls that cannot move the weights are left out; the others keep the weight that they have among all.
    """
    tokens = sum(len(call.sampled_ids) for lesson in lessons for call in lesson.calls)
    all_count = not algorithm_of(spec).rewards_alone
    units = [_units(lesson.calls, spec) for lesson in lessons]
    number_of_units = sum(len(set(own)) for own in units)
    made = []
    for lesson, own in zip(lessons, units, strict=True):
        size_of: Counter[int] = Counter()
        for unit, call in zip(own, lesson.calls, strict=True):
            size_of[unit] += len(call.sampled_ids)
        for call, unit, advantage in zip(lesson.calls, own, lesson.advantages, strict=True):
            per_token = {
                "token": 1.0 / tokens,
                "constant": 1.0 / (len(lessons) * spec.loss_length),
            }.get(spec.loss_agg, 1.0 / (number_of_units * size_of[unit]))
            if advantage or all_count:
                made.append(Branch(call=call, advantage=advantage, weight=per_token))
    return made


def _units(calls: Sequence[TrainCall], spec: AlgorithmSpec) -> list[int]:
    """Which of the episode's parts each call belongs to, where the loss is a mean over the means of parts."""
    match spec.loss_agg:
        case "call":
            return list(range(len(calls)))
        case "timeline":
            return timeline_numbers(calls)
        case _:
            return [0] * len(calls)


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


_Actor = tuple[int, int, str | None]
"""Which group, which of its episodes, which agent."""


def _actors(
    batch: TrainBatch, algorithm: Algorithm, notes: Mapping[str, CallNotes] | None = None
) -> dict[_Actor, Trajectory]:
    """What each agent of a group did in each of the group's episodes; also where it said nothing there."""
    limit = batch.spec.sampling.max_tokens
    actors: dict[_Actor, Trajectory] = {}
    for number, group in enumerate(batch.groups):
        for agent in _agents(group):
            for index, (episode, reward) in enumerate(zip(group.episodes, _rewards(group, agent), strict=True)):
                own = [call for call in episode.calls if call.agent == agent]
                calls = [call for call in trainable_calls(episode, algorithm.spec) if call.agent == agent]
                longest = max((len(call.sampled_ids) for call in own), default=0)
                noted = [notes[call.call_id] for call in calls] if notes is not None else []
                actors[number, index, agent] = Trajectory(
                    group=(number, agent),
                    reward=algorithm.shaped(reward, longest, limit),
                    tokens=sum(len(call.sampled_ids) for call in calls),
                    penalties=list(chain.from_iterable(note.penalties for note in noted)),
                    values=list(chain.from_iterable(note.values for note in noted)),
                )
    return actors


def _flat_groups(advantages: Mapping[_Actor, float], algorithm: Algorithm) -> set[int]:
    """Groups in which no advantage differs from 0; algorithms that compare over the batch have all of them or none."""
    groups = {number for number, _, _ in advantages}
    taught = {number for (number, _, _), advantage in advantages.items() if advantage}
    if taught and not algorithm.spec.compares_groups:
        return set()
    return groups - taught


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
