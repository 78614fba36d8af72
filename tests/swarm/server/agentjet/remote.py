"""A server in a process of its own, as AgentJet's client reaches it: under a secret prefix."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from bench.serving import ServerProcess
from tests.swarm.server.agentjet.replay import Json

SECRET = "admin-secret-0123456789"


def prefix_file(folder: Path) -> str:
    """The file for `--agentjet-prefix`."""
    path = folder / "prefix.toml"
    path.touch(mode=0o600)
    path.write_text(f'admin = "{SECRET}"\nclient = "client-secret-012345678"\n')
    return str(path)


def is_rolling(status: Json) -> bool:
    return bool(status["engine_status"] == "ENGINE.ROLLING")


def sent(
    server: ServerProcess, method: str, path: str, body: Json | None, key: str = "", *, status: int = 200
) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    answer = httpx.request(
        method, f"{server.url}/ajet/{SECRET}{path}", json=body, headers=headers, trust_env=False, timeout=60
    )
    assert answer.status_code == status, answer.text
    return dict(answer.json())


def until(server: ServerProcess, holds: Callable[[Json], bool], limit_s: float = 30.0) -> None:
    """Looked at after each change that the server tells of."""
    give_up_at = time.monotonic() + limit_s
    with server.client() as http:
        seen = http.get("/swarm/v1/status").json()["revision"]
        while not holds(sent(server, "GET", "/get_engine_status", None)):
            assert time.monotonic() < give_up_at
            seen = http.get("/swarm/v1/status", params={"since": seen, "wait_s": 10}).json()["revision"]
