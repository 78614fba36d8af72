"""Attention over a prefix tree: each token sees only itself and its ancestors, whatever else is in the row.

On the CPU it works in tiles of queries. A tile's keys are the path above it and the tile itself, so there is no need for
repeated prefixes, nor for a mask as large as the tree's size squared. Scores and attention weights have the compute dtype, with
float32 inside the softmax; the backward pass recomputes them. On a GPU it uses FlexAttention, with the same rule as mask (`flex`).

Tensor suffixes: T tokens of a micro-batch; B tiles of about equal width, with Q queries and K keys each; H query heads,
G key heads, R query heads per key head; D head width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn.functional import embedding_bag

from swarm.engine.seam import EngineError
from swarm.engine.tree import Segment

if TYPE_CHECKING:
    from swarm.engine.local.flex import FlexPlan

NAME = "prefix_tree"
"""Name under which transformers knows this attention."""
_TILE, _LONG_TILE = 64, 128
"""Queries per tile: larger tiles for long paths, because they share more keys."""
_LONG = 512
"""A path with at least this many tokens is long."""
_SCORES = 1 << 20
"""Maximum number of scores held at a time: 2 MB in bfloat16, so that they stay in the cache."""
_COPIES = 1 << 20
"""Maximum number of key copies held at a time: 0.5 GB for heads of width 64."""
_LANES = 32
"""Numbers per vector instruction. Padding rows of scores to a multiple of this cuts the softmax's time by a third."""

