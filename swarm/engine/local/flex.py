"""Attention over a prefix tree on a GPU: FlexAttention, with the tree as its mask.

Its backward pass assigns each block of keys to one processor, which handles all queries that see the block one after
another. All queries see a shared prefix, so the GPU would wait for that one block. Therefore a block with many readers gets
several copies, each for some of the readers, and the gradients of the copies are summed.

Suffixes of tensors: T tokens of a micro-batch; N blocks of tokens, B blocks with copies; K rows of keys, those of all B blocks;
G key heads, D width of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import embedding_bag

from swarm.engine.tree import Segment

BLOCK = 128
"""Queries, or keys, per block."""
_READERS = 8
"""Query blocks per copy of a key block: fewer would mean more copies, more would mean longer waits."""
_COPIES = 4
"""Most blocks, copies included, as a multiple of the blocks: each layer keeps them for its backward pass. In a row of N blocks
that all later ones see, each block would have N / 16 copies on average; more readers per copy still occupy every processor."""
_KERNELS = 64
"""Most compiled variants of the kernel: with or without gradients of inputs, with or without a window, in either type, for one
token, one block, or more. Beyond torch's default of eight it would hold all scores at once, and only a log line would say so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlexPlan:
    """The attention mask, for all layers with the same window.

    row_K: token of each row of keys. copy_B: key blocks, sorted by the block that they copy; first_N: where each block's copies
    begin.
    """

    mask: BlockMask
    row_K: Tensor
    copy_B: Tensor
    first_N: Tensor


def planned(segment: Segment, window: int | None, device: torch.device) -> FlexPlan:
    """Build the plan on the CPU, without waiting for the GPU; needs memory for blocks squared, not for tokens squared.

    Avoids multi-threaded torch operations: waking the threads would take longer than all of this.
    """
    end_T, depth_T = torch.tensor(segment.end), torch.tensor(segment.depth)
    seen_NN, full_NN = blocks(end_T, depth_T, window)
    copied_NN, origin_B = _copies(seen_NN, _readers_of_one(seen_NN))
    seen_NB, full_NB = (_spread(chosen_NN, copied_NN, len(origin_B)) for chosen_NN in (seen_NN, full_NN))
    count = len(end_T)
    place_K = (torch.tensor(origin_B)[:, None] * BLOCK + torch.arange(BLOCK)).flatten()
    row_K = place_K.clamp(max=count - 1)
    first_K, last_K = ((BLOCK * bound_B)[:, None].expand(-1, BLOCK).flatten() for bound_B in _readers(seen_NB))
    end_K, depth_K = end_T.index_select(0, row_K), depth_T.index_select(0, row_K)
    begin_K = first_K.maximum(place_K)
    end_K = last_K.minimum(end_K).where(place_K < count, 0)  # no query sees the padding of the last block
    begin_K, end_K, depth_K, depth_T = (one.to(device) for one in (begin_K, end_K, depth_K, depth_T))
    mask = BlockMask.from_kv_blocks(
        *_listed(seen_NB & ~full_NB),
        *_listed(full_NB),
        BLOCK_SIZE=BLOCK,
        mask_mod=_rule(begin_K, end_K, depth_K, depth_T, window),
        seq_lengths=(count, len(row_K)),
    )
    order_B = sorted(range(len(origin_B)), key=origin_B.__getitem__)
    first_N = [0] * len(seen_NN)
    for place, block in reversed([*enumerate(sorted(origin_B))]):
        first_N[block] = place
    return FlexPlan(
        mask=mask.to(device),
        row_K=row_K.to(device),
        copy_B=torch.tensor(order_B, device=device),
        first_N=torch.tensor(first_N, device=device),
    )


def attend(query: Tensor, key: Tensor, value: Tensor, plan: FlexPlan, scale: float) -> Tensor:
    """query [1, H, T, D]; key, value [1, G, T, D]; all in one type. Returns [1, T, H, D]. Compiled on a GPU, where alone it has a backward pass."""
    key, value = (_Copied.apply(tensor, plan.row_K, plan.copy_B, plan.first_N) for tensor in (key, value))  # type: ignore[no-untyped-call]
    grouped = query.shape[1] != key.shape[1]
    seen = kernel(query.is_cuda)(query, key, value, block_mask=plan.mask, scale=scale, enable_gqa=grouped)
    result: Tensor = seen.transpose(1, 2)
    return result


@cache
def kernel(compiled: bool) -> Callable[..., Any]:
    """FlexAttention itself."""
    if not compiled:
        return cast(Callable[..., Any], flex_attention)
    torch._dynamo.config.recompile_limit = _KERNELS
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)  # else it would go on uncompiled at the limit


