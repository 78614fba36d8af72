"""The trainer's model: trained weights in float32, the hosted weights, and a forward pass over prefix trees.

Tensor suffixes: T tokens of a micro-batch, D hidden size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.func import functional_call
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel

from swarm.engine.local import attention, layers
from swarm.engine.local.adapters import Adapters, hosted_name
from swarm.engine.local.attention import MicroBatch
from swarm.engine.local.layers import layer_by_layer, recomputed_layers
from swarm.engine.local.pinned import pinned_copies
from swarm.engine.memory.host import tokens_on_cpu
from swarm.engine.memory.model import ModelShape
from swarm.engine.memory.plan import MOST_TOKENS, TRAINER_OVERHEAD, usable
from swarm.engine.memory.training import TrainerMemory, Training
from swarm.engine.seam import EngineError
from swarm.protocol.runspec import ComputeType, LoraSpec

_LOG = logging.getLogger(__name__)
DTYPES: dict[ComputeType, torch.dtype] = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_OTHER_LOGITS = (
    "final_logit_softcapping",
    "attn_logit_softcapping",
    "logit_scale",
    "logits_scaling",
    "lm_head_multiplier",
)
"""Config fields of models whose logits are not just hidden states times the output embedding, or whose attention is not just
scaled products."""
_ATTENDING = {"full_attention", "sliding_attention", "attention"}
"""Layer types in which a token reads only its ancestors, whatever else is in the row."""
_RUNNING = {"linear_attention", "conv", "mamba", "recurrent"}
"""Layer types whose state runs along the row, so that a token reads everything before it."""
_SCALE = "scalar_embed_scale"
"""Attribute that holds the exact factor of a scaled embedding; transformers multiplies by a separate tensor, `embed_scale`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceShare:
    """The trainer's share of a GPU.

    room: bytes during a step, including CUDA's own; None: all.
    context: tokens of the longest call.
    offload: keep moments and initial weights in host memory, and copy them to the GPU when they are read.
    """

    room: int | None = None
    context: int = 0
    offload: bool = False


class UnsupportedModel(EngineError):
    """This trainer cannot compute the model's distribution exactly."""


class _Cast:
    """A lower-precision copy of a weight, refreshed when the weight has changed."""

    def __init__(self, weight: nn.Parameter, dtype: torch.dtype) -> None:
        self._weight = weight
        self._state = weight._version
        self._copy = weight.detach().to(dtype).requires_grad_(weight.requires_grad)
        if weight.requires_grad:
            # Not a bound method: a hook that refers to its own tensor would never be collected.
            self._copy.register_post_accumulate_grad_hook(partial(_hand_on, weight))  # type: ignore[no-untyped-call]

    def current(self) -> Tensor:
        if self._state != self._weight._version:
            with torch.no_grad():
                self._copy.copy_(self._weight)
            self._state = self._weight._version
        return self._copy


def _hand_on(weight: nn.Parameter, copy: Tensor) -> None:
    """Add the copy's gradient to the weight's."""
    if weight.grad is None or copy.grad is None:
        raise ValueError("call `Optimizer.begin` before computing gradients")
    weight.grad.add_(copy.grad)
    copy.grad = None


