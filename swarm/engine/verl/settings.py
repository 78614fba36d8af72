"""The driver's settings: the model, and how ranks and replicas lie on the nodes. Imports no torch."""

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
"""How often the driver checks that its ranks and replicas are alive."""
HUNG_STATUS = 75
"""Exit status of a driver that found a hung rank or replica."""
ON_EVERY_NODE = VLLM_ANYWHERE | REPRODUCIBLE_SUMS | {"TOKENIZERS_PARALLELISM": "false"}
"""The environment that ranks and replicas count on, wherever they run."""


class VerlSettings(StrictModel):
    """Ranks train (FSDP2 over all of them); each replica samples on the devices of `tensor_parallel` neighbouring ranks."""

    model_dir: Path
    model_name: str
    max_model_len: Count
    chat_template: Path | None = None
    tool_parser: str | None = None
    ray_address: str | None = None
    """A Ray cluster that runs already (`auto`, `HOST:6379`, `ray://…`); None: one that lives and dies with the driver."""
    nodes: Count = 1
    ranks_per_node: Count = 1
    """Devices that are used on each node, one rank per device."""
    tensor_parallel: Count = 1
    dtype: ComputeType = "bfloat16"
    """Compute type of ranks and replicas. Weights and moments of the ranks are float32."""
    adapters: LoraSpec | None = None
    """What is trained and served on top of the hosted weights; None: all weights. Another run may want other ranks or targets: then the
    driver is started anew, for FSDP splits what is trained and vLLM makes room for it when they start."""
    max_num_seqs: Count | None = None
    """Sequences that each replica samples at once; None: as the local engine does on this kind of device."""
    sampling_memory: Annotated[float, Field(gt=0, lt=1)] = 0.45
    """Share of each device's memory that its replica takes, and keeps while the ranks train unless it sleeps."""
    kv_cache_bytes: Count | None = None
    """Instead of what `sampling_memory` leaves for keys and values."""
    sleep: bool = False
    """Replicas give up the memory of their device while a step is trained, and calls wait."""
    offload: frozenset[Offloaded] = frozenset()
    """Parts of the ranks' state to keep in host memory while they are not in use."""
    fused_kernels: FusedKernels | None = None
    """verl's kernels that make log-probabilities of hidden states without the whole distribution in memory; None: not used."""
    tokens_per_rank: Count = Field(default_factory=lambda fields: _tokens_per_rank(fields))
    """Tokens of one micro-batch of one rank; at least `max_model_len`."""

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
        """What ranks of this kind of device (`cpu`, `cuda`) are asked for."""
        return ModelWork(model_dir=self.model_dir, device=device, devices=self.ranks, start_s=start_s)

    def silence_s(self, device: str) -> float:
        """How long a part that has nothing long to do may give no sign of life."""
        return self.work(device).silence_s(self.tokens_per_rank)


def _tokens_per_rank(fields: dict[str, Any]) -> int:
    """No more than one row takes, or what fills a device: activations and the distribution over tokens grow with them."""
    longest: int = fields.get("max_model_len", LEAST_TOKENS)
    return max(LEAST_TOKENS, longest)


def adapters_of(spec: RunSpec) -> LoraSpec | None:
    """The adapters that a run trains, as in `VerlSettings`; None: all weights."""
    if not isinstance(spec.parameters, LoraSpec):
        return None
    wanted = spec.parameters
    return LoraSpec(rank=wanted.rank, alpha=wanted.alpha, targets=wanted.targets)
