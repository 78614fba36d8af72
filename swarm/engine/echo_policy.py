"""A policy with one parameter that really learns: it repeats a word with probability sigmoid(theta / temperature).

The loss is the algorithm's, with KL and entropy terms, for the one random token of each call; its slope is taken by
central differences, which is exact enough for one parameter. A critic is one number here, which the normalisation of
advantages takes off again. Knows nothing of HTTP, files or time.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean

from foundation.ids import derived_seed
from swarm.engine.echo_tokens import last_user_word
from swarm.engine.lesson import branches, reward_metrics, select, token_metrics
from swarm.engine.schedule import learning_rate_at
from swarm.engine.seam import StepOutcome, TrainBatch, TrainCall, TrainingRefused
from swarm.engine.tree import Branch, check_provenance
from swarm.protocol.runspec import AlgorithmSpec, RunSpec

START_THETA = -2.0
"""The hosted model: it echoes 12 % of the time."""
LEARNING_GAIN = 15_000.0
"""theta moves by learning_rate * LEARNING_GAIN * slope: ten steps at 4e-5 take p from 0.12 to 0.5, at 1e-5 to 0.18."""
STEP_NOISE = 0.1
"""Standard deviation of the noise on each step's slope, drawn from the run's seed."""
_MAX_LOGIT = 500.0


@dataclass(frozen=True, slots=True)
class Choice:
    """One trained call as the loss sees it: only the token where echo and garble part is random."""

    echoed: bool
    old_logprob: float
    temperature: float
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


def improve(theta: float, start: float, batch: TrainBatch) -> tuple[float, StepOutcome]:
    """One optimiser step: the new theta, and what the step did.

    Raises: TrainingRefused when a trained call's tokens lack their provenance, or the outcome is not finite.
    """
    selection = select(batch, _penalty(theta, start, batch.spec.algorithm))
    trained = branches(selection.lessons, batch.spec.algorithm)
    for branch in trained:
        check_provenance(branch.call)
    choices = [choice for branch in trained if (choice := _choice(branch)) is not None]
    rate = learning_rate_at(batch.spec.optimizer, batch.step, batch.spec.limits.steps)
    new, loss, grad_norm = _descend(theta, start, choices, batch, rate)
    if not math.isfinite(new):
        raise TrainingRefused(f"step {batch.step} made theta {new}; lower optimizer.learning_rate")
    metrics = reward_metrics(batch) | token_metrics(batch) | _policy_metrics(theta, start, choices, batch.spec)
    metrics |= {
        "tokens_trained": float(sum(len(branch.call.sampled_ids) for branch in trained)),
        "loss": loss,
        "grad_norm": grad_norm,
        "learning_rate": rate,
        "weights_change": abs(new - theta) / max(abs(theta), 1e-9),
    }
    return new, StepOutcome(step=batch.step, metrics=metrics, untrained=selection.untrained)


def _choice(branch: Branch) -> Choice | None:
    """None for a call in which nothing was drawn: its tokens were certain, and have no gradient."""
    drawn = _drawn(branch.call)
    if drawn is None:
        return None
    echoed, logprob = drawn
    weight = branch.weight * len(branch.call.sampled_ids)  # the one random token stands for the whole call
    return Choice(echoed, logprob, branch.call.temperature, branch.advantage, weight)


def _drawn(call: TrainCall) -> tuple[bool, float] | None:
    """Whether the call's one random token echoes, and its recorded log-probability; None where there is no such token.

    What was asked for had one answer, or the call was cut off before it.
    """
    at = next((index for index, logprob in enumerate(call.logprobs) if logprob != 0.0), None)
    if at is None:
        return None
    return call.sampled_ids[at] != ord(garble_mark(last_user_word(call.prompt_ids))), call.logprobs[at]


def _penalty(theta: float, start: float, algorithm: AlgorithmSpec) -> Callable[[TrainCall], float] | None:
    """What a call loses of its reward, where the KL penalty stands in there."""
    if not algorithm.kl or algorithm.kl_in != "reward":
        return None

    def penalty(call: TrainCall) -> float:
        drawn = _drawn(call)
        if drawn is None:
            return 0.0
        now, before = (echo_logprob(at, call.temperature, echoed=drawn[0]) for at in (theta, start))
        return algorithm.kl * (now - before)

    return penalty


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
            slope = _slope(partial(_loss, start=start, choices=part, algorithm=algorithm, held=theta), theta)
            largest = max(largest, abs(slope))
            clipped = max(-optimizer.max_grad_norm, min(optimizer.max_grad_norm, slope))
            clipped += noise.gauss(0.0, STEP_NOISE) + optimizer.weight_decay * theta
            theta -= rate * LEARNING_GAIN * clipped
    return theta, first_loss, largest


def _minibatches(choices: list[Choice], count: int) -> list[list[Choice]]:
    """At most `count` parts of nearly equal size, weighted so that each stands for the whole."""
    parts = [choices[index::count] for index in range(min(count, len(choices)))]
    return [[replace(choice, weight=choice.weight * len(choices) / len(part)) for choice in part] for part in parts]


def _loss(
    theta: float, start: float, choices: Sequence[Choice], algorithm: AlgorithmSpec, held: float | None = None
) -> float:
    """The algorithm's loss (docs/algorithms.md). held: where what has no gradient is taken; None: at theta itself."""
    total = 0.0
    in_loss = algorithm.kl if algorithm.kl_in == "loss" else 0.0
    for choice in choices:
        term = -_gain(theta, theta if held is None else held, choice, algorithm)
        term += in_loss * _kl(theta, start, choice) - algorithm.entropy * _entropy(theta, choice.temperature)
        total += choice.weight * term
    return total


