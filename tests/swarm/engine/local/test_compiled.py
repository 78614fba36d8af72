"""Compiled layers compute what they compute uncompiled, and are compiled once for all layers and sizes.

On the CPU, with FlexAttention in its plain form and without a compiler's kernels behind the traced graphs.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import flex_attention
from transformers import AttentionInterface, LlamaConfig, MistralConfig, PretrainedConfig

from foundation.clock import SystemClock
from swarm.engine.local import attention, flex, norms
from swarm.engine.local.attention import MicroBatch
from swarm.engine.local.compiled import compile_layers
from swarm.engine.local.forward import Policy
from swarm.engine.local.learner import Learner
from swarm.engine.seam import TrainBatch
from swarm.engine.tree import Segment
from swarm.protocol.runspec import LoraSpec
from tests.swarm.engine.batches import branching_batch

from .test_attention import SMALL, saved
from .test_learner import FREE, distance

WINDOW = 5


def by_blocks(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    micro: MicroBatch,
    scaling: float,
    sliding_window: int | None = None,
    **ignored: object,
) -> tuple[Tensor, None]:
    return flex.attend(query, key, value, micro.flex[sliding_window], scaling), None


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    whole = MicroBatch.of

    def prepared(segment: Segment, device: torch.device | None = None) -> MicroBatch:
        made = whole(segment, device)
        made.prepare([None, WINDOW])
        return made

    monkeypatch.setattr(MicroBatch, "of", prepared)
    monkeypatch.setattr(norms, "hasten", lambda model: None)
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    AttentionInterface.register(attention.NAME, attention.tree_attention)


def compiled(path: Path) -> tuple[Learner, Any]:
    policy = Policy.load(path)
    AttentionInterface.register(attention.NAME, by_blocks)
    counter = CompileCounterWithBackend("aot_eager")
    compile_layers(policy.model, backend=counter)
    return Learner(policy, SystemClock()), counter


def gradient(learner: Learner) -> dict[str, Tensor]:
    return {name: weight.grad for name, weight in learner.policy.trained.items() if weight.grad is not None}


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # the compiler's own
@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(
    ("config", "spec"),
    [
        (LlamaConfig(**SMALL | {"num_hidden_layers": 3}), {}),
        (MistralConfig(**SMALL, sliding_window=WINDOW), {}),
        (LlamaConfig(**SMALL), {"activation_checkpointing": True}),
        (LlamaConfig(**SMALL), {"parameters": LoraSpec(rank=4, targets=["q_proj", "down_proj"])}),
    ],
    ids=["plain", "windowed", "recomputed", "adapted"],
)
def test_compiled_layers_compute_the_same_and_are_compiled_once(
    tmp_path: Path, config: PretrainedConfig, spec: dict[str, Any]
) -> None:
    path = saved(config, tmp_path / "model")
    made = branching_batch(optimizer=FREE, **spec)
    plain = Learner(Policy.load(path), SystemClock())
    learner, counter = compiled(path)
    for one in (plain, learner):
        if "parameters" in spec:
            one.policy.adapt(spec["parameters"], 1)
            one.begin_run()
    AttentionInterface.register(attention.NAME, attention.tree_attention)
    expected = plain.learn(made).metrics
    AttentionInterface.register(attention.NAME, by_blocks)
    metrics = learner.learn(made).metrics
    assert distance(gradient(learner), gradient(plain)) < 1e-5
    assert metrics["kl_to_start"] == pytest.approx(expected["kl_to_start"], abs=1e-6)
    graphs = counter.frame_count
    assert graphs <= 4  # with and without a gradient, of the present weights and of the first
    learner.learn(TrainBatch(step=2, spec=made.spec, groups=made.groups[:1]))
    assert counter.frame_count == graphs
