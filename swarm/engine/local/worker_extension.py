"""What a vLLM worker is asked in addition to what it offers: tokens sampled so far, another adapter, the weights it holds.

Loaded by the worker itself (`--worker-extension-cls`); the control process never imports it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import equal

from swarm.engine.local import cpu_kernels

cpu_kernels.register()  # this module is loaded once, by the worker, just before it chooses its kernels

_ONLY_ADAPTER = 1
"""The number that vLLM gives to the adapter it is started with."""


class SampledCounts:
    """Mixed into vLLM's worker class; called over `/collective_rpc` while the scheduler is paused."""

    model_runner: Any
    add_lora: Callable[[Any], bool]

    def sampled_counts(self) -> dict[str, int]:
        """Sampled tokens of every request that the worker holds, by vLLM's internal request id."""
        return {name: len(request.output_token_ids) for name, request in self.model_runner.requests.items()}

    def replace_adapter(self, name: str, folder: str) -> dict[str, bool]:
        """Load the adapter in `folder` in the place of the one that is served; requests that run go on with it."""
        from vllm.lora.request import LoRARequest

        wanted = LoRARequest(lora_name=name, lora_int_id=_ONLY_ADAPTER, lora_path=folder, load_inplace=True)
        return {"loaded": self.add_lora(wanted)}

    def differing_weights(self, folder: str) -> list[str]:
        """Embeddings and norms of the running model that are not those in `folder`.

        The matrices between them are packed for the processor and cannot be compared; they come from the same file in the
        same pass. Nothing to compare counts as a difference.
        """
        held = dict(self.model_runner.model.named_parameters())
        differing, compared = [], 0
        for file in sorted(Path(folder).glob("*.safetensors")):
            with safe_open(file, framework="pt") as stored:
                for name in stored.keys():  # noqa: SIM118  (not a dictionary)
                    if name not in held or not (held[name].ndim == 1 or name.endswith("embed_tokens.weight")):
                        continue
                    weight = stored.get_tensor(name)
                    compared += 1
                    if not equal(held[name][: len(weight)], weight.to(held[name].dtype)):
                        differing.append(name)
        return differing if compared else ["(none of its weights could be found)"]
