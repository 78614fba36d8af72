"""Exports the trained models of a study's trials from the state of the servers that the study started.

Each model goes to `models/STAGE/ARM-seedN` in the study's folder, a trial's further models to `…-ROLE`. The servers have ended
by then: `swarm models export` reads their state, in a separate process, because this one must not import torch. Models that
were already exported are not exported again. `end_left_of` ends what a study left running, and `discard_if_over` frees the disk
of a study that nothing continues.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from foundation.clock import Clock
from researcher.executor.blueprint import folder_name
from researcher.executor.errors import ModelsNotKept, ServerUnfit
from researcher.executor.local_server import LocalLimits
from researcher.executor.processes import Berth, child_environ
from researcher.executor.servers import lease_holder, server_token
from researcher.models import MODELS_KEPT, MODELS_NOT_KEPT, StudyRecord, StudyStatus, TrialRecord, TrialStatus
from researcher.store.errors import LeaseHeld
from researcher.store.store import Store
from swarm.client import Patience, SwarmClient
from swarm.protocol.errors import ErrorCode, SwarmError

_log = logging.getLogger(__name__)
_MODELS = "models"
_EXPORT_S = 1800.0
_CLIENTS, _SERVERS = "trials/*/*/*/lock", "server*/process/lock"
"""Lock files of a study's clients and of its own servers, in its folder."""
_STOP_S = 15.0
"""Seconds that a server may take to answer a request to stop a run."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    run_id: str
    to: Path


def model_place(folder: Path, trial: TrialRecord) -> Path:
    """Return the folder for the trained model of a trial. `folder` is the study's."""
    return folder / _MODELS / trial.stage / folder_name(trial)


