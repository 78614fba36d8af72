"""Extra methods of a vLLM worker: count sampled tokens, replace weights or the adapter.

The worker itself loads this module (`--worker-extension-cls`); the control process never imports it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from swarm.engine.local import cpu_kernels, mask_writer, sampled_counts
from swarm.engine.local.device_transfer import Incoming
from swarm.engine.training.weights_digest import WeightsDigest

mask_writer.register()
sampled_counts.register()
cpu_kernels.register()  # this module is loaded once, by the worker, just before it chooses its kernels

_ONLY_ADAPTER = 1
"""Number that vLLM gives to the adapter it is started with."""


class SampledCounts:
    """Mixin for vLLM's worker class. Its methods are called over `/collective_rpc` while the scheduler is paused."""

    model_runner: Any
    add_lora: Callable[[Any], bool]
    reload_weights: Callable[..., None]

    def sampled_counts(self) -> dict[str, int]:
        """See `swarm.engine.local.sampled_counts`."""
        return sampled_counts.sampled_counts(self.model_runner)

    def replace_weights(self, folder: str) -> None:
        """Replace the served weights with those in `folder`, including every copy of them."""
        self.reload_weights(weights_path=folder)
        cpu_kernels.pack_output_layer(self.model_runner.get_model())

    def take_weights(self, socket: str) -> dict[str, str]:
        """Replace the served weights with those that the trainer sends. Returns their `digest`, or in `refused` why nothing could be
        sent."""
        try:
            incoming = Incoming(Path(socket))
        except (OSError, EOFError, RuntimeError) as error:
            return {"refused": str(error) or type(error).__name__}
        digest = WeightsDigest()
        with incoming:
            self.reload_weights(weights_iterator=digest.over(incoming.weights()))
        cpu_kernels.pack_output_layer(self.model_runner.get_model())
        return {"digest": digest.hexdigest()}

    def replace_adapter(self, name: str, folder: str) -> dict[str, bool]:
        """Replace the served adapter with the one in `folder`; running requests continue with it."""
        from vllm.lora.request import LoRARequest

        wanted = LoRARequest(lora_name=name, lora_int_id=_ONLY_ADAPTER, lora_path=folder, load_inplace=True)
        return {"loaded": self.add_lora(wanted)}
