"""A recorded batch against a real server that is killed in the middle of it: each end counts once."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from bench.serving import ServerProcess
from tests.swarm.server.agentjet.replay import Json, Replay

SECRET = "admin-secret-0123456789"
KILLED_AFTER = 2
"""Ended episodes."""


def test_a_batch_is_trained_once_though_the_server_is_killed_in_the_middle(tmp_path: Path) -> None:
    prefixes = tmp_path / "prefix.toml"
    prefixes.touch(mode=0o600)
    prefixes.write_text(f'admin = "{SECRET}"\nclient = "client-secret-012345678"\n')
    arguments = ("--agentjet-prefix", str(prefixes))
    server = ServerProcess(tmp_path / "state", *arguments)
    replay, ends = Replay("batch"), list[Json]()
    for method, path, body, key in replay:
        if path == "/stop_engine":
            until(server, lambda status: status["global_step"] == 1)
        answer = sent(server, method, path, body, key)
        replay.heard(path, answer)
        if path == "/start_engine":
            until(server, is_rolling)
        if path == "/end_episode":
            assert body is not None
            ends.append(body)
            if len(ends) == KILLED_AFTER:
                open_one = sent(server, "POST", "/claim_episode", {"client_uuid": "CLIENT 1"})
                server.kill()
                server = ServerProcess(tmp_path / "state", *arguments)
                until(server, is_rolling)
                for again in ends:
                    assert sent(server, "POST", path, again) == {"success": True}
                lost = ends[0] | {"episode_uuid": open_one["episode_uuid"]}
                assert "server_restarted" in sent(server, "POST", path, lost, status=400)["detail"]
    until(server, lambda status: status["engine_status"] == "ENGINE.OFFLINE")
    with server.client() as http:
        entries = http.get("/swarm/v1/ledger").json()["entries"]
    assert server.stop() == 0
    assert SECRET not in server.log_path.read_text()
    fates = [(one["task_id"], one["state"], one["reason"], one["step"]) for one in entries]
    trained = [(task, "trained", None, 1) for task in ("t1", "t1", "t2", "t2")]
    assert fates == [*trained[:2], ("", "dropped", "server_restarted", None), *trained[2:]]
    assert [
        len({(one["group_id"], one["slot"]) for one in entries if one["task_id"] == task}) for task in ("t1", "t2")
    ] == [2, 2]


def is_rolling(status: Json) -> bool:
    return bool(status["engine_status"] == "ENGINE.ROLLING")


def sent(
    server: ServerProcess, method: str, path: str, body: Json | None, key: str = "", *, status: int = 200
) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    answer = httpx.request(
        method, f"{server.url}/ajet/{SECRET}{path}", json=body, headers=headers, trust_env=False, timeout=30
    )
    assert answer.status_code == status, answer.text
    return dict(answer.json())


def until(server: ServerProcess, holds: Callable[[Json], bool]) -> None:
    """Looked at after each change that the server tells of."""
    give_up_at = time.monotonic() + 30
    with server.client() as http:
        seen = http.get("/swarm/v1/status").json()["revision"]
        while not holds(sent(server, "GET", "/get_engine_status", None)):
            assert time.monotonic() < give_up_at
            seen = http.get("/swarm/v1/status", params={"since": seen, "wait_s": 10}).json()["revision"]