class Keeping:
    """Keeps the models of a finished study and frees the disk space of its servers. `folder` is the study's."""

    def __init__(self, store: Store, study_id: str, folder: Path, clock: Clock, environ: Mapping[str, str]) -> None:
        self._store = store
        self._study_id = study_id
        self._folder = folder
        self._models = folder / _MODELS
        self._clock = clock
        self._environ = environ

    async def keep_models(self, tell: Callable[[str], None] = lambda _: None) -> Path:
        """Export the model of every finished trial and return their folder. `tell` receives progress lines.

        Raises: ModelsNotKept when an export fails; the servers' state is still there then.
        """
        wanted = list(self._wanted())
        try:
            for number, each in enumerate(wanted, 1):
                if not each.to.exists():
                    tell(f"keeping the model of {each.to.relative_to(self._models)} ({number} of {len(wanted)}) ...")
                    await self._export(each)
        except ModelsNotKept as error:
            self._store.journal.record(self._study_id, MODELS_NOT_KEPT, {"because": str(error)})
            raise
        self._store.journal.record(self._study_id, MODELS_KEPT, {"models": len(wanted), "in": str(self._models)})
        return self._models

    async def discard_servers(self) -> None:
        """Delete the servers' checkpoints and pools. Raises: ServerUnfit when a server is running and cannot be ended."""
        for server in self._servers():
            berth = Berth(server / "process", self._clock)
            await berth.end(LocalLimits().grace_s)  # a killed researcher may have left it running
            if berth.alive():
                raise ServerUnfit("the swarm server is still running; stop it, so that its state can be deleted")
            await asyncio.to_thread(shutil.rmtree, server / "state", ignore_errors=True)

    def _wanted(self) -> Iterator[_Wanted]:
        attempts = self._store.trials.attempts_of_study(self._study_id)
        for trial in self._store.trials.all(self._study_id):
            done = [each for each in attempts.get(trial.key, ()) if each.outcome == "done"]
            if trial.status is TrialStatus.DONE and done and done[-1].run_id is not None:
                yield _Wanted(done[-1].run_id, self._place(trial))
                for role, partner in ((done[-1].blueprint or {}).get("partners") or {}).items():
                    yield _Wanted(partner["run_id"], self._place(trial, f"-{role}"))

    def _place(self, trial: TrialRecord, ending: str = "") -> Path:
        place = model_place(self._folder, trial)
        return place.with_name(f"{place.name}{ending}")

    async def _export(self, wanted: _Wanted) -> None:
        said = f"none of the study's servers has records of run {wanted.run_id} any more"
        for server in self._servers():
            if not (server / "state" / "pool").is_dir():
                continue
            command = [sys.executable, "-m", "swarm.main", "models", "export", wanted.run_id, "--json"]
            exit_code, told = await self._ended(
                [*command, "--state-dir", str(server / "state"), "--to", str(wanted.to)]
            )
            if exit_code == 0:
                return
            said, code = _last_words(told)
            if code != ErrorCode.NOT_FOUND:
                break
        name = wanted.to.relative_to(self._models)
        raise ModelsNotKept(f"the model of {name} was not kept: {said}; `researcher resume` tries again")

    async def _ended(self, command: list[str]) -> tuple[int, str]:
        """Run the command and return its exit code and standard error. Kill it if the wait is cancelled or takes too long."""
        process = await asyncio.create_subprocess_exec(
            *command,
            env=child_environ(self._environ),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(_EXPORT_S):
                _, told = await process.communicate()
        except TimeoutError:
            return 1, f"it took longer than {_EXPORT_S:.0f} s"
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        return process.returncode or 0, told.decode(errors="replace")

    def _servers(self) -> list[Path]:
        return sorted(lock.parent.parent for lock in self._folder.glob(_SERVERS))


def _last_words(text: str) -> tuple[str, str | None]:
    """Return the command's error message and its error code, if it printed one."""
    lines = [line for line in text.splitlines() if line.strip()]
    last = lines[-1] if lines else "`swarm models export` printed nothing"
    try:
        told = json.loads(last)
        return str(told["error"]), told["code"]
    except (ValueError, KeyError, TypeError):
        return last, None


def unresumable(store: Store, study: StudyRecord) -> str | None:
    """Return why `researcher resume` does not continue this study unless it is done; None if it does."""
    if study.campaign_id is not None:
        return (
            f"{study.id} is part of {study.campaign_id}: `researcher campaign resume {study.campaign_id}` continues it"
        )
    if store.journal.last(study.id, "reproduces"):
        return f"{study.id} repeats one trial of an archive; run `researcher reproduce` again instead"
    if study.options.calibrates:
        return f"{study.id} only timed a short trial; run `researcher calibrate` again instead"
    return None


async def discard_if_over(store: Store, study_id: str, folder: Path, clock: Clock) -> None:
    """Free the disk of a stopped or failed study's own servers, if nothing can continue the study. `folder` is the study's.

    A server that cannot be ended keeps its state, with a warning.
    """
    study = store.studies.get(study_id)
    if study.status in (StudyStatus.STOPPED, StudyStatus.FAILED) and unresumable(store, study) is not None:
        try:
            await Keeping(store, study_id, folder, clock, os.environ).discard_servers()
        except ServerUnfit as error:
            _log.warning("the disk of %s is not freed: %s", study_id, error)


async def end_left_of(store: Store, study_id: str, folder: Path, clock: Clock) -> list[str]:
    """End all clients and servers of a study that no process works on. Server state stays, so that the study can continue.

    `folder` is the study's. Servers given by URL are asked to stop its runs. Return a line of text for each server on which that
    failed.
    """
    begun = bool(store.trials.all(study_id, series=()))
    urls = store.studies.get(study_id).options.servers if begun else ()
    await _end_all(folder, _CLIENTS, clock)
    await _end_all(folder, _SERVERS, clock)
    return await _stop_runs(store, urls, study_id, clock)


async def leave_servers(store: Store, study_id: str, folder: Path, kept: Sequence[str], clock: Clock) -> list[str]:
    """End what a dead worker left running on servers that the study no longer uses: it continues on those at `kept` only.

    `folder` is the study's. Return a line of text for each server on which that failed.
    """
    await _end_all(folder, _SERVERS, clock)
    still = {url.rstrip("/") for url in kept}
    before = store.studies.get(study_id).options.servers
    left = [url for url in before if url.rstrip("/") not in still]
    return await _stop_runs(store, left, study_id, clock)


async def _end_all(folder: Path, locks: str, clock: Clock) -> None:
    berths = [Berth(lock.parent, clock) for lock in await asyncio.to_thread(_found, folder, locks)]
    await asyncio.gather(*(berth.end(LocalLimits().grace_s) for berth in berths))


async def _stop_runs(store: Store, urls: Sequence[str], study_id: str, clock: Clock) -> list[str]:
    """Stop the study's runs on these servers, and end the leases that a dead worker left on them."""
    told = await asyncio.gather(*(_stop_run(url, study_id, clock) for url in dict.fromkeys(urls)))
    for url in dict.fromkeys(urls):
        with suppress(LeaseHeld):
            lease = store.leases.acquire_server(url, lease_holder(study_id), 1.0)
            store.leases.release_server(url, lease)
    return [each for each in told if each is not None]


def _found(folder: Path, pattern: str) -> list[Path]:
    return list(folder.glob(pattern))


async def _stop_run(url: str, study_id: str, clock: Clock) -> str | None:
    """Stop the study's run on this server with a checkpoint, and leave any other run alone. If that fails, return why."""
    once = Patience(connect_s=0.0, later_s=0.0)
    async with SwarmClient(url, server_token(os.environ), patience=once, clock=clock) as swarm:
        try:
            async with asyncio.timeout(_STOP_S):
                run_id = (await swarm.status()).run_id
                if run_id is not None and (await swarm.run(run_id)).spec.labels.get("study") == study_id:
                    await swarm.stop_run(run_id)
        except (SwarmError, TimeoutError) as problem:
            error = str(problem) or f"no answer within {_STOP_S:.0f} s"
            return f"its run at {url} may still be running ({error}): `swarm run stop --url {url}` stops it"
    return None
