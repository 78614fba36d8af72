"""The server as a process: how it starts, refuses to start, stops, and what it never imports."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.serving import DidNotStart, ServerProcess
from swarm.server.main import add_parser

TOKEN = "swt_admin-0123456789"


def last_line(fault: DidNotStart) -> str:
    """What the server said, which must be one line for a person and no traceback."""
    text = str(fault)
    assert "Traceback" not in text
    return str(json.loads(text.splitlines()[-1])["error"])


def test_it_says_where_it_listens_and_stops_in_good_order(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "state") as server:
        told = json.loads((tmp_path / "state" / "server.json").read_text())
        assert told["url"] == server.url
        assert told["pid"] == server.process.pid
        with server.client() as http:
            assert http.get("/health").status_code == 200
            assert http.get("/swarm/v1/status").json()["server_id"] == told["server_id"]
        assert server.stop() == 0
        assert not (tmp_path / "state" / "server.json").exists()
        log = server.log_path.read_text()
        assert f"ready: echo on cpu (engine echo, float32) at {server.url}\n" in log
        assert "Traceback" not in log


def test_it_may_have_as_many_connections_as_the_system_lets_it(tmp_path: Path) -> None:
    least = ("sh", "-c", 'ulimit -Sn 128; exec "$@"', "sh")
    with ServerProcess(tmp_path / "state", wrapper=least) as server:
        limits = Path(f"/proc/{server.pid}/limits").read_text()
        soft, hard = re.findall(r"Max open files +(\d+) +(\d+)", limits)[0]
        assert int(soft) == min(int(hard), 65_536)


def test_a_stop_answers_those_who_wait(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "state") as server, server.client() as http:
        revision = http.get("/swarm/v1/status").json()["revision"]
        with http.stream("GET", "/swarm/v1/events") as events:
            lines = events.iter_lines()
            assert next(lines) == "event: status"
            began = time.monotonic()
            assert server.stop() == 0
            list(lines)
        assert time.monotonic() - began < 8
        assert revision >= 0


@pytest.mark.parametrize("asked", [1, 2])
def test_a_stop_tells_agents_whose_calls_take_longer_than_it_waits(tmp_path: Path, asked: int) -> None:
    with ServerProcess(tmp_path / "state", "--echo-latency-s", "60") as server, server.client() as http:
        grant = claimed(http, kind="eval")
        headers = {"Authorization": f"Bearer {grant['api_key']}", "Content-Type": "application/json"}
        said = {"model": "policy", "max_tokens": 8, "messages": [{"role": "user", "content": "hi"}]}
        calls = [
            (HTTPConnection(http.base_url.host, http.base_url.port), path, json.dumps(said | {"stream": stream}))
            for path in ("/v1/chat/completions", "/v1/messages")
            for stream in (False, True)
        ]
        for connection, path, body in calls:
            connection.request("POST", path, body, headers)
        with http.stream("GET", "/swarm/v1/events") as events:
            lines = events.iter_lines()
            assert next(lines) == "event: status"
            for _ in range(asked - 1):
                os.kill(server.pid, signal.SIGTERM)
                list(lines)  # they end when it has heard
            assert server.stop() == 0
        for connection, _, _ in calls:
            answer = connection.getresponse()
            assert (answer.status, json.loads(answer.read())["error"]["code"]) == (503, "not_rolling")
            connection.close()
    assert "Traceback" not in server.log_path.read_text()


def test_a_busy_port_is_one_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(DidNotStart) as fault:
            ServerProcess(tmp_path / "state", "--port", str(port))
    assert re.search(rf"cannot listen on 127\.0\.0\.1:{port}: .*--port", last_line(fault.value))


def test_a_state_directory_in_use_is_one_line_with_the_pid(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "state") as server:
        with pytest.raises(DidNotStart) as fault:
            ServerProcess(tmp_path / "state")
        assert f"pid {server.process.pid}" in last_line(fault.value)


def test_a_state_directory_of_another_model_is_one_line(tmp_path: Path) -> None:
    ServerProcess(tmp_path / "state", model="one").stop()
    with pytest.raises(DidNotStart) as fault:
        ServerProcess(tmp_path / "state", model="two")
    assert "belongs to model" in last_line(fault.value)


def test_a_missing_model_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(DidNotStart) as fault:
        ServerProcess(tmp_path / "state", engine="local", model=str(tmp_path / "no-model"))
    assert "no-model" in last_line(fault.value)


def test_a_public_address_without_tokens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DidNotStart) as fault:
        ServerProcess(tmp_path / "state", "--host", "0.0.0.0")
    assert "SWARM_ADMIN_TOKEN" in last_line(fault.value)


def test_with_tokens_a_public_address_is_served_to_those_who_have_one(tmp_path: Path) -> None:
    environ = {"SWARM_ADMIN_TOKEN": TOKEN}
    with ServerProcess(tmp_path / "state", "--host", "0.0.0.0", environ=environ) as server, server.client() as http:
        assert http.get("/swarm/v1/status").status_code == 401
        answer = http.get("/swarm/v1/status", headers={"Authorization": f"Bearer {TOKEN}"})
        assert answer.status_code == 200
        arguments = Path(f"/proc/{server.process.pid}/cmdline")
        assert not arguments.exists() or TOKEN not in arguments.read_text()
    assert TOKEN not in server.log_path.read_text()


def test_the_control_process_imports_neither_torch_nor_vllm() -> None:
    script = (
        "import sys\nimport swarm.server.main, swarm.server.process, swarm.engine.echo.engine, swarm.engine.local.engine, swarm.models\n"
        "heavy = {'torch', 'vllm', 'transformers', 'numpy'}\n"
        "print(sorted(heavy & {name.split('.')[0] for name in sys.modules}))"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "[]"


def test_the_parser_is_made_without_fastapi_or_pydantic() -> None:
    script = (
        "import argparse, sys\nfrom swarm.server.main import add_parser\n"
        "add_parser(argparse.ArgumentParser().add_subparsers())\n"
        "print(sorted({'fastapi', 'uvicorn', 'pydantic', 'httpx'} & set(sys.modules)))"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--port", "70000"],
        ["--port", "abc"],
        ["--max-model-len", "0"],
        ["--max-model-len", "x"],
        ["--engine", "sglang"],
    ],
)
def test_bad_arguments_are_usage_errors(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(["serve", "--model", "echo", *arguments])
    assert ended.value.code == 2
    assert not re.search(r"_\w+ value", capsys.readouterr().err)


def test_a_public_url_is_told_without_its_last_slash() -> None:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    args = parser.parse_args(["serve", "--public-url", "https://swarm.example/at/"])
    assert args.public_url == "https://swarm.example/at"


def test_an_end_is_on_disk_before_its_200(tmp_path: Path) -> None:
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("strace is not installed; test_end_to_end kills the server right after a 200 instead")
    log = tmp_path / "strace.log"
    trace = "trace=read,readv,recvfrom,recvmsg,write,writev,sendto,sendmsg,fsync,fdatasync"
    wrapper = (strace, "-f", "-y", "-s", "400", "-e", trace, "-o", str(log))
    try:
        server = ServerProcess(tmp_path / "state", wrapper=wrapper)
    except DidNotStart as fault:
        pytest.skip(f"strace may not trace here: {str(fault)[-200:]}")
    with server, server.client() as http:
        end_one_episode(http)
    lines = log.read_text().splitlines()
    asked = next(index for index, line in enumerate(lines) if re.search(r"(read|recv)\w*\(.*:end HTTP", line))
    told = next(index for index, line in enumerate(lines) if re.search(r"(write|send)\w*\(.*pooled", line))
    synced = [line for line in lines[asked:told] if re.search(r"f(data)?sync\(.*pool", line)]
    assert synced, lines[asked : told + 1]


def test_the_calls_of_a_killed_client_end_at_once_and_its_episodes_with_their_lease_or_the_drain(
    tmp_path: Path,
) -> None:
    with ServerProcess(tmp_path / "state", "--echo-latency-s", "600") as server, server.client() as http:
        grant = claimed(http, kind="eval")
        code = (
            "import json, sys, time\nfrom http.client import HTTPConnection\n"
            "host, port, key = sys.argv[1:]\n"
            "said = {'model': 'policy', 'messages': [{'role': 'user', 'content': 'hi'}]}\n"
            "calls = [HTTPConnection(host, int(port)) for _ in range(2)]\n"
            "for stream, call in enumerate(calls):\n"
            "    call.request('POST', '/v1/chat/completions', json.dumps(said | {'stream': bool(stream)}), {'Authorization': f'Bearer {key}'})\n"
            "print('asked', flush=True)\ntime.sleep(600)"
        )
        address = [str(http.base_url.host), str(http.base_url.port), grant["api_key"]]
        with subprocess.Popen([sys.executable, "-c", code, *address], stdout=subprocess.PIPE) as client:
            assert client.stdout is not None
            client.stdout.readline()
            for _ in range(5):  # answered after what came before: the server has read the calls
                http.get("/health")
            client.kill()
        trace = f"/swarm/v1/episodes/{grant['episode_id']}/trace"
        deadline = time.monotonic() + 20
        while len(calls := http.get(trace).json()["calls"]) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert [(call["complete"], call["failure"]) for call in calls] == [(False, None)] * 2
        run_id = http.get("/swarm/v1/status").json()["run_id"]
        http.post(f"/swarm/v1/runs/{run_id}:stop").raise_for_status()
        status = http.get("/swarm/v1/status").json()
        assert (status["phase"], status["pool"]["running"]) == ("draining", 1)
        http.patch(f"/swarm/v1/runs/{run_id}", json={"limits": {"drain_limit_s": 0.01}}).raise_for_status()
        while (status := http.get("/swarm/v1/status").json())["phase"] != "idle" and time.monotonic() < deadline:
            time.sleep(0.05)
        assert (status["phase"], status["pool"]["running"]) == ("idle", 0)


def claimed(http: httpx.Client, **fields: str) -> dict[str, Any]:
    """An episode of a new run."""
    run_id = http.post("/swarm/v1/runs", json={"spec": {}}).json()["run_id"]
    claim = {"run_id": run_id, "client_id": "c", "task_id": "t", **fields}
    granted: dict[str, Any] = http.post("/swarm/v1/episodes:claim", json=claim).raise_for_status().json()
    return granted


def end_one_episode(http: httpx.Client) -> None:
    grant = claimed(http)
    end = {"lease": grant["lease"], "reward": 1.0}
    http.post(f"/swarm/v1/episodes/{grant['episode_id']}:end", json=end).raise_for_status()
