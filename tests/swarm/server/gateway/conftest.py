"""The server's surface in a thread, over whatever engine, for agents that use a real SDK."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
import uvicorn

from foundation.clock import SystemClock
from foundation.ids import RandomIds
from swarm.engine.echo.engine import EchoEngine
from swarm.engine.local.inference import VllmInference
from swarm.engine.seam import Engine
from swarm.engine.training.selection import untrained_reason
from swarm.protocol.episodes import EpisodeTrace
from swarm.protocol.runspec import RunSpec, SamplingSpec
from swarm.protocol.sampling_mask import allows
from swarm.server.app import create_app
from swarm.server.gateway.gateway import Gateway
from swarm.server.keys import ControlTokens, Keyring
from swarm.server.service import Service
from swarm.server.storage.replay import train_call
from swarm.server.training_loop import TrainingLoop
from tests.fakes.sampling_engine import SamplingEngine
from tests.vllm_fixture import LoopThread

EXACT = RunSpec(sampling=SamplingSpec(train="exact"))
SPEC = {"seed": 1, "batch": {"tasks": 64, "group_size": 2}, "sampling": {"temperature": 0.7, "max_tokens": 24}}


class Episode:
    """A claimed episode: an SDK client bound to it, and what was recorded."""

    def __init__(self, http: httpx.Client, grant: dict[str, Any]) -> None:
        self._http = http
        self.grant = grant
        self.id: str = grant["episode_id"]
        told: dict[str, Any] = {"base_url": grant["base_url"], "api_key": grant["api_key"], "max_retries": 0}
        self.sdk = openai.OpenAI(**told)
        self.claude = anthropic.Anthropic(**told)

    def close(self) -> None:
        self.sdk.close()
        self.claude.close()

    def raw(self, body: dict[str, Any], *, path: str = "chat/completions", **headers: str) -> httpx.Response:
        """A request as some other client would send it."""
        auth = {"authorization": f"Bearer {self.grant['api_key']}"}
        return self._http.post(f"{self.grant['base_url']}/{path}", json=body, headers=auth | headers)

    def trace(self) -> EpisodeTrace:
        answer = self._http.get(f"/swarm/v1/episodes/{self.id}/trace").raise_for_status()
        return EpisodeTrace.model_validate_json(answer.content)

    def abort(self) -> httpx.Response:
        lease = {"lease": self.grant["lease"], "reason": "no more of it"}
        return self._http.post(f"/swarm/v1/episodes/{self.id}:abort", json=lease)

    def end(self) -> httpx.Response:
        return self._http.post(f"/swarm/v1/episodes/{self.id}:end", json={"lease": self.grant["lease"], "reward": 1.0})


class Served:
    """A running server with an open run."""

    def __init__(self, url: str, stop_calls: Callable[[], object], spec: Mapping[str, Any]) -> None:
        self.stop_calls = stop_calls
        """As a server does that is shutting down."""
        self.http = httpx.Client(base_url=url, timeout=120)
        self.run_id = self.http.post("/swarm/v1/runs", json={"spec": spec}).raise_for_status().json()["run_id"]
        self._episodes: list[Episode] = []

    def claim(self, **fields: Any) -> Episode:
        body = fields | {"run_id": self.run_id, "client_id": "test", "task_id": f"task-{len(self._episodes) + 1}"}
        grant = self.http.post("/swarm/v1/episodes:claim", json=body).raise_for_status().json()
        self._episodes.append(Episode(self.http, grant))
        return self._episodes[-1]

    def close(self) -> None:
        for episode in self._episodes:
            episode.close()
        self.http.close()


def assert_drawn_from_a_part(trace: EpisodeTrace, why: str = "") -> None:
    """Of every call it is known among which tokens each one was drawn, and that is trained."""
    assert trace.calls, why
    for call in trace.calls:
        assert not call.sampling.reproducible, why
        assert call.mask is not None, why
        assert len(call.mask.row_of) == len(call.sampled_ids) > 0, why
        rows = call.mask.rows
        drawn = list(zip(call.sampled_ids, call.mask.row_of, strict=True))
        assert [(token, row) for token, row in drawn if not allows(rows[row], token)] == [], why
        assert untrained_reason(train_call(call), EXACT) is None, why
    assert trace.untrained == {}, why


@contextlib.contextmanager
def served_by(loop: LoopThread, engine: Engine, state_dir: Path, spec: Mapping[str, Any] = SPEC) -> Iterator[Served]:
    """A server over the engine, in the loop."""
    # The protocol by its number: where it is left out, asyncio leaves TCP's delay on, and an answer takes 40 ms.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    clock, ids, closing = SystemClock(), RandomIds(), asyncio.Event()
    server: uvicorn.Server
    started: Future[Gateway] = Future()

    async def run() -> None:
        nonlocal server
        service = Service.open(state_dir / "pool", engine.info, clock=clock, ids=ids)
        await service.start()
        gateway = Gateway(service, engine, clock, ids)
        app = create_app(
            service=service,
            gateway=gateway,
            info=engine.info,
            keys=Keyring.open(state_dir / "secret"),
            tokens=ControlTokens(admin=None, client=None),
            clock=clock,
            closing=closing,
        )
        training_loop = asyncio.create_task(
            TrainingLoop(service, engine, clock=clock, runs_dir=state_dir / "runs").run()
        )
        server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None, timeout_graceful_shutdown=2))
        started.set_result(gateway)
        try:
            await server.serve(sockets=[listener])
        finally:
            training_loop.cancel()
            await asyncio.gather(training_loop, return_exceptions=True)
            await service.close()

    serving = asyncio.run_coroutine_threadsafe(run(), loop.loop)
    try:
        wait({started, serving}, timeout=30, return_when=FIRST_COMPLETED)
        if serving.done():
            serving.result()
        gateway = started.result()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        served = Served(url, lambda: loop.loop.call_soon_threadsafe(gateway.stop), spec)
        yield served
        served.close()
    finally:
        loop.loop.call_soon_threadsafe(closing.set)
        loop.loop.call_soon_threadsafe(lambda: setattr(server, "should_exit", True))
        serving.result(30)
        listener.close()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[[Engine], AbstractContextManager[Served]]]:
    """Serve any engine, in a loop of its own."""
    thread = LoopThread()
    yield lambda engine: served_by(thread, engine, tmp_path)
    thread.close()


@pytest.fixture
def served(serve: Callable[[Engine], AbstractContextManager[Served]]) -> Iterator[Served]:
    """A server with the echo engine."""
    with serve(EchoEngine(model="echo")) as running:
        yield running


@pytest.fixture(scope="module")
def served_vllm(
    vllm: VllmInference, vllm_loop: LoopThread, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """A server over real vLLM."""
    with served_by(vllm_loop, SamplingEngine(vllm), tmp_path_factory.mktemp("served")) as running:
        yield running
