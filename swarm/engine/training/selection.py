"""Selects what a batch trains: episodes, advantages, weights and minibatches. Also says why other episodes are not trained.

Pure arithmetic on rewards; knows neither tensors nor what tokens mean.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from statistics import fmean, pstdev

from foundation.ids import derived_seed
from swarm.engine.algorithms import algorithm_of
from swarm.engine.algorithms.base import Algorithm
from swarm.engine.algorithms.rewards import Credit, Episodes, Trajectory
from swarm.engine.seam import TrainBatch, TrainCall, TrainEpisode, TrainGroup
from swarm.engine.tree import Branch, merged_tokens, timeline_numbers
from swarm.protocol.episodes import DropReason
from swarm.protocol.runspec import AlgorithmSpec, OptimizerSpec, RunSpec
from swarm.protocol.sampling_mask import LEAST_TEMPERATURE


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedEpisode:
    """The trainable calls of an episode, each with the advantage of its agent."""

    episode_id: str
    group: int
    """Index of its group in the batch."""
    calls: list[TrainCall]
    advantages: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """A batch, divided into what is trained and what is not (episode id → the ledger's reason)."""

    trained: list[TrainedEpisode]
    untrained: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallNotes:
    """The trainer's measurements of a call, per sampled token: KL penalty, the critic's value before the token, and its
    log-probability and entropy before the step."""

    penalties: Sequence[float] = ()
    values: Sequence[float] = ()
    logps: Sequence[float] = ()
    entropies: Sequence[float] = ()


def select(batch: TrainBatch) -> Selection:
    """Select what this batch trains.

    Equal rewards (in a group, or in the whole batch for algorithms that compare over it) give no learning signal; such episodes
    are trained only if the loss has other terms. Algorithms that credit tokens replace these advantages with those of `credit`.
    """
    algorithm = algorithm_of(batch.spec.algorithm)
    actors = _actors(batch, algorithm)
    advantages = dict(zip(actors, algorithm.outcomes(list(actors.values())), strict=True))
    flat = _flat_groups(advantages, algorithm) if algorithm.rewards_alone else set()
    trained: list[TrainedEpisode] = []
    untrained: dict[str, str] = {}
    for number, group in enumerate(batch.groups):
        for index, episode in enumerate(group.episodes):
            calls = trainable_calls(episode, batch.spec)
            if not calls:
                untrained[episode.episode_id] = _why_not(episode, batch.spec)
            elif number in flat:
                untrained[episode.episode_id] = DropReason.ZERO_VARIANCE.value
            else:
                own = [advantages[number, index, call.agent] for call in calls]
                trained.append(TrainedEpisode(episode_id=episode.episode_id, group=number, calls=calls, advantages=own))
    return Selection(trained=trained, untrained=untrained)


def credit(batch: TrainBatch, notes: Mapping[str, CallNotes]) -> dict[str, Credit]:
    """Return token-level advantages by call. `notes` has an entry for every trained call.

    An agent's calls in an episode form one trajectory, in order, with the reward at its last token.
    """
    algorithm = algorithm_of(batch.spec.algorithm)
    actors = _actors(batch, algorithm, notes)
    earned = dict(zip(actors, algorithm.credit(list(actors.values())), strict=True))
    shares: dict[str, Credit] = {}
    for number, group in enumerate(batch.groups):
        for index, episode in enumerate(group.episodes):
            begun: dict[str | None, int] = {}
            for call in trainable_calls(episode, batch.spec):
                whole, first = earned[number, index, call.agent], begun.get(call.agent, 0)
                begun[call.agent] = last = first + len(call.sampled_ids)
                shares[call.call_id] = Credit(
                    advantages=whole.advantages[first:last], targets=whole.targets[first:last]
                )
    return shares


def episodes_of(batch: TrainBatch) -> Episodes:
    """Return what functions over a whole update need to know about the batch's episodes."""
    actors = _actors(batch, algorithm_of(batch.spec.algorithm))
    groups: dict[Hashable, int] = {}
    for trajectory in actors.values():
        groups.setdefault(trajectory.group, len(groups))
    number = {actor: at for at, actor in enumerate(actors)}
    return Episodes(
        rewards=[trajectory.reward for trajectory in actors.values()],
        groups=[groups[trajectory.group] for trajectory in actors.values()],
        of_call={
            call.call_id: number[at, index, call.agent]
            for at, group in enumerate(batch.groups)
            for index, episode in enumerate(group.episodes)
            for call in trainable_calls(episode, batch.spec)
        },
    )


def is_flat(group: TrainGroup) -> bool:
    """Return whether all rewards of the group are equal, for each agent."""
    return all(len(set(_rewards(group, agent))) == 1 for agent in _agents(group))


def untrained_reason(call: TrainCall, spec: RunSpec) -> DropReason | None:
    """Return why a call can have no loss, whatever its reward; None if it can."""
    if not call.sampled_ids:
        return DropReason.NO_CALLS
    if call.temperature < LEAST_TEMPERATURE:
        return DropReason.GREEDY
    if not call.reproducible and not _trains_restricted(call, spec):
        return DropReason.UNREPRODUCIBLE_SAMPLING
    return DropReason.TRUNCATED if call.truncated and not spec.algorithm.train_truncated else None


def _trains_restricted(call: TrainCall, spec: RunSpec) -> bool:
    """Return whether to train a call whose tokens were not sampled from softmax(logits / temperature)."""
    match spec.sampling.train:
        case "policy":
            return True
        case "off":
            return False
        case _:
            return call.mask is not None


def trainable_calls(episode: TrainEpisode, spec: RunSpec) -> list[TrainCall]:
    """Return the episode's trainable calls, without their sampling restrictions if `sampling.train` is policy."""
    calls = [call for call in episode.calls if untrained_reason(call, spec) is None]
    if spec.sampling.train == "policy":
        return [call if call.mask is None else replace(call, mask=None, changes=None) for call in calls]
    return calls


def branches(episodes: Sequence[TrainedEpisode], spec: AlgorithmSpec) -> list[Branch]:
    """Return the calls of the episodes, weighted so that the weights of all their tokens add up to one (except with `loss_agg:
    constant`).

    Leaves out calls that cannot move the weights, without changing the weight of the others.
    """
    tokens = sum(len(call.sampled_ids) for episode in episodes for call in episode.calls)
    all_count = not algorithm_of(spec).rewards_alone
    units = [_units(episode.calls, spec) for episode in episodes]
    number_of_units = sum(len(set(own)) for own in units)
    made = []
    for episode, own in zip(episodes, units, strict=True):
        size_of: Counter[int] = Counter()
        for unit, call in zip(own, episode.calls, strict=True):
            size_of[unit] += len(call.sampled_ids)
        for call, unit, advantage in zip(episode.calls, own, episode.advantages, strict=True):
            per_token = {
                "token": 1.0 / tokens,
                "constant": 1.0 / (len(episodes) * spec.loss_length),
            }.get(spec.loss_agg, 1.0 / (number_of_units * size_of[unit]))
            if advantage or all_count:
                made.append(Branch(call=call, advantage=advantage, weight=per_token))
    return made


def _units(calls: Sequence[TrainCall], spec: AlgorithmSpec) -> list[int]:
    """Return, for each call, the index of its part of the episode; `loss_agg` says whether a part is a call, a timeline or the
    episode."""
    match spec.loss_agg:
        case "call":
            return list(range(len(calls)))
        case "timeline":
            return timeline_numbers(calls)
        case _:
            return [0] * len(calls)


def minibatches(episodes: Sequence[TrainedEpisode], spec: RunSpec, step: int) -> list[list[TrainedEpisode]]:
    """Split the episodes into at most `optimizer.minibatches` parts of nearly equal size.

    Episodes of a group stay together as far as the sizes allow, because they share their prompts; with several parts, the
    groups are shuffled with the run's seed.
    """
    count = min(spec.optimizer.minibatches, len(episodes))
    by_group: dict[int, list[TrainedEpisode]] = {}
    for episode in episodes:
        by_group.setdefault(episode.group, []).append(episode)
    groups = list(by_group.values())
    if count > 1:
        random.Random(derived_seed(spec.seed, "minibatches", step)).shuffle(groups)
    ordered = [episode for group in groups for episode in group]
    edges = [len(ordered) * number // max(1, count) for number in range(count + 1)]
    return [ordered[first:last] for first, last in pairwise(edges)]


def learning_rate_at(optimizer: OptimizerSpec, step: int, total_steps: int | None) -> float:
    """Return the learning rate of a step, counted from 1: a linear warm-up, then the schedule.

    Decaying schedules end at `limits.steps` (`total_steps`); in a run without that limit the rate stays constant.
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
        "tokens_forced": float(sum(call.mask.forced for call in calls if call.mask is not None)),
    }


_Actor = tuple[int, int, str | None]
"""Index of the group, index of the episode in it, and agent."""


def _actors(
    batch: TrainBatch, algorithm: Algorithm, notes: Mapping[str, CallNotes] | None = None
) -> dict[_Actor, Trajectory]:
    """Return the trajectory of each agent of a group in each of the group's episodes, even if it sampled nothing there."""
    limit = batch.spec.sampling.max_tokens
    actors: dict[_Actor, Trajectory] = {}
    for number, group in enumerate(batch.groups):
        for agent in _agents(group):
            for index, (episode, reward) in enumerate(zip(group.episodes, _rewards(group, agent), strict=True)):
                own = [call for call in episode.calls if call.agent == agent]
                calls = [call for call in trainable_calls(episode, batch.spec) if call.agent == agent]
                longest = max((len(call.sampled_ids) for call in own), default=0)
                noted = [notes[call.call_id] for call in calls] if notes is not None else []
                actors[number, index, agent] = Trajectory(
                    group=(number, agent),
                    reward=algorithm.shaped(reward, longest, limit),
                    tokens=sum(len(call.sampled_ids) for call in calls),
                    penalties=list(chain.from_iterable(note.penalties for note in noted)),
                    values=list(chain.from_iterable(note.values for note in noted)),
                    logps=list(chain.from_iterable(note.logps for note in noted)),
                    entropies=list(chain.from_iterable(note.entropies for note in noted)),
                    recorded=list(chain.from_iterable(call.logprobs for call in calls)) if noted else (),
                    calls=[len(call.sampled_ids) for call in calls],
                )
    return actors


def _flat_groups(advantages: Mapping[_Actor, float], algorithm: Algorithm) -> set[int]:
    """Return the groups whose advantages are all 0; for algorithms that compare over the batch, either all groups or none."""
    groups = {number for number, _, _ in advantages}
    taught = {number for (number, _, _), advantage in advantages.items() if advantage}
    if taught and not algorithm.spec.compares_groups:
        return set()
    return groups - taught


def _agents(group: TrainGroup) -> Iterable[str | None]:
    """Return the group's agents in the order of their first call, so that nothing depends on hashing."""
    return dict.fromkeys(call.agent for episode in group.episodes for call in episode.calls) or [None]


def _rewards(group: TrainGroup, agent: str | None) -> list[float]:
    """Return the group's rewards for one agent: its own reward if the episode states one, else the episode's."""
    return [(episode.agent_rewards or {}).get(agent or "", episode.reward) for episode in group.episodes]


def _why_not(episode: TrainEpisode, spec: RunSpec) -> str:
    """Return why an episode has no trainable call: the reason of the call that came closest to being trainable."""
    reasons = {untrained_reason(call, spec) for call in episode.calls}
    closest = (DropReason.TRUNCATED, DropReason.UNREPRODUCIBLE_SAMPLING, DropReason.GREEDY)
    return next((reason for reason in closest if reason in reasons), DropReason.NO_CALLS).value
