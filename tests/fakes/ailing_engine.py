"""An echo engine that is down, hangs, fails or breaks off when a test says so."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from typing import Any, Literal

from swarm.engine.echo.engine import EchoEngine
from swarm.engine.seam import EngineDown, EngineHealth, Sampled, SampledEvent, SampleRequest

Ailment = Literal["down", "hung", "faulty"]


class AilingEngine(EchoEngine):
    """May be told from another thread than the one that it serves in.

    ailment: what happens to each request; None: it is well. cut_after: a stream breaks off after so many events.
    """

    def __init__(self) -> None:
        super().__init__(model="echo")
        self.ailment: Ailment | None = None
        self.cut_after: int | None = None
        self.asked = threading.Event()
        """Set whenever a request meets the ailment."""
        self._loop: asyncio.AbstractEventLoop | None = None

    def subscribe(self, on_health: Callable[[EngineHealth], None]) -> None:
        self._loop = asyncio.get_running_loop()
        super().subscribe(on_health)

    def tell(self, health: EngineHealth) -> None:
        """Say this to the subscribers. Returns when they have heard it."""
        assert self._loop is not None
        heard: Future[None] = Future()

        def say() -> None:
            self._tell(health)
            heard.set_result(None)

        self._loop.call_soon_threadsafe(say)
        heard.result(10)

    def falls(self, ailment: Ailment, **health: Any) -> None:
        """From now on; health: what its supervisor says of it."""
        self.ailment = ailment
        if health:
            self.tell(EngineHealth(ready=False, **health))

    def recovers(self) -> None:
        self.ailment = None
        self.tell(EngineHealth(ready=True))

    async def sample(self, request: SampleRequest) -> Sampled:
        await self._suffer()
        return await super().sample(request)

    async def stream(self, request: SampleRequest) -> AsyncIterator[SampledEvent]:
        await self._suffer()
        shown = 0
        async for event in super().stream(request):
            if shown == self.cut_after:
                raise EngineDown("crashed in the middle")
            yield event
            shown += 1

    async def _suffer(self) -> None:
        if self.ailment is None:
            return
        self.asked.set()
        if self.ailment == "down":
            raise EngineDown("no child is there")
        if self.ailment == "faulty":
            raise RuntimeError("a bug")
        await asyncio.Event().wait()
