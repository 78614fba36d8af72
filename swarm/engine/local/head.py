"""Log-probabilities, entropies and their gradients from hidden states, a few heads at a time to avoid holding all logits; the critic.

Tensor suffixes: H heads, U uses (sampled tokens), D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import AdamW

from swarm.engine.local.restrictions import Restrictions, Slopes
from swarm.engine.memory.training import BLOCK_LOGITS, CHUNK_GRADIENT, CHUNK_LOGITS, GPU_LOGITS
from swarm.engine.tree import Branch, Segment

_LANES = 32
"""Chunks and blocks have a multiple of this many heads; other sizes make matrix products up to a quarter slower."""

Price = Callable[[Tensor, Tensor, slice], Tensor]
"""Function that computes the loss, a scalar, from logp_U, entropy_U and the slice of uses that they belong to. Gradients flow to logp_U
and entropy_U."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """The positions of a micro-batch whose distributions are needed, and the tokens sampled from each."""

    at_H: Tensor
    temperature_H: Tensor
    head_U: Tensor
    token_U: Tensor
    uses_before: list[int]
    """Uses of head h are [uses_before[h], uses_before[h + 1])."""
    restrictions: Restrictions

    @classmethod
    def of(cls, segment: Segment, branches: Sequence[Branch], device: torch.device | None = None) -> Heads:
        """Build the heads of a segment. `branches` has the calls that the segment's restricted heads refer to."""
        counts = torch.bincount(torch.tensor(segment.use_head), minlength=len(segment.head_at))
        return cls(
            at_H=torch.tensor(segment.head_at, device=device),
            temperature_H=torch.tensor(segment.head_temperature, device=device),
            head_U=torch.tensor(segment.use_head, device=device),
            token_U=torch.tensor(segment.use_token, device=device),
            uses_before=[0, *torch.cumsum(counts, 0).tolist()],
            restrictions=Restrictions(segment, branches, device),
        )

    def chunks(self, vocabulary: int) -> Iterator[slice]:
        """Return the chunks of heads whose logits are held together."""
        size = CHUNK_LOGITS if self.at_H.device.type == "cpu" else GPU_LOGITS
        return _parts(slice(0, len(self.at_H)), size // vocabulary)

    def gradient_rows(self, grad_VD: Tensor) -> Iterator[slice]:
        """Return slices of the output weight's gradient that are updated together."""
        size = CHUNK_GRADIENT if self.at_H.device.type == "cpu" else CHUNK_LOGITS
        return _parts(slice(0, len(grad_VD)), size // grad_VD.shape[1])

    def blocks(self, chunk: slice, vocabulary: int) -> Iterator[tuple[slice, slice]]:
        """Yield the blocks of a chunk that are processed together, with the uses of each."""
        size = (BLOCK_LOGITS if self.at_H.device.type == "cpu" else GPU_LOGITS) // vocabulary
        for block in _parts(chunk, size):
            yield block, slice(self.uses_before[block.start], self.uses_before[block.stop])


@dataclass(slots=True)
class _Block:
    """The distribution at some heads, and the tokens sampled there."""

    scaled_HV: Tensor
    """Logits divided by the temperature, for the tokens that could be sampled."""
    log_norm_H: Tensor
    prob_HV: Tensor
    entropy_H: Tensor
    head_U: Tensor
    token_U: Tensor
    slopes: Slopes | None

    @property
    def logp_U(self) -> Tensor:
        return self.scaled_HV[self.head_U, self.token_U] - self.log_norm_H[self.head_U]

    @property
    def entropy_U(self) -> Tensor:
        return self.entropy_H[self.head_U]


@torch.no_grad()
def survey(heads: Heads, hidden_HD: Tensor, weight_VD: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each use and the entropy of the distribution it was sampled from; both [U], in float32."""
    logps, entropies = [], []
    for at in heads.chunks(weight_VD.shape[0]):
        logits_HV = hidden_HD[at] @ weight_VD.T
        for some, uses in heads.blocks(at, weight_VD.shape[0]):
            seen = _distribution(heads, some, uses, logits_HV[_within(at, some)])
            logps.append(seen.logp_U)
            entropies.append(seen.entropy_U)
    return torch.cat(logps), torch.cat(entropies)


def gradients(
    heads: Heads, hidden_HD: Tensor, weight_VD: Tensor, grad_VD: Tensor | None, price: Price
) -> tuple[Tensor, Tensor, Tensor, float]:
    """Compute the loss of every use and its gradient, in one pass over the vocabulary.

    Adds the gradient with respect to the output weight to `grad_VD` (None: it is not trained). `hidden_HD` and `weight_VD` must be
    in the compute dtype. Returns: gradient with respect to hidden_HD, logp_U, entropy_U, loss.
    """
    grad_hidden_HD = torch.empty_like(hidden_HD)
    logps, entropies, loss = [], [], 0.0
    with torch.no_grad():
        for at in heads.chunks(weight_VD.shape[0]):
            logits_HV = hidden_HD[at] @ weight_VD.T
            for some, uses in heads.blocks(at, weight_VD.shape[0]):
                part_HV = logits_HV[_within(at, some)]
                seen = _distribution(heads, some, uses, part_HV)
                logp_U, entropy_U = seen.logp_U, seen.entropy_U
                cost, by_logp_U, by_entropy_U = _priced(price, logp_U, entropy_U, uses)
                part_HV.copy_(_slope(seen, by_logp_U, by_entropy_U).div_(heads.temperature_H[some, None]))
                logps.append(logp_U)
                entropies.append(entropy_U)
                loss += cost
            slope_HV = logits_HV  # each block's slopes have overwritten its logits
            grad_hidden_HD[at] = slope_HV @ weight_VD
            if grad_VD is not None:
                for rows in heads.gradient_rows(grad_VD):
                    grad_VD[rows].add_(slope_HV[:, rows].T @ hidden_HD[at])
    return grad_hidden_HD, torch.cat(logps), torch.cat(entropies), loss


@torch.enable_grad()
def _priced(price: Price, logp_U: Tensor, entropy_U: Tensor, uses: slice) -> tuple[float, Tensor, Tensor]:
    """Return the loss and its gradients with respect to logp_U and entropy_U."""
    leaves = (logp_U.detach().requires_grad_(), entropy_U.detach().requires_grad_())
    cost = price(*leaves, uses)
    by_logp_U, by_entropy_U = torch.autograd.grad(cost, leaves, allow_unused=True, materialize_grads=True)
    return float(cost.detach()), by_logp_U, by_entropy_U


def _parts(whole: slice, size: int) -> Iterator[slice]:
    """Split a slice into parts of at most `size` entries. A `size` of at least `_LANES` is rounded down to a multiple of it."""
    step = max(1, size if size < _LANES else size // _LANES * _LANES)
    return (slice(first, min(first + step, whole.stop)) for first in range(whole.start, whole.stop, step))


def _within(chunk: slice, block: slice) -> slice:
    """Return the block as a slice relative to the start of the chunk."""
    return slice(block.start - chunk.start, block.stop - chunk.start)


def _distribution(heads: Heads, at: slice, uses: slice, logits_HV: Tensor) -> _Block:
    scaled_HV = logits_HV.float()
    slopes = heads.restrictions.change(scaled_HV, at)
    scaled_HV = scaled_HV.div_(heads.temperature_H[at, None])
    heads.restrictions.forbid(scaled_HV, at)
    prob_HV = scaled_HV.softmax(-1)
    log_norm_H = scaled_HV.amax(-1) - prob_HV.amax(-1).log()
    mean_H = torch.bmm(prob_HV[:, None, :], scaled_HV[:, :, None])[:, 0, 0]
    head_U = heads.head_U[uses] - at.start
    return _Block(scaled_HV, log_norm_H, prob_HV, log_norm_H - mean_H, head_U, heads.token_U[uses], slopes)


def _slope(block: _Block, by_logp_U: Tensor, by_entropy_U: Tensor) -> Tensor:
    """Return the gradient of the loss with respect to the model's logits, times the temperature, [H, V]. Overwrites the block's
    probabilities.

    d logp(a) / d logits = onehot(a) - p, and d entropy / d logits = -p * (log p + entropy).
    """
    zeros_H = torch.zeros_like(block.log_norm_H)
    by_logp_H = zeros_H.index_add(0, block.head_U, by_logp_U)
    if by_entropy_U.any():
        by_entropy_H = zeros_H.index_add(0, block.head_U, by_entropy_U)
        surprise_HV = block.scaled_HV.sub_((block.log_norm_H - block.entropy_H)[:, None])
        factor_HV = surprise_HV.mul_(-by_entropy_H[:, None]).sub_(by_logp_H[:, None])
        slope_HV = block.prob_HV.mul_(factor_HV)
    else:
        slope_HV = block.prob_HV.mul_(-by_logp_H[:, None])
    slope_HV.index_put_((block.head_U, block.token_U), by_logp_U, accumulate=True)
    if block.slopes is not None:
        block.slopes.apply(slope_HV)
    return slope_HV


_PREFIX = "critic/"
_STATE = ("step", "exp_avg", "exp_avg_sq")


class Critic:
    """V = w h / |h| + b, initialised to zero. Its weights and moments belong to the run's checkpoint (docs/decisions/0011)."""

    def __init__(self, width: int, device: torch.device) -> None:
        self._weights = {"weight": torch.zeros(width, device=device), "bias": torch.zeros(1, device=device)}
        for weight in self._weights.values():
            weight.requires_grad_()
        self._optimizer = AdamW(self._weights.values())
        self.forget()

    def forget(self) -> None:
        """Reset weights and moments."""
        with torch.no_grad():
            for weight in self._weights.values():
                weight.zero_()
        self._optimizer = AdamW(self._weights.values(), weight_decay=0.0, fused=False, foreach=False)

    def values(self, hidden_HD: Tensor) -> Tensor:
        """Return the values, [H], in float32, with gradients to the hidden states and the critic's weights."""
        unit_HD = torch.nn.functional.normalize(hidden_HD.float(), dim=-1)
        return unit_HD @ self._weights["weight"] + self._weights["bias"]

    def begin(self) -> None:
        self._optimizer.zero_grad()

    def step(self, learning_rate: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()

    def state(self) -> dict[str, Tensor]:
        """Return weights and moments as `critic/weight`, `critic/weight/exp_avg`, …; empty before the first step."""
        found: dict[str, Tensor] = {}
        for name, weight in self._weights.items():
            if moments := self._optimizer.state.get(weight):
                found[f"{_PREFIX}{name}"] = weight.detach()
                found |= {f"{_PREFIX}{name}/{key}": moments[key] for key in _STATE}
        return found

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned; ignore other entries."""
        self.forget()
        with torch.no_grad():
            for name, weight in self._weights.items():
                if (saved := state.get(f"{_PREFIX}{name}")) is not None:
                    weight.copy_(saved)
                    self._optimizer.state[weight] = {
                        key: state[f"{_PREFIX}{name}/{key}"].to("cpu" if key == "step" else weight.device, copy=True)
                        for key in _STATE
                    }


def without_critic(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in state.items() if not name.startswith(_PREFIX)}
