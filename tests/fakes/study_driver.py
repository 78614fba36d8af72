"""A researcher's process for kill tests: `python -m tests.fakes.study_driver HOME [METHOD:before|after[:N] [CLIENTS]]`.

Runs the trials of one `repeat` study, adopted from wherever the last process left it. With a METHOD of the store's trials, or `record` of its journal, it kills
itself there (the N-th time), as a power cut would; METHOD `submit` is that of a Ray cluster. Prints what the server's records say in the end.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from researcher.executor.local_server import LocalServer
from researcher.executor.ray_cluster import RayCluster
from researcher.executor.servers import ServerPool
from researcher.executor.trials import Executor
from researcher.store.store import Store
from tests.contracts.client_job_contract import place_at
from tests.fakes.example_plan import ARMS
from tests.fakes.repeat_study import repeat_plan, repeat_setup


def armed(store: Store, where: str) -> None:
    """Let a call of one method of the store, or of a cluster, be the last thing that this process does."""
    method, moment, *rest = where.split(":")
    left = [int(rest[0]) if rest else 1]
    target: Any = {"submit": RayCluster, "record": store.journal}.get(method, store.trials)
    real = getattr(target, method)

    async def fatal_submit(*args: Any, **kwargs: Any) -> Any:
        if moment == "after":
            await real(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)

    def fatal(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] == 0 and moment == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = real(*args, **kwargs)
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(target, method, fatal_submit if method == "submit" else fatal)


async def records(pool: ServerPool, store: Store, study: str) -> dict[str, Any]:
    """What the server knows of each trial: attempts, run, episodes that were ended for good, by kind and fate."""
    found = {}
    for trial in store.trials.all(study):
        attempts = store.trials.attempts(study, trial.key)
        run_id = str(attempts[-1].run_id)
        swarm = pool.servers[0].swarm
        entries = [entry async for entry in swarm.ledger(run_id=run_id) if entry.reward is not None]
        report = await swarm.run(run_id)
        found[f"{trial.arm}/{trial.seed}"] = {
            "status": trial.status,
            "attempts": len(attempts),
            "run_id": run_id,
            "finals": trial.finals,
            "heldout": [step for step, _ in trial.series["heldout_reward"]],
            "steps": [step.step for step in report.steps],
            "in_steps": sum(step.values["episodes"] for step in report.steps),
            "fates": dict(Counter(str(entry.reason or entry.state) for entry in entries if entry.kind == "train")),
            "evaluated": dict(Counter(str(entry.claimed_step) for entry in entries if entry.kind == "eval")),
        }
    return found


async def drive(home: Path, where: str = "", words: str = "local") -> None:
    store = Store.open(f"sqlite:///{home}/researcher.db")
    plan = repeat_plan(heldout_every=2)
    if not store.studies.all():
        store.plans.save(store.studies.create("kill me", {}), plan)
    study = store.studies.resolve("latest")
    token = store.leases.acquire(
        study, f"process {os.getpid()}", 60, dead_owner=getattr(store.leases.holder(study), "owner", None)
    )
    mine = store.fenced(study, token)
    trials = mine.trials.ensure(study, "compare", [(arm, 0) for arm in ARMS])
    if where:
        armed(mine, where)
    slow = ("--echo-latency-s", "0.4")  # no client is to outrun its researcher while that one starts again
    local = LocalServer(
        model="echo", engine="echo", folder=home / "server", arguments=("--log-level", "warning", *slow)
    )
    async with ServerPool(mine, f"study {study}", local=local) as pool:
        clients = await place_at(words)
        await Executor(mine, pool, repeat_setup(home / "studies"), clients=clients).run_trials(study, plan, trials)
        print(json.dumps(await records(pool, mine, study)))  # noqa: T201 - the test reads it
    mine.leases.release(study, token)
    store.close()


if __name__ == "__main__":
    asyncio.run(drive(Path(sys.argv[1]), *sys.argv[2:]))
