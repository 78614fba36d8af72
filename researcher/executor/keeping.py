"""The trained models of a study's trials as folders, out of what the servers that it started have kept.

The servers are at their end by then: `swarm models export` reads their state, in a process of its own, since torch has no place in
this one. What was written before is found, not written again.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from foundation.clock import Clock
from researcher.executor.blueprint import folder_name
from researcher.executor.errors import ModelsNotKept, ServerUnfit
from researcher.executor.processes import Berth, child_environ
from researcher.models import TrialRecord, TrialStatus
from researcher.store.store import Store
from swarm.protocol.errors import ErrorCode

_MODELS = "models"


def models_folder(folder: Path) -> Path | None:
    """Where models of the study in `folder` are kept: `STAGE/ARM-seedN`, `…-ROLE` for further ones. None: none was."""
    return folder / _MODELS if (folder / _MODELS).is_dir() else None


@dataclass(frozen=True, slots=True)
class _Wanted:
    run_id: str
    to: Path


class Keeping:
    """What is kept of a study that is over. folder: the study's."""

    def __init__(self, store: Store, study_id: str, folder: Path, clock: Clock, environ: Mapping[str, str]) -> None:
        self._store = store
        self._study_id = study_id
        self._folder = folder
        self._models = folder / _MODELS
        self._clock = clock
        self._environ = environ

    def keep_models(self, tell: Callable[[str], None] = lambda _: None) -> int:
        """Write the model of every trial that was done, as its run left it; returns how many there are now.

        tell: told of each. Raises: ModelsNotKept, with what is in the way; what the servers kept is there still then.
        """
        wanted = list(self._wanted())
        for number, each in enumerate(wanted, 1):
            if not each.to.exists():
                tell(f"keeping the model of {each.to.relative_to(self._models)} ({number} of {len(wanted)}) ...")
                self._export(each)
        return len(wanted)

    def discard_servers(self) -> None:
        """Free the disk of checkpoints and pools. Raises: ServerUnfit while a server runs."""
        for server in self._servers():
            if Berth(server / "process", self._clock).alive():
                raise ServerUnfit("the swarm server still runs; stop it before its state is discarded")
            shutil.rmtree(server / "state", ignore_errors=True)

    def _wanted(self) -> Iterator[_Wanted]:
        attempts = self._store.attempts_of_study(self._study_id)
        for trial in self._store.trials(self._study_id):
            done = [each for each in attempts.get(trial.key, ()) if each.outcome == "done"]
            if trial.status is TrialStatus.DONE and done and done[-1].run_id is not None:
                yield _Wanted(done[-1].run_id, self._place(trial))
                for role, partner in ((done[-1].blueprint or {}).get("partners") or {}).items():
                    yield _Wanted(partner["run_id"], self._place(trial, f"-{role}"))

    def _place(self, trial: TrialRecord, ending: str = "") -> Path:
        return self._models / trial.stage / f"{folder_name(trial)}{ending}"

    def _export(self, wanted: _Wanted) -> None:
        said = f"none of the study's servers has records of run {wanted.run_id} any more"
        for server in self._servers():
            if not (server / "state" / "pool").is_dir():
                continue
            command = [sys.executable, "-m", "swarm.main", "models", "export", wanted.run_id, "--json"]
            command += ["--state-dir", str(server / "state"), "--to", str(wanted.to)]
            done = subprocess.run(
                command, env=child_environ(self._environ), capture_output=True, text=True, check=False
            )
            if done.returncode == 0:
                return
            said, code = _last_words(done.stderr)
            if code != ErrorCode.NOT_FOUND:
                break
        raise ModelsNotKept(
            f"the model of {wanted.to.relative_to(self._models)} was not kept: {said}; `researcher resume` tries again"
        )

    def _servers(self) -> list[Path]:
        return sorted(lock.parent.parent for lock in self._folder.glob("server*/process/lock"))


def _last_words(text: str) -> tuple[str, str | None]:
    """What the command said was wrong, and the error's code."""
    lines = [line for line in text.splitlines() if line.strip()]
    last = lines[-1] if lines else "`swarm models export` said nothing"
    try:
        told = json.loads(last)
        return str(told["error"]), told["code"]
    except (ValueError, KeyError, TypeError):
        return last, None
