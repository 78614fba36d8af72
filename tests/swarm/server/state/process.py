"""One process of a server without its event loop: the state machine over real storage, which may fail or die at each write."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from foundation.clock import ManualClock
from foundation.ids import Ids
from swarm.engine.seam import EngineHealth, EngineInfo
from swarm.protocol.errors import ErrorCode, Refusal
from swarm.server.state import episodes, health
from swarm.server.state.machine import Command, apply, load
from swarm.server.state.server_state import Moment, ServerState
from swarm.server.storage.store import Store

T = TypeVar("T")
INFO = EngineInfo(backend="fake", device="cpu", model="tiny", fingerprint="f" * 64, max_model_len=4096, dtype="float32")


class Died(Exception):
    """The process was killed."""


class Process:
    """Does what the service does: decide, write, answer."""

    def __init__(self, path: Path, clock: ManualClock, ids: Ids) -> None:
        self.path = path
        self.clock = clock
        self.ids = ids
        self.deaths = 0
        self.store = Store(path)
        self.start()

    @property
    def now(self) -> Moment:
        return Moment(self.clock.now(), self.clock.monotonic())

    def start(self) -> None:
        self.state = ServerState(info=INFO, ids=self.ids)
        self.take_up()
        self.tell(lambda t: health.engine_health(t, EngineHealth(ready=True)))

    def take_up(self) -> None:
        loaded = load(self.state, self.store.read.snapshot(), self.now)
        self.store.write(loaded.changes)
        self.tell(lambda t: episodes.forget(t, loaded.closed))

    def die(self) -> None:
        self.deaths += 1
        self.store.close()
        self.store = Store(self.path)
        self.start()

    def carry_out(self, fate: str, command: Command[T]) -> T:
        """fate: written, full, dies before, dies after. Raises: Died or Refusal(STORAGE_FULL) by fate."""
        outcome = apply(self.state, command, self.now)
        if outcome.changes and fate == "dies before":
            self.die()
            raise Died
        if outcome.changes and fate == "full":
            self.take_up()
            raise Refusal(ErrorCode.STORAGE_FULL, "full")
        self.store.write(outcome.changes)
        if outcome.changes and fate == "dies after":
            self.die()
            raise Died
        if outcome.closed:
            self.tell(lambda t: episodes.forget(t, outcome.closed))
        return outcome.answer()

    def tell(self, command: Command[T]) -> T:
        return self.carry_out("written", command)

    def is_open(self, episode_id: str) -> bool:
        return episode_id in self.state.live
