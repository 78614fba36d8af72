"""The client of one attempt: a process that is started, and when it fails, diagnosed and perhaps given other code."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from foundation.logs import redact
from foundation.paths import write_atomically
from researcher.executor.blueprint import Code, Work
from researcher.executor.diagnosis import Cause, Diagnosis, Symptoms, diagnose
from researcher.executor.mending import Case, Mender
from researcher.executor.processes import Berth, child_environ, started_at
from researcher.models import TrialRecord
from researcher.sandbox.launch import confined
from researcher.store.store import Store
from swarm.client import ServerUnreachable, SwarmClient
from swarm.protocol.blueprint import TrialBlueprint
from swarm.protocol.episodes import DropReason
from swarm.protocol.status import Phase

_log = logging.getLogger(__name__)
_SAID = 40_000
"""Letters of a client's output that are looked at."""
_ABORTED = 16
"""Newest episodes that were given up, whose reasons are looked at."""


class Client:
    """mender: None mends nothing, and every client runs the code that the study began with."""

    def __init__(
        self, work: Work, trial: TrialRecord, swarm: SwarmClient, berth: Berth, store: Store, mender: Mender | None
    ) -> None:
        self._work = work
        self._trial = trial
        self._swarm = swarm
        self.berth = berth
        self._store = store
        self._mender = mender
        self._said_from = 0

    def code(self) -> Code:
        """What a client that starts now is to run."""
        return self._work.setup.code if self._mender is None else self._mender.code()

    def write(self, blueprint: TrialBlueprint) -> None:
        """Put the blueprint where the process, and a person, finds it."""
        text = blueprint.model_dump_json(indent=2) + "\n"
        write_atomically(self.berth.folder / "blueprint.json", text.encode())

    def start(self, blueprint: TrialBlueprint) -> None:
        """Raises: BlockingIOError when one lives here already."""
        file = self.berth.folder / "blueprint.json"
        command, environ = [sys.executable, "-m", "swarm.client.trial", str(file)], child_environ()
        code = self.code()
        if code.version != blueprint.code_version:
            raise ValueError(
                f"the blueprint is for code {blueprint.code_version[:12]}, and {code.version[:12]} is to run"
            )
        if code.sandboxed:
            servers = [blueprint.server_url, *(run.server_url for run in blueprint.partners.values())]
            command, environ = confined(command, environ, self.berth.folder, reads=[code.folder, file], servers=servers)
        elif "SWARM_TOKEN" not in environ and "SWARM_ADMIN_TOKEN" in os.environ:
            environ["SWARM_TOKEN"] = os.environ["SWARM_ADMIN_TOKEN"]
        self._said_from = self.berth.size()
        pid = self.berth.start(command, environ)
        self._store.record_client(self._work.study_id, self._trial.key, pid, started_at(pid) or 0.0)

    async def diagnosis(self, blueprint: TrialBlueprint, *, stalled: bool) -> Diagnosis:
        """Why it ended, by rules; where these cannot tell, with the opinion of whoever may be asked. Journalled."""
        said = self.berth.tail(length=max(0, min(_SAID, self.berth.size() - self._said_from)))
        found = diagnose(
            Symptoms(
                folder=Path(blueprint.instrument_dir),
                exit_code=self.berth.exit_code(),
                said=said,
                aborted=[reason for _, reason in await self._aborted(blueprint)],
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
        self._store.record_event(self._work.study_id, "client_failed", detail)
        _log.warning("the client of %s failed: %s", self._trial.key, redact(str(found)))
        return found

    async def other_code(self, blueprint: TrialBlueprint, diagnosis: Diagnosis, *, last: bool) -> Code | None:
        """Other code for the client to go on with; None: the same again.

        last: the same again is no use any more. Raises: Unmended, MendByHand.
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
                    attempt=len(self._store.attempts(self._work.study_id, self._trial.key)),
                    code=newest,
                    blueprint=blueprint,
                    diagnosis=diagnosis,
                    tasks=tuple(dict.fromkeys(tasks)),
                    last=last,
                )
            )
        return None if newest.version == blueprint.code_version else newest

    async def _aborted(self, blueprint: TrialBlueprint) -> list[tuple[str, str]]:
        """Task and reason of the newest episodes that this version of the code gave up."""
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
