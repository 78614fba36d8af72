"""A server's surface in this process: the real service and training loop, over the echo engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from starlette.types import ASGIApp

from foundation.clock import SystemClock
from foundation.ids import RandomIds
from swarm.engine.echo.engine import EchoEngine
from swarm.server.app import create_app
from swarm.server.gateway.gateway import Gateway
from swarm.server.keys import ControlTokens, Keyring
from swarm.server.service import Service
from swarm.server.training_loop import TrainingLoop


@dataclass(frozen=True)
class Surface:
    """The application, and what is behind it."""

    app: ASGIApp
    service: Service
    engine: EchoEngine
    closing: asyncio.Event


@contextlib.asynccontextmanager
async def in_process(directory: Path, tokens: ControlTokens, public_url: str | None = None) -> AsyncIterator[Surface]:
    clock, ids, engine, closing = SystemClock(), RandomIds(), EchoEngine(), asyncio.Event()
    service = Service.open(directory / "pool", engine.info, clock=clock, ids=ids)
    await service.start()
    training_loop = asyncio.create_task(TrainingLoop(service, engine, clock=clock, runs_dir=directory / "runs").run())
    app = create_app(
        service=service,
        gateway=Gateway(service, engine, clock, ids),
        info=engine.info,
        keys=Keyring(b"k" * 32),
        tokens=tokens,
        clock=clock,
        closing=closing,
        public_url=public_url,
    )
    yield Surface(app, service, engine, closing)
    training_loop.cancel()
    await asyncio.gather(training_loop, return_exceptions=True)
    await service.close()
