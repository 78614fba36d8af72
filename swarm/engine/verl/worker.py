"""One rank of the training half: verl's actor and rollout worker, with the additional methods that our runs need.

Runs inside Ray's actors. Only FSDP2; parameters are float32, split over all ranks.
"""

from __future__ import annotations

import math
import platform
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from peft.tuners.lora import LoraLayer
from tensordict import TensorDict
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.modules.dropout import _DropoutNd
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils import tensordict_utils as verl_tensors
from verl.utils.device import get_torch_device
from verl.utils.fsdp_utils import fsdp2_clip_grad_norm_
from verl.utils.memory_utils import aggressive_empty_cache
from verl.workers.engine_workers_tinker import TinkerActorRolloutRefWorker

from foundation.paths import memory_dir
from swarm.engine.local.adapters import drawn, folder_config
from swarm.engine.local.checkpoints import Stored, stored
from swarm.engine.training.shards import WRAPPER
from swarm.engine.training.weights_digest import WeightsDigest
from swarm.engine.verl.collective import on_all_or_none
from swarm.engine.verl.config import configured_adapters
from swarm.engine.verl.room import Room
from swarm.engine.verl.transfer import meeting
from swarm.protocol.runspec import LoraSpec

_ADAMW = {"step", "exp_avg", "exp_avg_sq"}


class RankWorker(TinkerActorRolloutRefWorker):  # type: ignore[misc]
    """One rank. Its methods are called on all ranks together, through verl's worker group."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def init_model(self) -> None:
        """Build the model and the optimizer, and remember this rank's share of the initial trained weights."""
        super().init_model()
        self._adapters = configured_adapters(self.config.model)
        if self._adapters is not None:
            _scale(self.actor.engine.module, self._adapters)
        _drop_nothing(self.actor.engine.module)
        self._remember_start()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)  # type: ignore[untyped-decorator]
    def room(self) -> Room:
        """Return the resources that this rank finds, before it uses any."""
        free, total = get_torch_device().mem_get_info()
        shared = shutil.disk_usage(memory_dir()).free
        return Room(node=platform.node(), shared_bytes=shared, device_bytes=free, device_total_bytes=total)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def to_start(self, seed: int, adapters_seed: int, alpha: float | None = None) -> None:
        """Reset to the hosted weights, with new adapters if these are trained, without moments and with a fresh random generator.

        `alpha` replaces the adapters' alpha from now on; None keeps it.
        """
        engine = self.actor.engine
        with engine.train_mode(), torch.no_grad():
            if self._adapters is not None:
                self._adapters = self._adapters.model_copy(update={} if alpha is None else {"alpha": alpha})
                _scale(engine.module, self._adapters)
                self._draw_adapters(self._adapters, adapters_seed)
                self._remember_start()
            for name, shard in self._shards().items():
                shard.copy_(self._start[name])
            engine.optimizer.state.clear()
        torch.manual_seed(seed)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def take_optimizer_step(self, learning_rate: float, weight_decay: float, max_grad_norm: float) -> dict[str, float]:
        """Make one optimizer step on the accumulated gradients.

        Returns the gradient norm over all ranks before clipping, and this rank's squared norms of the change of its weights (`moved`)
        and of its weights before the step. If the norm is not finite, no weight moves.
        """
        engine = self.actor.engine
        with engine.train_mode(zero_grad_on_exit=True):
            for group in engine.optimizer.param_groups:
                group.update(lr=learning_rate, weight_decay=weight_decay)
            norm = fsdp2_clip_grad_norm_(engine.module.parameters(), max_norm=max_grad_norm)
            grad_norm = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
            shards = self._shards()
            before = {name: shard.detach().clone() for name, shard in shards.items()}
            if math.isfinite(grad_norm):
                engine.optimizer.step()
            moved = sum(_squared(shards[name] - old) for name, old in before.items())
            return {"grad_norm": grad_norm, "moved": moved, "before": sum(map(_squared, before.values()))}

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))  # type: ignore[untyped-decorator]
    def compute_start_log_prob(self, data: TensorDict) -> TensorDict | None:
        """Return log-probabilities of the rows under the initial weights, which replace the current ones for this call."""
        # Offloading would replace the tensors meanwhile.
        verl_tensors.assign_non_tensor(data, disable_auto_offload=True)
        with self.actor.engine.eval_mode(), torch.no_grad():
            shards = self._shards()
            kept = {name: shard.clone() for name, shard in shards.items()}
            for name, shard in shards.items():
                shard.copy_(self._start[name])
            try:
                output: TensorDict | None = self.actor.infer_batch(data)
            finally:
                for name, shard in shards.items():
                    shard.copy_(kept[name])
        return None if output is None else output.cpu()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def give_back(self) -> None:
        """Release device memory that torch has cached."""
        aggressive_empty_cache(force_sync=True)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def save_checkpoint(self, local_path: str) -> None:
        """Write this rank's part into the folder. Raises: OSError or RuntimeError, on all ranks if any rank fails."""
        on_all_or_none(lambda: self.actor.save_checkpoint(local_path))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def take_over(self, folder: str) -> None:
        """Read weights and moments of a checkpoint that others wrote. Raises: OSError or RuntimeError, on all ranks if any rank
        fails."""
        engine = self.actor.engine
        with engine.train_mode(), torch.no_grad():
            on_all_or_none(lambda: self._take_over(stored(Path(folder))))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)  # type: ignore[untyped-decorator]
    async def send_weights(self, step: int, word: str) -> str:
        """Send the weights to this rank's replica; return the digest of what was sent. `word` is unique to this change of weights."""
        weights, _ = self.actor.engine.get_per_tensor_param(base_sync_done=True)
        named = weights.items() if isinstance(weights, Mapping) else weights
        peft = None if self._adapters is None else folder_config(self._adapters, "hosted")
        digest = WeightsDigest()
        with meeting(self.rollout, word):
            await self.rollout.update_weights(
                digest.over(named), peft_config=peft, base_sync_done=True, global_steps=step, word=word
            )
        return digest.hexdigest()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)  # type: ignore[untyped-decorator]
    def alive(self) -> None:
        """Do nothing: the answer shows that the rank is alive."""

    def _trained(self) -> dict[str, Any]:
        """Return the trained weights, each split over all ranks."""
        return {name: weight for name, weight in self.actor.engine.module.named_parameters() if weight.requires_grad}

    def _shards(self) -> dict[str, Tensor]:
        """Return this rank's part of each trained weight."""
        return {name: _shard(weight) for name, weight in self._trained().items()}

    def _take_over(self, found: Stored) -> None:
        states = self.actor.engine.optimizer.state
        states.clear()
        for name, weight in self._trained().items():
            bare = name.removeprefix(WRAPPER)
            _shard(weight).copy_(_shard(_split_as(weight, found.weight(bare))))
            moments = found.moments(bare)
            if moments.keys() <= _ADAMW:  # another optimizer's moments are of no use
                states[weight] = {
                    kind: _split_as(weight, value) if value.ndim else value.clone() for kind, value in moments.items()
                }

    def _remember_start(self) -> None:
        self._start = {name: weight.cpu().clone() for name, weight in self._shards().items()}

    def _draw_adapters(self, adapters: LoraSpec, seed: int) -> None:
        """Initialise the adapters as the local engine does from this seed, whatever the number of ranks."""
        start = drawn(self.actor.engine.model_config.hf_config, adapters, seed)
        for name, weight in self._trained().items():
            _shard(weight).copy_(_shard(_split_as(weight, start[name.removeprefix(WRAPPER)])))


