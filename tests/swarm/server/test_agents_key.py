"""An episode's api key calls the model and nothing else, on servers with and without tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.serving import ServerProcess

ADMIN = "swt_admin_0123456789"


@pytest.fixture(params=[None, ADMIN], ids=["without tokens", "with tokens"])
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[ServerProcess, dict[str, str]]]:
    """A server, and the headers of who may steer it."""
    environ = {} if request.param is None else {"SWARM_ADMIN_TOKEN": request.param}
    headers = {} if request.param is None else {"Authorization": f"Bearer {request.param}"}
    with ServerProcess(tmp_path / "state", "--log-level", "warning", environ=environ) as server:
        yield server, headers


def test_it_is_refused_on_every_control_route(served: tuple[ServerProcess, dict[str, str]]) -> None:
    server, mine = served
    with server.client() as http:
        spec = {"batch": {"tasks": 1, "group_size": 2}, "limits": {"steps": 5}}
        run = http.post("/swarm/v1/runs", json={"spec": spec}, headers=mine).json()["run_id"]
        wish = {"run_id": run, "client_id": "c", "task_id": "t"}
        grant = http.post("/swarm/v1/episodes:claim", json=wish, headers=mine).json()
        document: dict[str, Any] = http.get("/openapi.json").json()
        routes = [
            (method.upper(), path)
            for path, methods in document["paths"].items()
            for method in methods
            if not path.startswith("/v1/") and path != "/health"
        ]
        assert len(routes) > 15
        names = {"run_id": run, "episode_id": grant["episode_id"]}
        body = {**wish, "lease": grant["lease"], "reward": 1.0, "reason": "r", "step": 0, "spec": spec}
        for method, path in routes:
            place = re.sub(r"{(\w+)}", lambda found: names[found[1]], path)
            for sent in ({"Authorization": f"Bearer {grant['api_key']}"}, {"x-api-key": grant["api_key"]}):
                answer = http.request(method, place, json=None if method == "GET" else body, headers=sent)
                # A team's decision is asked for with a key of its own; where tokens are, this is none of them.
                wanted = 401 if path.endswith("/decision") or mine else 403
                assert answer.status_code == wanted, (method, path, answer.text)
                assert "server_id" not in answer.text
        entry = http.get(f"/swarm/v1/episodes/{grant['episode_id']}", headers=mine).json()
        assert (entry["state"], entry["reward"]) == ("running", None)
        models = http.get("/v1/models", headers={"Authorization": f"Bearer {grant['api_key']}"})
        assert models.status_code == 200


def test_the_status_says_where_the_state_lies(served: tuple[ServerProcess, dict[str, str]]) -> None:
    server, mine = served
    with server.client() as http:
        assert http.get("/swarm/v1/status", headers=mine).json()["state_dir"] == str(server.state_dir.resolve())
