"""Attention over prefix trees against a dense mask, and models whose layers do not simply read all ancestors."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import Lfm2Config, LlamaConfig, MistralConfig, PretrainedConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from foundation.clock import SystemClock
from swarm.engine.local import attention
from swarm.engine.local.attention import MicroBatch
from swarm.engine.local.forward import Policy, UnsupportedModel
from swarm.engine.local.learner import Learner
from swarm.engine.seam import EngineError
from swarm.engine.tree import Branch, Segment, cut, grow
from tests.swarm.engine.batches import batch, branching_batch, call, conversation, group
from tests.swarm.engine.plain_grpo import PlainGrpo

from .test_learner import FREE, distance, gradient

HEADS, KV_HEADS, WIDTH = 6, 2, 16
"""Kernels of GPUs take no narrower heads."""
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def segment_of(branches: int = 12, seed: int = 0) -> Segment:
    """A bushy tree: short shared prompts, answers that part at different depths."""
    draw = torch.Generator().manual_seed(seed)
    made = []
    for number in range(branches):
        ids = torch.randint(0, 2, (30,), generator=draw).tolist()
        made.append(call(str(number), [1, *range(10, 40), *ids[:3]], ids[3:]))
    (segment,) = cut(grow([Branch(call=one, advantage=1.0, weight=1.0) for one in made]), 10_000)
    return segment


def rows(segment: Segment, dtype: torch.dtype = torch.float32, device: str = "cpu") -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    count = len(segment.token)
    made = [torch.randn(1, heads, count, WIDTH, generator=draw) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return [tensor.to(device, dtype).requires_grad_() for tensor in made]


def dense(segment: Segment, query: Tensor, key: Tensor, value: Tensor, window: int | None = None) -> Tensor:
    """The whole mask, in double precision."""
    count = len(segment.token)
    seen = torch.zeros(count, count, dtype=torch.bool)
    for position in range(count):
        path = [*segment.above(position), position]
        seen[position, path[-window:] if window else path] = True
    wide = [tensor.double().cpu() for tensor in (query, key, value)]
    return scaled_dot_product_attention(*wide, attn_mask=seen, enable_gqa=True).transpose(1, 2)


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize(
    "limits",
    [{}, {"_SCORES": 3000}, {"_LONG": 1}, {"_SCORES": 3000, "_COPIES": 500}],
    ids=lambda limits: " ".join(limits),
)
def test_tiles_compute_what_a_dense_mask_computes_forwards_and_backwards(
    monkeypatch: pytest.MonkeyPatch, window: int | None, limits: dict[str, int]
) -> None:
    for name, value in limits.items():
        monkeypatch.setattr(attention, name, value)
    segment = segment_of()
    inputs, others = rows(segment), rows(segment)
    micro = MicroBatch.of(segment)
    ours, none = attention.tree_attention(torch.nn.Module(), *inputs, None, micro=micro, sliding_window=window)
    theirs = dense(segment, *others, window)
    assert none is None
    assert torch.allclose(ours.double(), theirs, atol=1e-6)
    slope = torch.randn(ours.shape, generator=torch.Generator().manual_seed(2))
    by_ours = torch.autograd.grad(ours, inputs, slope)
    by_theirs = torch.autograd.grad(theirs, others, slope.double())
    for mine, right in zip(by_ours, by_theirs, strict=True):
        assert torch.allclose(mine, right, atol=1e-5)


@pytest.mark.parametrize("rotated", [torch.bfloat16, torch.float32])
def test_what_is_computed_in_bfloat16_under_autocast_is_near_to_what_is_exact(rotated: torch.dtype) -> None:
    segment = segment_of()
    query, key, value = (tensor.detach() for tensor in rows(segment, torch.bfloat16))
    narrow = [query.to(rotated).requires_grad_(), key.to(rotated).requires_grad_(), value.requires_grad_()]
    exact = [tensor.detach().double().requires_grad_() for tensor in (query, key, value)]
    with torch.autocast("cpu", torch.bfloat16):
        ours, _ = attention.tree_attention(torch.nn.Module(), *narrow, None, micro=MicroBatch.of(segment))
    assert ours.dtype is torch.bfloat16
    theirs = dense(segment, *exact)
    slope = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    ours.backward(slope)
    theirs.backward(slope.double())
    assert [tensor.grad.dtype for tensor in narrow if tensor.grad is not None] == [rotated, rotated, torch.bfloat16]
    pairs = [(ours, theirs), *((own.grad, true.grad) for own, true in zip(narrow, exact, strict=True))]
    off = [float((own.double() - true).detach().norm() / true.detach().norm()) for own, true in pairs]
    assert max(off) < 6e-3  # roundings of scores, probabilities and products to 8 bits


def test_scores_that_are_more_than_scaled_products_are_refused() -> None:
    segment = segment_of()
    with pytest.raises(EngineError, match="softcap"):
        attention.tree_attention(torch.nn.Module(), *rows(segment), None, micro=MicroBatch.of(segment), softcap=50.0)


# -- kinds of layers --------------------------------------------------------------------------------------------------------

SMALL = {
    "vocab_size": 128,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.1,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
}


def saved(config: PretrainedConfig, path: Path) -> Path:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


def test_a_sliding_window_is_measured_along_the_path(tmp_path: Path) -> None:
    path = saved(MistralConfig(**SMALL, sliding_window=5), tmp_path / "windowed")
    learner = Learner(Policy.load(path), SystemClock())
    assert learner.policy.on_trees
    made = branching_batch(optimizer=FREE)
    learner.learn(made)
    assert distance(gradient(learner), PlainGrpo(path).step(made).gradient) < 1e-5


def test_a_state_that_runs_along_the_row_is_trained_on_merged_timelines(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = saved(Lfm2Config(**SMALL, layer_types=["conv", "full_attention"]), tmp_path / "running")
    with caplog.at_level(logging.WARNING):
        learner = Learner(Policy.load(path), SystemClock())
    assert not learner.policy.on_trees
    assert "merged timelines" in caplog.text
    made = branching_batch(optimizer=FREE)
    metrics = learner.learn(made).metrics
    assert distance(gradient(learner), PlainGrpo(path).step(made).gradient) < 1e-5
    assert metrics["prefix_tree"] == 0.0
    assert metrics["tokens_computed"] > metrics["tokens_merged"]


def test_layers_that_choose_what_they_read_are_refused(tmp_path: Path) -> None:
    path = saved(LlamaConfig(**SMALL), tmp_path / "chunked")
    config = path / "config.json"
    config.write_text(config.read_text().replace("{", '{"layer_types": ["chunked_attention", "full_attention"],', 1))
    with pytest.raises(UnsupportedModel, match="chunked_attention"):
        Policy.load(path)


def test_the_report_of_a_step_says_what_was_called_merged_computed_and_trained(tmp_path: Path) -> None:
    learner = Learner(Policy.load(saved(LlamaConfig(**SMALL), tmp_path / "plain")), SystemClock())
    made = batch(group("a", conversation("a1", 1.0, [[70, 2], [71, 2]]), conversation("a2", 0.0, [[70, 3]])))
    metrics = learner.learn(made).metrics
    assert metrics["tokens_called"] == 10 + 14 + 10
    assert metrics["tokens_merged"] == 14 + 1
    assert metrics["token_ratio"] == pytest.approx(34 / 15)
    assert metrics["tokens_trained"] == 6
    assert metrics["tokens_computed"] == 15 - 2  # the last tokens predict nothing
    assert metrics["prefix_tree"] == 1.0


@pytest.mark.gpu
@NEEDS_GPU
def test_a_step_on_a_gpu_equals_call_by_call_training(tmp_path: Path) -> None:
    path = saved(LlamaConfig(**SMALL | {"hidden_size": 64}), tmp_path / "plain")
    learner = Learner(Policy.load(path, torch.device("cuda")), SystemClock())
    made = branching_batch(optimizer=FREE)
    learner.learn(made)
    ours = {name: grad.cpu() for name, grad in gradient(learner).items()}
    assert distance(ours, PlainGrpo(path).step(made).gradient) < 1e-4