def _shard(weight: Tensor) -> Tensor:
    """Return this rank's part of the weight."""
    part: Tensor = getattr(weight, "_local_tensor", weight)
    return part.detach()


def _split_as(weight: Tensor, whole: Tensor) -> Tensor:
    """Split `whole`, of which every rank has a copy, over the ranks in the same way as `weight`."""
    whole = whole.to(weight.device)
    if not isinstance(weight, DTensor):
        return whole
    return distribute_tensor(whole, weight.device_mesh, weight.placements, src_data_rank=None)


def _scale(model: nn.Module, adapters: LoraSpec) -> None:
    """Scale the output of adapters by alpha / rank, whatever verl made of alpha."""
    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.scaling = dict.fromkeys(module.scaling, adapters.alpha / adapters.rank)


def _drop_nothing(model: nn.Module) -> None:
    """Disable dropout during training: the replicas have none, so sampled tokens would get other log-probabilities.

    verl computes steps in training mode, which gradient checkpointing needs. Modules read their rates from attributes of their
    own or of their configuration.
    """
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.p = 0.0
        owned = [module] if (config := getattr(module, "config", None)) is None else [module, config]
        for owner in owned:
            for name in [name for name, value in vars(owner).items() if "drop" in name and isinstance(value, float)]:
                setattr(owner, name, 0.0)


def _squared(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.detach())) ** 2
