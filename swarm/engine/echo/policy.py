"""A policy with one parameter that really learns: it repeats a word with probability sigmoid(theta / temperature).

It uses the loss of the run's algorithm. Instead of tensors, the loss gets numbers that carry their derivative with respect to theta.
Knows nothing of HTTP, files or time.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from foundation.ids import derived_seed
from swarm.engine.algorithms import algorithm_of, over_numbers
from swarm.engine.algorithms.base import Algorithm
from swarm.engine.algorithms.facts import TokenFacts, kl_to_start
from swarm.engine.algorithms.rewards import Credit, Episodes
from swarm.engine.echo.answers import garble_mark, last_user_word
from swarm.engine.seam import StepOutcome, TrainBatch, TrainCall, TrainingRefused
from swarm.engine.training.repetition import repetition_metrics
from swarm.engine.training.selection import (
    CallNotes,
    TrainedEpisode,
    branches,
    credit,
    episodes_of,
    learning_rate_at,
    minibatches,
    reward_metrics,
    select,
    token_metrics,
)
from swarm.engine.tree import check_provenance
from swarm.protocol.algorithms import AlgorithmSpec

START_THETA = -2.0
"""Theta of the hosted model, which echoes 12 % of the time."""
LEARNING_GAIN = 15_000.0
"""theta moves by learning_rate * LEARNING_GAIN * slope: ten steps at 4e-5 take p from 0.12 to 0.5, at 1e-5 to 0.18."""
STEP_NOISE = 0.1
"""Standard deviation of the noise on each step's slope, which is derived from the run's seed."""
_MAX_LOGIT = 500.0


@dataclass(frozen=True, slots=True)
class Dual:
    """A number and its derivative with respect to theta (forward-mode differentiation), with the tensor methods that losses use."""

    value: float
    slope: float = 0.0

    def __add__(self, other: Dual) -> Dual:
        return Dual(self.value + other.value, self.slope + other.slope)

    def __sub__(self, other: Dual) -> Dual:
        return self + -other

    def __neg__(self) -> Dual:
        return Dual(-self.value, -self.slope)

    def __mul__(self, other: Dual | float) -> Dual:
        by = other if isinstance(other, Dual) else Dual(other)
        return Dual(self.value * by.value, self.slope * by.value + self.value * by.slope)

    __rmul__ = __mul__

    def __lt__(self, bound: float) -> bool:
        return self.value < bound

    def __gt__(self, bound: float) -> bool:
        return self.value > bound

    def __le__(self, bound: float) -> bool:
        return self.value <= bound

    def __ge__(self, bound: float) -> bool:
        return self.value >= bound

    def exp(self) -> Dual:
        return Dual(math.exp(self.value), self.slope * math.exp(self.value))

    def expm1(self) -> Dual:
        return Dual(math.expm1(self.value), self.slope * math.exp(self.value))

    def sigmoid(self) -> Dual:
        value = 0.5 + 0.5 * math.tanh(0.5 * self.value)
        return Dual(value, self.slope * value * (1.0 - value))

    def clamp(self, min: float = -math.inf, max: float = math.inf) -> Dual:
        return self if min <= self.value <= max else Dual(min if self.value < min else max)

    def minimum(self, other: Dual) -> Dual:
        return self if self.value <= other.value else other

    def detach(self) -> Dual:
        return Dual(self.value)

    def sum(self) -> Dual:
        return self


@dataclass(frozen=True, slots=True)
class _Use:
    """The only random token of a trained call. Its facts are Duals."""

    call_id: str
    echoed: bool
    temperature: float
    facts: Any


def echo_logprob(theta: float, temperature: float, *, echoed: bool) -> Dual:
    """Return the log-probability of this choice. At temperature 0 the likelier choice is certain."""
    if temperature == 0:
        return Dual(0.0 if echoed == (theta >= 0) else -math.inf)
    logit = max(-_MAX_LOGIT, min(_MAX_LOGIT, theta / temperature)) * (1 if echoed else -1)
    value = min(logit, 0.0) - math.log1p(math.exp(-abs(logit)))
    return Dual(value, -math.expm1(value) / temperature * (1 if echoed else -1))


def improve(theta: float, start: float, batch: TrainBatch) -> tuple[float, StepOutcome]:
    """Make one optimizer step; return the new theta and the outcome.

    Raises: TrainingRefused if a trained call's tokens lack their provenance, or the outcome is not finite.
    """
    spec, algorithm, selection = batch.spec, algorithm_of(batch.spec.algorithm), select(batch)
    trained = [branch.call for branch in branches(selection.trained, spec.algorithm)]
    for call in trained:
        check_provenance(call)
    credits = credit(batch, _notes(trained, theta, start, batch, algorithm)) if algorithm.credits_tokens else {}
    parts = [
        _uses(part, spec.algorithm, theta, start, credits) for part in minibatches(selection.trained, spec, batch.step)
    ]
    rate = learning_rate_at(spec.optimizer, batch.step, spec.limits.steps)
    new, seen = _optimise(theta, [part for part in parts if part], batch, algorithm, rate)
    if not math.isfinite(new):
        raise TrainingRefused(f"step {batch.step} made theta {new}; lower optimizer.learning_rate")
    seen |= {
        "tokens_trained": float(sum(len(call.sampled_ids) for call in trained)),
        "learning_rate": rate,
        "weights_change": abs(new - theta) / max(abs(theta), 1e-9),
    }
    metrics = reward_metrics(batch) | token_metrics(batch) | repetition_metrics(batch) | seen
    return new, StepOutcome(step=batch.step, metrics=metrics, untrained=selection.untrained)


def _optimise(
    theta: float, parts: Sequence[Sequence[_Use]], batch: TrainBatch, algorithm: Algorithm, rate: float
) -> tuple[float, dict[str, float]]:
    """Run all epochs and minibatches; return the new theta and the token metrics of the step."""
    optimizer, noise = batch.spec.optimizer, random.Random(derived_seed(batch.spec.seed, "echo-step", batch.step))
    first_loss, largest = 0.0, 0.0
    clipped: list[bool] = []
    now = theta
    episodes = episodes_of(batch) if algorithm.of_updates else None
    for epoch in range(optimizer.epochs):
        for part in parts:
            loss: Any = Dual(0.0)
            for use in part if episodes is None else _priced(part, algorithm, episodes, theta, now):
                logp: Any = echo_logprob(now, use.temperature, echoed=use.echoed)
                facts = replace(use.facts, call_gap_U=logp.detach() - use.facts.old_U)
                loss += algorithm.loss(logp, _entropy(now, use.temperature), facts)
                clipped.append(bool(algorithm.clipped(logp, facts)))
            first_loss += loss.value / len(parts) if epoch == 0 else 0.0
            largest = max(largest, abs(loss.slope))
            slope = max(-optimizer.max_grad_norm, min(optimizer.max_grad_norm, loss.slope))
            slope += noise.gauss(0.0, STEP_NOISE) + optimizer.weight_decay * now
            now -= rate * LEARNING_GAIN * slope
    facts = [use.facts for part in parts for use in part]
    gaps = [abs(each.old_U.value - each.recorded_U.value) for each in facts]
    return now, {
        "loss": first_loss,
        "grad_norm": largest,
        "clip_share": fmean(clipped or [0.0]),
        "kl_to_start": fmean([_kl(each) for each in facts] or [0.0]),
        "entropy": fmean([_entropy(theta, use.temperature).value for part in parts for use in part] or [0.0]),
        "logprob_mismatch_mean": fmean(gaps or [0.0]),
        "logprob_mismatch_max": max(gaps, default=0.0),
    }


def _priced(part: Sequence[_Use], algorithm: Algorithm, episodes: Episodes, before: float, now: float) -> list[_Use]:
    """Return the uses with the facts that the algorithm computes over the whole update. `before` is theta before the step.

    Raises: TrainingRefused.
    """
    names = ("advantage_U", "weight_U", "recorded_U", "old_U", "start_U", "rollout_gap_U")
    facts = {name: [getattr(use.facts, name).value for use in part] for name in names} | {
        "entropy_U": [_entropy(before, use.temperature).value for use in part],
        "logp_N": [echo_logprob(now, use.temperature, echoed=use.echoed).value for use in part],
    }
    told = over_numbers(algorithm, facts, [(use.call_id, 1) for use in part], episodes)
    return [
        replace(use, facts=replace(use.facts, **{name: Dual(values[at]) for name, values in told.items()}))
        for at, use in enumerate(part)
    ]


def _uses(
    episodes: Sequence[TrainedEpisode],
    algorithm: AlgorithmSpec,
    theta: float,
    start: float,
    credits: Mapping[str, Credit],
) -> list[_Use]:
    """Return one use per trained call. Calls without a random token are left out, because they have no gradient."""
    found = []
    for branch in branches(episodes, algorithm):
        call, dual = branch.call, _constant
        if (at := _drawn_at(call)) is None:
            continue
        echoed, share = _echoed(call, at), credits.get(call.call_id)
        old, first = (echo_logprob(each, call.temperature, echoed=echoed).value for each in (theta, start))
        facts = TokenFacts(
            advantage_U=dual(branch.advantage if share is None else share.advantages[at]),
            weight_U=dual(branch.weight * len(call.sampled_ids)),  # the one random token stands for the whole call
            recorded_U=dual(call.logprobs[at]),
            old_U=dual(old),
            start_U=dual(first),
            rollout_gap_U=dual(old - call.logprobs[at]),
        )
        found.append(_Use(call.call_id, echoed, call.temperature, facts))
    return found


def _notes(
    calls: Sequence[TrainCall], theta: float, start: float, batch: TrainBatch, algorithm: Algorithm
) -> dict[str, CallNotes]:
    """Return the inputs of token-level advantages, by call. The critic is one number: the batch's mean reward."""
    value = fmean(episode.reward for group in batch.groups for episode in group.episodes)
    notes = {}
    for call in calls:
        penalties, logps, entropies = ([0.0] * len(call.sampled_ids) for _ in range(3))
        if (at := _drawn_at(call)) is not None:
            echoed = _echoed(call, at)
            now, before = (echo_logprob(each, call.temperature, echoed=echoed).value for each in (theta, start))
            penalties[at] = algorithm.spec.kl * (now - before) if algorithm.penalises else 0.0
            logps[at], entropies[at] = now, _entropy(theta, call.temperature).value
        values = [value] * len(penalties)
        notes[call.call_id] = CallNotes(penalties=penalties, values=values, logps=logps, entropies=entropies)
    return notes


def _drawn_at(call: TrainCall) -> int | None:
    """Return the position of the call's only random token, or None if the answer was certain or was cut off before it."""
    return next((index for index, logprob in enumerate(call.logprobs) if logprob != 0.0), None)


def _echoed(call: TrainCall, at: int) -> bool:
    return call.sampled_ids[at] != ord(garble_mark(last_user_word(call.prompt_ids)))


def _kl(facts: Any) -> float:
    kl: Any = kl_to_start(facts.old_U, facts.start_U)
    return float(kl.value)


def _entropy(theta: float, temperature: float) -> Any:
    both = [echo_logprob(theta, temperature, echoed=echoed) for echoed in (True, False)]
    return -(both[0].exp() * both[0] + both[1].exp() * both[1])


def _constant(value: float) -> Any:
    return Dual(value)