class Policy:
    """A model with the weights being trained.

    `start` holds the hosted weights in their stored dtype, in host memory if offloaded; every run begins with them. Trained weights
    are float32, in memory of their own. With adapters, the matrices are the start weights themselves, or a copy if those are not
    stored in the compute dtype; vectors are float32.

    recompute: whether a layer's activations are computed again for the backward pass instead of being kept.
    has_to_recompute: whether otherwise not even one context of maximum length fits on the device.
    segment_tokens: how many tokens are computed together, unless one context has more.
    on_trees: False for models with layers whose state runs along the row; these compute merged timelines, one at a time.
    """

    def __init__(self, model: PreTrainedModel, share: DeviceShare | None = None) -> None:
        _refuse_other_logits(model)
        self.on_trees = _reads_ancestors_alone(model)
        self.model = model.train(False)  # no dropout: the sampler has none
        self.start = {name: weight.detach() for name, weight in model.named_parameters()}
        for tensor in [*model.buffers(), *(weight for weight in model.parameters() if weight.ndim == 1)]:
            if tensor.is_floating_point():
                tensor.data = tensor.data.float()
        layers.hasten(model)
        # The gradient covers only the rows that were read, not the whole table.
        model.get_input_embeddings().sparse = True  # type: ignore[assignment]
        self.compute_dtype = torch.float32
        self.recompute = False
        self.adapters: Adapters | None = None
        self._casts: dict[str, _Cast] = {}
        self._shape = _shape_of(model, self.start)
        self._share = share or DeviceShare()
        if self.offloads:
            self.start = pinned_copies(self.start, self.device)
        self.has_to_recompute = False
        self.segment_tokens = 0
        self._fit()

    @classmethod
    def load(
        cls, path: Path, device: torch.device | None = None, *, trained: bool = True, share: DeviceShare | None = None
    ) -> Policy:
        """Load a model from a folder.

        device: None is the CPU.
        trained: False allocates memory for the hosted weights only, until `adapt`.
        share: the share of a GPU; None: all of it.

        Raises: UnsupportedModel when the checkpoint's weights do not match the model's parameters one to one.
        """
        AttentionInterface.register(attention.NAME, attention.tree_attention)
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype="auto", attn_implementation=attention.NAME, local_files_only=True
        )
        _refuse_other_names(model, path)
        nn.Module.to(model, device or torch.device("cpu"))
        policy = cls(model, share)
        if trained:
            policy.adapt(None, seed=0)
        if not policy.on_trees:
            _LOG.warning(
                "%s has layers whose state runs along the row (%s): it trains on merged timelines one by one, without a prefix tree",
                path.name,
                type(model).__name__,
            )
        return policy

    def adapt(self, lora: LoraSpec | None, seed: int) -> None:
        """Reset all weights, and from now on train new adapters initialised from this seed (None: train all weights).

        Raises: EngineError when a target is not a layer of the model.
        """
        if self.adapters is not None:
            self.adapters.remove()
            self.adapters = None
        self._casts.clear()
        for weight in self.model.parameters():
            weight.grad = None
        if lora is None:
            self._own_all()
        else:
            self.adapters = Adapters(self.model, lora, seed)
            self._hold_frozen()
        self._fit()
        if self.has_to_recompute:
            _LOG.warning(
                "activations are computed twice, because those of %d tokens would not fit in memory",
                self._share.context,
            )

    @property
    def offloads(self) -> bool:
        """True if moments and initial weights are in host memory."""
        return self._share.offload

    @property
    def memory(self) -> TrainerMemory:
        """Memory of this policy with its current training settings."""
        return self._memory(checkpointing=self.recompute)

    def _memory(self, *, checkpointing: bool) -> TrainerMemory:
        training = Training(
            dtype=_NAMES[self.compute_dtype],
            lora=self.adapters.spec if self.adapters is not None else None,
            checkpointing=checkpointing,
            offload=self.offloads,
            on_gpu=self.device.type == "cuda",
            context=self._share.context,
        )
        return TrainerMemory(self._shape, training)

    def _fit(self) -> None:
        """Choose how many tokens to compute together."""
        keeping = self._memory(checkpointing=False)
        if self.device.type == "cpu":
            self.segment_tokens = tokens_on_cpu(keeping)
            return
        device = torch.cuda.get_device_properties(self.device).total_memory
        room = (self._share.room or usable(device)) - TRAINER_OVERHEAD - keeping.standing
        self.has_to_recompute = keeping.peak(self._share.context) > room
        memory = self._memory(checkpointing=True) if self.has_to_recompute else keeping
        self.segment_tokens = memory.tokens_within(room, MOST_TOKENS)

    @torch.no_grad()
    def _own_all(self) -> None:
        """Copy the start weights to float32 parameters."""
        for name, weight in self.model.named_parameters():
            start = self.start[name]
            # Adapters that could not be inserted leave weights without memory.
            own = weight.is_contiguous() and weight.data_ptr() != start.data_ptr()
            if own and weight.dtype is torch.float32:
                weight.copy_(start)
            else:
                weight.data = start.to(weight.device, torch.float32, copy=True)

    def _hold_frozen(self) -> None:
        """Store untrained matrices in the compute dtype, and untrained vectors in float32."""
        for name, weight in self.model.named_parameters():
            if not weight.requires_grad:
                dtype = self.compute_dtype if weight.ndim > 1 else torch.float32
                weight.data = self.start[hosted_name(name)].to(weight.device, dtype)

    def rest(self) -> None:
        """Release device memory that the next step will allocate again."""
        self._casts.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """The trained weights, by name."""
        return {name: weight for name, weight in self.model.named_parameters() if weight.requires_grad}

    def _start_of(self, name: str) -> Tensor:
        """Return the value that this weight has at the start of every run."""
        if self.adapters is not None and name in self.adapters.start:
            return self.adapters.start[name]
        return self.start[hosted_name(name)]

    def use_dtype(self, dtype: Literal["auto"] | ComputeType) -> None:
        """Compute in `bfloat16` (autocast) or `float32`. Trained weights stay float32. Raises: EngineError for `auto`."""
        if dtype == "auto":
            raise EngineError("dtype is still auto; resolve it with RunSpec.computed_in")
        before, self.compute_dtype = self.compute_dtype, DTYPES[dtype]
        if self.adapters is not None and before is not self.compute_dtype:
            self._casts.clear()
            self._hold_frozen()
        if before is not self.compute_dtype:
            self._fit()
        for module in self.model.modules():
            if hasattr(module, _SCALE):  # vLLM rounds it to the compute type, as the models' authors do
                module.embed_scale.fill_(torch.tensor(getattr(module, _SCALE), dtype=self.compute_dtype))

    @property
    def device(self) -> torch.device:
        return self.output_weight.device

    @property
    def output_weight(self) -> nn.Parameter:
        """The output embedding, [V, D]; in models that tie the two, the input embedding itself."""
        weight = self.model.get_output_embeddings().weight
        assert isinstance(weight, nn.Parameter)
        return weight

    @property
    def cast_output_weight(self) -> Tensor:
        """The output embedding, [V, D], in the compute dtype, without gradient."""
        weight = self.output_weight
        return weight.detach() if weight.dtype is self.compute_dtype else self._cast("output", weight).detach()

    @property
    def output_grad(self) -> Tensor | None:
        """Accumulated gradient of `output_weight`, [V, D]; None if it is not trained."""
        grad = self.output_weight.grad
        if grad is None and self.output_weight.requires_grad:
            raise ValueError("call `Optimizer.begin` before computing gradients")
        return grad

    @property
    def start_output_weight(self) -> Tensor:
        """The initial output weight, [V, D], in the compute dtype."""
        if not self.output_weight.requires_grad:
            return self.cast_output_weight
        return self._start_named(self.output_weight).to(self.device, self.compute_dtype)

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Multiply matrices in the compute dtype within the block."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.compute_dtype is torch.bfloat16):
            yield

    def hidden(self, micro: MicroBatch) -> Tensor:
        """Return the last hidden states of the current weights, [T, D]."""
        table = self.model.get_input_embeddings()
        trained = table.weight.requires_grad
        embedded_1TD = table(micro.token_T[None]) if trained else self._start_embedded(micro.token_T)
        casts = {
            name: self._cast(name, weight)
            for name, weight in self._body.named_parameters()
            if self._is_cast(weight) and weight.dtype is not self.compute_dtype and weight is not table.weight
        }
        with recomputed_layers(self._body, casts) if self.recompute else nullcontext():
            return self._run(lambda **inputs: functional_call(self._body, casts, (), inputs), micro, embedded_1TD)

    def _cast(self, name: str, weight: nn.Parameter) -> Tensor:
        """Return the weight in the compute dtype, cast again only if it has changed; its gradient is added to the weight's."""
        cast = self._casts.get(name)
        if cast is None:
            cast = self._casts[name] = _Cast(weight, self.compute_dtype)
        return cast.current()

    def start_hidden(self, micro: MicroBatch) -> Tensor:
        """Return the last hidden states of the start weights, [T, D]. Before any training they equal `hidden` bit for bit."""
        body, table = self._body, self.model.get_input_embeddings().weight
        prefix = next(name for name, module in self.model.named_modules() if module is body)
        begun = {
            name: self._start_of(f"{prefix}.{name}")
            for name, weight in body.named_parameters()
            if weight.requires_grad and weight is not table
        }
        embedded_1TD = self._start_embedded(micro.token_T)
        required = self.offloads and self.adapters is None  # adapters are small
        with layer_by_layer(body, begun, self._ready, required=required) as others:
            return self._run(lambda **inputs: functional_call(body, others, (), inputs), micro, embedded_1TD)

    def _ready(self, start: Tensor) -> Tensor:
        """Return a start weight on the device, in the dtype that the forward pass uses."""
        return start.to(self.device, start.dtype if self._is_cast(start) else torch.float32)

    def _start_embedded(self, token_T: Tensor) -> Tensor:
        """Embed tokens with the start weights, [1, T, D].

        Calls the model's own embedding, because it may scale its rows. Only the rows that are read become float32.
        """
        table = copy(self.model.get_input_embeddings())
        table.padding_idx = None  # it names a row of the whole table
        start_VD = self._start_named(self.model.get_input_embeddings().weight)
        rows_TD = start_VD[token_T.to(start_VD.device)].to(self.device, torch.float32)
        embedded: Tensor = functional_call(
            table, {"weight": rows_TD}, (torch.arange(len(token_T), device=self.device)[None],)
        )
        return embedded

    def _start_named(self, weight: nn.Parameter) -> Tensor:
        """Return the hosted model's original value of this weight, as stored."""
        return self.start[next(name for name, other in self.model.named_parameters() if other is weight)]

    def _is_cast(self, weight: Tensor) -> bool:
        """Return whether autocast casts the weight to the compute dtype; otherwise it stays float32."""
        return weight.ndim > 1 and self.compute_dtype is not torch.float32

    @property
    def _body(self) -> nn.Module:
        body = self.model.base_model
        assert isinstance(body, nn.Module)
        return body

    @staticmethod
    def _run(body: Callable[..., Any], micro: MicroBatch, embedded_1TD: Tensor) -> Tensor:
        output = body(
            inputs_embeds=embedded_1TD,
            position_ids=micro.depth_T[None],
            use_cache=False,
            micro=micro,
        )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden


