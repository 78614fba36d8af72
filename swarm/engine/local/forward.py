"""The model as the trainer sees it: float32 weights, the weights it began with, and a forward pass over prefix trees.

Suffixes of tensors: T tokens of a micro-batch, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel

from swarm.engine.local.adapters import Adapters, hosted_name
from swarm.engine.local.recomputation import recomputed_layers
from swarm.engine.seam import EngineError
from swarm.engine.tree import Segment
from swarm.protocol.runspec import LoraSpec

_ATTENTION = "prefix_tree"
_TILE = 64
"""Queries per tile of the attention."""
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_OTHER_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling")
"""Configuration fields of models whose logits are not simply hidden states times the output embedding."""


class UnsupportedModel(EngineError):
    """This trainer cannot compute the model's distribution exactly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """Tiles of about equal width: B of them, each with Q queries in a row and the K keys that any of these may see.

    query_BQ, key_BK: positions. Short tiles are filled up: queries with the last one again, keys with ones that no query sees.
    mask_BQK: 0 at ancestors and the token itself, -inf elsewhere.
    """

    query_BQ: Tensor
    key_BK: Tensor
    mask_BQK: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """A segment as tensors.

    In depth-first order the keys outside a tile are the path above its first token. place_T: where each token's result lies
    in those of all tiles, one behind the other.
    """

    token_T: Tensor
    depth_T: Tensor
    tiles: list[Tiles]
    place_T: Tensor

    @classmethod
    def of(cls, segment: Segment, dtype: torch.dtype) -> MicroBatch:
        end_T = torch.tensor(segment.end)
        count = len(segment.token)
        spans = [range(first, min(first + _TILE, count)) for first in range(0, count, _TILE)]
        keys = [[*segment.above(span.start), *span] for span in spans]
        places, before = torch.empty(count, dtype=torch.long), 0
        tiles = []
        for group in _alike([len(key) for key in keys]):
            tiles.append(_stacked([spans[tile] for tile in group], [keys[tile] for tile in group], end_T, dtype))
            width = tiles[-1].query_BQ.shape[1]
            for tile in group:
                span = spans[tile]
                places[span.start : span.stop] = torch.arange(before, before + len(span))
                before += width
        return cls(
            token_T=torch.tensor(segment.token), depth_T=torch.tensor(segment.depth), tiles=tiles, place_T=places
        )


def _alike(widths: Sequence[int]) -> list[list[int]]:
    """Which tiles go together: the widest of a group has at most a quarter more keys than the narrowest."""
    groups: list[list[int]] = []
    for tile in sorted(range(len(widths)), key=widths.__getitem__):
        if groups and widths[tile] <= 1.25 * widths[groups[-1][0]]:
            groups[-1].append(tile)
        else:
            groups.append([tile])
    return groups


def _stacked(spans: Sequence[range], keys: Sequence[Sequence[int]], end_T: Tensor, dtype: torch.dtype) -> Tiles:
    queries, width = max(map(len, spans)), max(map(len, keys))
    query_BQ = torch.tensor([[*span, *[span[-1]] * (queries - len(span))] for span in spans])
    key_BK = torch.tensor([[*key, *[-1] * (width - len(key))] for key in keys])
    filling = key_BK < 0
    key_BK = key_BK.masked_fill(filling, 0)
    query, key = query_BQ[:, :, None], key_BK[:, None, :]
    seen = (query >= key) & (query < end_T[key]) & ~filling[:, None, :]
    mask = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -torch.inf)
    return Tiles(query_BQ=query_BQ, key_BK=key_BK, mask_BQK=mask)


class _Cast:
    """A lower-precision copy of a weight, made anew when the weight has changed."""

    def __init__(self, weight: nn.Parameter, dtype: torch.dtype) -> None:
        self._weight = weight
        self._state = weight._version
        self._copy = weight.detach().to(dtype).requires_grad_(weight.requires_grad)
        if weight.requires_grad:
            self._copy.register_post_accumulate_grad_hook(self._hand_on)  # type: ignore[no-untyped-call]

    def current(self) -> Tensor:
        if self._state != self._weight._version:
            with torch.no_grad():
                self._copy.copy_(self._weight)
            self._state = self._weight._version
        return self._copy

    def _hand_on(self, copy: Tensor) -> None:
        if self._weight.grad is None or copy.grad is None:
            raise ValueError("gradients are made by `Optimizer.begin`")
        self._weight.grad.add_(copy.grad)
        copy.grad = None


class Policy:
    """One model. `start` holds the hosted weights, in the type they are stored in; every run begins with them.

    recompute: activations of a layer are computed again for the backward pass, and not kept.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        _refuse_other_logits(model)
        self.model = model.train(False)  # no dropout: the sampler has none
        self.start = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        self.model.float()
        # A gradient of the rows that were read, not of the whole table.
        model.get_input_embeddings().sparse = True  # type: ignore[assignment]
        self.compute_dtype = torch.float32
        self.recompute = False
        self.adapters: Adapters | None = None
        self._casts: dict[str, _Cast] = {}
        self.segment_tokens = _segment_tokens(model)

    @classmethod
    def load(cls, path: Path) -> Policy:
        """Raises: UnsupportedModel when the checkpoint's weights are not the model's parameters, one for one."""
        AttentionInterface.register(_ATTENTION, _tree_attention)
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype="auto", attn_implementation=_ATTENTION, local_files_only=True
        )
        _refuse_other_names(model, path)
        return cls(model)

    def adapt(self, lora: LoraSpec | None, seed: int) -> None:
        """Train new adapters from here on, made from this seed; None: all weights. All weights are reset.

        Raises: EngineError when a target is no layer of the model.
        """
        if self.adapters is not None:
            self.adapters.remove()
            self.adapters = None
        self._casts.clear()
        for weight in self.model.parameters():
            weight.grad = None
        if lora is not None:
            self.adapters = Adapters(self.model, lora, seed)
        self.reset()

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """The weights that are trained, by name."""
        return {name: weight for name, weight in self.model.named_parameters() if weight.requires_grad}

    def reset(self) -> None:
        """Back to the start weights, in place."""
        with torch.no_grad():
            for name, weight in self.model.named_parameters():
                weight.copy_(self._start_of(name))

    def _start_of(self, name: str) -> Tensor:
        """What the weight of this name begins with in every run."""
        if self.adapters is not None and name in self.adapters.start:
            return self.adapters.start[name]
        return self.start[hosted_name(name)]

    def use_dtype(self, name: str) -> None:
        """Compute in `bfloat16` (autocast) or `float32`. The weights stay float32."""
        self.compute_dtype = _DTYPES[name]

    @property
    def output_weight(self) -> nn.Parameter:
        """[V, D]; the input embedding itself in models that tie the two."""
        weight = self.model.get_output_embeddings().weight
        assert isinstance(weight, nn.Parameter)
        return weight

    @property
    def cast_output_weight(self) -> Tensor:
        """[V, D] in the compute type, without gradient."""
        weight = self.output_weight
        return weight.detach() if self.compute_dtype is torch.float32 else self._cast("output", weight).detach()

    @property
    def output_grad(self) -> Tensor | None:
        """Where the gradient by `output_weight` is added up, [V, D]; None when it is not trained."""
        grad = self.output_weight.grad
        if grad is None and self.output_weight.requires_grad:
            raise ValueError("gradients are made by `Optimizer.begin`")
        return grad

    @property
    def start_output_weight(self) -> Tensor:
        name = next(name for name, weight in self.model.named_parameters() if weight is self.output_weight)
        return self.start[name]

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Matrices are multiplied in the compute type."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self.compute_dtype is torch.bfloat16):
            yield

    def hidden(self, micro: MicroBatch) -> Tensor:
        """Last hidden states of the current weights, [T, D]."""
        embedded = self.model.get_input_embeddings()(micro.token_T)
        casts = {
            name: self._cast(name, weight) for name, weight in self._body.named_parameters() if self._is_cast(weight)
        }
        with recomputed_layers(self._body, casts) if self.recompute else nullcontext():
            return self._run(lambda **inputs: functional_call(self._body, casts, (), inputs), micro, embedded)

    def _cast(self, name: str, weight: nn.Parameter) -> Tensor:
        """The weight in the compute type, cast once for each state of it; what is its gradient is added to the weight's."""
        cast = self._casts.get(name)
        if cast is None:
            cast = self._casts[name] = _Cast(weight, self.compute_dtype)
        return cast.current()

    def start_hidden(self, micro: MicroBatch) -> Tensor:
        """The same, of the start weights. Equal to `hidden` bit for bit as long as nothing was trained."""
        body = self._body
        prefix = next(name for name, module in self.model.named_modules() if module is body)
        begun = {name: self._start_of(f"{prefix}.{name}") for name, _ in body.named_parameters()}
        weights = {name: weight if self._is_cast(weight) else weight.float() for name, weight in begun.items()}
        names = {id(weight): name for name, weight in self.model.named_parameters()}
        table = self.start[names[id(self.model.get_input_embeddings().weight)]]
        embedded = table[micro.token_T].float()
        return self._run(lambda **inputs: functional_call(body, weights, (), inputs), micro, embedded)

    def _is_cast(self, weight: Tensor) -> bool:
        """Whether autocast brings the weight to the compute type; else it takes part as float32."""
        return weight.ndim > 1 and self.compute_dtype is not torch.float32

    @property
    def _body(self) -> nn.Module:
        body = self.model.base_model
        assert isinstance(body, nn.Module)
        return body

    @staticmethod
    def _run(body: Callable[..., Any], micro: MicroBatch, embedded_TD: Tensor) -> Tensor:
        output = body(
            inputs_embeds=embedded_TD[None],
            position_ids=micro.depth_T[None],
            use_cache=False,
            micro=micro,
        )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden


