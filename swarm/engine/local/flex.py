"""Attention over a prefix tree on a GPU: FlexAttention, with the tree as its mask.

Its backward pass assigns each block of keys to one processor, which handles all queries that see the block one after
another. All queries see a shared prefix, so the GPU would wait for that one block. Therefore a block with many readers gets
several copies, each for some of the readers, and the gradients of the copies are summed.

Tensor suffixes: T tokens of a micro-batch; N blocks of tokens; B blocks including copies; K key rows of all B blocks;
G key heads; D head width.
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
"""Maximum number of blocks, including copies, as a multiple of the original blocks; each layer keeps them for its backward pass. In a
row of N blocks that all later blocks see, each block would have N / 16 copies on average; more readers per copy still occupy every
processor."""
_KERNELS = 64
"""Maximum number of compiled kernel variants: with or without input gradients, with or without a window, in either dtype, for one
token, one block, or more. Beyond torch's default of eight, attention would hold all scores in memory, and only a log line would say
so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlexPlan:
    """The attention mask, for all layers with the same window.

    row_K: token of each row of keys.
    copy_B: key blocks, sorted by the block that they copy.
    first_N: index at which each block's copies begin.
    """

    mask: BlockMask
    row_K: Tensor
    copy_B: Tensor
    first_N: Tensor


def planned(segment: Segment, window: int | None, device: torch.device) -> FlexPlan:
    """Build the plan on the CPU, without waiting for the GPU. It needs memory for the square of the blocks, not of the tokens.

    Avoids multi-threaded torch operations: waking the threads would take longer than the whole function.
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
    """Return attention [1, T, H, D] for query [1, H, T, D] and key, value [1, G, T, D], all of one dtype. It is compiled on a GPU, and
    has a backward pass only there."""
    key, value = (_Copied.apply(tensor, plan.row_K, plan.copy_B, plan.first_N) for tensor in (key, value))  # type: ignore[no-untyped-call]
    grouped = query.shape[1] != key.shape[1]
    seen = kernel(query.is_cuda)(query, key, value, block_mask=plan.mask, scale=scale, enable_gqa=grouped)
    result: Tensor = seen.transpose(1, 2)
    return result


@cache
def kernel(compiled: bool) -> Callable[..., Any]:
    """Return FlexAttention, compiled or not."""
    if not compiled:
        return cast(Callable[..., Any], flex_attention)
    torch._dynamo.config.recompile_limit = _KERNELS
    # Without fullgraph it would run uncompiled beyond the limit.
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)


class _Copied(torch.autograd.Function):
    """[1, G, T, D] → [1, G, K, D]; the backward pass sums the gradients of all copies of a row in float32."""

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
    """Return two masks over blocks, queries by keys [N, N]: where some query sees some key, and where every query sees every key.

    Needs only the ends of the blocks' subtrees. torch's own `create_block_mask` looks at each pair of tokens and takes ten bytes for
    each.
    """
    lacking = -len(end_T) % BLOCK
    end_NB, depth_NB = (
        torch.cat([row_T, row_T[-1:].expand(lacking)]).view(-1, BLOCK)  # pad with a value that is already there
        for row_T in (end_T, depth_T)
    )
    block_N = torch.arange(len(end_NB))
    query_N1, key_1N = block_N[:, None], block_N[None, :]
    # A query block sees an earlier key block if one of its subtrees ends after the query block's first token.
    seen_NN = (key_1N == query_N1) | (key_1N < query_N1) & (end_NB.amax(1) > query_N1 * BLOCK)
    full_NN = (key_1N < query_N1) & (end_NB.amin(1) >= (query_N1 + 1) * BLOCK)
    if window is not None:
        seen_NN &= depth_NB.amin(1)[:, None] - depth_NB.amax(1) < window
        full_NN &= depth_NB.amax(1)[:, None] - depth_NB.amin(1) < window
    return seen_NN, full_NN


def _readers_of_one(seen_NN: Tensor) -> int:
    """Return the maximum number of query blocks per copy of a key block."""
    seen_N, readers = seen_NN.sum(0), _READERS
    while int((seen_N + readers - 1).div(readers, rounding_mode="floor").sum()) > _COPIES * len(seen_N):
        readers += 1
    return readers


def _copies(seen_NN: Tensor, readers: int) -> tuple[Tensor, list[int]]:
    """Return which copy of each key block each query block reads [N, N], and which block each of the B blocks copies. The first N of B
    are the original blocks."""
    count = len(seen_NN)
    part_NN = (seen_NN.cumsum(0) - 1).div(readers, rounding_mode="floor")
    extra_N = part_NN[-1].clamp(min=0)
    first_N = count + extra_N.cumsum(0) - extra_N
    block_NN = torch.arange(count).expand(count, count).where(part_NN <= 0, first_N + part_NN - 1)
    return block_NN, [*range(count), *(block for block, extra in enumerate(extra_N.tolist()) for _ in range(extra))]


def _spread(chosen_NN: Tensor, copied_NN: Tensor, count: int) -> Tensor:
    """Assign each chosen key block to the copy that its reader uses: [N, B]."""
    return torch.zeros(len(chosen_NN), count, dtype=torch.int32).scatter_add_(1, copied_NN, chosen_NN.int()).bool()


def _readers(seen_NB: Tensor) -> tuple[Tensor, Tensor]:
    """Return, for each of the B blocks, the first query block that sees it, and the one after the last."""
    place_N1 = torch.arange(len(seen_NB))[:, None]
    first_B = place_N1.where(seen_NB, len(seen_NB)).amin(0)
    return first_B, (place_N1 + 1).where(seen_NB, 0).amax(0)


def _listed(chosen_NB: Tensor) -> tuple[Tensor, Tensor]:
    """Convert to BlockMask's format: how many key blocks each query block sees, and which; the same for all heads."""
    order_NB = chosen_NB.int().argsort(dim=-1, descending=True, stable=True)
    return chosen_NB.sum(-1, dtype=torch.int32)[None, None], order_NB.int()[None, None]


def _rule(
    begin_K: Tensor, end_K: Tensor, depth_K: Tensor, depth_T: Tensor, window: int | None
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Return the mask rule. Subtrees are contiguous: a key's readers run from the key to the end of its subtree, and each reads one of
    its copies."""

    def above(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= begin_K[key]) & (query < end_K[key])

    if window is None:
        return above
    beyond_T = depth_T - window  # a tensor, because a number would be compiled as a dynamic value

    def near(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return above(batch, head, query, key) & (depth_K[key] > beyond_T[query])

    return near
