"""FlexAttention over prefix trees: its mask of blocks, the copies of keys that many see, and what a GPU makes of it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from swarm.engine.local import attention, flex
from swarm.engine.local.attention import MicroBatch
from swarm.engine.tree import Branch, Segment, cut, grow
from tests.swarm.engine.batches import call

from .test_attention import NEEDS_GPU, WIDTH, dense, rows, segment_of

CPU = torch.device("cpu")


def long_segment(answers: int = 3) -> Segment:
    """A shared prompt of several blocks, then answers of which each fills some: 1,500 tokens, no whole number of blocks."""
    prompt = [1, *(10 + at % 50 for at in range(399))]
    made = [call(str(number), prompt, [70 + number, *(10 + at % 40 for at in range(366))]) for number in range(answers)]
    (segment,) = cut(grow([Branch(call=one, advantage=1.0, weight=1.0) for one in made]), 10_000)
    assert len(segment.token) % flex.BLOCK
    return segment


def one_row(tokens: int) -> Segment:
    """A timeline without a fork."""
    row = [*range(tokens)]
    return Segment(token=row, depth=row, parent=[at - 1 for at in row], end=[tokens] * tokens)


class Largest(TorchDispatchMode):
    """Numbers in the largest tensor that was made inside."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.numbers = max([self.numbers, *(one.numel() for one in tree_leaves(made) if isinstance(one, Tensor))])
        return made


def listed(mask: BlockMask) -> tuple[Tensor, Tensor]:
    """[N, B] each: blocks that are looked into, and blocks that are taken whole."""
    assert mask.full_kv_num_blocks is not None
    assert mask.full_kv_indices is not None
    both = []
    for counts, order in ((mask.kv_num_blocks, mask.kv_indices), (mask.full_kv_num_blocks, mask.full_kv_indices)):
        there = torch.arange(order.shape[-1]) < counts[..., None]
        both.append(torch.zeros_like(there).scatter(-1, order.long(), there)[0, 0])
    return both[0], both[1]


def exact_blocks(segment: Segment, window: int | None) -> tuple[Tensor, Tensor]:
    """The same for all pairs of blocks, from all pairs of tokens."""
    end_T, depth_T = torch.tensor(segment.end), torch.tensor(segment.depth)

    def rule(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        near = depth_T[query] - depth_T[key] < (window or len(depth_T))
        return (query >= key) & (query < end_T[key]) & near

    count = len(end_T)
    return listed(create_block_mask(rule, B=None, H=None, Q_LEN=count, KV_LEN=count, device="cpu"))


@pytest.mark.parametrize("window", [None, 7, 300])
def test_blocks_of_a_long_tree_leave_out_nothing_that_is_seen(window: int | None) -> None:
    segment = long_segment()
    there, whole = exact_blocks(segment, window)
    seen, full = flex.blocks(torch.tensor(segment.end), torch.tensor(segment.depth), window)
    assert seen[there | whole].all()
    assert whole[full].all()
    if window is None:
        assert torch.equal(seen, there | whole)
        assert torch.equal(full, whole)
    assert int(seen.sum()) < seen.numel() * 0.6


@pytest.mark.parametrize("readers", [1, 2, 5, 100])
def test_every_copy_of_a_block_has_few_readers_and_together_they_have_all(
    monkeypatch: pytest.MonkeyPatch, readers: int
) -> None:
    monkeypatch.setattr(flex, "_READERS", readers)
    monkeypatch.setattr(flex, "_COPIES", 100)
    segment = long_segment()
    plan = flex.planned(segment, None, CPU)
    partial, full = listed(plan.mask)
    assert not (partial & full).any()
    assert int((partial | full).sum(0).max()) <= readers
    origin = plan.row_K.view(-1, flex.BLOCK)[:, 0] // flex.BLOCK
    together = torch.zeros(len(partial), len(partial), dtype=torch.int32)
    together.index_add_(1, origin, (partial | full).int())
    there, whole = exact_blocks(segment, None)
    assert torch.equal(together, (there | whole).int())
    assert (len(plan.row_K) == len(partial) * flex.BLOCK) == (readers == 100)


@pytest.mark.parametrize("tokens", [100, 5_000, 9_000, 32_768])
def test_the_keys_of_a_long_row_are_copied_a_few_times_at_most(tokens: int) -> None:
    plan = flex.planned(one_row(tokens), None, CPU)
    partial, full = listed(plan.mask)
    blocks = len(partial)
    assert flex.BLOCK * blocks <= len(plan.row_K) <= 4 * flex.BLOCK * blocks
    assert int((partial | full).sum()) == blocks * (blocks + 1) // 2
    assert int((partial | full).sum(0).max()) <= max(8, blocks / 6)


def test_what_the_copies_receive_is_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "_READERS", 1)
    segment = long_segment()
    plan = flex.planned(segment, None, CPU)
    _, key, _ = rows(segment)
    copied = flex._Copied.apply(key, plan.row_K, plan.copy_B, plan.first_N)
    assert torch.equal(copied, key[:, :, plan.row_K])
    place = torch.arange(flex.BLOCK) + flex.BLOCK * (plan.row_K.view(-1, flex.BLOCK)[:, :1] // flex.BLOCK)
    slope = torch.randn(copied.shape) * (place.flatten() < key.shape[2])[:, None]  # no query sees what fills up
    (ours,) = torch.autograd.grad(copied, key, slope)
    (theirs,) = torch.autograd.grad(key[:, :, plan.row_K], key, slope)
    assert torch.allclose(ours, theirs, atol=1e-5)


def test_a_mask_of_blocks_takes_nothing_that_grows_with_the_pairs_of_tokens() -> None:
    segment = long_segment()
    with Largest() as seen:
        plan = flex.planned(segment, None, CPU)
    assert seen.numbers <= len(plan.row_K)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [None, 7, pytest.param(200, marks=pytest.mark.campaign)])
