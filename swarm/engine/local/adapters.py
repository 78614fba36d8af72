"""Low-rank adapters: insert them with peft, write files that peft and vLLM read, merge them into one model.

A target's weight W becomes W + alpha / rank · B·A. A starts random and B at zero, so the model is unchanged at first.
Source: Hu et al. 2021, LoRA (arXiv 2106.09685), section 4.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from swarm.engine.training.targets import require_layers
from swarm.protocol.runspec import LoraSpec

WEIGHTS_FILE, CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"
_ADAPTER = "default"
"""peft's default name for an adapter."""
_A, _B = f".lora_A.{_ADAPTER}.weight", f".lora_B.{_ADAPTER}.weight"


class Adapters:
    """Adapters inserted into a model, until `remove`. Inserting them freezes the model's own weights and drops their values, which the
    caller must set again.

    Raises: EngineError if a target is not a linear layer of the model's body. After any error, the model has its original layers.
    """

    def __init__(self, model: nn.Module, spec: LoraSpec, seed: int) -> None:
        require_layers(spec.targets, _layers(model))
        for weight in model.parameters():
            # peft creates adapters in the dtype of the adapted weights; these need no memory yet.
            weight.data = torch.zeros((), device=weight.device).expand(weight.shape)
        self.spec = spec
        self._model = model
        try:
            self.start = self._added(seed)
        except BaseException:
            self.remove()
            raise

    def _added(self, seed: int) -> dict[str, Tensor]:
        """Insert the adapters; return their initial values."""
        from peft import LoraConfig, LoraModel

        alpha: Any = self.spec.alpha  # peft's annotation is int, but it takes any number
        config = LoraConfig(
            r=self.spec.rank, lora_alpha=alpha, target_modules=list(self.spec.targets), lora_dropout=0.0
        )
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            LoraModel(self._model, {_ADAPTER: config}, _ADAPTER)
        for name, weight in self._model.named_parameters():
            weight.requires_grad_(name.endswith((_A, _B)))
        trained = [(name, weight) for name, weight in self._model.named_parameters() if weight.requires_grad]
        return {name: weight.detach().clone() for name, weight in trained}

    def remove(self) -> None:
        """Restore the model's original layers, even if only some of them have adapters so far."""
        from peft.tuners.tuners_utils import BaseTunerLayer

        for parent in [*self._model.modules()]:
            for name, layer in [*parent.named_children()]:
                if isinstance(layer, BaseTunerLayer):
                    setattr(parent, name, layer.get_base_layer())
        if hasattr(self._model, "peft_config"):
            del self._model.peft_config
        for weight in self._model.parameters():
            weight.requires_grad_(True)


def drawn(config: Any, spec: LoraSpec, seed: int) -> dict[str, Tensor]:
    """Return the initial weights of new adapters for a model with this config, by name. Allocates no memory for the model's own
    weights."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    model._apply(lambda weight: torch.zeros((), dtype=weight.dtype).expand(weight.shape))
    return Adapters(model, spec, seed).start


def hosted_name(name: str) -> str:
    """Return the name that this weight of an adapted model has in the model without adapters."""
    return name.replace(".base_layer.", ".")


def folder_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return trained adapters under the names used in an adapter's folder."""
    return {f"base_model.model.{name.replace(f'.{_ADAPTER}.', '.')}": weight for name, weight in weights.items()}


def folder_config(spec: LoraSpec, base: str) -> dict[str, Any]:
    """Return the content of `adapter_config.json`."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": spec.rank,
        "lora_alpha": spec.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(spec.targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def merged(hosted: Mapping[str, Tensor], trained: Mapping[str, Tensor], spec: LoraSpec) -> dict[str, Tensor]:
    """Return the hosted weights with the adapters added: changed weights in float32, the others as they are."""
    result = dict(hosted)
    for name, a in trained.items():
        if not name.endswith(_A):
            continue
        stem = name.removesuffix(_A)
        own = hosted[f"{stem}.weight"]
        change = (trained[f"{stem}{_B}"] @ a) * (spec.alpha / spec.rank)
        result[f"{stem}.weight"] = own.float() + change
    return result


def _layers(model: nn.Module) -> set[str]:
    """Return the names of the linear layers in the model's body."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    return {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    }
