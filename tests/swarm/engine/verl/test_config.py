"""What verl is told of our settings."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from swarm.engine.verl.settings import VerlSettings
from swarm.models.folder import ModelFolder
from swarm.protocol.runspec import LoraSpec

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="needs verl: `make verl`"),
    pytest.mark.filterwarnings("default"),  # verl's and hydra's own
]


@pytest.fixture
def flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    made = types.ModuleType("flash_attn")
    made.__spec__ = importlib.machinery.ModuleSpec("flash_attn", None)
    monkeypatch.setitem(sys.modules, "flash_attn", made)


def settings(**fields: Any) -> VerlSettings:
    return VerlSettings(**{"model_dir": Path("/m"), "model_name": "m", "max_model_len": 64} | fields)


def test_flash_attention_is_left_alone_by_a_server_that_computes_in_float32(
    cpu_platform: None, flash_attention: None
) -> None:
    from swarm.engine.verl.config import packed

    assert packed(settings())
    assert not packed(settings(dtype="float32"))


def test_what_an_operator_chooses_reaches_verl(cpu_platform: None, tiny_llama: ModelFolder) -> None:
    from swarm.engine.verl.config import verl_config

    chosen = VerlSettings(
        model_dir=tiny_llama.path,
        model_name="m",
        max_model_len=64,
        sleep=True,
        offload=frozenset({"parameters"}),
        fused_kernels="torch",
    )
    part = verl_config(chosen).actor_rollout_ref
    assert part.actor.fsdp_config.param_offload
    assert not part.actor.fsdp_config.optimizer_offload
    assert part.model.use_fused_kernels
    assert part.model.fused_kernel_options.impl_backend == "torch"
    assert not part.rollout.enable_sleep_mode  # a processor's memory cannot be given up
    bare = verl_config(settings(model_dir=tiny_llama.path)).actor_rollout_ref
    chosen_nothing = (bare.actor.fsdp_config.param_offload, bare.model.use_fused_kernels, bare.model.lora_rank)
    assert not any(chosen_nothing)


def test_replicas_sample_as_many_sequences_at_once_as_the_local_engine_does_unless_an_operator_chooses(
    cpu_platform: None, tiny_llama: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    from swarm.engine.verl import config

    def at_once(**fields: Any) -> int:
        made = config.verl_config(settings(model_dir=tiny_llama.path, **fields))
        return int(made.actor_rollout_ref.rollout.max_num_seqs)

    assert (at_once(), at_once(max_num_seqs=7)) == (64, 7)
    monkeypatch.setattr(config, "on_cpu", lambda: False)
    assert (at_once(), at_once(max_num_seqs=7)) == (256, 7)


def test_adapters_keep_an_alpha_that_verl_has_no_type_for(cpu_platform: None, tiny_llama: ModelFolder) -> None:
    from swarm.engine.verl.config import configured_adapters, verl_config

    adapters = LoraSpec(rank=4, alpha=0.5, targets=("q_proj",))
    part = verl_config(settings(model_dir=tiny_llama.path, adapters=adapters)).actor_rollout_ref
    assert configured_adapters(part.model) == adapters
    assert isinstance(part.model.lora_alpha, int)


def test_a_rank_computes_few_tokens_at_once_and_at_least_one_row() -> None:
    assert settings().tokens_per_rank == 4096
    longer = VerlSettings(model_dir=Path("/m"), model_name="m", max_model_len=9000)
    assert longer.tokens_per_rank == 9000
