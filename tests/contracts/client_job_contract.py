"""What every place keeps to where clients of trials live: a class to inherit from.

The subclass gives `words`: what `--clients` says of the place. The client is the real one; its instrument ends, waits, or is
deaf as soon as it is loaded, so that no server is needed.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import signal
import sys
from pathlib import Path

import pytest

from foundation.clock import SystemClock
from researcher.cli.clients import place_of
from researcher.executor.blueprint import Code
from researcher.executor.diagnosis import Cause, Symptoms, diagnose
from researcher.executor.jobs import BLUEPRINT, ClientJob, ClientPlace, Order
from researcher.executor.processes import child_environ
from researcher.instruments.catalogue import folder_digest, read_instrument
from researcher.models import StudyOptions
from swarm.protocol.blueprint import HeldOut, TrialBlueprint
from swarm.protocol.status import Phase
from tests.fakes.repeat_study import FOLDER

SECRET = "swt_a-token-of-the-contract"
ENDS = f"""
import hashlib, os, sys
assert hashlib.sha256(os.environ["SWARM_TOKEN"].encode()).hexdigest() == {hashlib.sha256(SECRET.encode()).hexdigest()!r}
print("last words of", __file__, file=sys.stderr, flush=True)
os._exit(3)
"""
WAITS = """
import signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_DFL)
print("waits", file=sys.stderr, flush=True)
time.sleep(1000)
"""
DEAF = """
import pathlib, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path({file!r}).touch()
time.sleep(1000)
"""
STARTED_S = 60.0


def order_of(tmp_path: Path, code: str) -> Order:
    """A client whose instrument does this when it is loaded."""
    folder = tmp_path / f"instrument-{len(list(tmp_path.glob('instrument-*')))}"
    shutil.copytree(FOLDER, folder)
    (folder / "workflow.py").write_text(code)
    return order_in(folder)


def order_in(folder: Path) -> Order:
    """A client with the instrument that lies there."""
    version = folder_digest(folder)
    blueprint = TrialBlueprint(
        trial_key="plan/arm/0",
        server_url="http://127.0.0.1:9",
        run_id="run-1",
        instrument_dir=str(folder),
        workflow="workflow.py",
        code_version=version,
        seed=0,
        group_size=1,
        concurrency=1,
        heldout=HeldOut(tasks=1, episodes=1, temperature=1.0),
    )
    return Order(blueprint=blueprint, code=Code(folder=folder, version=version))


async def started(job: ClientJob, order: Order) -> None:
    job.folder.mkdir(parents=True, exist_ok=True)
    (job.folder / BLUEPRINT).write_text(order.blueprint.model_dump_json())
    await job.start(order)


async def place_at(words: str) -> ClientPlace:
    return await place_of(
        StudyOptions(clients=words), read_instrument(FOLDER), SystemClock(), sys.executable, lambda _: None
    )


class ClientJobContract:
    @pytest.fixture
    def words(self) -> str:
        raise NotImplementedError

    @pytest.fixture
    async def place(self, words: str, monkeypatch: pytest.MonkeyPatch) -> ClientPlace:
        monkeypatch.setenv("SWARM_TOKEN", SECRET)
        return await place_at(words)

    async def test_nobody_lives_where_nothing_was_started(self, place: ClientPlace, tmp_path: Path) -> None:
        job = place.job(tmp_path / "attempt1", "study/plan/arm/0#1")
        assert not await job.alive()
        await job.ended()
        await job.end(1.0)
        assert (job.said(), (await job.ending()).exit_code) == ("", None)

    async def test_a_client_is_known_by_its_last_words_and_its_exit_code(
        self, place: ClientPlace, tmp_path: Path
    ) -> None:
        """It has the token that servers ask for; nobody finds that in the folder. Other code may take its place."""
        job, order = place.job(tmp_path / "attempt1", f"{tmp_path}#1"), order_of(tmp_path, ENDS)
        await started(job, order)
        await job.ended()
        said = job.as_here(job.said(), order.code.folder)
        assert said.endswith(f"last words of {order.code.folder / 'workflow.py'}"), said
        ending = await job.ending()
        assert (ending.exit_code, ending.lost, await job.alive()) == (3, "", False)
        written = b"".join(file.read_bytes() for file in job.folder.rglob("*") if file.is_file())
        assert SECRET.encode() not in written
        mended = order_of(tmp_path, "raise KeyError('in other code')")
        await started(job, mended)
        await job.ended()
        folder = mended.code.folder
        assert "last words" not in job.said()
        symptoms = Symptoms(folder=folder, said=job.as_here(job.said(40_000), folder), phase=Phase.ROLLING)
        found = diagnose(symptoms)
        assert (found.cause, found.place, found.error) == (Cause.CODE, "workflow.py:1", "KeyError: 'in other code'")

    async def test_one_at_a_time_found_by_whoever_looks_and_ended_from_there(
        self, place: ClientPlace, words: str, tmp_path: Path
    ) -> None:
        """Its starter is killed as soon as it has started it."""
        folder, name, order = tmp_path / "attempt1", f"{tmp_path}#1", order_of(tmp_path, WAITS)
        starter = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.fakes.client_starter",
            words,
            str(folder),
            name,
            str(order.code.folder),
            env=child_environ(),
        )
        assert await starter.wait() == -signal.SIGKILL
        job = place.job(folder, name)
        assert await job.alive()
        with pytest.raises(BlockingIOError):
            await job.start(order)
        await job.end(5.0)
        assert not await job.alive()
        await job.ended()

    async def test_one_that_will_not_end_is_made_to(self, place: ClientPlace, tmp_path: Path) -> None:
        job, deaf = place.job(tmp_path / "attempt1", f"{tmp_path}#1"), tmp_path / "deaf"
        await started(job, order_of(tmp_path, DEAF.format(file=str(deaf))))
        async with asyncio.timeout(STARTED_S):
            while not deaf.exists():  # noqa: ASYNC110 - another process says so, by a file
                await asyncio.sleep(0.05)
        await job.end(1.0)
        assert not await job.alive()
        assert (await job.ending()).exit_code in (None, -signal.SIGKILL)
