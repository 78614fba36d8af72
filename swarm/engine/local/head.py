"""From hidden states to log-probabilities, entropies and back, a few heads at a time: the logits never exist all at once.

Suffixes of tensors: H heads, U uses (sampled tokens), D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from swarm.engine.tree import Segment

CHUNK_LOGITS = 16_000_000
"""So many logits are held at a time: 64 MB in float32, and three times as much at the peak."""
_CHUNK_GRADIENT = 2_000_000
"""So many numbers of the output weight's gradient are added at a time."""

Price = Callable[[Tensor, Tensor, slice], Tensor]
"""(logp_U, entropy_U, which uses) → their loss, a scalar. Gradients flow into the first two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """Where distributions are needed in a micro-batch, and which tokens were drawn from each."""

    at_H: Tensor
    temperature_H: Tensor
    head_U: Tensor
    token_U: Tensor
    uses_before: list[int]
    """Uses of head h are [uses_before[h], uses_before[h + 1])."""

    @classmethod
    def of(cls, segment: Segment, device: torch.device | None = None) -> Heads:
        counts = torch.bincount(torch.tensor(segment.use_head), minlength=len(segment.head_at))
        return cls(
            at_H=torch.tensor(segment.head_at, device=device),
            temperature_H=torch.tensor(segment.head_temperature, device=device),
            head_U=torch.tensor(segment.use_head, device=device),
            token_U=torch.tensor(segment.use_token, device=device),
            uses_before=[0, *torch.cumsum(counts, 0).tolist()],
        )

    def chunks(self, vocabulary: int) -> Iterator[tuple[slice, slice]]:
        """Heads, and the uses that belong to them."""
        size = max(1, CHUNK_LOGITS // vocabulary)
        count = len(self.at_H)
        for first in range(0, count, size):
            last = min(first + size, count)
            yield slice(first, last), slice(self.uses_before[first], self.uses_before[last])


@dataclass(slots=True)
class _Chunk:
    """The distribution at some heads, and the tokens drawn there."""

    scaled_HV: Tensor
    """Logits over temperature."""
    log_norm_H: Tensor
    prob_HV: Tensor
    entropy_H: Tensor
    head_U: Tensor
    token_U: Tensor

    @property
    def logp_U(self) -> Tensor:
        return self.scaled_HV[self.head_U, self.token_U] - self.log_norm_H[self.head_U]


@torch.no_grad()
def survey(heads: Heads, hidden_HD: Tensor, weight_VD: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability of each use, and the entropy where it was drawn; both [U], in float32."""
    logps, entropies = [], []
    for at, uses in heads.chunks(weight_VD.shape[0]):
        chunk = _distribution(heads, at, uses, hidden_HD[at] @ weight_VD.T)
        logps.append(chunk.logp_U)
        entropies.append(chunk.entropy_H[chunk.head_U])
    return torch.cat(logps), torch.cat(entropies)


def descend(
    heads: Heads, hidden_HD: Tensor, weight_VD: Tensor, grad_VD: Tensor | None, price: Price
) -> tuple[Tensor, Tensor, Tensor, float]:
    """Price every use and take the loss's gradient, in one pass over the vocabulary.

    Adds the gradient by the output weight to grad_VD (None: it is not trained). hidden_HD and weight_VD come in the compute type.
    Returns: gradient by hidden_HD, logp_U, entropy_U, loss.
    """
    grad_hidden_HD = torch.empty_like(hidden_HD)
    logps, entropies, loss = [], [], 0.0
    for at, uses in heads.chunks(weight_VD.shape[0]):
        with torch.no_grad():
            chunk = _distribution(heads, at, uses, hidden_HD[at] @ weight_VD.T)
            logp_U, entropy_U = chunk.logp_U, chunk.entropy_H[chunk.head_U]
        logps.append(logp_U.clone())
        entropies.append(entropy_U.clone())
        cost = price(logp_U.requires_grad_(), entropy_U.requires_grad_(), uses)
        by_logp_U, by_entropy_U = torch.autograd.grad(
            cost, (logp_U, entropy_U), allow_unused=True, materialize_grads=True
        )
        loss += float(cost.detach())
        with torch.no_grad():
            slope_HV = _slope(chunk, by_logp_U, by_entropy_U).div_(heads.temperature_H[at, None]).to(weight_VD.dtype)
            grad_hidden_HD[at] = slope_HV @ weight_VD
            if grad_VD is not None:
                for rows in _rows(*grad_VD.shape):
                    grad_VD[rows] += slope_HV[:, rows].T @ hidden_HD[at]
    return grad_hidden_HD, torch.cat(logps), torch.cat(entropies), loss


def _rows(vocabulary: int, width: int) -> Iterator[slice]:
    """Of the output weight, a few at a time: their products stay in the cache, and no second gradient of its size is made."""
    size = max(1, _CHUNK_GRADIENT // width)
    return (slice(first, first + size) for first in range(0, vocabulary, size))


def _distribution(heads: Heads, at: slice, uses: slice, logits_HV: Tensor) -> _Chunk:
    scaled_HV = logits_HV.float().div_(heads.temperature_H[at, None])
    prob_HV = scaled_HV.softmax(-1)
    top_H, top_token_H = scaled_HV.max(-1)
    log_norm_H = top_H - prob_HV.gather(1, top_token_H[:, None])[:, 0].log()
    mean_H = torch.bmm(prob_HV[:, None, :], scaled_HV[:, :, None])[:, 0, 0]
    head_U = heads.head_U[uses] - at.start
    return _Chunk(scaled_HV, log_norm_H, prob_HV, log_norm_H - mean_H, head_U, heads.token_U[uses])


def _slope(chunk: _Chunk, by_logp_U: Tensor, by_entropy_U: Tensor) -> Tensor:
    """Gradient of the loss by the scaled logits, [H, V]; written over the chunk's probabilities.

    d logp(a) / d logits = onehot(a) - p, and d entropy / d logits = -p * (log p + entropy).
    """
    zeros_H = torch.zeros_like(chunk.log_norm_H)
    by_logp_H = zeros_H.index_add(0, chunk.head_U, by_logp_U)
    if by_entropy_U.any():
        by_entropy_H = zeros_H.index_add(0, chunk.head_U, by_entropy_U)
        surprise_HV = chunk.scaled_HV.sub_((chunk.log_norm_H - chunk.entropy_H)[:, None])
        factor_HV = surprise_HV.mul_(-by_entropy_H[:, None]).sub_(by_logp_H[:, None])
        slope_HV = chunk.prob_HV.mul_(factor_HV)
    else:
        slope_HV = chunk.prob_HV.mul_(-by_logp_H[:, None])
    slope_HV.index_put_((chunk.head_U, chunk.token_U), by_logp_U, accumulate=True)
    return slope_HV
