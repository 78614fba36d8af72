"""A recorded batch against a real server that is killed in the middle of it: each end counts once."""

from __future__ import annotations

from pathlib import Path

from bench.serving import ServerProcess
from tests.swarm.server.agentjet.remote import SECRET, is_rolling, prefix_file, sent, until
from tests.swarm.server.agentjet.replay import Json, Replay

KILLED_AFTER = 2
"""Ended episodes."""


def test_a_batch_is_trained_once_though_the_server_is_killed_in_the_middle(tmp_path: Path) -> None:
    arguments = ("--agentjet-prefix", prefix_file(tmp_path))
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
