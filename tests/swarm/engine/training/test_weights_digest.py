"""The digest of weights: what it tells apart, and what it takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from swarm.engine.training.weights_digest import WeightsDigest


class Allocations(TorchDispatchMode):
    """Bytes of the largest tensor that was made inside."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = {one.untyped_storage().data_ptr() for one in tree_leaves(args) if isinstance(one, Tensor)}
        for one in tree_leaves(made):
            if isinstance(one, Tensor) and one.untyped_storage().data_ptr() not in given:
                self.largest = max(self.largest, one.untyped_storage().nbytes())
        return made


def digest(weight: Tensor) -> str:
    made = WeightsDigest()
    made.add([("w", weight)])
    return made.hexdigest()


def random(size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_values_that_changed_or_changed_places_show(dtype: torch.dtype) -> None:
    weight = random(9_000_000, dtype)
    changed, exchanged = weight.clone(), weight.clone()
    changed[-1] += 1
    exchanged[[3, 8_500_000]] = weight[[8_500_000, 3]]
    assert len({digest(weight), digest(changed), digest(exchanged)}) == 3
    assert digest(weight) == digest(weight.clone())


def test_the_digest_is_over_all_bits_and_places_at_once() -> None:
    weight = random(9_000_000, torch.bfloat16)
    bits = weight.view(torch.int16).to(torch.int64)
    places = torch.arange(len(bits)) % 1_000_003 + 1
    made = WeightsDigest()
    made._lines.append(f"w {weight.dtype} {tuple(weight.shape)} {(int(bits.sum()), int((bits * places).sum()))}")
    assert made.hexdigest() == digest(weight)


def test_a_digest_takes_little_memory_beside_a_large_weight() -> None:
    weight = random(40_000_000)
    with Allocations() as seen:
        digest(weight)
    assert 0 < seen.largest <= 64 << 20
