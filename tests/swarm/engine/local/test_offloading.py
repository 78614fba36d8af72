"""Moments and first weights in the machine's memory: the same steps bit for bit, and little of them on the device at a time."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from foundation.clock import SystemClock
from swarm.engine.local import layers, optimizer
from swarm.engine.local.checkpoints import hash_tensors
from swarm.engine.local.forward import DeviceShare, Policy
from swarm.engine.local.minibatch import pieces, read
from swarm.engine.local.optimizer import Optimizer
from swarm.engine.local.pinned import pinned_copies
from swarm.engine.local.session import LocalSession
from swarm.engine.seam import EngineError
from swarm.engine.training.channel import OpenRun
from swarm.engine.tree import Branch
from swarm.models.folder import ModelFolder
from swarm.protocol.runspec import OptimizerSpec
from tests.swarm.engine.batches import PROMPT, branching_batch, call

from .test_optimizer import filled, weights

CPU = torch.device("cpu")
OFFLOADED = DeviceShare(offload=True)
RUNS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16, kl": {"dtype": "bfloat16", "algorithm": {"kl": 0.3}},
    "two epochs, computed twice": {
        "optimizer": {"learning_rate": 1e-3, "epochs": 2},
        "activation_checkpointing": True,
    },
    "adafactor": {"optimizer": {"name": "adafactor", "learning_rate": 1e-3}},
    "adapters, kl": {"parameters": {"rank": 4, "alpha": 8}, "algorithm": {"kl": 0.3}},
}


class Card:
    """Counts what was brought to it and is there still. On the CPU nothing would have to be brought."""

    def __init__(self) -> None:
        self.most = 0
        self._there: list[weakref.ref[Tensor]] = []

    def bring(self, value: Tensor) -> Tensor:
        brought = value.clone()
        self._there.append(weakref.ref(brought))
        self.most = max(self.most, sum(one.nbytes for ref in self._there if (one := ref()) is not None))
        return brought


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    """Moments are brought to it."""
    made = Card()
    monkeypatch.setattr(optimizer, "_brought", lambda value, device: made.bring(value))
    return made


def session_of(model: ModelFolder, *, offload: bool, turns: bool = False) -> LocalSession:
    policy = Policy.load(model.path, share=OFFLOADED if offload else None)
    return LocalSession(policy, model.fingerprint, SystemClock(), turns=turns)


def opened(session: LocalSession, directory: Path, fields: dict[str, Any]) -> int:
    spec = branching_batch(**fields).spec
    return session.open_run(OpenRun(run_id="run", branch=0, spec=spec, directory=directory, at_step=None))


def trained(session: LocalSession, step: int, fields: dict[str, Any]) -> tuple[dict[str, float], str, str]:
    """Metrics of the step, and hashes of weights and moments behind it."""
    metrics = dict(session.train(branching_batch(step=step, **fields)).metrics)
    del metrics["train_s"]
    return metrics, session.fingerprint()[1], hash_tensors(session._model.state())


@pytest.mark.usefixtures("card")
@pytest.mark.parametrize(("name", "turns"), [*((name, False) for name in RUNS), ("float32", True), ("adafactor", True)])
def test_steps_are_the_same_bit_for_bit_through_checkpoints_and_back(
    tiny_llama: ModelFolder, tmp_path: Path, name: str, turns: bool
) -> None:
    fields = RUNS[name]
    plain = session_of(tiny_llama, offload=False)
    offloading = session_of(tiny_llama, offload=True, turns=turns)
    opened(plain, tmp_path / "plain", fields)
    opened(offloading, tmp_path / "offloading", fields)
    for step in (1, 2):
        assert trained(offloading, step, fields) == trained(plain, step, fields)
    for session in (plain, offloading):
        session.checkpoint()
    assert opened(plain, tmp_path / "offloading", fields) == opened(offloading, tmp_path / "plain", fields) == 2
    assert trained(offloading, 3, fields) == trained(plain, 3, fields)


@pytest.mark.usefixtures("card")
def test_a_run_of_all_weights_follows_one_of_adapters_and_the_other_way_round(
    tiny_llama: ModelFolder, tmp_path: Path
) -> None:
    plain, offloading = (session_of(tiny_llama, offload=offload) for offload in (False, True))
    for name in ("bfloat16, kl", "adapters, kl", "float32"):
        for session in (plain, offloading):
            opened(session, tmp_path / f"{name} {session is plain}", RUNS[name])
        assert trained(offloading, 1, RUNS[name]) == trained(plain, 1, RUNS[name])


def test_no_more_moments_are_on_the_card_than_those_of_one_part(card: Card, tiny_llama: ModelFolder) -> None:
    held = weights()
    made = Optimizer(held, offload=True)
    for seed in range(2):
        filled(made, held, "adamw", seed)
        made.step(OptimizerSpec(), 0.01)
    assert 0 < card.most <= max(8 * weight.numel() + 4 for weight in held.values())


@pytest.mark.parametrize("together", [1, 64, 100])
def test_a_large_weight_is_stepped_by_rows_bit_for_bit(
    card: Card, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for offload in (False, True):
        held = {"a": nn.Parameter(torch.randn(7, 32, generator=torch.Generator().manual_seed(0)))}
        made = Optimizer(held, offload=offload)
        monkeypatch.setattr(optimizer, "OPTIMIZED_TOGETHER", together)
        for seed in range(3):
            filled(made, held, "adamw", seed)
            version = held["a"]._version
            made.step(OptimizerSpec(max_grad_norm=1.0, weight_decay=0.1), 0.01)
            assert held["a"]._version > version  # copies in another type hear of it
        found.append((hash_tensors(held), hash_tensors(made.state())))
    assert found[0] == found[1]
    assert 0 < card.most <= 8 * max(together, 32) + 4  # a row at least


def test_first_weights_are_brought_a_layer_at_a_time(tiny_llama: ModelFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    card, policy = Card(), Policy.load(tiny_llama.path, share=OFFLOADED)
    ready: Callable[[Tensor], Tensor] = policy._ready
    monkeypatch.setattr(policy, "_ready", lambda start: card.bring(ready(start)))
    branch = Branch(call=call("c1", PROMPT, [70, 71, 2]), advantage=1.0, weight=1.0)
    (piece,) = pieces([branch], policy)
    first_U, _ = read(policy, piece, at_start=True)
    assert first_U.equal(read(policy, piece)[0])
    first, *others = policy.model.base_model.layers
    layer = sum(4 * weight.numel() for weight in first.parameters())
    assert others
    assert layer <= card.most <= layer + 4 * policy.output_weight.shape[1]  # and the last norm


def test_first_weights_of_a_model_without_named_layers_are_not_brought_all_at_once(
    tiny_llama: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "GradientCheckpointingLayer", type("Other", (), {}))
    branch = Branch(call=call("c1", PROMPT, [70, 71, 2]), advantage=1.0, weight=1.0)
    for share in (None, OFFLOADED):
        policy = Policy.load(tiny_llama.path, share=share)
        (piece,) = pieces([branch], policy)
        with pytest.raises(EngineError, match="serve with --no-offload") if share else nullcontext():
            read(policy, piece, at_start=True)


def test_first_weights_share_no_memory_with_the_model(tiny_llama: ModelFolder) -> None:
    policy = Policy.load(tiny_llama.path, trained=False, share=OFFLOADED)
    hosted = {weight.data_ptr() for weight in policy.model.parameters()}
    assert not hosted & {weight.data_ptr() for weight in policy.start.values()}
    assert policy.memory.start == 0


def test_pinned_copies_are_copies_in_one_stretch_of_memory() -> None:
    tensors = {
        "matrix": torch.randn(3, 5),
        "number": torch.tensor(7.0),
        "narrow": torch.randn(7).bfloat16(),
        "empty": torch.zeros(0, 4),
    }
    copies = pinned_copies(tensors, CPU)
    assert hash_tensors(copies) == hash_tensors(tensors)
    assert len({copy.untyped_storage().data_ptr() for copy in copies.values()}) == 1
    assert all(copy.data_ptr() % 64 == 0 for copy in copies.values() if copy.numel())
    tensors["matrix"].zero_()
    assert copies["matrix"].all()
    assert pinned_copies({}, CPU) == {}


class Driver:
    """Registers memory, and notes whether it was mapped meanwhile. code: what it answers when it is to unregister."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.events: list[str] = []

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.events.append(f"register {mapped(address)}")
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.events.append(f"unregister {mapped(address)}")
        return self.code


def mapped(address: int) -> bool:
    """Whether this process has memory at the address."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    ranges = [[int(end, 16) for end in line.split()[0].split("-")] for line in lines]
    return any(first <= address < last for first, last in ranges)


@pytest.mark.parametrize("code", [0, 1])
def test_memory_is_unlocked_before_it_is_unmapped(
    code: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver = Driver(code)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    copies = pinned_copies({"a": torch.ones(1 << 24), "b": torch.ones(3)}, torch.device("cuda"))
    address = copies["b"].data_ptr()
    del copies["a"]
    assert driver.events == ["register True"]
    del copies
    assert driver.events == ["register True", "unregister True"]
    assert not mapped(address)
    assert ("stays page-locked" in caplog.text) == bool(code)
