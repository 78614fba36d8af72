"""The loop that drives a server: boot, collect, train, serve, checkpoint, recover. Decides nothing that the book can decide."""

from __future__ import annotations

from pathlib import Path

from foundation.clock import Clock
from swarm.engine.seam import Engine
from swarm.server.coordinator.desk import Desk


class Conductor:
    """One per server. `runs_dir` holds one directory per run, for the engine's checkpoints."""

    def __init__(self, desk: Desk, engine: Engine, *, clock: Clock, runs_dir: Path) -> None:
        raise NotImplementedError

    async def run(self) -> None:
        """Drive the server until cancelled. Subscribes to the engine's health and boots it first; leaves its shutdown to the caller."""
        raise NotImplementedError
