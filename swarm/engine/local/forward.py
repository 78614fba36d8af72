"""The model as the trainer sees it: float32 weights, the weights it began with, and a forward pass over prefix trees.

Suffixes of tensors: T tokens of a micro-batch, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel

from swarm.engine.seam import EngineError
from swarm.engine.tree import Segment

_ATTENTION = "prefix_tree"
_TILE = 128
"""Queries per tile of the attention."""
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_OTHER_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling")
"""Configuration fields of models whose logits are not simply hidden states times the output embedding."""


class UnsupportedModel(EngineError):
    """This trainer cannot compute the model's distribution exactly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """A segment as tensors. Attention is computed in tiles: some queries in a row, and the keys that any of them may see.

    sizes: queries per tile. keys: positions of all tiles' keys. masks: per tile [queries, keys], 0 at ancestors and the
    token itself, -inf elsewhere. In depth-first order the keys outside a tile are the path above its first token.
    """

    token_T: Tensor
    depth_T: Tensor
    sizes: list[int]
    keys: Tensor
    masks: list[Tensor]

    @classmethod
    def of(cls, segment: Segment, dtype: torch.dtype) -> MicroBatch:
        end_T = torch.tensor(segment.end)
        sizes, keys, masks = [], [], []
        for first in range(0, len(segment.token), _TILE):
            query = torch.arange(first, min(first + _TILE, len(segment.token)))
            key = torch.cat([torch.tensor(segment.above(first), dtype=torch.long), query])
            seen = (query[:, None] >= key) & (query[:, None] < end_T[key])
            sizes.append(len(query))
            keys.append(key)
            masks.append(torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -torch.inf))
        return cls(
            token_T=torch.tensor(segment.token),
            depth_T=torch.tensor(segment.depth),
            sizes=sizes,
            keys=torch.cat(keys),
            masks=masks,
        )


class Policy:
    """One model. `start` holds the weights that every run begins with, in the type they are stored in."""

    def __init__(self, model: PreTrainedModel) -> None:
        _refuse_other_logits(model)
        self.model = model.train(False)  # no dropout: the sampler has none
        self.start = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        self.model.float()
        self.compute_dtype = torch.float32
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

    def reset(self) -> None:
        """Back to the start weights, in place."""
        with torch.no_grad():
            for name, weight in self.model.named_parameters():
                weight.copy_(self.start[name])

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
    def output_grad(self) -> Tensor:
        """Where the gradient by `output_weight` is added up, [V, D]."""
        grad = self.output_weight.grad
        if grad is None:
            raise ValueError("gradients are made by `Optimizer.begin`")
        return grad

    @property
    def start_output_weight(self) -> Tensor:
        name = next(name for name, weight in self.model.named_parameters() if weight is self.output_weight)
        return self.start[name]

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Weights are cast once inside one of these. Not to be shared by passes with and without gradient."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self.compute_dtype is torch.bfloat16):
            yield

    def hidden(self, micro: MicroBatch) -> Tensor:
        """Last hidden states of the current weights, [T, D]."""
        embedded = self.model.get_input_embeddings()(micro.token_T)
        return self._run(self._body, micro, embedded)

    def start_hidden(self, micro: MicroBatch) -> Tensor:
        """The same, of the start weights. Equal to `hidden` bit for bit as long as nothing was trained."""
        body = self._body
        prefix = next(name for name, module in self.model.named_modules() if module is body)
        weights = {
            name.removeprefix(f"{prefix}."): weight if self._is_cast(weight) else weight.float()
            for name, weight in self.start.items()
            if name.startswith(f"{prefix}.")
        }
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
    """How many tokens are computed at once: their activations, kept for the backward pass, fill about 1.5 GiB."""
    config = model.config.get_text_config()
    per_layer = 60 * config.hidden_size + 18 * (getattr(config, "intermediate_size", None) or 4 * config.hidden_size)
    return int(max(256, min(4096, 3 * (1 << 29) // (per_layer * config.num_hidden_layers))))


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
    kv_heads = key.shape[1]
    groups = query.shape[1] // kv_heads
    dtype = micro.masks[0].dtype
    keys = key.to(dtype)[0].index_select(1, micro.keys)
    values = value.to(dtype)[0].index_select(1, micro.keys)
    queries = query.to(dtype)[0].view(kv_heads, groups, *query.shape[2:])
    tiles = []
    widths = [mask.shape[1] for mask in micro.masks]
    for q, k, v, mask in zip(
        torch.split(queries, micro.sizes, 2),
        torch.split(keys, widths, 1),
        torch.split(values, widths, 1),
        micro.masks,
        strict=True,
    ):
        flat = q.reshape(1, kv_heads, -1, q.shape[-1])
        seen = scaled_dot_product_attention(flat, k[None], v[None], attn_mask=mask.repeat(groups, 1), scale=scaling)
        tiles.append(seen.reshape(q.shape))
    return torch.cat(tiles, dim=2).flatten(0, 1).transpose(0, 1)[None], None


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
