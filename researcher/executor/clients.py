"""The client of one attempt: starts it and, when it fails, diagnoses why and may replace its code."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from foundation.logs import redact
from foundation.paths import write_atomically
from researcher.executor.blueprint import Code, Work
from researcher.executor.diagnosis import Cause, Diagnosis, Symptoms, diagnose
from researcher.executor.jobs import BLUEPRINT, ClientJob, Order
from researcher.models import TrialRecord
from researcher.store.store import Store
from researcher.study.plan import Plan
from swarm.client import ServerUnreachable, SwarmClient
from swarm.protocol.blueprint import TrialBlueprint
from swarm.protocol.episodes import DropReason
from swarm.protocol.status import Phase

_log = logging.getLogger(__name__)
_SAID = 40_000
"""Number of characters examined, from the end of a client's output."""
_ABORTED = 16
"""Number of aborted episodes, newest first, whose reasons are examined."""


class Client:
    """Starts and diagnoses the client of one attempt.

    Without a `mender`, nothing is repaired, and every client runs the code that the study began with.
    """

    def __init__(
        self, work: Work, trial: TrialRecord, swarm: SwarmClient, job: ClientJob, store: Store, mender: Mender | None
    ) -> None:
        self._work = work
        self._trial = trial
        self._swarm = swarm
        self.job = job
        self._store = store
        self._mender = mender

    def code(self) -> Code:
        """Return the code that the next client runs."""
        return self._work.setup.code if self._mender is None else self._mender.code()

    def write(self, blueprint: TrialBlueprint) -> None:
        """Write the blueprint to the client's folder, where the client process and people can find it."""
        text = blueprint.model_dump_json(indent=2) + "\n"
        write_atomically(self.job.folder / BLUEPRINT, text.encode())

    async def start(self, blueprint: TrialBlueprint) -> None:
        """Start the client. Raises: BlockingIOError when one is already alive."""
        code = self.code()
        if code.version != blueprint.code_version:
            raise ValueError(
                f"the blueprint is for code {blueprint.code_version[:12]}, but the client would run {code.version[:12]}"
            )
        started = await self.job.start(Order(blueprint=blueprint, code=code))
        if started.pid is not None:
            self._store.trials.record_client(self._work.study_id, self._trial.key, started.pid, started.began or 0.0)
        else:
            detail = {"trial": self._trial.key, "client": started.name, "code": code.version}
            self._store.journal.record(self._work.study_id, "client_started", detail)

    async def diagnosis(self, blueprint: TrialBlueprint, *, stalled: bool) -> Diagnosis:
        """Diagnose why the client ended, and record it in the journal. Ask an LLM if the rules do not decide."""
        folder, ending = Path(blueprint.instrument_dir), await self.job.ending()
        found = diagnose(
            Symptoms(
                folder=folder,
                exit_code=ending.exit_code,
                lost=ending.lost,
                said=self.job.as_here(self.job.said(_SAID), folder),
                aborted=[self.job.as_here(reason, folder) for _, reason in await self._aborted(blueprint)],
                phase=await self._phase(),
                stalled=stalled,
            )
        )
        if found.cause is Cause.UNKNOWN and found.trace and self._mender is not None:
            found = await self._mender.opinion(found)
        detail = {
            "trial": self._trial.key,
            "cause": found.cause.value,
            "why": redact(found.why),
            "error": redact(found.error),
            "place": found.place,
            "by": found.by,
            "code": blueprint.code_version,
        }
        self._store.journal.record(self._work.study_id, "client_failed", detail)
        _log.warning("the client of %s failed: %s", self._trial.key, redact(str(found)))
        return found

    async def other_code(self, blueprint: TrialBlueprint, diagnosis: Diagnosis, *, last: bool) -> Code | None:
        """Return other code to continue with, or None to restart the same code.

        `last` means that restarting the same code is not worth another try. Raises: Unmended, MendByHand.
        """
        if self._mender is None or diagnosis.cause is not Cause.CODE:
            return None
        newest = self._mender.code()
        if newest.version == blueprint.code_version:
            tasks = [task for task, _ in await self._aborted(blueprint)]
            newest = await self._mender.mend(
                Case(
                    study_id=self._work.study_id,
                    plan=self._work.plan,
                    trial=self._trial,
                    attempt=len(self._store.trials.attempts(self._work.study_id, self._trial.key)),
                    code=newest,
                    blueprint=blueprint,
                    diagnosis=diagnosis,
                    tasks=tuple(dict.fromkeys(tasks)),
                    last=last,
                )
            )
        return None if newest.version == blueprint.code_version else newest

    async def last_words(self, reason: str, diagnosis: Diagnosis | None) -> str:
        """Describe a failed attempt: what was missing, the diagnosis, and the client's last output."""
        found = f" {diagnosis}." if diagnosis is not None else ""
        said, ending = redact(self.job.said()), await self.job.ending()
        return f"{reason}.{found} The client ended with code {ending.exit_code}; its last output: {said or 'nothing'}"

    async def _aborted(self, blueprint: TrialBlueprint) -> list[tuple[str, str]]:
        """Return the task and the reason of the newest episodes that this version of the code aborted."""
        found = [
            (entry.task_id, entry.detail)
            async for entry in self._swarm.ledger(run_id=blueprint.run_id)
            if entry.reason is DropReason.ABORTED and entry.detail and entry.client_version == blueprint.code_version
        ]
        return found[-_ABORTED:]

    async def _phase(self) -> Phase | None:
        try:
            return (await self._swarm.status()).phase
        except ServerUnreachable:
            return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A client that failed because of its own code.

    `last` means that restarting the same code is not worth another try. `tasks` are the tasks of the failed episodes.
    """

    study_id: str
    plan: Plan
    trial: TrialRecord
    attempt: int
    code: Code
    blueprint: TrialBlueprint
    diagnosis: Diagnosis
    tasks: tuple[str, ...] = ()
    last: bool = False


class Mender(Protocol):
    """Repairs an instrument's code. One per study: a repair applies to every client that starts later."""

    def code(self) -> Code:
        """Return the code that the next client runs."""

    async def opinion(self, diagnosis: Diagnosis) -> Diagnosis:
        """Return an LLM's opinion on a diagnosis that the rules left open, labelled as such.

        If the LLM does not answer, return the diagnosis unchanged.
        """

    async def mend(self, case: Case) -> Code:
        """Return the version to continue with: a repaired one, or the same version if it deserves another try.

        Raises: Unmended when this trial cannot be saved; MendByHand when a person has to repair the code.
        """
