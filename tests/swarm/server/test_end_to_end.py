"""Agents, clients and a real server over HTTP, with the echo engine: from claim to ledger, through crashes."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from bench.serving import ServerProcess

SPEC: dict[str, Any] = {
    "seed": 1,
    "batch": {"tasks": 2, "group_size": 4, "group_patience_s": 1.0},
    "optimizer": {"learning_rate": 4e-5},
    "checkpoint": {"every_steps": 2},
}

KEPT_OUT = ("zero_variance", "stale", "partial_group")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path / "state", "--log-level", "warning") as each:
        yield each


def start_run(http: httpx.Client, **changes: Any) -> str:
    return str(http.post("/swarm/v1/runs", json={"spec": SPEC | changes}).raise_for_status().json()["run_id"])


def claim_body(run_id: str, task_id: str) -> dict[str, Any]:
    return {"run_id": run_id, "client_id": "test", "task_id": task_id}


def claim(http: httpx.Client, run_id: str, task_id: str, **fields: Any) -> dict[str, Any]:
    answer = http.post("/swarm/v1/episodes:claim", json=claim_body(run_id, task_id) | fields)
    return dict(answer.raise_for_status().json())


def ask(grant: dict[str, Any], text: str, **fields: Any) -> str:
    with openai.OpenAI(base_url=grant["base_url"], api_key=grant["api_key"]) as client:
        answer = client.chat.completions.create(model="echo", messages=[{"role": "user", "content": text}], **fields)
    return str(answer.choices[0].message.content)


def ask_plainly(http: httpx.Client, grant: dict[str, Any], text: str) -> None:
    body = {"model": "echo", "messages": [{"role": "user", "content": text}]}
    key = {"Authorization": f"Bearer {grant['api_key']}"}
    http.post("/v1/chat/completions", json=body, headers=key).raise_for_status()


def end(http: httpx.Client, grant: dict[str, Any], reward: float, **fields: Any) -> httpx.Response:
    body = {"lease": grant["lease"], "reward": reward, **fields}
    return http.post(f"/swarm/v1/episodes/{grant['episode_id']}:end", json=body)


def wait_until(http: httpx.Client, reached: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Follow the status by long poll."""
    until = time.monotonic() + 60
    status = http.get("/swarm/v1/status").raise_for_status().json()
    while not reached(status):
        assert time.monotonic() < until, status
        query = {"since": status["revision"], "wait_s": 5}
        status = http.get("/swarm/v1/status", params=query).raise_for_status().json()
    return dict(status)


def ledger(http: httpx.Client, **filters: Any) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = []
    after: dict[str, str] = {}
    while True:
        page = http.get("/swarm/v1/ledger", params={**filters, **after, "limit": 50}).raise_for_status().json()
        entries += page["entries"]
        if page["next"] is None:
            return entries
        after = {"after": page["next"]}


def play(http: httpx.Client, run_id: str, task: int) -> str:
    """One whole episode; its id, once the server has said that it is kept."""
    grant = claim(http, run_id, f"t-{task}")
    word = f"word{task}"
    end(http, grant, float(ask(grant, f"Repeat {word}") == word)).raise_for_status()
    return str(grant["episode_id"])


