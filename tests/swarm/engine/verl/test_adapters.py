"""verl's rank with adapters: they begin by the seed, and make the step that the local engine makes with them."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from foundation.clock import SystemClock
from swarm.engine.local import checkpoints as of_any_engine
from swarm.engine.local.forward import Policy
from swarm.engine.local.learner import Learner as LocalLearner
from swarm.engine.local.trained_model import export_adapter, export_model
from swarm.engine.training.checkpoints import folder_of
from swarm.engine.training.shards import WRAPPER
from swarm.models.folder import ModelFolder
from swarm.protocol.runspec import LoraSpec
from tests.swarm.engine.batches import branching_batch
from tests.swarm.engine.verl.handing_over import assert_goes_on, assert_takes_over, write_checkpoint

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="needs verl: `make verl`"),
    pytest.mark.filterwarnings("default"),  # verl's and hydra's own
]

ADAPTERS = LoraSpec(rank=4, alpha=6.5, targets=("q_proj", "down_proj"))


@pytest.fixture(scope="module")
def learner(tiny_llama: ModelFolder, cpu_platform: None) -> Iterator[Any]:
    from swarm.engine.verl.learner import Learner
    from tests.swarm.engine.verl.one_rank import OneRank

    with OneRank(tiny_llama.path, adapters=ADAPTERS) as cluster:
        yield Learner(cluster, SystemClock(), pad_token=0)


@pytest.fixture
def fresh(learner: Any) -> Any:
    learner._cluster.all_ranks("to_start", 1, 7, ADAPTERS.alpha)
    return learner


def trained(learner: Any) -> dict[str, torch.Tensor]:
    return {name.removeprefix(WRAPPER): shard.clone() for name, shard in learner._cluster.rank._shards().items()}


def test_adapters_begin_by_the_seed_as_the_local_engines_do(fresh: Any, tiny_llama: ModelFolder) -> None:
    first = trained(fresh)
    policy = Policy.load(tiny_llama.path, trained=False)
    policy.adapt(ADAPTERS, seed=7)
    assert first.keys() == policy.trained.keys()
    assert all(torch.equal(first[name], weight) for name, weight in policy.trained.items())
    fresh.learn(branching_batch(parameters=ADAPTERS))
    moved = trained(fresh)
    assert any(not torch.equal(moved[name], first[name]) for name in first if ".lora_B." in name)
    fresh._cluster.all_ranks("to_start", 1, 7)
    again = trained(fresh)
    assert all(torch.equal(again[name], first[name]) for name in first)
    fresh._cluster.all_ranks("to_start", 1, 8)
    other = trained(fresh)
    for name, weight in other.items():
        assert torch.equal(weight, first[name]) == (".lora_B." in name)
        assert bool(weight.any()) == (".lora_A." in name)


@pytest.mark.parametrize("alpha", [ADAPTERS.alpha, 13.0])
def test_two_steps_of_adapters_are_those_of_the_local_engine(fresh: Any, tiny_llama: ModelFolder, alpha: float) -> None:
    """Whatever alpha the ranks were started with."""
    adapters = ADAPTERS.model_copy(update={"alpha": alpha})
    fresh._cluster.all_ranks("to_start", 1, 7, alpha)
    policy = Policy.load(tiny_llama.path, trained=False)
    policy.adapt(adapters, seed=7)
    local = LocalLearner(policy, SystemClock())
    local.begin_run()
    for step in (1, 2):
        made = branching_batch(parameters=adapters, algorithm={"kl": 0.1}, optimizer={"learning_rate": 1e-2})
        ours, theirs = (each.learn(made).metrics for each in (fresh, local))
        for name in ("loss", "grad_norm", "weights_change", "entropy"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-5), (step, name)
    assert ours["kl_to_start"] > 0


def test_a_checkpoint_holds_the_adapters_alone_and_brings_them_back(fresh: Any, tmp_path: Path) -> None:
    write_checkpoint(fresh, tmp_path, ADAPTERS)
    kept = trained(fresh)
    folder = folder_of(tmp_path, 1)
    fresh._cluster.all_ranks("to_start", 1, 8)
    fresh._cluster.all_ranks("load_checkpoint", str(folder))
    assert all(torch.equal(weight, kept[name]) for name, weight in trained(fresh).items())
    stored = torch.load(folder / "model_world_size_1_rank_0.pt", weights_only=False)
    assert {name.removeprefix(WRAPPER) for name in stored} == kept.keys()


def test_the_local_engine_goes_on_from_adapters_of_a_rank(fresh: Any, tiny_llama: ModelFolder, tmp_path: Path) -> None:
    write_checkpoint(fresh, tmp_path, ADAPTERS)
    policy = Policy.load(tiny_llama.path, trained=False)
    policy.adapt(ADAPTERS, seed=0)
    assert_goes_on(fresh, policy, tmp_path, ADAPTERS)


def test_a_rank_goes_on_from_adapters_of_the_local_engine(fresh: Any, tiny_llama: ModelFolder, tmp_path: Path) -> None:
    policy = Policy.load(tiny_llama.path, trained=False)
    policy.adapt(ADAPTERS, seed=0)
    assert_takes_over(fresh, policy, tmp_path, ADAPTERS)


def test_an_adapter_of_a_rank_is_exported_as_peft_reads_it(fresh: Any, tiny_llama: ModelFolder, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    write_checkpoint(fresh, tmp_path, ADAPTERS, fingerprint=tiny_llama.fingerprint)
    found = of_any_engine.read(tmp_path, 1)
    adapter = export_adapter(tiny_llama, found, tmp_path / "adapter")
    merged = export_model(tiny_llama, found, tmp_path / "merged")
    ids = torch.tensor([[1, 30, 31, 70]])
    hosted = AutoModelForCausalLM.from_pretrained(tiny_llama.path, dtype=torch.float32)
    before = hosted(ids).logits
    adapted = PeftModel.from_pretrained(hosted, adapter.path)(ids).logits
    whole = AutoModelForCausalLM.from_pretrained(merged.path, dtype=torch.float32)(ids).logits
    assert torch.allclose(adapted, whole, atol=1e-4)
    assert not torch.allclose(adapted, before, atol=1e-3)