def _shape_of(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> ModelShape:
    """Describe the model's shape. `weights` must have their stored dtypes."""
    described = ModelShape.described(model.config.get_text_config().to_dict())
    count = sum(weight.numel() for weight in weights.values())
    stored = sum(weight.nbytes for weight in weights.values())
    largest = max(weights.values(), key=Tensor.numel)
    return replace(described, parameters=count, stored=stored, stored_as=_NAMES.get(largest.dtype))


def _reads_ancestors_alone(model: PreTrainedModel) -> bool:
    """Return whether a token reads only its ancestors in every layer. Raises: UnsupportedModel for layer types with other rules."""
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    if other := sorted(kinds - _ATTENDING - _RUNNING):
        raise UnsupportedModel(f"the trainer does not support this model's layer types: {', '.join(other)}")
    return not (kinds & _RUNNING or model._is_stateful)


def _refuse_other_logits(model: PreTrainedModel) -> None:
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if head is None or getattr(head, "bias", None) is not None:
        raise UnsupportedModel("the trainer needs a model that has an output embedding without bias")
    config = model.config.get_text_config()
    for name in _OTHER_LOGITS:
        if getattr(config, name, None) not in (None, 1, 1.0):
            raise UnsupportedModel(f"the trainer cannot recompute this model's logits: its configuration sets {name}")


def _refuse_other_names(model: PreTrainedModel, path: Path) -> None:
    """Refuse checkpoints whose weight names differ from the model's: exported weights must carry the checkpoint's names."""
    stored: set[str] = set()
    for file in path.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            stored.update(opened.keys())
    missing = [name for name, _ in model.named_parameters() if name not in stored]
    if missing:
        raise UnsupportedModel(f"{path.name} stores no weights with the names of these trained weights: {missing[:3]}")