def test_episodes_are_claimed_acted_ended_trained_and_in_the_ledger(server: ServerProcess) -> None:
    with server.client() as http:
        run_id = start_run(http)
        played = [play(http, run_id, number // 4) for number in range(16)]
        wait_until(http, lambda status: status["step"] >= 2)
        entries = {entry["episode_id"]: entry for entry in ledger(http, run_id=run_id)}
        assert set(entries) == set(played)
        steps = Counter(entry["step"] for entry in entries.values() if entry["state"] in ("trained", "in_step"))
        assert set(steps) <= {1, 2}
        for entry in entries.values():
            assert entry["state"] in ("trained", "in_step") or entry["reason"] == "zero_variance", entry
        report = http.get(f"/swarm/v1/runs/{run_id}").json()
        assert [step["step"] for step in report["steps"]] == [1, 2]
        assert report["steps"][0]["values"]["episodes"] == 8
        trace = http.get(f"/swarm/v1/episodes/{played[0]}/trace").json()
        (call,) = trace["calls"]
        assert len(call["sampled_ids"]) == len(call["logprobs"]) == call["versions"][-1]["end"]
        progress = http.get("/swarm/v1/tasks").json()
        assert {(row["task_id"], row["ended"]) for row in progress} == {(f"t-{task}", 4) for task in range(4)}


def test_streams_of_the_sdk_are_recorded_like_whole_answers(server: ServerProcess) -> None:
    with server.client() as http:
        grant = claim(http, start_run(http), "t-1")
        messages: Any = [{"role": "user", "content": "Repeat streaming"}]
        with openai.OpenAI(base_url=grant["base_url"], api_key=grant["api_key"]) as client:
            stream = client.chat.completions.create(model="echo", messages=messages, stream=True)
            text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
        (call,) = http.get(f"/swarm/v1/episodes/{grant['episode_id']}/trace").json()["calls"]
        assert text in {"streaming", "~gnimaerts"}
        assert bytes(token for token in call["sampled_ids"] if token < 256).decode() == text
        assert call["complete"]


def test_an_end_said_twice_counts_once(server: ServerProcess) -> None:
    with server.client() as http:
        run_id = start_run(http)
        grant = claim(http, run_id, "t-1")
        ask(grant, "Say red")
        first = end(http, grant, 1.0, idempotency_key="e-1")
        again = end(http, grant, 1.0, idempotency_key="e-1")
        assert (first.json()["status"], again.json()["status"]) == ("pooled", "already_ended")
        assert http.get("/swarm/v1/status").json()["pool"]["ended"] == 1


def test_a_claim_said_twice_grants_one_episode(server: ServerProcess) -> None:
    with server.client() as http:
        run_id = start_run(http)
        first = claim(http, run_id, "t-1", idempotency_key="c-1")
        again = claim(http, run_id, "t-1", idempotency_key="c-1")
        assert first["episode_id"] == again["episode_id"]
        assert first["lease"] == again["lease"]
        assert ask(again, "Say red") in {"red", "~der"}


def test_after_its_lease_ran_out_an_episode_is_closed_to_everybody(server: ServerProcess) -> None:
    with server.client() as http:
        grant = claim(http, start_run(http), "t-1", idle_limit_s=0.2)
        wait_until(http, lambda status: status["pool"]["running"] == 0)
        late = end(http, grant, 1.0)
        assert (late.status_code, late.json()["code"]) == (409, "lease_lost")
        with pytest.raises(openai.PermissionDeniedError, match="expired"):
            ask(grant, "Say red")
        entry = http.get(f"/swarm/v1/episodes/{grant['episode_id']}").json()
        assert (entry["state"], entry["reason"], entry["reward"]) == ("dropped", "expired", None)


def test_an_aborted_episodes_slot_is_offered_again(server: ServerProcess) -> None:
    with server.client() as http:
        run_id = start_run(http)
        first = claim(http, run_id, "t-1")
        body = {"lease": first["lease"], "reason": "the tool crashed"}
        entry = http.post(f"/swarm/v1/episodes/{first['episode_id']}:abort", json=body).raise_for_status().json()
        assert (entry["reason"], entry["detail"]) == ("aborted", "the tool crashed")
        second = claim(http, run_id, "t-1")
        assert (second["group_id"], second["slot"]) == (first["group_id"], first["slot"])


def test_renewing_moves_the_end_of_the_lease(server: ServerProcess) -> None:
    with server.client() as http:
        grant = claim(http, start_run(http), "t-1", idle_limit_s=100)
        body = {"lease": grant["lease"]}
        renewed = http.post(f"/swarm/v1/episodes/{grant['episode_id']}:renew", json=body).raise_for_status().json()
        assert renewed["expires_at"] >= grant["expires_at"]


def test_a_client_that_hangs_up_stops_its_sampling(tmp_path: Path) -> None:
    slow = ("--echo-tokens-per-s", "10")
    with ServerProcess(tmp_path / "state", *slow) as server, server.client() as http:
        grant = claim(http, start_run(http), "t-1")
        body = {"model": "echo", "stream": True, "messages": [{"role": "user", "content": "Say " + "long" * 50}]}
        key = {"Authorization": f"Bearer {grant['api_key']}"}
        with http.stream("POST", "/v1/chat/completions", json=body, headers=key) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data: ")
            assert next(lines) == ""
            assert next(lines).startswith("data: ")
        path = f"/swarm/v1/episodes/{grant['episode_id']}/trace"
        until = time.monotonic() + 5  # the whole answer would take 20 s
        while not (calls := http.get(path).json()["calls"]):
            assert time.monotonic() < until
        assert not calls[0]["complete"]
        assert len(calls[0]["sampled_ids"]) < 100


def test_a_full_disk_is_told_and_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    limit = 300_000  # bytes that any one file of the server may have
    script = f"import os, resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))"
    wrapper = (sys.executable, "-c", f"{script}; os.execv(sys.argv[1], sys.argv[1:])")
    kept: list[str] = []
    with ServerProcess(tmp_path / "state", wrapper=wrapper) as server, server.client() as http:
        run_id = start_run(http, batch={"tasks": 500, "group_size": 4})
        for number in range(500):
            answer = http.post("/swarm/v1/episodes:claim", json=claim_body(run_id, f"t-{number}"))
            if answer.status_code == 200:
                grant = answer.json()
                ask_plainly(http, grant, "Say " + "word" * 100)
                answer = end(http, grant, 1.0)
            if answer.status_code != 200:
                break
            kept.append(grant["episode_id"])
        assert kept
        assert (answer.status_code, answer.json()["code"]) == (507, "storage_full")
        assert "disk" in answer.json()["detail"]
        assert http.get("/swarm/v1/status").status_code == 200
        server.stop()
        assert "Traceback" not in server.log_path.read_text()
    with ServerProcess(tmp_path / "state") as server, server.client() as http:
        fates = {entry["episode_id"]: entry["state"] for entry in ledger(http, run_id=run_id)}
        assert [fates[episode_id] for episode_id in kept] == ["ended"] * len(kept)


def test_killing_the_whole_server_loses_no_acknowledged_episode(tmp_path: Path) -> None:
    acknowledged: list[str] = []
    with ServerProcess(tmp_path / "state", "--log-level", "warning") as server:
        with server.client() as http:
            run_id = start_run(http)
        players = [threading.Thread(target=_play_on, args=(server, run_id, each, acknowledged)) for each in range(4)]
        for player in players:
            player.start()
        with server.client() as http:
            wait_until(http, lambda status: status["step"] >= 3)
        server.kill()
        for player in players:
            player.join()
    before_the_crash = list(acknowledged)
    assert len(before_the_crash) >= 24
    with ServerProcess(tmp_path / "state", "--log-level", "warning") as server, server.client() as http:
        assert wait_until(http, lambda status: status["phase"] == "rolling")["run_id"] == run_id
        acknowledged += [play(http, run_id, number // 4) for number in range(100, 116)]
        wait_until(http, lambda status: status["pool"]["ended"] < 8 and status["phase"] == "rolling")
        entries = ledger(http, run_id=run_id)
        report = http.get(f"/swarm/v1/runs/{run_id}").json()
    assert len({entry["episode_id"] for entry in entries}) == len(entries)
    fates = {entry["episode_id"]: (entry["state"], entry["reason"], entry["step"]) for entry in entries}
    for episode_id in acknowledged:
        state, reason, step = fates[episode_id]
        assert state in ("trained", "in_step", "ended") or reason in KEPT_OUT, fates[episode_id]
        assert (step is not None) == (state in ("trained", "in_step")) or reason == "zero_variance"
    assert [step["step"] for step in report["steps"]] == list(range(1, report["step"] + 1))
    in_steps = Counter(entry["step"] for entry in entries if entry["state"] in ("trained", "in_step"))
    assert all(count <= 8 for count in in_steps.values()), in_steps


def _play_on(server: ServerProcess, run_id: str, player: int, acknowledged: list[str]) -> None:
    """Play episode after episode until the server is gone."""
    with server.client() as http:
        try:
            for number in range(10_000):
                acknowledged.append(play(http, run_id, player * 10_000 + number // 4))
        except (httpx.HTTPError, openai.APIConnectionError):
            return
