"""Norms that are computed in fewer passes say what their modules say, forwards and backwards; others are left alone."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from swarm.engine.local import layers

WIDTH = 48


@pytest.fixture
def model() -> PreTrainedModel:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=WIDTH,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    made = LlamaForCausalLM(config)
    for module in made.modules():
        if isinstance(module, LlamaRMSNorm):
            module.weight.data.uniform_(0.5, 2.0)
    return made


def gradients(norm: nn.Module, rows: Tensor, slope: Tensor) -> tuple[Tensor, ...]:
    rows = rows.clone().requires_grad_()
    return torch.autograd.grad(norm(rows), (rows, *norm.parameters()), slope)


def test_value_and_gradient_are_the_modules_own(model: PreTrainedModel) -> None:
    layer = model.base_model.layers[0]
    plain = copy.deepcopy(layer.input_layernorm)
    layers.hasten(model)
    ours = layer.input_layernorm
    assert ours.forward is not plain.forward
    rows, slope = torch.randn(2, 7, WIDTH) * 30, torch.randn(2, WIDTH, 7).transpose(1, 2)
    torch.testing.assert_close(ours(rows), plain(rows))
    for mine, theirs in zip(gradients(ours, rows, slope), gradients(plain, rows, slope), strict=True):
        assert float((mine - theirs).norm() / theirs.norm()) < 1e-6


def test_a_backward_pass_under_autocast_loses_no_digits(model: PreTrainedModel) -> None:
    layer = model.base_model.layers[0]
    plain = copy.deepcopy(layer.input_layernorm)
    layers.hasten(model)
    rows, slope = torch.randn(5, WIDTH), torch.randn(5, WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        mine = gradients(layer.input_layernorm, rows, slope.bfloat16())
    for one, other in zip(mine, gradients(plain, rows, slope.bfloat16().float()), strict=True):
        assert float((one - other).norm() / other.norm()) < 1e-6


def test_inside_a_layer_the_result_comes_in_the_compute_type(model: PreTrainedModel) -> None:
    layers.hasten(model)
    rows = torch.randn(3, WIDTH)
    body = model.base_model
    with torch.autocast("cpu", torch.bfloat16):
        assert body.layers[0].input_layernorm(rows).dtype is torch.bfloat16
        assert body.norm(rows).dtype is torch.float32
    assert body.layers[0].input_layernorm(rows).dtype is torch.float32


@pytest.mark.parametrize("other", [GemmaRMSNorm(WIDTH), nn.LayerNorm(WIDTH)], ids=["one plus weight", "with a mean"])
def test_a_norm_of_another_formula_is_left_alone(model: PreTrainedModel, other: nn.Module) -> None:
    other.weight.data.uniform_(0.5, 2.0)
    rows = torch.randn(3, WIDTH)
    expected = other(rows)
    model.base_model.layers[0].input_layernorm = other
    layers.hasten(model)
    assert torch.equal(other(rows), expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert other(rows).dtype is torch.bfloat16
