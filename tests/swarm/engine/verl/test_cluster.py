"""What the driver asks of Ray, with Ray left out."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest

from swarm.engine.verl.settings import VerlSettings

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="needs verl: `make verl`"),
    pytest.mark.filterwarnings("default"),  # verl's own
]


def connected(patch: pytest.MonkeyPatch, **fields: Any) -> dict[str, Any]:
    """What ray.init was given."""
    from swarm.engine.verl import cluster

    given: dict[str, Any] = {}
    patch.setattr(cluster.ray, "init", given.update)
    cluster.Cluster(VerlSettings(model_dir=Path("/m"), model_name="m", max_model_len=64, **fields))._connect()
    return given


def test_the_nodes_of_a_cluster_that_runs_already_hear_what_vllm_is_told_here(
    cpu_platform: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "x")
    told = connected(monkeypatch, ray_address="head:6379")["runtime_env"]["env_vars"]
    assert told["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    assert told["HF_HUB_OFFLINE"] == "1"
    first, own = told["PYTHONPATH"].split(os.pathsep)
    assert Path(first, "swarm", "engine", "verl").is_dir()
    assert own == "${PYTHONPATH}"  # Ray puts the node's own in its place
    assert not {"OPENAI_API_KEY", "PATH", "OMP_NUM_THREADS", "VLLM_SERVER_DEV_MODE"} & told.keys()


def test_a_cluster_of_this_machines_own_inherits_it(cpu_platform: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "runtime_env" not in connected(monkeypatch)
