"""Sample tokens from log-probabilities: first a block of the vocabulary, then a token in it.

Tensor suffixes: B rows, V vocabulary, N blocks of the vocabulary, K tokens of a block.
"""

import torch
from torch import Tensor

_BLOCK = 256


def noises(size: int) -> int:
    """Return how many random numbers a row needs, for a vocabulary of this size."""
    return -(-size // _BLOCK) + _BLOCK


def draw(logprobs_BV: Tensor, noise: Tensor) -> Tensor:
    """Return a sampled token id for each row, [B].

    logprobs_BV: float32, -inf for impossible tokens.
    noise: independent, exponentially distributed numbers, [B, noises(V)].

    Each choice is an exponential race: each weight is divided by an exponentially distributed number, and the largest quotient wins.
    Each weight then wins with probability proportional to it (Efraimidis and Spirakis, Weighted random sampling with a reservoir,
    2006). Rounding that moves a probability a little hardly ever changes the choice; with a search in cumulative probabilities it
    would.
    """
    rows, size = logprobs_BV.shape
    blocks = noises(size) - _BLOCK
    probabilities = logprobs_BV.new_empty(rows, blocks * _BLOCK)
    probabilities[:, size:] = 0.0
    torch.exp(logprobs_BV, out=probabilities[:, :size])
    split_BNK = probabilities.view(rows, blocks, _BLOCK)
    noise = noise.clamp(min=torch.finfo(noise.dtype).tiny)
    block_B = (split_BNK.sum(-1) / noise[:, :blocks]).argmax(-1)
    chosen_BK = split_BNK[torch.arange(rows), block_B]
    return block_B * _BLOCK + (chosen_BK / noise[:, blocks:]).argmax(-1)
