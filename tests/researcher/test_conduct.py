"""A conduct and its budget of wall time: what it counts, and what becomes of a trial when it is spent."""

from __future__ import annotations

from pathlib import Path

import pytest

from foundation.clock import SystemClock
from researcher.conduct import Conduct
from researcher.executor.attempts import TrialLimits
from researcher.executor.local_server import LocalServer
from researcher.executor.servers import ServerPool
from researcher.executor.trials import Executor
from researcher.models import Budget, StudyStatus, TrialStatus
from researcher.store.errors import OverBudget
from researcher.store.store import Store
from researcher.view import StudyPicture
from tests.fakes.repeat_study import repeat_plan, repeat_setup

pytestmark = pytest.mark.anyio


class _Quiet:
    """Neither view nor copy."""

    def show(self, picture: StudyPicture) -> None: ...

    def say(self, line: str) -> None: ...

    def close(self) -> None: ...

    def drain(self, study_id: str | None = None) -> int:
        return 0


async def test_when_its_wall_time_is_spent_what_runs_is_paused_and_the_study_stops(tmp_path: Path) -> None:
    store = Store.open(f"sqlite:///{tmp_path}/r.db")
    plan = repeat_plan(budget=Budget(wall_s=4, trials=12))
    study = store.create_study("a topic", {})
    store.save_plan(study, plan)
    slow = LocalServer(model="echo", engine="echo", folder=tmp_path / "server", arguments=("--echo-latency-s", "0.5"))
    limits = TrialLimits(check_s=0.3, grace_s=5)
    for _ in range(2):  # resuming it does not give it more
        async with ServerPool(store, f"study {study}", local=slow) as pool:
            executor = Executor(store, pool, repeat_setup(tmp_path / "studies"), limits=limits)
            conduct = Conduct(store, executor, _Quiet(), _Quiet(), SystemClock(), tmp_path / "studies")
            with pytest.raises(OverBudget, match="wall time is spent"):
                await conduct.carry_out(study)
            assert (await pool.servers[0].swarm.status()).run_id is None
        assert store.study(study).status is StudyStatus.STOPPED
        states = {trial.status for trial in store.trials(study)}
        assert states == {TrialStatus.PAUSED, TrialStatus.PLANNED}
        [wall] = [budget for budget in store.budget(study) if budget.kind == "wall_s"]
        assert wall.spent >= 4
    store.close()
