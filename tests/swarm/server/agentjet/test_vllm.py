"""A recorded batch against real vLLM and a real trainer: the small model learns from what AgentJet's client sends."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.serving import ServerProcess
from tests.swarm.server.agentjet.remote import is_rolling, prefix_file, sent, until
from tests.swarm.server.agentjet.replay import Replay

pytestmark = pytest.mark.campaign

BOOT_S = 600.0


def test_a_recorded_batch_trains_the_small_model_under_what_its_agent_asked_for(smollm2: Path, tmp_path: Path) -> None:
    arguments = ("--device", "cpu", "--max-model-len", "1024", "--agentjet-prefix", prefix_file(tmp_path))
    replay = Replay("batch")
    with ServerProcess(tmp_path / "state", *arguments, engine="local", model=str(smollm2)) as server:
        for method, path, body, key in replay:
            if path == "/sync_train_config":
                assert body is not None
                body = {"yaml_as_string": body["yaml_as_string"].replace("Qwen/echo", str(smollm2))}
            if path == "/stop_engine":
                until(server, lambda status: status["global_step"] == 1, BOOT_S)
            replay.heard(path, sent(server, method, path, body, key))
            if path == "/start_engine":
                until(server, is_rolling, BOOT_S)
        until(server, lambda status: status["engine_status"] == "ENGINE.OFFLINE", BOOT_S)
        with server.client() as http:
            entries = http.get("/swarm/v1/ledger").json()["entries"]
            trace = http.get(f"/swarm/v1/episodes/{entries[0]['episode_id']}/trace").json()
            run = http.get(f"/swarm/v1/runs/{entries[0]['run_id']}").json()
    assert [(one["task_id"], one["state"], one["step"]) for one in entries] == [
        (task, "trained", 1) for task in ("t1", "t1", "t2", "t2")
    ]
    (call,) = trace["calls"]
    assert (call["sampling"]["temperature"], call["sampling"]["top_p"]) == (0.7, 0.9)
    assert call["mask"] is not None, "trained among the tokens that top_p left"
    assert trace["untrained"] in ({}, [], None)
    assert run["spec"]["sampling"]["train"] == "exact"
    assert run["steps"][0]["values"]["reward_mean"] == 0.5