class _Copied(torch.autograd.Function):
    """[1, G, T, D] → [1, G, K, D]; backwards, what all copies of a row received is added up in float32."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, row_K: Tensor, copy_B: Tensor, first_N: Tensor) -> Tensor:
        ctx.save_for_backward(copy_B, first_N)
        ctx.count = tensor.shape[2]
        return tensor.index_select(2, row_K)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        copy_B, first_N = ctx.saved_tensors
        _, heads, _, width = grad.shape
        by_block = grad[0].view(heads, -1, BLOCK, width).transpose(0, 1).reshape(len(copy_B), -1).float()
        summed = embedding_bag(copy_B, by_block, first_N, mode="sum").view(-1, heads, BLOCK, width)
        by_row = summed.transpose(0, 1).reshape(1, heads, -1, width)[:, :, : ctx.count]
        return by_row.to(grad.dtype), None, None, None


def blocks(end_T: Tensor, depth_T: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
    """Of all blocks of queries [N, by keys N]: those with a pair that may see each other, and those in which every pair does.

    From the ends of the blocks' subtrees alone. torch's own `create_block_mask` looks at each pair of tokens, ten bytes for each.
    """
    lacking = -len(end_T) % BLOCK
    end_NB, depth_NB = (
        torch.cat([row_T, row_T[-1:].expand(lacking)]).view(-1, BLOCK)  # no value that is not there already
        for row_T in (end_T, depth_T)
    )
    block_N = torch.arange(len(end_NB))
    query_N1, key_1N = block_N[:, None], block_N[None, :]
    # Keys of blocks before reach at least to a query's block when a subtree ends behind its first token.
    seen_NN = (key_1N == query_N1) | (key_1N < query_N1) & (end_NB.amax(1) > query_N1 * BLOCK)
    full_NN = (key_1N < query_N1) & (end_NB.amin(1) >= (query_N1 + 1) * BLOCK)
    if window is not None:
        seen_NN &= depth_NB.amin(1)[:, None] - depth_NB.amax(1) < window
        full_NN &= depth_NB.amax(1)[:, None] - depth_NB.amin(1) < window
    return seen_NN, full_NN


def _readers_of_one(seen_NN: Tensor) -> int:
    """Most query blocks per copy of a key block."""
    seen_N, readers = seen_NN.sum(0), _READERS
    while int((seen_N + readers - 1).div(readers, rounding_mode="floor").sum()) > _COPIES * len(seen_N):
        readers += 1
    return readers


def _copies(seen_NN: Tensor, readers: int) -> tuple[Tensor, list[int]]:
    """(which copy each query block reads of each key block [N, N]; the block that each of B copies). The first N of B are the
    original blocks."""
    count = len(seen_NN)
    part_NN = (seen_NN.cumsum(0) - 1).div(readers, rounding_mode="floor")
    extra_N = part_NN[-1].clamp(min=0)
    first_N = count + extra_N.cumsum(0) - extra_N
    block_NN = torch.arange(count).expand(count, count).where(part_NN <= 0, first_N + part_NN - 1)
    return block_NN, [*range(count), *(block for block, extra in enumerate(extra_N.tolist()) for _ in range(extra))]


def _spread(chosen_NN: Tensor, copied_NN: Tensor, count: int) -> Tensor:
    """The chosen key blocks, each at the copy that its reader uses: [N, B]."""
    return torch.zeros(len(chosen_NN), count, dtype=torch.int32).scatter_add_(1, copied_NN, chosen_NN.int()).bool()


def _readers(seen_NB: Tensor) -> tuple[Tensor, Tensor]:
    """For each of B, the first query block that sees it, and the one after the last."""
    place_N1 = torch.arange(len(seen_NB))[:, None]
    first_B = place_N1.where(seen_NB, len(seen_NB)).amin(0)
    return first_B, (place_N1 + 1).where(seen_NB, 0).amax(0)


def _listed(chosen_NB: Tensor) -> tuple[Tensor, Tensor]:
    """BlockMask's format: how many key blocks each query block sees, and which; the same for all heads."""
    order_NB = chosen_NB.int().argsort(dim=-1, descending=True, stable=True)
    return chosen_NB.sum(-1, dtype=torch.int32)[None, None], order_NB.int()[None, None]


def _rule(
    begin_K: Tensor, end_K: Tensor, depth_K: Tensor, depth_T: Tensor, window: int | None
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The mask rule. Subtrees are contiguous: a key's readers run from it to the end of its subtree, and each reads one of its copies."""

    def above(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= begin_K[key]) & (query < end_K[key])

    if window is None:
        return above
    beyond_T = depth_T - window  # a tensor: a number would be compiled as one that may change

    def near(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return above(batch, head, query, key) & (depth_K[key] > beyond_T[query])

    return near
