"""Clients as jobs on a real Ray cluster: the contract of clients, kills between submission and record, whole trials."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from foundation.clock import SystemClock
from researcher.executor.blueprint import Code
from researcher.executor.clients import Case
from researcher.executor.diagnosis import Cause
from researcher.executor.jobs import ClientPlace
from researcher.executor.processes import Berth, child_environ
from researcher.executor.ray_cluster import RayCluster
from researcher.executor.ray_jobs import RayPlace
from researcher.instruments.catalogue import folder_digest
from researcher.models import TrialStatus
from researcher.repair.repairs import Repairer
from tests.contracts.client_job_contract import SECRET, ClientJobContract
from tests.fakes.mended_study import MendedStudy
from tests.fakes.repeat_study import FOLDER, repeat_plan
from tests.ray_fixture import lacking

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(bool(lacking()), reason=f"needs {', '.join(lacking())}: `make verl`"),
]


class TestRayJobs(ClientJobContract):
    @pytest.fixture
    def words(self, ray_cluster: str) -> str:
        return f"ray={ray_cluster}"

    @pytest.fixture
    async def place(self, ray_cluster: str, monkeypatch: pytest.MonkeyPatch) -> RayPlace:
        monkeypatch.setenv("SWARM_TOKEN", SECRET)
        return RayPlace(RayCluster(ray_cluster, SystemClock()), stop_s=1)

    async def test_a_client_is_known_by_its_last_words_and_its_exit_code(  # type: ignore[override]
        self, place: ClientPlace, tmp_path: Path, ray_home: Path
    ) -> None:
        """Its token is in no log of the cluster, and no file that it left there."""
        before = holding(ray_home, SECRET.encode())
        assert {file.name for file in before} <= {"token"}  # of jobs that were ended before they began
        await super().test_a_client_is_known_by_its_last_words_and_its_exit_code(place, tmp_path)
        assert holding(ray_home, SECRET.encode()) == before


def holding(folder: Path, text: bytes) -> list[Path]:
    return [file for file in folder.rglob("*") if file.is_file() and text in file.read_bytes()]


@pytest.mark.campaign
async def test_killed_around_the_submission_a_study_has_each_client_once(ray_cluster: str, tmp_path: Path) -> None:
    for where in ("submit:after", "record:before"):
        code, _ = await drive(tmp_path, ray_cluster, where)
        assert code == -signal.SIGKILL, f"{where} was never reached"
    code, found = await drive(tmp_path, ray_cluster)
    assert code == 0
    assert len({trial["run_id"] for trial in found.values()}) == len(found) == 2
    for trial in found.values():
        assert (trial["status"], trial["attempts"]) == (TrialStatus.DONE, 1)
        assert trial["in_steps"] == repeat_plan().steps * 4 * 8
        assert trial["evaluated"] == {"0": 8, "2": 8, "4": 8}
    assert len(holding(tmp_path / "studies", b'"number": 1')) == 2
    assert not Berth(tmp_path / "server" / "process", SystemClock()).alive()


class Mended(Repairer):
    """Somebody mends the code as soon as it fails."""

    async def mend(self, case: Case) -> Code:
        self.failed = case.diagnosis
        self._code = Code(folder=FOLDER, version=folder_digest(FOLDER))
        return self._code


@pytest.mark.campaign
async def test_a_mended_client_takes_the_place_of_the_one_that_failed_in_the_running_run(
    ray_cluster: str, tmp_path: Path
) -> None:
    study = MendedStudy(tmp_path)
    mender = Mended(study.store, study.study, study.plan, study.instrument, tmp_path / "code")
    async with study.pool() as pool:
        clients = RayPlace(RayCluster(ray_cluster, SystemClock()))
        [done] = await study.run(pool, study.trials(), mender, clients=clients)
    assert (done.status, done.attempt) == (TrialStatus.DONE, 1)
    assert (mender.failed.cause, mender.failed.error) == (Cause.CODE, "KeyError: 'wrod'")
    assert mender.failed.place.startswith("workflow.py:")
    assert done.evidence is not None
    assert {*(done.evidence.code_versions or ())} == {study.plan.instrument_code, folder_digest(FOLDER)}
    assert len(holding(tmp_path / "studies", b'"number": 2')) == 1
    study.store.close()


async def drive(home: Path, cluster: str, where: str = "") -> tuple[int, dict[str, Any]]:
    """A researcher's process, which kills itself there."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "tests.fakes.study_driver", str(home), where, f"ray={cluster}"),
        env=child_environ(),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), timeout=120)
    assert process.returncode in (0, -signal.SIGKILL), err.decode()[-3000:]
    return process.returncode or 0, json.loads(out) if out else {}
