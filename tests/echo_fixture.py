"""A server with the echo engine in a process of its own, for tests over real HTTP."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bench.serving import ServerProcess


@pytest.fixture(scope="session")
def _shared_echo_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("echo") / "state", "--log-level", "warning") as server:
        yield server


@pytest.fixture
def echo_server(_shared_echo_server: ServerProcess) -> Iterator[ServerProcess]:
    """Booted once: each test starts a run of its own, which is stopped after it. Not for tests that stop or kill a server."""
    yield _shared_echo_server
    with _shared_echo_server.client() as http:
        run_id = http.get("/swarm/v1/status").raise_for_status().json()["run_id"]
        if run_id is not None:
            http.post(f"/swarm/v1/runs/{run_id}:stop").raise_for_status()
