"""A real service with the echo engine in this process, and AgentJet's routes in front of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from httpx import ASGITransport
from starlette.types import ASGIApp, Receive, Scope, Send

from foundation.clock import ManualClock
from swarm.server.agentjet.facade import START_TAKES_S, AgentJet
from swarm.server.agentjet.prefix import Prefixes
from swarm.server.keys import ControlTokens
from swarm.server.service import Service
from tests.swarm.server.agentjet.replay import Json, Replay
from tests.swarm.server.in_process import in_process

PREFIXES = Prefixes(admin="admin-secret-0123456789", client="client-secret-012345678")
ADMIN, CLIENT = f"/ajet/{PREFIXES.admin}", f"/ajet/{PREFIXES.client}"
JOB = "ajet: {model: {path: Qwen/echo}, rollout: {num_repeat: 2, max_response_length_in_one_turn: 16}, data: {train_batch_size: 2}}"
ASK = {"model": "reserved_field", "messages": [{"role": "user", "content": "echo this"}]}


class Exchangeable:
    """ASGI: an application in the place of which another may be put."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    def exchange(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


@dataclass(frozen=True)
class Served:
    http: httpx.AsyncClient
    service: Service
    clock: ManualClock
    """The facade's."""
    forget: Callable[[], None]
    """As a restart of the process does to what the facade has in memory alone."""

    async def get(self, path: str, prefix: str = ADMIN) -> Json:
        answer = await self.http.get(prefix + path)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    async def post(self, path: str, body: Json, *, prefix: str = ADMIN, key: str = "", status: int = 200) -> Json:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        sent = asyncio.ensure_future(self.http.post(prefix + path, json=body, headers=headers))
        answer = await (self.started(sent) if path == "/start_engine" else sent)
        assert answer.status_code == status, answer.text
        return dict(answer.json())

    async def started(self, sent: asyncio.Future[httpx.Response]) -> httpx.Response:
        """The answer to a start, for which time must pass."""
        while not sent.done():
            self.clock.advance(START_TAKES_S)
            await asyncio.sleep(0)
        return await sent

    async def start(self, job: str = JOB) -> None:
        await self.post("/sync_train_config", {"yaml_as_string": job})
        await self.post("/start_engine", {})
        await self.until(lambda status: status["engine_status"] == "ENGINE.ROLLING")

    async def until(self, holds: Any) -> None:
        async with asyncio.timeout(10):
            seen = (await self.service.status()).revision
            while not holds(await self.get("/get_engine_status")):
                seen = (await self.service.status(since=seen, wait_s=10)).revision

    async def until_step(self, step: int) -> None:
        await self.until(lambda status: status["global_step"] == step)

    async def engine_status(self) -> str:
        return str((await self.get("/get_engine_status", CLIENT))["engine_status"])

    async def claim(self, client: str = "c-1", **fields: Any) -> Json:
        return await self.post("/claim_episode", {"client_uuid": client, **fields}, prefix=CLIENT)

    async def end(self, claimed: Json, task: str, reward: Any, *, status: int = 200, **fields: Any) -> Json:
        output = {"reward": reward, "metadata": {"task_id": task}}
        body = {
            "client_uuid": "c-1",
            "episode_uuid": claimed["episode_uuid"],
            "task_id": task,
            "workflow_output": output,
        }
        return await self.post("/end_episode", body | fields, prefix=CLIENT, status=status)

    async def play(self, task: str, reward: float, client: str = "c-1", **fields: Any) -> Json:
        claimed = await self.claim(client)
        await self.post("/v1/chat/completions", ASK, prefix=CLIENT, key=claimed["openai_api_key"])
        await self.end(claimed, task, reward, client_uuid=client, **fields)
        return claimed

    async def fates(self) -> list[str]:
        page = await self.service.ledger(limit=1000)
        return [f"{one.task_id or '-'} {one.state} {one.reason or one.step or ''}".strip() for one in page.entries]


@contextlib.asynccontextmanager
async def serving(
    directory: Path, prefixes: Prefixes = PREFIXES, facade_clock: ManualClock | None = None
) -> AsyncIterator[Served]:
    """facade_clock: of the facade alone."""
    facade_clock, tokens = facade_clock or ManualClock(), ControlTokens(None, None)
    async with in_process(directory, tokens) as surface:

        def front() -> ASGIApp:
            facade = AgentJet(
                service=surface.service,
                info=surface.engine.info,
                tokens=tokens,
                clock=facade_clock,
                closing=surface.closing,
            )
            return facade.before(surface.app, prefixes)

        transport = Exchangeable(front())
        async with httpx.AsyncClient(transport=ASGITransport(transport), base_url="http://127.0.0.1:8642") as http:
            yield Served(http, surface.service, facade_clock, lambda: transport.exchange(front()))


async def replayed(served: Served, name: str) -> Replay:
    """Each request of a recording is answered with success. Waits where the recorded client did."""
    replay = Replay(name)
    for _, path, body, key in replay:
        if path == "/stop_engine" and name != "abort":
            await served.until(lambda status: status["global_step"] == 1)
        answer = await (served.get(path) if body is None else served.post(path, body, key=key))
        assert answer.get("success", True) is True, (path, answer)
        replay.heard(path, answer)
        if path == "/start_engine":
            assert (await served.get("/get_engine_status"))["engine_status"] != "ENGINE.OFFLINE"
            await served.until(lambda status: status["engine_status"] == "ENGINE.ROLLING")
    await served.until(lambda status: status["engine_status"] == "ENGINE.OFFLINE")
    return replay
