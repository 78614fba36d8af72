"""Tokens are drawn as often as they are probable, and never when they cannot be."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from swarm.engine.local.draw import draw, noises


def logprobs(rows: int, size: int, *, spread: float = 2.0) -> Tensor:
    made = torch.Generator().manual_seed(size)
    return (spread * torch.randn(rows, size, generator=made)).log_softmax(-1)


def noise(rows: int, size: int, seed: int = 0) -> Tensor:
    made = torch.Generator().manual_seed(seed)
    return torch.empty(rows, noises(size), dtype=torch.float64).exponential_(generator=made)


@pytest.mark.parametrize("size", [7, 257, *(pytest.param(size, marks=pytest.mark.campaign) for size in (1, 256, 1003))])
def test_each_token_is_drawn_as_often_as_it_is_probable(size: int) -> None:
    at_once, times = 20_000, 20
    row = logprobs(1, size)
    drawn = torch.cat([draw(row.expand(at_once, -1), noise(at_once, size, seed)) for seed in range(times)])
    expected = at_once * times * row[0].double().exp()
    found = torch.bincount(drawn, minlength=size).double()
    assert len(found) == size
    often = expected >= 5
    score = ((found - expected)[often] ** 2 / expected[often]).sum().item()
    freedom = int(often.sum()) - 1
    assert score < freedom + 5 * math.sqrt(2 * freedom) + 1e-6


@pytest.mark.parametrize("size", [600, 49_152])
@pytest.mark.parametrize("edge", [None, 0.0, 1e300])
def test_a_token_that_cannot_be_is_never_drawn(size: int, edge: float | None) -> None:
    allowed = torch.tensor([3, 255, 256, 511, 590])
    row = torch.full((1, size), -math.inf)
    row[:, allowed] = torch.tensor([0.1, 0.2, 0.3, 0.2, 0.2]).log()
    numbers = noise(3000, size)
    if edge is not None:
        numbers[:, ::2] = edge
    drawn = set(draw(row.expand(len(numbers), -1), numbers).tolist())
    assert drawn <= set(allowed.tolist())
    assert edge is not None or len(drawn) == len(allowed)


def test_a_row_is_drawn_alike_alone_and_among_others() -> None:
    rows, numbers = logprobs(64, 5000), noise(64, 5000)
    together = draw(rows, numbers).tolist()
    assert together == [int(draw(rows[at : at + 1], numbers[at : at + 1])) for at in range(64)]


def test_rounding_of_logits_hardly_moves_what_is_drawn() -> None:
    """As between batches of other sizes, in which bfloat16 rounds otherwise."""
    rows, numbers = logprobs(500, 49_152, spread=3.0), noise(500, 49_152)
    rounded = (rows * (1 + 0.002 * torch.randn(rows.shape, generator=torch.Generator().manual_seed(1)))).log_softmax(-1)
    distance = 0.5 * (rows.exp() - rounded.exp()).abs().sum(-1).mean().item()
    moved = (draw(rows, numbers) != draw(rounded, numbers)).double().mean().item()
    assert moved < 4 * distance