def _gain(theta: float, held: float, choice: Choice, algorithm: AlgorithmSpec) -> float:
    low, high = 1 - algorithm.clip_low, 1 + algorithm.clip_high
    logprob = echo_logprob(theta, choice.temperature, echoed=choice.echoed)
    if algorithm.name == "cispo":
        weight = max(low, min(high, _ratio(held, choice)))
        return weight * choice.advantage * logprob
    ratio = _ratio(theta, choice)
    return min(ratio * choice.advantage, max(low, min(high, ratio)) * choice.advantage)


def _ratio(theta: float, choice: Choice) -> float:
    """Of the token, which is that of the whole call too."""
    return math.exp(min(echo_logprob(theta, choice.temperature, echoed=choice.echoed) - choice.old_logprob, 30.0))


def _slope(function: Callable[[float], float], at: float, width: float = 1e-5) -> float:
    return (function(at + width) - function(at - width)) / (2 * width)


def _kl(theta: float, start: float, choice: Choice) -> float:
    """k3 estimate of KL(theta, start) from one choice (Schulman 2020, "Approximating KL divergence")."""
    before = echo_logprob(start, choice.temperature, echoed=choice.echoed)
    gap = before - echo_logprob(theta, choice.temperature, echoed=choice.echoed)
    return math.expm1(min(gap, 30.0)) - gap


def _entropy(theta: float, temperature: float) -> float:
    logprobs = [echo_logprob(theta, temperature, echoed=echoed) for echoed in (True, False)]
    return -sum(math.exp(logprob) * logprob for logprob in logprobs)


def _softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def _policy_metrics(theta: float, start: float, choices: list[Choice], spec: RunSpec) -> dict[str, float]:
    names = ("kl_to_start", "entropy", "clip_share", "logprob_mismatch_mean", "logprob_mismatch_max")
    if not choices:
        return dict.fromkeys(names, 0.0)
    gaps = [echo_logprob(theta, choice.temperature, echoed=choice.echoed) - choice.old_logprob for choice in choices]
    low, high = 1 - spec.algorithm.clip_low, 1 + spec.algorithm.clip_high
    values = (
        fmean(_kl(theta, start, choice) for choice in choices),
        fmean(_entropy(theta, choice.temperature) for choice in choices),
        fmean(not low <= _ratio(theta, choice) <= high for choice in choices),
        fmean(abs(gap) for gap in gaps),
        max(abs(gap) for gap in gaps),
    )
    return dict(zip(names, values, strict=True))
