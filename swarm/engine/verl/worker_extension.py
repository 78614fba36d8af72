"""Extra methods of a replica's vLLM workers: counts of sampled tokens, and a digest of the weights.

The worker itself loads this module (`worker_extension_cls`); the control process never imports it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from verl.utils.vllm import TensorLoRARequest
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from vllm.model_executor.models.utils import WeightsMapper
from vllm.platforms import current_platform

from swarm.engine.local import sampled_counts
from swarm.engine.local.cpu_kernels import pack_output_layer
from swarm.engine.training.weights_digest import WeightsDigest
from swarm.engine.verl.transfer import of_this_change

if not hasattr(WeightsMapper, "get_unstacked_mapper"):  # verl 0.9.1 uses the name that vLLM had for it until 0.24
    WeightsMapper.get_unstacked_mapper = WeightsMapper.get_rename_mapper

sampled_counts.register()

_ONLY_ADAPTER = 1
"""Number that vLLM gives to the adapter it is started with."""


class ReplicaWorker(vLLMColocateWorkerExtension):  # type: ignore[misc]
    """Mixin for vLLM's worker class. Its methods are called over `collective_rpc`."""

    model_runner: Any
    add_lora: Callable[[Any], bool]
    _digest: WeightsDigest
    _word: str

    def sampled_counts(self) -> dict[str, int]:
        """See `swarm.engine.local.sampled_counts`."""
        return sampled_counts.sampled_counts(self.model_runner)

    def weights_digest(self) -> str:
        """Return the digest of the weights from the latest update."""
        return self._digest.hexdigest()

    def update_weights_from_ipc(
        self,
        peft_config: dict[str, Any] | None = None,
        base_sync_done: bool = False,
        use_shm: bool = False,
        *,
        word: str,
    ) -> None:
        """Receive the ranks' weights and load them.

        `word` is unique to this change of weights. With a `peft_config`, they are the weights of adapters.
        """
        self._word = word
        self._digest = WeightsDigest()
        if current_platform.is_cpu() and peft_config is None:
            self._reload(use_shm)
        else:
            super().update_weights_from_ipc(peft_config, base_sync_done, use_shm)

    def _get_zmq_handle(self) -> str:
        return of_this_change(super()._get_zmq_handle(), self._word)

    def _update_weights(
        self, weights: Iterable[tuple[str, Tensor]], peft_config: dict[str, Any] | None, base_sync_done: bool
    ) -> None:
        received = list(weights)
        self._digest.add(received)
        if peft_config is None:
            super()._update_weights(received, peft_config, base_sync_done)
            return
        adapter = TensorLoRARequest(
            lora_name="trained",
            lora_int_id=_ONLY_ADAPTER,
            lora_path="the ranks",
            peft_config=peft_config,
            lora_tensors=dict(received),
            load_inplace=True,  # running requests continue with it
        )
        if not self.add_lora(adapter):
            raise RuntimeError("vLLM did not load the adapters")

    def _reload(self, use_shm: bool) -> None:
        """Load weights through vLLM's layer-wise reload, the only way on its CPU backend, which has packed its linear layers."""
        received: list[tuple[str, Tensor]] = []
        receiver = BucketedWeightReceiver(zmq_handle=self._get_zmq_handle(), device=self.device, use_shm=use_shm)
        receiver.receive_weights(on_bucket_received=_keeper(received))
        self._digest.add(received)
        self.model_runner.reload_weights(weights_iterator=iter(received), is_checkpoint_format=True)
        pack_output_layer(self.model_runner.get_model())


def _keeper(received: list[tuple[str, Tensor]]) -> Callable[[list[tuple[str, Tensor]], bool], None]:
    """Return a callback that copies each bucket, because the next one reuses its memory."""

    def keep(bucket: list[tuple[str, Tensor]], is_last: bool) -> None:
        received.extend((name, tensor.clone()) for name, tensor in bucket)

    return keep