_OTHER_SCORES = ("softcap", "s_aux")
"""Arguments of unsupported attention variants: capped scores, and attention sinks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """A stack of tiles. Queries are consecutive positions; keys are padded with positions that no query sees."""

    query_BQ: Tensor
    key_BK: Tensor
    mask_BQK: Tensor
    """0 at ancestors and the token itself, -inf elsewhere; in bfloat16, which represents both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathering:
    """Source indices of the rows in one stack of tiles. Heads and tokens share one index."""

    mask_B1QK: Tensor
    query_N: Tensor
    """Indices into [H * T], shape [B * G * R * Q]."""
    key_N: Tensor
    """Indices into [G * T], shape [B * G * K]."""
    shape: tuple[int, int, int, int, int]
    """B, G, R, Q, K"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Stacks whose key gradients are summed together. There are several batches because, on a long path, all stacks together could have
    T² / 128 key rows.

    slot_N: key rows of its stacks, sorted by the key that they copy.
    first_GT: index at which each key's copies begin.
    """

    gatherings: list[Gathering]
    slot_N: Tensor
    first_GT: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All tiles of a micro-batch for a given number of heads.

    `place_TH` has the position of each token's result among the query rows of all tiles.
    """

    batches: list[Batch]
    place_TH: Tensor

    @property
    def gatherings(self) -> Iterator[Gathering]:
        """The gatherings of all batches, in order."""
        return (part for batch in self.batches for part in batch.gatherings)


@dataclass(slots=True, kw_only=True)
class MicroBatch:
    """A segment as tensors on one device."""

    token_T: Tensor
    depth_T: Tensor
    tiles: list[Tiles]
    """Tiles for the CPU; empty on a GPU."""
    segment: Segment
    _plans: dict[tuple[int, int, int | None], Plan] = field(default_factory=dict)
    _flex_plans: dict[int | None, FlexPlan] = field(default_factory=dict)

    @classmethod
    def of(cls, segment: Segment, device: torch.device | None = None) -> MicroBatch:
        on_cpu = device is None or device.type == "cpu"
        return cls(
            token_T=torch.tensor(segment.token, device=device),
            depth_T=torch.tensor(segment.depth, device=device),
            tiles=list(_tiles(segment, torch.tensor(segment.end))) if on_cpu else [],
            segment=segment,
        )

    def plan(self, heads: int, kv_heads: int, window: int | None) -> Plan:
        """Return the plan for the CPU; layers with equal heads and window share it."""
        key = (heads, kv_heads, window)
        if key not in self._plans:
            depth_T = self.depth_T if window is not None else None
            self._plans[key] = _planned(self.tiles, len(self.token_T), heads, kv_heads, depth_T, window)
        return self._plans[key]

    def flex_plan(self, window: int | None) -> FlexPlan:
        """Return the plan for a GPU; layers with equal windows share it."""
        from swarm.engine.local.flex import planned

        if window not in self._flex_plans:
            self._flex_plans[window] = planned(self.segment, window, self.token_T.device)
        return self._flex_plans[window]


# -- what transformers calls ----------------------------------------------------------------------------------------------


def tree_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    micro: MicroBatch,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **ignored: object,
) -> tuple[Tensor, None]:
    """Compute attention for transformers: query [1, H, T, D]; key, value [1, G, T, D]; returns [1, T, H, D].

    With `sliding_window`, a token sees only this many of its nearest ancestors, itself included, as if its path were a row of its own.
    Raises: EngineError for attention variants whose scores are not just scaled products.
    """
    if others := [name for name in _OTHER_SCORES if ignored.get(name) is not None]:
        raise EngineError(f"the trainer cannot recompute this model's attention: it uses {', '.join(others)}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if query.is_cuda:
        from swarm.engine.local.flex import attend

        dtype = _compute_dtype(query)
        return attend(query.to(dtype), key.to(dtype), value.to(dtype), micro.flex_plan(sliding_window), scale), None
    plan = micro.plan(query.shape[1], key.shape[1], sliding_window)
    return tiled(query[0], key[0], value[0], plan, scale)[None], None


def tiled(query_HTD: Tensor, key_GTD: Tensor, value_GTD: Tensor, plan: Plan, scale: float) -> Tensor:
    """Return the attention output [T, H, D], in autocast's dtype if autocast is on, else in the queries' dtype."""
    seen: Tensor = _Tiled.apply(query_HTD, key_GTD, value_GTD, plan, scale)  # type: ignore[no-untyped-call]
    return seen


class _Tiled(torch.autograd.Function):
    """Softmax attention, computed tile by tile."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, query_HTD: Tensor, key_GTD: Tensor, value_GTD: Tensor, plan: Plan, scale: float
    ) -> Tensor:
        dtype = _compute_dtype(query_HTD)
        rows = [_rows(tensor, dtype) for tensor in (query_HTD, key_GTD, value_GTD)]
        ctx.save_for_backward(*rows)
        ctx.plan, ctx.scale = plan, scale  # type: ignore[attr-defined]
        query_ND, key_ND, value_ND = rows
        results = []
        with torch.autocast("cpu", enabled=False):
            for part in plan.gatherings:
                prob, _, _ = _probabilities(part, query_ND, key_ND, scale)
                results.append(torch.bmm(prob, _keys(value_ND, part)).flatten(0, 1))
        return torch.cat(results).index_select(0, plan.place_TH.flatten()).view(*plan.place_TH.shape, -1)

    @staticmethod
    def backward(ctx: Any, grad_THD: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query_ND, key_ND, value_ND = ctx.saved_tensors
        plan, scale, dtype = ctx.plan, ctx.scale, query_ND.dtype
        grad_ND = _rows(grad_THD.transpose(0, 1), dtype)
        by_query: list[Tensor] = []
        of_key, of_value = (torch.zeros(key_ND.shape, dtype=torch.float32) for _ in range(2))
        with torch.autocast("cpu", enabled=False):
            for batch in plan.batches:
                by_key, by_value = [], []
                for part in batch.gatherings:
                    prob, scaled, key = _probabilities(part, query_ND, key_ND, scale)
                    grad = _queries(grad_ND, part)
                    by_value.append(torch.bmm(prob.transpose(1, 2), grad).flatten(0, 1))
                    slope = torch.bmm(grad, _keys(value_ND, part).transpose(1, 2))
                    slope = torch._softmax_backward_data(slope, prob, -1, dtype)
                    by_query.append(torch.bmm(slope, key).mul_(scale).flatten(0, 1))
                    by_key.append(torch.bmm(slope.transpose(1, 2), scaled).flatten(0, 1))
                of_key += _summed(by_key, batch)
                of_value += _summed(by_value, batch)
        of_query = torch.cat(by_query).index_select(0, plan.place_TH.T.flatten())
        # Autograd casts each gradient to the dtype of its tensor.
        return _by_head(of_query, plan), _by_head(of_key, plan), _by_head(of_value, plan), None, None


def _compute_dtype(query: Tensor) -> torch.dtype:
    """Return autocast's dtype if autocast is on, else the queries' dtype."""
    device = query.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query.dtype


def _rows(tensor_HTD: Tensor, dtype: torch.dtype) -> Tensor:
    """Flatten heads and tokens into rows, [H * T, D]."""
    return tensor_HTD.to(dtype).reshape(-1, tensor_HTD.shape[-1])


def _by_head(rows_ND: Tensor, plan: Plan) -> Tensor:
    """Split rows by head, [H, T, D]."""
    return rows_ND.view(-1, len(plan.place_TH), rows_ND.shape[-1])


def _queries(rows_ND: Tensor, part: Gathering) -> Tensor:
    """Gather the queries of a stack, [B * G, R * Q, D]."""
    tiles, groups, ratio, queries, _ = part.shape
    return rows_ND.index_select(0, part.query_N).view(tiles * groups, ratio * queries, -1)


def _keys(rows_ND: Tensor, part: Gathering) -> Tensor:
    """Gather the keys of a stack, [B * G, K, D]."""
    tiles, groups, _, _, keys = part.shape
    return rows_ND.index_select(0, part.key_N).view(tiles * groups, keys, -1)


def _probabilities(part: Gathering, query_ND: Tensor, key_ND: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the attention weights [B * G, R * Q, K], the scaled queries, and the keys."""
    tiles, groups, ratio, queries, keys = part.shape
    scaled, key = _queries(query_ND, part).mul_(scale), _keys(key_ND, part)
    score = torch.bmm(scaled, key.transpose(1, 2)).view(tiles, groups * ratio, queries, keys).add_(part.mask_B1QK)
    return score.softmax(-1).view(tiles * groups, ratio * queries, keys), scaled, key


def _summed(parts: Sequence[Tensor], batch: Batch) -> Tensor:
    """Sum all copies of each key, in float32, [G * T, D]."""
    return embedding_bag(batch.slot_N, torch.cat(list(parts)).float(), batch.first_GT, mode="sum")


# -- tiles ------------------------------------------------------------------------------------------------------------------


def _tiles(segment: Segment, end_T: Tensor) -> Iterator[Tiles]:
    """Cut the segment into tiles. In depth-first order, the keys outside a tile are the path above its first token."""
    count = len(segment.token)
    height = _LONG_TILE if max(segment.depth) >= _LONG else _TILE
    spans = [range(first, min(first + height, count)) for first in range(0, count, height)]
    keys = [[*segment.above(span.start), *span] for span in spans]
    for stack in _alike([len(span) for span in spans], [len(key) for key in keys]):
        yield _stacked([spans[tile] for tile in stack], [keys[tile] for tile in stack], end_T)


def _alike(heights: Sequence[int], widths: Sequence[int]) -> list[list[int]]:
    """Group tiles into stacks with the same number of queries, in which the widest tile has at most a quarter more keys than the
    narrowest."""
    stacks: list[list[int]] = []
    for tile in sorted(range(len(widths)), key=lambda tile: (heights[tile], widths[tile])):
        first = stacks[-1][0] if stacks else tile
        if stacks and heights[tile] == heights[first] and widths[tile] <= 1.25 * widths[first]:
            stacks[-1].append(tile)
        else:
            stacks.append([tile])
    return stacks


def _stacked(spans: Sequence[range], keys: Sequence[Sequence[int]], end_T: Tensor) -> Tiles:
    width = -(-max(map(len, keys)) // _LANES) * _LANES
    query_BQ = torch.tensor([[*span] for span in spans])
    key_BK = torch.tensor([[*key, *[-1] * (width - len(key))] for key in keys])
    filling = key_BK < 0
    key_BK = key_BK.masked_fill(filling, 0)
    query, key = query_BQ[:, :, None], key_BK[:, None, :]
    seen = (query >= key) & (query < end_T[key]) & ~filling[:, None, :]
    mask_BQK = torch.zeros(seen.shape, dtype=torch.bfloat16).masked_fill_(~seen, -torch.inf)
    return Tiles(query_BQ=query_BQ, key_BK=key_BK, mask_BQK=mask_BQK)


def _planned(
    tiles: Sequence[Tiles], count: int, heads: int, kv_heads: int, depth_T: Tensor | None, window: int | None
) -> Plan:
    gatherings = [
        gathered
        for stack in tiles
        for some in _split(stack, heads)
        for gathered in [_gathering(some, count, heads, kv_heads, depth_T, window)]
    ]
    query_N = torch.cat([part.query_N for part in gatherings])
    place_HT = torch.empty(heads * count, dtype=torch.long)
    place_HT[query_N] = torch.arange(heads * count)
    batches = [_batch(some, kv_heads * count) for some in _within_copies(gatherings)]
    return Plan(batches=batches, place_TH=place_HT.view(heads, count).T.contiguous())


def _within_copies(gatherings: Sequence[Gathering]) -> Iterator[list[Gathering]]:
    """Group consecutive stacks with at most `_COPIES` key rows in total; a single stack may have more."""
    some, copies = list[Gathering](), 0
    for part in gatherings:
        if some and copies + len(part.key_N) > _COPIES:
            yield some
            some, copies = [], 0
        some.append(part)
        copies += len(part.key_N)
    yield some


def _batch(gatherings: list[Gathering], keys: int) -> Batch:
    """Combine stacks into a batch. `keys` is G * T."""
    key_N = torch.cat([part.key_N for part in gatherings])
    copies = torch.bincount(key_N, minlength=keys)
    return Batch(gatherings=gatherings, slot_N=key_N.argsort(stable=True), first_GT=copies.cumsum(0) - copies)


def _split(stack: Tiles, heads: int) -> Iterator[Tiles]:
    """Split the stack into parts whose scores fit into the cache."""
    count, queries, keys = stack.mask_BQK.shape
    size = max(1, _SCORES // (heads * queries * keys))
    for first in range(0, count, size):
        part = slice(first, first + size)
        yield Tiles(query_BQ=stack.query_BQ[part], key_BK=stack.key_BK[part], mask_BQK=stack.mask_BQK[part])


def _gathering(
    tiles: Tiles, count: int, heads: int, kv_heads: int, depth_T: Tensor | None, window: int | None
) -> Gathering:
    mask_BQK = tiles.mask_BQK
    if depth_T is not None and window is not None:
        distance_BQK = depth_T[tiles.query_BQ][:, :, None] - depth_T[tiles.key_BK][:, None, :]
        mask_BQK = mask_BQK.masked_fill(distance_BQK >= window, -torch.inf)
    first_H, first_G = torch.arange(heads) * count, torch.arange(kv_heads) * count
    (size, queries), keys = tiles.query_BQ.shape, tiles.key_BK.shape[1]
    return Gathering(
        mask_B1QK=mask_BQK[:, None],
        query_N=(tiles.query_BQ[:, None, :] + first_H[None, :, None]).flatten(),
        key_N=(tiles.key_BK[:, None, :] + first_G[None, :, None]).flatten(),
        shape=(size, kv_heads, heads // kv_heads, queries, keys),
    )
