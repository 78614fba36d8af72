"""`prompt_tails` as a vLLM connector (`--kv-transfer-config`).

vLLM creates two instances: one for the scheduler, and one in the worker, which copies. Here both are in one process; for each
step, the first passes its plan to the second. The control process never imports this module.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import Request, RequestStatus

from swarm.engine.local.prompt_tails import Copies, PromptTails

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput


@dataclass
class Plan(KVConnectorMetadata):  # type: ignore[misc]
    """The scheduler's message to the worker for a step."""

    copies: Copies


class TailsConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Connects `PromptTails` to vLLM. Models with several kinds of caches share only whole blocks."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        groups = kv_cache_config.kv_cache_groups
        # With windowed attention, a running request frees the blocks behind its window.
        self._usable = len(groups) == 1 and isinstance(groups[0].kv_cache_spec, FullAttentionSpec)
        self._tails = PromptTails(int(vllm_config.cache_config.block_size), _runs, self._blocks_of)
        self._layers: list[Tensor] = []

    @property
    def requires_kv_delivery(self) -> bool:
        """False: no data leaves this process."""
        return False

    # -- for the scheduler ----------------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._tails.available(self._key(request), request, num_computed_tokens), False

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self._tails.give(self._key(request), request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Plan:
        return Plan(self._tails.take_copies())

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._tails.finish(self._key(request), request)
        return False, None

    def _key(self, request: Request) -> Hashable:
        embedded = request.prompt_token_ids is None or request.mm_features or request.prompt_embeds is not None
        if not self._usable or embedded:
            return None
        adapter = request.lora_request.lora_int_id if request.lora_request else None
        return adapter, request.cache_salt, tuple(request.prompt_token_ids or ())

    def _blocks_of(self, request_id: str) -> list[int]:
        assert self._kv_cache_manager is not None
        return list(self._kv_cache_manager.get_block_ids(request_id)[0])

    # -- in the worker --------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """Remember the caches. `kv_caches` has one per layer, [blocks, …]; the layout within a block does not matter."""
        self._layers = list(kv_caches.values())

    def start_load_kv(self, forward_context: Any, **_: Any) -> None:
        plan = self._get_connector_metadata()
        assert isinstance(plan, Plan)
        if not plan.copies.sources:
            return
        sources, targets = torch.tensor(plan.copies.sources), torch.tensor(plan.copies.targets)
        for layer in self._layers:
            layer.index_copy_(0, targets, layer.index_select(0, sources))

    def wait_for_layer_load(self, layer_name: str) -> None:
        """No-op: all layers are copied before the step."""

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **_: Any) -> None:
        """No-op: nothing is stored elsewhere."""

    def wait_for_save(self) -> None:
        """No-op: nothing is stored elsewhere."""


def _runs(request: Any) -> bool:
    return bool(request.status == RequestStatus.RUNNING)
