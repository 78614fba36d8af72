"""A whole training, killed at each of its writes in turn: before the write was on disk, and after it but before anyone was told."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from foundation.clock import ManualClock
from foundation.paths import memory_dir
from swarm.protocol.episodes import EpisodeClaim, EpisodeResult
from swarm.protocol.errors import ErrorCode, Refusal
from swarm.protocol.status import RunRequest
from swarm.server.storage.store import Store
from tests.fakes.engine import FaultyEngine
from tests.swarm.server.state.world import World, spec

pytestmark = pytest.mark.anyio
STEPS = 3


class Killed(BaseException):
    """The process is no more."""


class MortalStore(Store):
    """Dies at its n-th commit, counted from 0; never when `dies_at` is None."""

    def __init__(self, path: Path, dies_at: int | None, *, after: bool) -> None:
        self.commits = 0
        self.dead = asyncio.Event()
        self._dies_at = dies_at
        self._after = after
        self._loop = asyncio.get_running_loop()
        super().__init__(path)

    def begin(self) -> None:
        if self.dead.is_set():
            raise Killed
        super().begin()

    def commit(self) -> None:
        number, self.commits = self.commits, self.commits + 1
        dies = number == self._dies_at
        if dies and not self._after:
            self._die()
        super().commit()
        if dies:
            self._die()

    def _die(self) -> None:
        self._loop.call_soon_threadsafe(self.dead.set)
        raise Killed


class Client:
    """Works until the run is complete, whatever happens; remembers what was acknowledged."""

    def __init__(self) -> None:
        self.acknowledged: dict[str, float] = {}
        self.unanswered: dict[str, EpisodeResult] = {}
        self.run_id = ""

    async def work(self, world: World) -> None:
        created = await world.service.create_run(RunRequest(spec=spec(), idempotency_key="the run"), by="tester")
        world.run_id = self.run_id = created.run_id
        for episode_id, result in list(self.unanswered.items()):
            await self._end(world, episode_id, result)
        for turn in itertools.count():
            task_id, reward = ("t-1", "t-1", "t-2", "t-2")[turn % 4], float(turn % 2)
            claim = EpisodeClaim(run_id=self.run_id, client_id="c", task_id=task_id, wait_s=2)
            try:
                lease = await world.service.claim(claim)
            except Refusal as refusal:
                if refusal.code is ErrorCode.OVER_LIMIT:
                    return
                continue
            await world.call(lease)
            await self._end(world, lease.episode_id, EpisodeResult(lease=lease.lease, reward=reward))

    async def _end(self, world: World, episode_id: str, result: EpisodeResult) -> None:
        self.unanswered[episode_id] = result
        try:
            await world.service.end(episode_id, result)
        except Refusal as refusal:
            if refusal.code is not ErrorCode.LEASE_LOST:
                raise
        else:
            self.acknowledged[episode_id] = result.reward
        del self.unanswered[episode_id]


async def life(folder: Path, engine: FaultyEngine, client: Client, dies_at: int | None, *, after: bool) -> int | None:
    """One process, until the run is complete or it is killed. Returns its number of commits, or None when it was killed."""
    store = MortalStore(folder / "pool.sqlite", dies_at, after=after)
    try:
        world = World(folder, engine, ManualClock(), store)
    except Killed:
        store.close()
        return None
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)  # the dead complain of being dead
    await world.start()
    working = asyncio.create_task(client.work(world))
    dying = asyncio.create_task(store.dead.wait())
    while not working.done() and not dying.done():
        await asyncio.wait([working, dying], timeout=0.005, return_when=asyncio.FIRST_COMPLETED)
        world.clock.advance(1.0)
    try:
        if working.done():
            working.result()
            dying.cancel()
            await check(world, client)
            await world.stop()
            return store.commits
    except Killed:  # at a write that nobody's work waited for
        pass
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)
    await world.die()
    store.close()
    return None


async def check(world: World, client: Client) -> None:
    """Every acknowledged episode is in one step of the history that stands, and nothing else is."""
    made = [[e.episode_id for group in batch.groups for e in group.episodes] for batch in world.engine.made]
    assert len(made) == STEPS
    assert all(2 <= len(episodes) <= 4 for episodes in made)
    trained = [episode_id for episodes in made for episode_id in episodes]
    assert len(set(trained)) == len(trained)
    entries = {entry.episode_id: entry for entry in (await world.service.ledger(limit=1000)).entries}
    for episode_id, reward in client.acknowledged.items():
        assert entries[episode_id].reward == reward
    for episode_id, entry in entries.items():
        if entry.state == "trained":
            assert entry.step is not None
            assert episode_id in made[entry.step - 1]
        else:
            assert entry.state == "dropped"
            assert entry.reason in ("server_restarted", "zero_variance", "run_ended")
            assert episode_id not in client.acknowledged or entry.reason != "server_restarted"
    steps = (await world.service.report(client.run_id)).steps
    assert [step.step for step in steps] == [1, 2, 3]


@pytest.fixture
def folder() -> Iterator[Path]:
    """In memory: hundreds of fsyncs of a real disk would take minutes, and show nothing more about an order of events."""
    with TemporaryDirectory(dir=memory_dir()) as name:
        yield Path(name)


async def test_a_server_killed_at_any_of_its_writes_comes_back_and_loses_and_doubles_nothing(folder: Path) -> None:
    commits = await life(folder / "undisturbed", FaultyEngine(), Client(), None, after=False)
    assert commits is not None
    for dies_at in range(commits):
        for after in (False, True):
            home = folder / f"{dies_at}-{after}"
            engine, client = FaultyEngine(), Client()
            if await life(home, engine, client, dies_at, after=after) is None:
                assert await life(home, FaultyEngine().adopt(engine), client, None, after=False) is not None
