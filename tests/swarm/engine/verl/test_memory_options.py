"""Ranks that save memory take the same step: offloaded parameters and moments, fused kernels."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest

from foundation.clock import SystemClock
from swarm.engine.local.forward import Policy
from swarm.engine.local.learner import Learner as LocalLearner
from swarm.models.folder import ModelFolder
from swarm.protocol.runspec import LoraSpec
from tests.swarm.engine.batches import branching_batch

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="needs verl: `make verl`"),
    pytest.mark.filterwarnings("default"),  # verl's and hydra's own
]


ADAPTERS = LoraSpec(rank=4, alpha=8.0, targets=("q_proj", "down_proj"))


@pytest.fixture(
    scope="module", params=[pytest.param(None, marks=pytest.mark.campaign), ADAPTERS], ids=["all weights", "adapters"]
)
def learner(request: pytest.FixtureRequest, tiny_llama: ModelFolder, cpu_platform: None) -> Iterator[Any]:
    from transformers import LlamaForCausalLM

    from swarm.engine.verl.learner import Learner
    from tests.swarm.engine.verl.one_rank import OneRank

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            LlamaForCausalLM, "forward", LlamaForCausalLM.forward
        )  # verl puts its own there, for the whole process
        offload = frozenset({"parameters", "optimizer"})
        with OneRank(tiny_llama.path, offload=offload, fused_kernels="torch", adapters=request.param) as cluster:
            yield Learner(cluster, SystemClock(), pad_token=0)


def test_two_steps_are_those_of_the_local_engine(learner: Any, tiny_llama: ModelFolder) -> None:
    learner._cluster.all_ranks("to_start", 1, 1)
    adapters = learner._cluster.settings.adapters
    policy = Policy.load(tiny_llama.path)
    policy.adapt(adapters, seed=1)
    local = LocalLearner(policy, SystemClock())
    local.begin_run()
    for step in (1, 2):
        made = branching_batch(
            parameters=adapters or "full",
            algorithm={"kl": 0.1, "entropy": 0.01},
            optimizer={"minibatches": 2, "learning_rate": 1e-3},
        )
        ours, theirs = (each.learn(made).metrics for each in (learner, local))
        for name in ("loss", "grad_norm", "weights_change", "entropy", "kl_to_start", "logprob_mismatch_mean"):
            assert ours[name] == pytest.approx(theirs[name], rel=2e-3, abs=1e-5), (step, name)
