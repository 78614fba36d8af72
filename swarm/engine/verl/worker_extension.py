"""What each vLLM worker of a replica is asked beside what verl asks: counts of sampled tokens, and a digest of its weights.

Loaded by the worker itself (`worker_extension_cls`); the control process never imports it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from vllm.platforms import current_platform

from swarm.engine.local.cpu_kernels import pack_output_layer
from swarm.engine.verl.transfer import WeightsDigest, of_this_change


class ReplicaWorker(vLLMColocateWorkerExtension):  # type: ignore[misc]
    """Mixed into vLLM's worker class; called over `collective_rpc`."""

    model_runner: Any
    _digest: WeightsDigest
    _word: str

    def sampled_counts(self) -> dict[str, int]:
        """Sampled tokens of every request that the worker holds, by vLLM's internal request id."""
        return {name: len(request.output_token_ids) for name, request in self.model_runner.requests.items()}

    def weights_digest(self) -> str:
        """Of the weights that came with the newest update."""
        return self._digest.hexdigest()

    def update_weights_from_ipc(
        self,
        peft_config: dict[str, Any] | None = None,
        base_sync_done: bool = False,
        use_shm: bool = False,
        *,
        word: str,
    ) -> None:
        """Receive the ranks' weights and load them. word: of this change of weights alone."""
        self._word = word
        self._digest = WeightsDigest()
        if current_platform.is_cpu():
            self._reload(use_shm)
        else:
            super().update_weights_from_ipc(peft_config, base_sync_done, use_shm)

    def _get_zmq_handle(self) -> str:
        return of_this_change(super()._get_zmq_handle(), self._word)

    def _update_weights(self, weights: Iterable[tuple[str, Tensor]], **fields: Any) -> None:
        received = list(weights)
        self._digest.add(received)
        super()._update_weights(received, **fields)

    def _reload(self, use_shm: bool) -> None:
        """vLLM's CPU backend has packed its linear layers, so that weights go in through its layer-wise reload alone."""
        received: list[tuple[str, Tensor]] = []
        receiver = BucketedWeightReceiver(zmq_handle=self._get_zmq_handle(), device=self.device, use_shm=use_shm)
        receiver.receive_weights(on_bucket_received=_keeper(received))
        self._digest.add(received)
        self.model_runner.reload_weights(weights_iterator=iter(received), is_checkpoint_format=True)
        pack_output_layer(self.model_runner.get_model())


def _keeper(received: list[tuple[str, Tensor]]) -> Callable[[list[tuple[str, Tensor]], bool], None]:
    """Copies each bucket: its memory is used again for the next one."""

    def keep(bucket: list[tuple[str, Tensor]], is_last: bool) -> None:
        received.extend((name, tensor.clone()) for name, tensor in bucket)

    return keep
