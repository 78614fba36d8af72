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
    return VerlSettings(model_dir=Path("/m"), model_name="m", max_model_len=64, **fields)


def test_flash_attention_is_left_alone_by_a_server_that_computes_in_float32(
    cpu_platform: None, flash_attention: None
) -> None:
    from swarm.engine.verl.config import packed

    assert packed(settings())
    assert not packed(settings(dtype="float32"))
