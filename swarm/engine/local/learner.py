"""One optimiser step: from a batch to new weights and what became of it.

Everything that happens in it follows from the weights, the moments and the batch: the same again gives the same bits.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from foundation.clock import Clock
from foundation.ids import derived_seed
from swarm.engine.lesson import Lesson, branches, reward_metrics, select, token_metrics, trainable_calls
from swarm.engine.local.forward import MicroBatch, Policy
from swarm.engine.local.grpo import Grpo
from swarm.engine.local.head import Heads, descend
from swarm.engine.local.loss import Objective, Place, TokenFacts, facts_of, places
from swarm.engine.local.optimizer import Optimizer
from swarm.engine.local.reading import read_logprobs, read_segment
from swarm.engine.local.tally import Tally
from swarm.engine.schedule import learning_rate_at
from swarm.engine.seam import StepOutcome, TrainBatch, TrainingRefused
from swarm.engine.tree import Branch, cut, grow
from swarm.protocol.runspec import AlgorithmSpec, RunSpec

_ALGORITHMS: dict[str, type[Grpo]] = {"grpo": Grpo}
KL_SAMPLE = 256
"""With kl = 0 the KL to the first weights is only a metric: it is measured on whole calls with at least so many tokens."""


@dataclass(slots=True)
class _Step:
    """One step under way. old: log-probabilities before it, where the ratio needs them; start: under the first weights."""

    objective: Objective
    algorithm: AlgorithmSpec
    tally: Tally
    start: Mapping[Place, float]
    old: Mapping[Place, float] | None


class Learner:
    """The policy and its optimiser.

    half_way: a step moved the weights and was then refused; they are no step's weights and have to be restored.
    """

    def __init__(self, policy: Policy, clock: Clock) -> None:
        self.policy = policy
        self.optimizer = Optimizer(dict(policy.model.named_parameters()))
        self.half_way = False
        self._clock = clock

    def learn(self, batch: TrainBatch) -> StepOutcome:
        """Make the step. Raises: TrainingRefused."""
        began = self._clock.monotonic()
        spec = batch.spec
        torch.manual_seed(derived_seed(spec.seed, "step", batch.step))
        self.policy.use_dtype(spec.dtype)
        selection = select(batch)
        rate = learning_rate_at(spec.optimizer, batch.step, spec.limits.steps)
        made = branches(selection.lessons, spec.algorithm)
        tally = self._descend(made, selection.lessons, batch, rate) if made else self._look(batch)
        metrics = reward_metrics(batch) | token_metrics(batch) | tally.metrics() | {"learning_rate": rate}
        if wrong := sorted(name for name, value in metrics.items() if not math.isfinite(value)):
            raise TrainingRefused(f"step {batch.step} is not finite in {', '.join(wrong)}")
        if rate > 0 and tally.grad_norm > 0 and not tally.change.moved:
            raise TrainingRefused(f"step {batch.step} did not change the weights; raise optimizer.learning_rate")
        self.half_way = False
        metrics["train_s"] = self._clock.monotonic() - began
        return StepOutcome(step=batch.step, metrics=metrics, untrained=selection.untrained)

    def _descend(self, made: Sequence[Branch], lessons: Sequence[Lesson], batch: TrainBatch, rate: float) -> Tally:
        """All epochs and minibatches."""
        spec = batch.spec
        several = spec.optimizer.epochs * spec.optimizer.minibatches > 1
        step = _Step(
            objective=_ALGORITHMS[spec.algorithm.name](spec.algorithm),
            algorithm=spec.algorithm,
            tally=Tally(),
            start=self._start_logprobs(made, spec, batch.step),
            old=read_logprobs(self.policy, made, at_start=False) if several else None,
        )
        tally = step.tally
        for epoch in range(spec.optimizer.epochs):
            parts = _minibatches(lessons, spec, batch.step, epoch)
            for part in parts:
                loss = self._accumulate(branches(part, spec.algorithm), step, first=epoch == 0)
                if not math.isfinite(loss):
                    raise TrainingRefused(f"step {batch.step}: the loss is {loss}")
                tally.loss += loss / len(parts) if epoch == 0 else 0.0
                norm, change = self.optimizer.step(spec.optimizer, rate)
                self.half_way = True
                tally.grad_norm = max(tally.grad_norm, norm)
                tally.change.add(change)
        return tally

    def _accumulate(self, made: Sequence[Branch], step: _Step, *, first: bool) -> float:
        """The gradient of one minibatch, segment by segment; returns its loss."""
        policy, tally, dtype = self.policy, step.tally, self.policy.compute_dtype
        self.optimizer.begin()
        weight_VD = policy.output_weight.detach().to(dtype)
        loss = 0.0
        with policy.autocast():
            for segment in cut(grow(made), policy.segment_tokens):
                heads = Heads.of(segment)
                facts = facts_of(segment, made, step.old, step.start if step.algorithm.kl else None)
                hidden_HD = policy.hidden(MicroBatch.of(segment, dtype))[heads.at_H]
                with torch.autocast("cpu", enabled=False):
                    slope_HD, logp_U, entropy_U, cost = descend(
                        heads,
                        hidden_HD.detach().to(dtype),
                        weight_VD,
                        policy.output_grad,
                        partial(_price, step.objective, facts),
                    )
                torch.autograd.backward(hidden_HD, slope_HD.to(hidden_HD.dtype))
                loss += cost
                tally.priced += len(logp_U)
                tally.clipped += int(step.objective.clipped(logp_U, facts).sum())
                if first:
                    tally.tokens += len(logp_U)
                    tally.look(places(segment, made), logp_U, entropy_U, facts.recorded_U, step.start)
        return loss

    def _look(self, batch: TrainBatch) -> Tally:
        """Nothing is trained: measure on what could have been."""
        tally = Tally()
        made = [
            Branch(call=call, advantage=0.0, weight=0.0)
            for group in batch.groups
            for episode in group.episodes
            for call in trainable_calls(episode, batch.spec.algorithm)
        ]
        start = self._start_logprobs(made, batch.spec, batch.step)
        for segment in cut(grow(made), self.policy.segment_tokens):
            logp_U, entropy_U = read_segment(self.policy, segment, at_start=False)
            tally.look(places(segment, made), logp_U, entropy_U, facts_of(segment, made).recorded_U, start)
        return tally

    def _start_logprobs(self, made: Sequence[Branch], spec: RunSpec, step: int) -> dict[Place, float]:
        """Under the first weights: of all tokens where the loss needs them, else of a sample of the calls."""
        chosen = list(made)
        if not spec.algorithm.kl:
            random.Random(derived_seed(spec.seed, "kl", step)).shuffle(chosen)
            tokens, count = 0, 0
            while count < len(chosen) and tokens < KL_SAMPLE:
                tokens += len(chosen[count].call.sampled_ids)
                count += 1
            chosen = chosen[:count]
        return read_logprobs(self.policy, chosen, at_start=True)


def _price(objective: Objective, facts: TokenFacts, logp_U: Tensor, entropy_U: Tensor, uses: slice) -> Tensor:
    return objective.loss(logp_U, entropy_U, facts.part(uses))


def _minibatches(lessons: Sequence[Lesson], spec: RunSpec, step: int, epoch: int) -> list[list[Lesson]]:
    """At most `minibatches` parts of nearly equal size.

    Episodes of a group stay together as far as the sizes allow, since they share their prompts; with several parts the
    groups are shuffled in each epoch.
    """
    count = min(spec.optimizer.minibatches, len(lessons))
    by_group: dict[int, list[Lesson]] = {}
    for lesson in lessons:
        by_group.setdefault(lesson.group, []).append(lesson)
    groups = list(by_group.values())
    if count > 1:
        random.Random(derived_seed(spec.seed, "minibatches", step, epoch)).shuffle(groups)
    ordered = [lesson for group in groups for lesson in group]
    edges = [len(ordered) * number // count for number in range(count + 1)]
    return [ordered[first:last] for first, last in pairwise(edges)]