@pytest.mark.parametrize("readers", [1, 3, pytest.param(8, marks=pytest.mark.campaign)])
@pytest.mark.parametrize("made", [segment_of, long_segment])
@torch.no_grad()
def test_flex_attention_follows_the_rule(
    monkeypatch: pytest.MonkeyPatch, made: Any, readers: int, window: int | None
) -> None:
    monkeypatch.setattr(flex, "_READERS", readers)
    segment: Segment = made()
    inputs = [tensor.detach() for tensor in rows(segment)]
    ours = flex.attend(*inputs, flex.planned(segment, window, CPU), WIDTH**-0.5)
    assert torch.allclose(ours.double(), dense(segment, *inputs, window), atol=1e-5)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, CompileCounterWithBackend]]:
    """The kernel as a GPU compiles it, by a compiler that a CPU has; what counts how often."""
    counter = CompileCounterWithBackend("eager")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=torch._dynamo.config.recompile_limit):
        yield flex.kernel.__wrapped__(True), counter


@pytest.mark.campaign
@pytest.mark.filterwarnings("default")
@torch.no_grad()
def test_every_form_of_flex_attention_is_compiled(traced: tuple[Any, CompileCounterWithBackend]) -> None:
    kernel, counter = traced
    forms = [(w, d, t) for w in (None, 7) for d in (torch.float32, torch.bfloat16) for t in (1, 100, 300)]
    for number, (window, dtype, tokens) in enumerate(forms):
        plan = flex.planned(one_row(tokens), window, CPU)
        query, key = (torch.randn(1, 2, rows, WIDTH, dtype=dtype) for rows in (tokens, len(plan.row_K)))
        kernel(query, key, key, block_mask=plan.mask, scale=WIDTH**-0.5)
        assert counter.frame_count > number


@pytest.mark.campaign
@pytest.mark.filterwarnings("default")  # the compiler's own
@torch.no_grad()
def test_flex_attention_is_traced_for_all_windows_and_lengths_by_a_few_sizes(
    traced: tuple[Any, CompileCounterWithBackend],
) -> None:
    kernel, counter = traced
    first = 0
    for window in (7, 9):
        for answers in (3, 5, 7, 9):  # without copies and with some
            segment = long_segment(answers)
            plan, (query, key, value) = flex.planned(segment, window, CPU), [one.detach() for one in rows(segment)]
            copied = (one[:, :, plan.row_K] for one in (key, value))
            ours = kernel(query, *copied, block_mask=plan.mask, scale=WIDTH**-0.5, enable_gqa=True)
            assert torch.allclose(ours.transpose(1, 2).double(), dense(segment, query, key, value, window), atol=1e-5)
        first = counter.frame_count if window == 7 else first
    assert counter.frame_count == first <= 3


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("made", [segment_of, long_segment])
def test_flex_attention_on_a_gpu_equals_the_tiles(made: Any, window: int | None) -> None:
    segment: Segment = made()
    here, there = rows(segment), rows(segment, device="cuda")
    ours, _ = attention.tree_attention(
        torch.nn.Module(), *here, None, micro=MicroBatch.of(segment), sliding_window=window
    )
    micro = MicroBatch.of(segment, torch.device("cuda"))
    theirs, _ = attention.tree_attention(torch.nn.Module(), *there, None, micro=micro, sliding_window=window)
    assert torch.allclose(ours, theirs.cpu(), atol=1e-5)
    slope = torch.randn(ours.shape, generator=torch.Generator().manual_seed(2))
    by_ours, by_theirs = torch.autograd.grad(ours, here, slope), torch.autograd.grad(theirs, there, slope.cuda())
    for mine, other in zip(by_ours, by_theirs, strict=True):
        assert torch.allclose(mine, other.cpu(), atol=1e-4)
