"""One optimiser step: from a batch to new weights and what became of it.

Everything that happens in it follows from the weights, the moments and the batch: the same again gives the same bits.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from foundation.clock import Clock
from foundation.ids import derived_seed
from swarm.engine.lesson import Lesson, branches, reward_metrics, select, token_metrics, trainable_calls
from swarm.engine.local.forward import Policy
from swarm.engine.local.grpo import Grpo
from swarm.engine.local.head import descend
from swarm.engine.local.loss import Objective, TokenFacts, kl_to_start
from swarm.engine.local.optimizer import Optimizer
from swarm.engine.local.reading import Piece, pieces, read
from swarm.engine.local.tally import Tally
from swarm.engine.schedule import learning_rate_at
from swarm.engine.seam import StepOutcome, TrainBatch, TrainingRefused
from swarm.engine.tree import Branch
from swarm.protocol.runspec import RunSpec

_ALGORITHMS: dict[str, type[Grpo]] = {"grpo": Grpo}
KL_SAMPLE = 64
"""With kl = 0 the KL to the first weights is only a metric: it is measured on whole calls with at least so many tokens."""


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
        metrics["prefix_tree"] = float(self.policy.on_trees)
        metrics["train_s"] = self._clock.monotonic() - began
        return StepOutcome(step=batch.step, metrics=metrics, untrained=selection.untrained)

    def _descend(self, made: Sequence[Branch], lessons: Sequence[Lesson], batch: TrainBatch, rate: float) -> Tally:
        """All epochs and minibatches."""
        spec, tally = batch.spec, Tally()
        objective = _ALGORITHMS[spec.algorithm.name](spec.algorithm)
        parts = [branches(part, spec.algorithm) for part in _minibatches(lessons, spec, batch.step)]
        ready = [self._made_ready(part, spec, tally) for part in parts if part]
        if not spec.algorithm.kl:
            tally.kls.append(self._sampled_kl(made, spec, batch.step))
        for epoch in range(spec.optimizer.epochs):
            for part in ready:
                loss = self._accumulate(part, objective, tally, first=epoch == 0)
                if not math.isfinite(loss):
                    raise TrainingRefused(f"step {batch.step}: the loss is {loss}")
                tally.loss += loss / len(parts) if epoch == 0 else 0.0
                norm, change = self.optimizer.step(spec.optimizer, rate)
                self.half_way = True
                tally.grad_norm = max(tally.grad_norm, norm)
                tally.change.add(change)
        return tally

    def _made_ready(self, part: Sequence[Branch], spec: RunSpec, tally: Tally) -> list[Piece]:
        """A minibatch in pieces, with the log-probabilities that its loss compares with."""
        ready = pieces(part, self.policy)
        tally.computed += sum(piece.tokens for piece in ready)
        for piece in ready:
            old_U = read(self.policy, piece)[0] if spec.optimizer.epochs * spec.optimizer.minibatches > 1 else None
            start_U = None
            if spec.algorithm.kl:
                start_U, _ = read(self.policy, piece, at_start=True)
            piece.facts = replace(piece.facts, old_U=old_U, start_U=start_U)
        return ready

    def _accumulate(self, part: Sequence[Piece], objective: Objective, tally: Tally, *, first: bool) -> float:
        """The gradient of one minibatch; returns its loss."""
        policy, dtype, total = self.policy, self.policy.compute_dtype, 0.0
        self.optimizer.begin()
        with policy.autocast():
            for piece in part:
                hidden_HD = policy.hidden(piece.micro)[piece.heads.at_H]
                with torch.autocast(self.policy.device.type, enabled=False):
                    slope_HD, logp_U, entropy_U, loss = descend(
                        piece.heads,
                        hidden_HD.detach().to(dtype),
                        policy.cast_output_weight,
                        policy.output_grad,
                        partial(_price, objective, piece.facts),
                    )
                torch.autograd.backward(hidden_HD, slope_HD.to(hidden_HD.dtype))
                total += loss
                tally.priced += len(logp_U)
                tally.clipped += int(objective.clipped(logp_U, piece.facts).sum())
                if first:
                    tally.tokens += len(logp_U)
                    tally.look(logp_U, entropy_U, piece.facts.recorded_U)
                    if piece.facts.start_U is not None:
                        tally.kls.append(kl_to_start(logp_U, piece.facts.start_U))
        return total

    def _look(self, batch: TrainBatch) -> Tally:
        """Nothing is trained: measure on what could have been."""
        tally = Tally()
        made = [
            Branch(call=call, advantage=0.0, weight=0.0)
            for group in batch.groups
            for episode in group.episodes
            for call in trainable_calls(episode, batch.spec.algorithm)
        ]
        for piece in pieces(made, self.policy):
            tally.look(*read(self.policy, piece), piece.facts.recorded_U)
        tally.kls.append(self._sampled_kl(made, batch.spec, batch.step))
        return tally

    def _sampled_kl(self, made: Sequence[Branch], spec: RunSpec, step: int) -> Tensor:
        """KL to the first weights on neighbouring calls, from a place drawn anew at each step.

        Neighbours share their prompts, which makes this cheap. Both weights read the same pieces, so that rounding cancels.
        """
        first = random.Random(derived_seed(spec.seed, "kl", step)).randrange(len(made) or 1)
        chosen: list[Branch] = []
        for branch in [*made[first:], *made[:first]]:
            chosen.append(branch)
            if sum(len(other.call.sampled_ids) for other in chosen) >= KL_SAMPLE:
                break
        found = [
            kl_to_start(read(self.policy, piece)[0], read(self.policy, piece, at_start=True)[0])
            for piece in pieces(chosen, self.policy)
        ]
        return torch.cat(found) if found else torch.zeros(0)


def _price(objective: Objective, facts: TokenFacts, logp_U: Tensor, entropy_U: Tensor, uses: slice) -> Tensor:
    return objective.loss(logp_U, entropy_U, facts.part(uses))


def _minibatches(lessons: Sequence[Lesson], spec: RunSpec, step: int) -> list[list[Lesson]]:
    """At most `minibatches` parts of nearly equal size.

    Episodes of a group stay together as far as the sizes allow, since they share their prompts; with several parts the
    groups are shuffled.
    """
    count = min(spec.optimizer.minibatches, len(lessons))
    by_group: dict[int, list[Lesson]] = {}
    for lesson in lessons:
        by_group.setdefault(lesson.group, []).append(lesson)
    groups = list(by_group.values())
    if count > 1:
        random.Random(derived_seed(spec.seed, "minibatches", step)).shuffle(groups)
    ordered = [lesson for group in groups for lesson in group]
    edges = [len(ordered) * number // count for number in range(count + 1)]
    return [ordered[first:last] for first, last in pairwise(edges)]
