"""The driver's settings: the model, and how ranks and replicas are placed on the nodes. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from foundation.machine import REPRODUCIBLE_SUMS
from foundation.strict import StrictModel
from swarm.engine.sampling.server import VLLM_ANYWHERE
from swarm.engine.training.limits import ModelWork
from swarm.protocol.runspec import ComputeType, LoraSpec, RunSpec

Count = Annotated[int, Field(ge=1)]
Offloaded = Literal["parameters", "optimizer"]
FusedKernels = Literal["torch", "triton"]
LEAST_TOKENS = 4096
LOOK_EVERY_S = 10.0
"""Seconds between the driver's checks that its ranks and replicas are alive."""
HUNG_STATUS = 75
"""Exit status of a driver that found a hung rank or replica."""
ON_EVERY_NODE = VLLM_ANYWHERE | REPRODUCIBLE_SUMS | {"TOKENIZERS_PARALLELISM": "false"}
"""Environment that ranks and replicas need, wherever they run."""


class VerlSettings(StrictModel):
    """Ranks train (FSDP2 over all of them); each replica samples on the devices of `tensor_parallel` neighbouring ranks."""

    model_dir: Path
    model_name: str
    max_model_len: Count
    chat_template: Path | None = None
    tool_parser: str | None = None
    ray_address: str | None = None
    """A Ray cluster that is already running (`auto`, `HOST:6379`, `ray://…`); None: start one that ends with the driver."""
    nodes: Count = 1
    ranks_per_node: Count = 1
    """Number of devices used on each node, with one rank per device."""
    tensor_parallel: Count = 1
    dtype: ComputeType = "bfloat16"
    """Compute dtype of ranks and replicas. Weights and moments of the ranks are float32."""
    adapters: LoraSpec | None = None
    """Adapters trained and served on top of the hosted weights; None: all weights are trained. If a run needs other ranks or targets,
    the driver is restarted, because FSDP splits the trained weights and vLLM reserves room for adapters when they start."""
    max_num_seqs: Count | None = None
    """Maximum number of sequences that each replica samples together; None: as in the local engine on this kind of device."""
    sampling_memory: Annotated[float, Field(gt=0, lt=1)] = 0.45
    """Share of each device's memory for its replica, which keeps it while the ranks train, unless it sleeps."""
    kv_cache_bytes: Count | None = None
    """Bytes for keys and values, instead of what `sampling_memory` leaves for them."""
    sleep: bool = False
    """Whether replicas release their device memory while a step is trained; meanwhile calls wait."""
    offload: frozenset[Offloaded] = frozenset()
    """Parts of the ranks' state to keep in host memory while they are not in use."""
    fused_kernels: FusedKernels | None = None
    """verl's kernels that compute log-probabilities from hidden states without holding the whole distribution; None: not used."""
    tokens_per_rank: Count = Field(default_factory=lambda fields: _tokens_per_rank(fields))
    """Tokens in one micro-batch of one rank; at least `max_model_len`."""

    @model_validator(mode="after")
    def _replicas_fit(self) -> VerlSettings:
        if self.ranks_per_node % self.tensor_parallel:
            raise ValueError(
                f"{self.ranks_per_node} ranks per node cannot hold replicas over {self.tensor_parallel} devices each; "
                "choose a tensor_parallel that divides ranks_per_node"
            )
        if self.tokens_per_rank < self.max_model_len:
            raise ValueError(f"tokens_per_rank must be at least max_model_len, {self.max_model_len}")
        return self

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    def work(self, device: str, *, start_s: float = 0.0) -> ModelWork:
        """Return the estimates for ranks on this kind of device (`cpu`, `cuda`)."""
        return ModelWork(model_dir=self.model_dir, device=device, devices=self.ranks, start_s=start_s)

    def silence_s(self, device: str) -> float:
        """Return how many seconds an idle rank or replica may be silent."""
        return self.work(device).silence_s(self.tokens_per_rank)


def _tokens_per_rank(fields: dict[str, Any]) -> int:
    """Return the default: one longest row, but at least enough to fill a device. Activations and distributions over tokens grow with
    it."""
    longest: int = fields.get("max_model_len", LEAST_TOKENS)
    return max(LEAST_TOKENS, longest)


def adapters_of(spec: RunSpec) -> LoraSpec | None:
    """Return the adapters that a run trains, as in `VerlSettings`; None: all weights."""
    if not isinstance(spec.parameters, LoraSpec):
        return None
    wanted = spec.parameters
    return LoraSpec(rank=wanted.rank, alpha=wanted.alpha, targets=wanted.targets)
