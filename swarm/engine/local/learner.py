"""One optimizer step: from a batch to new weights and the outcome.

A step depends only on the weights, the moments and the batch: repeating it gives the same bits.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from foundation.clock import Clock
from foundation.ids import derived_seed
from swarm.engine.algorithms import algorithm_of
from swarm.engine.algorithms.base import Algorithm
from swarm.engine.algorithms.facts import TokenFacts, kl_to_start
from swarm.engine.local.forward import Policy
from swarm.engine.local.head import Critic, gradients, survey, without_critic
from swarm.engine.local.minibatch import Minibatch, Piece, known, pieces, read
from swarm.engine.local.optimizer import Optimizer
from swarm.engine.memory.model import GIB
from swarm.engine.seam import StepOutcome, TrainBatch, TrainingRefused
from swarm.engine.training.metrics import StepMetrics, kl_sample
from swarm.engine.training.selection import (
    CallNotes,
    TrainedEpisode,
    branches,
    credit,
    episodes_of,
    learning_rate_at,
    minibatches,
    select,
    trainable_calls,
)
from swarm.engine.tree import Branch
from swarm.protocol.runspec import RunSpec

_LOG = logging.getLogger(__name__)


class Learner:
    """The policy and its optimizer, and a critic if the algorithm has one.

    `half_way` is True while a step has moved the weights but is not finished. If the step is refused, these weights belong to no step
    and must be restored.
    """

    def __init__(self, policy: Policy, clock: Clock) -> None:
        self.policy = policy
        self.optimizer = Optimizer(dict(policy.model.named_parameters()), offload=policy.offloads)
        self.critic = Critic(policy.output_weight.shape[1], policy.device)
        self.half_way = False
        self._clock = clock
        self._warned_of_memory = False

    def begin_run(self) -> None:
        """Reset the optimizer and the critic for the weights that are trained now."""
        self.optimizer.take(self.policy.trained)
        self.critic.forget()
        self._warned_of_memory = False

    def state(self) -> dict[str, Tensor]:
        """Return everything that a step depends on, except the policy's weights."""
        return self.optimizer.state() | self.critic.state()

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned."""
        self.optimizer.restore(without_critic(state))
        self.critic.restore(state)

    def rest(self) -> None:
        """Keep moments, gradients and copies of the policy's weights off the device until the next step."""
        self.optimizer.rest()
        self.policy.rest()

    def learn(self, batch: TrainBatch) -> StepOutcome:
        """Make the step and return its outcome. Raises: TrainingRefused."""
        began = self._clock.monotonic()
        spec = batch.spec
        torch.manual_seed(derived_seed(spec.seed, "step", batch.step))
        self.policy.use_dtype(spec.dtype)
        self.policy.recompute = spec.activation_checkpointing or self.policy.has_to_recompute
        selection = select(batch)
        rate = learning_rate_at(spec.optimizer, batch.step, spec.limits.steps)
        made = branches(selection.trained, spec.algorithm)
        seen = self._optimise(made, selection.trained, batch, rate) if made else self._look(batch)
        metrics = seen.of_step(batch, rate)
        self.half_way = False
        metrics["prefix_tree"] = float(self.policy.on_trees)
        metrics["train_s"] = self._clock.monotonic() - began
        return StepOutcome(step=batch.step, metrics=metrics, untrained=selection.untrained)

    def _optimise(
        self, made: Sequence[Branch], episodes: Sequence[TrainedEpisode], batch: TrainBatch, rate: float
    ) -> StepMetrics:
        """Run all epochs and minibatches; return the step's metrics."""
        spec, seen = batch.spec, StepMetrics()
        algorithm = algorithm_of(spec.algorithm)
        parts = [branches(part, spec.algorithm) for part in minibatches(episodes, spec, batch.step)]
        ready = [self._made_ready(part, spec, algorithm, seen) for part in parts if part]
        self._warn_of_memory(max(piece.tokens for part in ready for piece in part.pieces), batch)
        if algorithm.credits_tokens:
            _give_credit(batch, ready, algorithm, seen)
        batch_episodes = episodes_of(batch) if algorithm.of_updates else None
        sampled = [] if spec.algorithm.kl else _sample(made, spec, batch.step)
        exact = self.policy.compute_dtype == torch.float32
        if not exact:
            seen.kls.append(self._kl(sampled))
        for epoch in range(spec.optimizer.epochs):
            for part in ready:
                if algorithm.couples_calls and self.half_way:
                    part.take_call_gaps([read(self.policy, piece)[0] for piece in part.pieces])
                if batch_episodes is not None:
                    part.take_prices(algorithm, batch_episodes, self._now(part))
                self.optimizer.begin(spec.optimizer.name)
                self.critic.begin()
                loss = self._accumulate(part.pieces, algorithm, seen, first=epoch == 0)
                if not math.isfinite(loss):
                    raise TrainingRefused(f"step {batch.step}: the loss is {loss}")
                seen.loss += loss / len(parts) if epoch == 0 else 0.0
                norm, change = self.optimizer.step(spec.optimizer, rate)
                if algorithm.has_critic:
                    self.critic.step(spec.algorithm.value_learning_rate)
                self.half_way = True
                seen.grad_norm = max(seen.grad_norm, norm)
                seen.change.add(change)
        if exact:
            seen.kls.append(self._kl(sampled, ready))
        if seen.value_loss is not None:
            seen.value_loss /= len(ready)
        return seen

    def _now(self, part: Minibatch) -> list[Tensor]:
        """Return each piece's log-probabilities under the current weights; until the weights move, reuse those from before the step."""
        moved = self.half_way
        return [read(self.policy, piece)[0] if moved else known(piece.facts.old_U) for piece in part.pieces]

    def _warn_of_memory(self, longest: int, batch: TrainBatch) -> None:
        """Warn once per run if long contexts make activations take far more memory than planned."""
        meant = self.policy.segment_tokens
        if self._warned_of_memory or self.policy.recompute or longest <= 2 * meant:
            return
        self._warned_of_memory = True
        taken_gib, meant_gib = (self.policy.memory.kept(tokens) / GIB for tokens in (longest, meant))
        _LOG.warning(
            "step %d computes %d tokens together, because its contexts are long: about %.1f GiB of activations instead of %.1f. "
            "If memory runs out, set activation_checkpointing or serve with a smaller --max-model-len",
            *(batch.step, longest, taken_gib, meant_gib),
        )

    def _made_ready(self, part: Sequence[Branch], spec: RunSpec, algorithm: Algorithm, seen: StepMetrics) -> Minibatch:
        """Build a minibatch with exactly those facts from before the step that its loss and its advantages need."""
        ready = Minibatch(branches=part, pieces=pieces(part, self.policy))
        seen.computed += sum(piece.tokens for piece in ready.pieces)
        several = spec.optimizer.epochs * spec.optimizer.minibatches > 1
        whole_calls = algorithm.correction.whole_calls
        for piece in ready.pieces:
            if algorithm.has_critic:
                old_U, entropy_U, value_U = self._appraised(piece)
                piece.facts = replace(piece.facts, old_U=old_U, value_U=value_U, entropy_U=entropy_U)
            elif several or whole_calls or algorithm.credits_tokens or algorithm.of_updates:
                old_U, entropy_U = read(self.policy, piece)
                piece.facts = replace(piece.facts, old_U=old_U, entropy_U=entropy_U)
            if spec.algorithm.kl:
                piece.facts = replace(piece.facts, start_U=read(self.policy, piece, at_start=True)[0])
            if piece.facts.old_U is not None:
                seen.add_trained(piece.facts.old_U, entropy_U, piece.facts)
        if whole_calls:
            ready.take_rollout_gaps()
        if algorithm.couples_calls and ready.pieces[0].facts.old_U is not None:
            ready.take_call_gaps([piece.facts.old_U for piece in ready.pieces if piece.facts.old_U is not None])
        return ready

    @torch.no_grad()
    def _appraised(self, piece: Piece) -> tuple[Tensor, Tensor, Tensor]:
        """Return logp_U, entropy_U and value_U before the step, computed in one pass."""
        policy = self.policy
        with policy.autocast():
            hidden_HD = policy.hidden(piece.micro)[piece.heads.at_H]
        logp_U, entropy_U = survey(piece.heads, hidden_HD.to(policy.compute_dtype), policy.cast_output_weight)
        return logp_U, entropy_U, self.critic.values(hidden_HD)[piece.heads.head_U]

    def _accumulate(self, part: Sequence[Piece], algorithm: Algorithm, seen: StepMetrics, *, first: bool) -> float:
        """Accumulate the gradient of one minibatch; return the policy's loss."""
        policy, dtype, total = self.policy, self.policy.compute_dtype, 0.0
        with policy.autocast():
            for piece in part:
                hidden_HD = policy.hidden(piece.micro)[piece.heads.at_H]
                with torch.autocast(self.policy.device.type, enabled=False):
                    slope_HD, logp_U, entropy_U, loss = gradients(
                        piece.heads,
                        hidden_HD.detach().to(dtype),
                        policy.cast_output_weight,
                        policy.output_grad,
                        partial(_price, algorithm, piece.facts),
                    )
                    if algorithm.has_critic:
                        slope_HD = slope_HD + self._taught(algorithm, piece, hidden_HD, seen if first else None)
                torch.autograd.backward(hidden_HD, slope_HD.to(hidden_HD.dtype))
                total += loss
                seen.add_pass(len(logp_U), int(algorithm.clipped(logp_U, piece.facts).sum()))
                if piece.facts.old_U is None:  # this is the only pass
                    seen.add_trained(logp_U, entropy_U, piece.facts)
                    piece.facts = replace(piece.facts, old_U=logp_U)
        return total

    def _taught(self, algorithm: Algorithm, piece: Piece, hidden_HD: Tensor, seen: StepMetrics | None) -> Tensor:
        """Add to the critic's gradient; return the gradient of its loss with respect to the policy's hidden states."""
        seen_HD = hidden_HD.detach().float().requires_grad_()
        loss = algorithm.value_loss(self.critic.values(seen_HD)[piece.heads.head_U], piece.facts)
        loss.backward()  # type: ignore[no-untyped-call]
        if seen is not None:
            seen.value_loss = (seen.value_loss or 0.0) + float(loss.detach())
        assert seen_HD.grad is not None
        return seen_HD.grad * algorithm.spec.value_coef

    def _look(self, batch: TrainBatch) -> StepMetrics:
        """Measure a step that trains nothing, on the calls that could have been trained."""
        seen = StepMetrics()
        made = [
            Branch(call=call, advantage=0.0, weight=0.0)
            for group in batch.groups
            for episode in group.episodes
            for call in trainable_calls(episode, batch.spec)
        ]
        for piece in pieces(made, self.policy):
            seen.add_tokens(*read(self.policy, piece), piece.facts)
        seen.kls.append(self._kl(_sample(made, batch.spec, batch.step)))
        return seen

    def _kl(self, sampled: Sequence[Branch], ready: Sequence[Minibatch] = ()) -> Tensor:
        """Return the KL to the initial weights on the tokens of these calls.

        `ready` has minibatches with their log-probabilities from before the step. Without it, this method computes them in the same
        shapes as for the initial weights, so that rounding cancels; below float32 this is necessary.
        """
        if not sampled:
            return torch.zeros(0)
        part = Minibatch(branches=sampled, pieces=pieces(sampled, self.policy))
        for piece in part.pieces:
            old_U = None if ready else read(self.policy, piece)[0]
            piece.facts = replace(piece.facts, old_U=old_U, start_U=read(self.policy, piece, at_start=True)[0])
        if not ready:
            return torch.cat(
                [kl_to_start(known(piece.facts.old_U), known(piece.facts.start_U)) for piece in part.pieces]
            )
        before = {name: logp_S for other in ready for name, logp_S in other.before().items()}
        return torch.cat([kl_to_start(before[name], start_S) for name, start_S in part.at_start().items()])


def _sample(made: Sequence[Branch], spec: RunSpec, step: int) -> list[Branch]:
    return kl_sample(made, lambda branch: len(branch.call.sampled_ids), spec, step)


def _price(algorithm: Algorithm, facts: TokenFacts, logp_U: Tensor, entropy_U: Tensor, uses: slice) -> Tensor:
    return algorithm.loss(logp_U, entropy_U, facts.part(uses))


def _give_credit(batch: TrainBatch, ready: Sequence[Minibatch], algorithm: Algorithm, seen: StepMetrics) -> None:
    """Set token-level advantages, computed over all minibatches."""
    notes: dict[str, CallNotes] = {}
    for part in ready:
        notes |= part.notes(algorithm.spec.kl if algorithm.penalises else 0.0, tokens=algorithm.reads_tokens)
    earned = credit(batch, notes)
    for part in ready:
        part.take_credit(earned)
    if algorithm.has_critic:
        seen.judge_critic([piece.facts for part in ready for piece in part.pieces])
