"""What a vLLM worker says of the weights that it holds. Without vLLM: a worker is anything with a model."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A worker whose model pads its vocabulary, as vLLM's does."""
    kernels = ModuleType("swarm.engine.local.cpu_kernels")
    kernels.register = lambda: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "swarm.engine.local.cpu_kernels", kernels)
    monkeypatch.setattr("swarm.engine.local.cpu_kernels", kernels, raising=False)
    monkeypatch.delitem(sys.modules, "swarm.engine.local.worker_extension", raising=False)
    module = importlib.import_module("swarm.engine.local.worker_extension")
    made = module.SampledCounts()
    held = {"model.embed_tokens.weight": torch.ones(8, 4, dtype=torch.bfloat16), "model.norm.weight": torch.ones(4)}
    made.model_runner = SimpleNamespace(model=SimpleNamespace(named_parameters=held.items))
    yield made
    sys.modules.pop("swarm.engine.local.worker_extension", None)


def stored(folder: Path, **changed: torch.Tensor) -> str:
    weights = {
        "model.embed_tokens.weight": torch.ones(6, 4),
        "model.norm.weight": torch.ones(4),
        "model.layers.0.q_proj.weight": torch.zeros(4, 4),
    }
    save_file(weights | {name.replace("__", "."): value for name, value in changed.items()}, folder / "w.safetensors")
    return str(folder)


def test_equal_weights_do_not_differ(worker: Any, tmp_path: Path) -> None:
    assert worker.differing_weights(stored(tmp_path)) == []


def test_weights_that_were_not_loaded_are_named(worker: Any, tmp_path: Path) -> None:
    assert worker.differing_weights(stored(tmp_path, model__norm__weight=torch.zeros(4))) == ["model.norm.weight"]


def test_nothing_to_compare_is_not_taken_for_no_difference(worker: Any, tmp_path: Path) -> None:
    save_file({"other": torch.ones(2)}, tmp_path / "w.safetensors")
    assert worker.differing_weights(str(tmp_path)) != []
