"""A server with the echo engine, the `swarm` command against it, and a run with some history."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.serving import ServerProcess
from swarm.client.sync import Episode, SwarmClient
from swarm.main import main
from swarm.protocol.runspec import RunSpec

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "docs" / "examples"
Swarm = Callable[..., tuple[int, str, str]]


@pytest.fixture
def server(echo_server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> ServerProcess:
    """The one that commands speak to."""
    monkeypatch.setenv("SWARM_URL", echo_server.url)
    monkeypatch.delenv("SWARM_TOKEN", raising=False)
    return echo_server


@pytest.fixture
def swarm(capsys: pytest.CaptureFixture[str]) -> Swarm:
    """Runs a command: exit code, output, errors."""

    def run(*arguments: str) -> tuple[int, str, str]:
        try:
            code = main(arguments)
        except SystemExit as exit:
            code = int(exit.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def black_box(
    tasks: Path, *agent: str | Path, cwd: Path | None = None, **environ: str
) -> subprocess.CompletedProcess[str]:
    """docs/examples/black_box.sh with groups of two, to the end of the run."""
    told = {"SWARM": f"{sys.executable} -m swarm.main", "GROUP": "2", "PYTHONPATH": str(ROOT), **environ}
    return subprocess.run(
        ["sh", str(EXAMPLES / "black_box.sh"), str(tasks), *map(str, agent)],
        env=os.environ | told,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def spec(**changes: Any) -> RunSpec:
    fields: dict[str, Any] = {"batch": {"tasks": 1, "group_size": 2}, "limits": {"steps": 50}, "seed": 1}
    return RunSpec.model_validate(fields | changes)


def ask(episode: Episode, messages: list[dict[str, Any]], **body: Any) -> dict[str, Any]:
    """The model's message."""
    headers = {"Authorization": f"Bearer {episode.api_key}", **body.pop("headers", {})}
    sent = {"model": "policy", "messages": messages, **body}
    reply = httpx.post(f"{episode.base_url}/chat/completions", json=sent, headers=headers, trust_env=False)
    return dict(reply.raise_for_status().json()["choices"][0]["message"])


def until_step(client: SwarmClient, step: int) -> None:
    for status in client.statuses(wait_s=5.0):
        if status.step >= step:
            return


@pytest.fixture
def history(_history: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A run whose episodes were trained, aborted with a traceback, flat, and forked: ids by what became of them, and the server's url."""
    monkeypatch.setenv("SWARM_URL", _history["url"])
    monkeypatch.delenv("SWARM_TOKEN", raising=False)
    return _history


@pytest.fixture(scope="module")
def _history(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    with ServerProcess(tmp_path_factory.mktemp("history") / "state", "--log-level", "warning") as server:
        yield _with_history(server.url)


def _with_history(url: str) -> dict[str, Any]:
    found: dict[str, Any] = {"url": url}
    with SwarmClient(url, client_id="good", client_version="v1") as client:
        found["run"] = client.start_run(spec()).run_id
        for number in range(2):
            with client.episode(task_id="sum") as episode:
                first = {"role": "user", "content": "Grüß <b>me</b>"}
                answer = ask(episode, [first], headers={"X-Agent-Name": "planner"})
                again = [first, answer, {"role": "user", "content": "once more"}]
                ask(episode, again)
                again[1] = {"role": "assistant", "content": "rewritten"}
                ask(episode, again)
                episode.end(reward=float(number))
            found["trained"] = episode.id
        until_step(client, 1)
        for _ in range(2):
            with client.episode(task_id="flat") as episode:
                ask(episode, [{"role": "user", "content": "hi"}])
                episode.end(reward=1.0)
            found["flat"] = episode.id
        until_step(client, 2)
    with SwarmClient(url, client_id="bad", client_version="v2") as client:
        for _ in range(3):
            with client.episode(task_id="sum") as episode:
                episode.abort("Traceback (most recent call last):\n  in agent\nKeyError: 'answer'")
            found["aborted"] = episode.id
    return found
