"""Weights stepped in parts: however many stand in one, the step is the same and so are its moments."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from swarm.engine.local import optimizer
from swarm.engine.local.optimizer import Optimizer, OptimizerName
from swarm.engine.seam import TrainingRefused
from swarm.protocol.runspec import OptimizerSpec

SHAPES = {"a": (6, 4), "b": (4,), "c": (3, 5)}


def weights() -> dict[str, nn.Parameter]:
    draw = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(shape, generator=draw)) for name, shape in SHAPES.items()}


def filled(made: Optimizer, held: dict[str, nn.Parameter], name: OptimizerName, seed: int) -> None:
    made.begin(name)
    draw = torch.Generator().manual_seed(seed)
    for weight in held.values():
        assert weight.grad is not None
        weight.grad.copy_(10 * torch.randn(weight.shape, generator=draw))


def stepped(
    name: OptimizerName, together: list[bool], monkeypatch: pytest.MonkeyPatch
) -> tuple[list[float], dict[str, Tensor]]:
    """Gradient norms and changes of steps by optimisers that each go on from the one before, and the weights at the end."""
    held, state, told = weights(), dict[str, Tensor](), list[float]()
    for seed, whole in enumerate(together):
        parts = [[*held]] if whole else [[each] for each in held]
        monkeypatch.setattr(optimizer, "_together", lambda _, parts=parts: iter(parts))
        made = Optimizer(held)
        made.restore(state)
        filled(made, held, name, seed)
        norm, change = made.step(OptimizerSpec(name=name, max_grad_norm=1.0), 0.01)
        state = made.state()
        told += [norm, change.relative]
    return told, {name: weight.detach() for name, weight in held.items()} | state


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_a_state_goes_on_in_other_parts(monkeypatch: pytest.MonkeyPatch, name: OptimizerName) -> None:
    apart, ends = stepped(name, [False, False, False], monkeypatch)
    mixed, others = stepped(name, [True, False, True], monkeypatch)
    assert mixed == pytest.approx(apart, rel=1e-6)
    assert others.keys() == ends.keys()
    assert all(torch.allclose(others[path], end, rtol=1e-6) for path, end in ends.items())


def test_a_gradient_is_clipped_by_the_norm_of_all_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    held = weights()
    made = Optimizer(held)
    filled(made, held, "adamw", 0)
    grads = torch.cat([weight.grad.flatten() for weight in held.values() if weight.grad is not None])
    norm, _ = made.step(OptimizerSpec(max_grad_norm=1.0), 0.01)
    assert norm == pytest.approx(float(grads.norm()))
    clipped = torch.cat([weight.grad.flatten() for weight in held.values() if weight.grad is not None])
    assert torch.allclose(clipped, grads / norm, atol=1e-6)


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_in_the_last_part_moves_no_weight(wrong: float) -> None:
    held = weights()
    made = Optimizer(held)
    filled(made, held, "adamw", 0)
    before = {name: weight.detach().clone() for name, weight in held.items()}
    assert held["c"].grad is not None
    held["c"].grad[2, 4] = wrong
    with pytest.raises(TrainingRefused, match="gradient norm"):
        made.step(OptimizerSpec(), 0.01)
    assert all(torch.equal(weight, before[name]) for name, weight in held.items())
    assert not any(value.any() for value in made.state().values())