def _segment_tokens(model: PreTrainedModel) -> int:
    """How many tokens are computed at once: their activations, kept for the backward pass, fill about 2 GiB."""
    config = model.config.get_text_config()
    per_layer = 60 * config.hidden_size + 18 * (getattr(config, "intermediate_size", None) or 4 * config.hidden_size)
    return int(max(256, min(4096, (1 << 31) // (per_layer * config.num_hidden_layers))))


def _tree_attention(
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
    """Each token sees its ancestors. query [1, heads, T, d]; key, value [1, kv_heads, T, d]; returns [1, T, heads, d].

    Query heads that share a key head are put behind each other, so that keys are never repeated.
    """
    if sliding_window is not None:
        raise UnsupportedModel("models with sliding-window attention cannot be trained on prefix trees")
    heads, kv_heads, width = query.shape[1], key.shape[1], query.shape[-1]
    groups = heads // kv_heads
    dtype = micro.tiles[0].mask_BQK.dtype
    rows = [tensor.to(dtype)[0].transpose(0, 1) for tensor in (query, key, value)]  # [T, heads, d]
    results = []
    for tiles in micro.tiles:
        (count, queries), keys = tiles.query_BQ.shape, tiles.key_BK.shape[1]
        q = (
            rows[0]
            .index_select(0, tiles.query_BQ.flatten())
            .view(count, queries, kv_heads, groups, width)
            .permute(0, 2, 3, 1, 4)
        )
        k, v = (
            row.index_select(0, tiles.key_BK.flatten()).view(count, keys, kv_heads, width).transpose(1, 2)
            for row in rows[1:]
        )
        seen = scaled_dot_product_attention(
            q.reshape(count, kv_heads, groups * queries, width),
            k,
            v,
            attn_mask=tiles.mask_BQK.repeat(1, groups, 1)[:, None],
            scale=scaling,
        )
        results.append(
            seen.view(count, kv_heads, groups, queries, width).permute(0, 3, 1, 2, 4).reshape(-1, heads, width)
        )
    return torch.cat(results).index_select(0, micro.place_T)[None], None


def _refuse_other_logits(model: PreTrainedModel) -> None:
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if head is None or getattr(head, "bias", None) is not None:
        raise UnsupportedModel("the trainer needs a model with an output embedding without bias")
    for name in _OTHER_LOGITS:
        if getattr(model.config, name, None) not in (None, 1, 1.0):
            raise UnsupportedModel(f"the trainer cannot recompute this model's logits: its configuration has {name}")


def _refuse_other_names(model: PreTrainedModel, path: Path) -> None:
    """What is exported for serving carries the checkpoint's own names."""
    stored: set[str] = set()
    for file in path.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            stored.update(opened.keys())
    missing = [name for name, _ in model.named_parameters() if name not in stored]
    if missing:
        raise UnsupportedModel(
            f"weights of {path.name} are stored in another layout than they are trained: {missing[:3]}"
        )
