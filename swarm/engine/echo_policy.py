"""A policy with one parameter that really learns: it repeats a word with probability sigmoid(theta / temperature).

The loss is GRPO's clipped surrogate with KL and entropy terms; its slope is taken by central differences, which is
exact enough for one parameter and keeps every field of the spec in force. Knows nothing of HTTP, files or time.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import fmean, pstdev

from foundation.ids import derived_seed
from swarm.engine.echo_tokens import last_user_word
from swarm.engine.seam import StepOutcome, TrainBatch, TrainCall, TrainEpisode, TrainGroup, TrainingRefused
from swarm.protocol.episodes import DropReason
from swarm.protocol.runspec import AlgorithmSpec, OptimizerSpec, RunSpec

START_THETA = -2.0
"""The hosted model: it echoes 12 % of the time."""
LEARNING_GAIN = 15_000.0
"""theta moves by learning_rate * LEARNING_GAIN * slope: ten steps at 4e-5 take p from 0.12 to 0.5, at 1e-5 to 0.18."""
STEP_NOISE = 0.1
"""Standard deviation of the noise on each step's slope, drawn from the run's seed."""
_MAX_LOGIT = 500.0


@dataclass(frozen=True, slots=True)
class Choice:
    """One trained call as the loss sees it."""

    echoed: bool
    old_logprob: float
    temperature: float
    tokens: int
    advantage: float
    weight: float


def garbled(word: str) -> str:
    """A wrong answer that differs from `word` in its first character."""
    return garble_mark(word) + word[::-1]


def garble_mark(word: str) -> str:
    return "!" if word.startswith("~") else "~"


def echo_logprob(theta: float, temperature: float, *, echoed: bool) -> float:
    """log of the probability of the choice. At temperature 0 the likelier choice is certain."""
    if temperature == 0:
        return 0.0 if echoed == (theta >= 0) else -math.inf
    logit = max(-_MAX_LOGIT, min(_MAX_LOGIT, theta / temperature))
    return -_softplus(-logit if echoed else logit)


def learning_rate_at(optimizer: OptimizerSpec, step: int, total_steps: int | None) -> float:
    """Warm-up, then the schedule. Decaying schedules need `limits.steps`; without it the rate stays constant."""
    rate = optimizer.learning_rate
    if optimizer.warmup and step <= optimizer.warmup:
        return rate * step / optimizer.warmup
    if optimizer.schedule == "constant" or total_steps is None:
        return rate
    span = max(1, total_steps - optimizer.warmup)
    done = min(1.0, (step - 1 - optimizer.warmup) / span)
    return rate * (1.0 - done) if optimizer.schedule == "linear" else rate * 0.5 * (1.0 + math.cos(math.pi * done))


def improve(theta: float, start: float, batch: TrainBatch) -> tuple[float, StepOutcome]:
    """One optimiser step: the new theta, and what the step did.

    Raises: TrainingRefused when a call's tokens lack their logprobs or versions, or the outcome is not finite.
    """
    spec = batch.spec
    for call in _calls(batch.groups):
        _check_provenance(call)
    untrained = _untrained(batch)
    choices = _weighted(_choices(batch.groups, untrained, spec.algorithm), spec.algorithm)
    rate = learning_rate_at(spec.optimizer, batch.step, spec.limits.steps)
    new, loss, grad_norm = _descend(theta, start, choices, batch, rate)
    if not math.isfinite(new):
        raise TrainingRefused(f"step {batch.step} made theta {new}; lower optimizer.learning_rate")
    metrics = _reward_metrics(batch) | _token_metrics(batch, choices) | _policy_metrics(theta, start, choices, spec)
    metrics |= {
        "loss": loss,
        "grad_norm": grad_norm,
        "learning_rate": rate,
        "weights_change": abs(new - theta) / max(abs(theta), 1e-9),
    }
    return new, StepOutcome(step=batch.step, metrics=metrics, untrained=untrained)


def _descend(
    theta: float, start: float, choices: list[Choice], batch: TrainBatch, rate: float
) -> tuple[float, float, float]:
    """theta after all epochs and minibatches, the first loss, and the largest slope before clipping."""
    optimizer, algorithm = batch.spec.optimizer, batch.spec.algorithm
    noise = random.Random(derived_seed(batch.spec.seed, "echo-step", batch.step))
    first_loss = _loss(theta, start, choices, algorithm)
    largest = 0.0
    for _ in range(optimizer.epochs if choices else 0):
        for part in _minibatches(choices, optimizer.minibatches):
            slope = _slope(partial(_loss, start=start, choices=part, algorithm=algorithm), theta)
            largest = max(largest, abs(slope))
            clipped = max(-optimizer.max_grad_norm, min(optimizer.max_grad_norm, slope))
            clipped += noise.gauss(0.0, STEP_NOISE) + optimizer.weight_decay * theta
            theta -= rate * LEARNING_GAIN * clipped
    return theta, first_loss, largest


def _minibatches(choices: list[Choice], count: int) -> list[list[Choice]]:
    """At most `count` parts of nearly equal size, weighted so that each stands for the whole."""
    parts = [choices[index::count] for index in range(min(count, len(choices)))]
    return [[_scaled(choice, len(choices) / len(part)) for choice in part] for part in parts]


def _scaled(choice: Choice, factor: float) -> Choice:
    return Choice(
        choice.echoed,
        choice.old_logprob,
        choice.temperature,
        choice.tokens,
        choice.advantage,
        choice.weight * factor,
    )


def _loss(theta: float, start: float, choices: Sequence[Choice], algorithm: AlgorithmSpec) -> float:
    """Shao et al. 2024 (arXiv 2402.03300), eq. 3, for the one random token of each call."""
    total = 0.0
    for choice in choices:
        logprob = echo_logprob(theta, choice.temperature, echoed=choice.echoed)
        ratio = math.exp(min(logprob - choice.old_logprob, 30.0))
        kept = max(1 - algorithm.clip_low, min(1 + algorithm.clip_high, ratio))
        term = -min(ratio * choice.advantage, kept * choice.advantage)
        term += algorithm.kl * _kl(theta, start, choice) - algorithm.entropy * _entropy(theta, choice.temperature)
        total += choice.weight * term
    return total


def _slope(function: Callable[[float], float], at: float, width: float = 1e-5) -> float:
    return (function(at + width) - function(at - width)) / (2 * width)


def _kl(theta: float, start: float, choice: Choice) -> float:
    """k3 estimate of KL(theta, start) from one choice (Schulman 2020, "Approximating KL divergence")."""
    gap = echo_logprob(start, choice.temperature, echoed=choice.echoed) - echo_logprob(
        theta, choice.temperature, echoed=choice.echoed
    )
    return math.expm1(min(gap, 30.0)) - gap


def _entropy(theta: float, temperature: float) -> float:
    return -sum(
        math.exp(logprob) * logprob
        for logprob in (echo_logprob(theta, temperature, echoed=echoed) for echoed in (True, False))
    )


def _softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def _rewards(group: TrainGroup, agent: str | None) -> list[float]:
    """The group's rewards as one agent got them: its own where episodes state it, else the episode's."""
    return [(episode.agent_rewards or {}).get(agent or "", episode.reward) for episode in group.episodes]


def _advantages(group: TrainGroup, norm: str, agent: str | None) -> list[float]:
    rewards = _rewards(group, agent)
    mean, spread = fmean(rewards), pstdev(rewards)
    if spread == 0:
        return [0.0] * len(rewards)
    return [(reward - mean) / (spread if norm == "std" else 1.0) for reward in rewards]


def _is_flat(group: TrainGroup) -> bool:
    """No agent of the group has anything to compare."""
    agents = {call.agent for episode in group.episodes for call in episode.calls} or {None}
    return all(len(set(_rewards(group, agent))) == 1 for agent in agents)


def _choices(groups: list[TrainGroup], untrained: dict[str, str], algorithm: AlgorithmSpec) -> list[list[Choice]]:
    """The trained calls of each trained episode, each with the advantage of its agent."""
    rows: list[list[Choice]] = []
    for group in groups:
        agents = {call.agent for episode in group.episodes for call in episode.calls}
        advantages = {agent: _advantages(group, algorithm.advantage_norm, agent) for agent in agents}
        for index, episode in enumerate(group.episodes):
            if episode.episode_id not in untrained:
                calls = [call for call in episode.calls if _trainable(call, algorithm)]
                rows.append([_choice(call, advantages[call.agent][index]) for call in calls])
    return rows


def _choice(call: TrainCall, advantage: float) -> Choice:
    at = next((index for index, logprob in enumerate(call.logprobs) if logprob != 0.0), 0)
    mark = ord(garble_mark(last_user_word(call.prompt_ids)))
    return Choice(
        call.sampled_ids[at] != mark, call.logprobs[at], call.temperature, len(call.sampled_ids), advantage, 1.0
    )


def _weighted(rows: list[list[Choice]], algorithm: AlgorithmSpec) -> list[Choice]:
    """Weights that add up to one: by token, by call, or by episode and then by call."""
    calls = [choice for row in rows for choice in row]
    if algorithm.loss_agg == "episode":
        return [_scaled(choice, 1.0 / (len(rows) * len(row))) for row in rows for choice in row]
    if algorithm.loss_agg == "call":
        return [_scaled(choice, 1.0 / len(calls)) for choice in calls]
    tokens = sum(choice.tokens for choice in calls)
    return [_scaled(choice, choice.tokens / tokens) for choice in calls]


def _trainable(call: TrainCall, algorithm: AlgorithmSpec) -> bool:
    """At temperature 0 nothing was drawn, so nothing can be learned from the call."""
    sound = bool(call.sampled_ids) and call.reproducible and call.temperature > 0
    return sound and (algorithm.train_truncated or not call.truncated)


def _untrained(batch: TrainBatch) -> dict[str, str]:
    algorithm = batch.spec.algorithm
    only_rewards_count = algorithm.kl == 0 and algorithm.entropy == 0
    reasons: dict[str, str] = {}
    for group in batch.groups:
        flat = only_rewards_count and _is_flat(group)
        for episode in group.episodes:
            reason = _reason(episode, algorithm) or (DropReason.ZERO_VARIANCE if flat else None)
            if reason is not None:
                reasons[episode.episode_id] = str(reason)
    return reasons


def _reason(episode: TrainEpisode, algorithm: AlgorithmSpec) -> DropReason | None:
    if not any(call.sampled_ids for call in episode.calls):
        return DropReason.NO_CALLS
    if any(_trainable(call, algorithm) for call in episode.calls):
        return None
    if any(call.truncated for call in episode.calls) and not algorithm.train_truncated:
        return DropReason.TRUNCATED
    return DropReason.UNREPRODUCIBLE_SAMPLING


def _check_provenance(call: TrainCall) -> None:
    if len(call.logprobs) != len(call.sampled_ids):
        raise TrainingRefused(f"call {call.call_id}: {len(call.sampled_ids)} tokens with {len(call.logprobs)} logprobs")
    stamped = sum(span.end - span.start for span in call.versions)
    if stamped != len(call.sampled_ids):
        raise TrainingRefused(
            f"call {call.call_id}: {stamped} of {len(call.sampled_ids)} tokens have a weights version"
        )


def _calls(groups: list[TrainGroup]) -> list[TrainCall]:
    return [call for group in groups for episode in group.episodes for call in episode.calls]


def _reward_metrics(batch: TrainBatch) -> dict[str, float]:
    rewards = [episode.reward for group in batch.groups for episode in group.episodes]
    flat = [_is_flat(group) for group in batch.groups]
    return {
        "reward_mean": fmean(rewards) if rewards else 0.0,
        "reward_std": pstdev(rewards) if rewards else 0.0,
        "zero_variance_share": fmean(flat) if flat else 0.0,
    }


def _token_metrics(batch: TrainBatch, choices: list[Choice]) -> dict[str, float]:
    paths = sorted(call.prompt_ids + call.sampled_ids for call in _calls(batch.groups))
    merged = sum(len(path) for path in paths) - sum(_shared(first, second) for first, second in pairwise(paths))
    return {
        "tokens_called": float(sum(len(path) for path in paths)),
        "tokens_merged": float(merged),
        "tokens_trained": float(sum(choice.tokens for choice in choices)),
    }


def _shared(first: list[int], second: list[int]) -> int:
    """Length of the common prefix. Over sorted paths, the sum of these is what a prefix tree saves."""
    for index, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return index
    return min(len(first), len(second))


def _policy_metrics(theta: float, start: float, choices: list[Choice], spec: RunSpec) -> dict[str, float]:
    names = ("kl_to_start", "entropy", "clip_share", "logprob_mismatch_mean", "logprob_mismatch_max")
    if not choices:
        return dict.fromkeys(names, 0.0)
    gaps = [echo_logprob(theta, choice.temperature, echoed=choice.echoed) - choice.old_logprob for choice in choices]
    low, high = math.log1p(-spec.algorithm.clip_low), math.log1p(spec.algorithm.clip_high)
    values = (
        fmean(_kl(theta, start, choice) for choice in choices),
        fmean(_entropy(theta, choice.temperature) for choice in choices),
        fmean(not low <= gap <= high for gap in gaps),
        fmean(abs(gap) for gap in gaps),
        max(abs(gap) for gap in gaps),
    )
    return dict(zip(names, values, strict=True))
