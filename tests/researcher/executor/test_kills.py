"""The researcher may die at any instruction: each trial is run once, and its numbers are those of an undisturbed study."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from foundation.clock import SystemClock
from researcher.executor.processes import Berth, child_environ
from researcher.models import TrialStatus
from researcher.store.store import Store
from tests.fakes.repeat_study import repeat_plan

pytestmark = pytest.mark.anyio

KILLS = (
    "record_intent:before",
    "record_intent:after",  # intent is written, nothing is submitted
    "record_submitted:before",  # the server has the run, SQL does not know
    "record_submitted:after",
    "record_client:before",  # the client runs, SQL does not know
    "record_progress:after:2",  # in the middle of a trial
    "finish:before",
    "finish:after",  # between trials; the run is still on the server
    "record_progress:after",  # in the second trial
)


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def home(tmp_path: Path) -> AsyncIterator[Path]:
    yield tmp_path
    for berth in berths(tmp_path):
        await berth.end(grace_s=10)


def berths(home: Path) -> list[Berth]:
    """Of the processes that live: the server's, and clients'."""
    folders = [home / "server" / "process", *(home / "studies").glob("*/trials/*/*/*")]
    return [berth for folder in folders if (berth := Berth(folder, SystemClock())).alive()]


async def drive(home: Path, where: str | None = None) -> tuple[int, dict[str, Any]]:
    arguments = ["-m", "tests.fakes.study_driver", str(home), *([where] if where else [])]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, env=child_environ(), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await asyncio.wait_for(process.communicate(), timeout=120)
    assert process.returncode in (0, -signal.SIGKILL), err.decode()[-3000:]
    return process.returncode or 0, json.loads(out) if out else {}


@pytest.fixture(scope="module")
async def quiet(
    anyio_backend: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[Path, dict[str, Any]]]:
    """A study that nobody disturbed: where it is, and what came of it."""
    home = tmp_path_factory.mktemp("quiet")
    _, found = await drive(home)
    yield home, found
    for berth in berths(home):
        await berth.end(grace_s=10)


@pytest.mark.campaign
async def test_killed_at_nine_moments_a_study_has_each_trial_once(
    home: Path, quiet: tuple[Path, dict[str, Any]]
) -> None:
    for where in KILLS:
        code, _ = await drive(home, where)
        assert code == -signal.SIGKILL, f"{where} was never reached"
    code, found = await drive(home)
    plan = repeat_plan()
    assert code == 0
    assert len({trial["run_id"] for trial in found.values()}) == len(found) == 2
    for trial in found.values():
        assert (trial["status"], trial["attempts"]) == (TrialStatus.DONE, 1)
        assert trial["steps"] == list(range(1, plan.steps + 1))
        assert trial["in_steps"] == plan.steps * 4 * 8
        assert set(trial["fates"]) <= {"trained", "in_step", "zero_variance", "run_ended"}
        assert trial["evaluated"] == dict.fromkeys(("0", "2", str(plan.steps)), plan.heldout_tasks)
        assert trial["heldout"] == [0, 2, 4]
    _, undisturbed = quiet
    assert {name: trial["finals"] for name, trial in undisturbed.items()} == {
        name: trial["finals"] for name, trial in found.items()
    }


async def test_after_a_power_cut_in_the_middle_of_a_trial_it_goes_on(home: Path) -> None:
    code, _ = await drive(home, "record_progress:after:2")
    assert code == -signal.SIGKILL
    for berth in berths(home):
        pid = berth.pid()
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await berth.ended()
    _, found = await drive(home)
    for trial in found.values():
        assert (trial["status"], trial["attempts"]) == (TrialStatus.DONE, 1)
        assert trial["in_steps"] == repeat_plan().steps * 4 * 8
        assert trial["evaluated"] == {"0": 8, "2": 8, "4": 8}
        assert trial["heldout"] == [0, 2, 4]


async def test_a_study_that_is_over_is_left_as_it_is(quiet: tuple[Path, dict[str, Any]]) -> None:
    home, first = quiet
    store = Store.open(f"sqlite:///{home}/researcher.db")
    before = store.trials.all(store.studies.resolve("latest"))
    _, again = await drive(home)
    assert again == first
    assert store.trials.all(store.studies.resolve("latest")) == before
    store.close()
