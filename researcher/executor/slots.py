"""One server during one attempt: starts or finds the attempt's run, waits for other runs to end, and frees the server."""

from __future__ import annotations

import logging
from collections.abc import Callable

from foundation.clock import Clock
from researcher.executor.errors import AttemptFailed, RunLost, ServerUnfit
from researcher.executor.servers import Server
from researcher.models import StudyStatus
from researcher.store.errors import NotFound as NoStudy
from researcher.store.store import Store
from researcher.study.plan import PlanModel
from swarm.client import IdempotencyConflict, InvalidSpec, NotFound, OverLimit, Refusal, ServerBusy
from swarm.client.episode import await_answer
from swarm.models.catalogue import hosted_name
from swarm.protocol.errors import SwarmError
from swarm.protocol.runspec import RunSpec
from swarm.protocol.status import Phase, RunReport, ServerStatus

_log = logging.getLogger(__name__)
_ABANDONED_DRAIN_S = 0.1
"""Drain limit for a run whose client is gone."""


class Slot:
    """One server, during one attempt. `tell` receives messages about waits. `check_halt` is called while waiting, and may raise
    StudyHalted to end the wait."""

    def __init__(
        self,
        server: Server,
        study_id: str,
        store: Store,
        clock: Clock,
        *,
        busy_s: float,
        look_s: float,
        tell: Callable[[str], None],
        check_halt: Callable[[], None],
    ) -> None:
        self.server = server
        self.swarm = server.swarm
        self._study_id = study_id
        self._store = store
        self._clock = clock
        self._busy_s = busy_s
        self._look_s = look_s
        self._tell = tell
        self._check_halt = check_halt
        self._told: set[str] = set()
        self.run_id: str | None = None
        """The run that was started or found, even if the caller was cancelled in between."""

    async def start(self, spec: RunSpec, idempotency_key: str, model: PlanModel) -> RunReport:
        """Start the run under this key, or find it again. The server has to host `model`.

        Raises: AttemptFailed when the server refuses the run; ServerUnfit when it hosts another model or other weights, or stays
        busy with another run; StudyHalted when the study is halted during that wait.
        """
        status = await self.server.ready(self._clock, self._busy_s)
        deadline = self._clock.monotonic() + self._busy_s
        self._check_weights(model, status)
        while True:
            self.server.check()
            try:
                report = await await_answer(self._begun(spec, idempotency_key), self._clock)
            except ServerBusy as busy:
                await self._make_room(str(busy.fields.get("run_id")), deadline)
                await self._clock.sleep(self._look_s)
            except (InvalidSpec, IdempotencyConflict) as error:
                raise AttemptFailed(f"the server refused the run: {_details(error)}") from error
            else:
                if report.status == "running":
                    await self.server.discard_runs_before(report.run_id)
                return report

    async def _begun(self, spec: RunSpec, idempotency_key: str) -> RunReport:
        report = await self.swarm.start_run(spec, idempotency_key)
        self.run_id = report.run_id
        return report

    def _check_weights(self, model: PlanModel, status: ServerStatus) -> None:
        """Compare the server's weights with the plan and with the weights of earlier trials. Raises: ServerUnfit."""
        seen = weights_seen(self._store, self._study_id).get(model.name)
        problem = misfit(model, self.server.url, status, seen)
        if problem is not None:
            raise ServerUnfit(problem, self.server.url)
        if seen is None and status.model_fingerprint is not None:
            note_weights(self._store, self._study_id, model, status)

    def check(self, status: ServerStatus, run_id: str) -> None:
        """Check that the server can be used and still has the run.

        Raises: ServerUnfit; AttemptFailed when the run was removed from the server.
        """
        self.server.check()
        if status.phase is Phase.FAILED:
            reason = status.failed.reason if status.failed else "no reason given"
            self.server.unfit = f"its engine failed: {reason}"
            self.server.check()
        if status.run_id != run_id and status.phase is not Phase.BOOTING:
            raise AttemptFailed(f"the run is no longer on its server (current run: {status.run_id or 'none'})")

    async def rest(self, run_id: str) -> None:
        """Stop the run with a checkpoint. Its open episodes may end first, within its drain limit. A second call does nothing.

        Raises: ServerUnfit when the run does not stop; SwarmError.
        """
        report = await self.swarm.stop_run(run_id)
        await self._released(run_id, self._clock.monotonic() + report.spec.limits.drain_limit_s + self._busy_s)
        if (await self.swarm.status()).run_id == run_id:
            raise await self._unstoppable(run_id)

    async def go_on(self, run_id: str) -> bool:
        """Resume the run if it is paused, and return whether it was.

        Raises: RunLost when its server no longer has it, or has run something else since; SwarmError.
        """
        if (await self.swarm.status()).run_id == run_id:
            return False
        try:
            report = await self.swarm.run(run_id)
            if report.status == "failed":
                raise RunLost(f"run {run_id} failed on {self.server.url}: {report.reason}; the trial starts again")
            await self.swarm.restore(run_id, report.step)
        except (NotFound, OverLimit) as refusal:
            raise RunLost(
                f"{self.server.url} cannot continue run {run_id}: {refusal.detail}; the trial starts again"
            ) from refusal
        return True

    async def free(self, run_id: str | None) -> None:
        """Stop the run to free the engine. If that fails, the next run will stop it."""
        if run_id is None or self.server.unfit is not None:
            return
        try:
            await self._stop(run_id)
            await self._released(run_id, self._clock.monotonic() + self._busy_s)
        except (SwarmError, ServerUnfit) as error:
            _log.warning("run %s could not be stopped: %s", run_id, error)

    async def _make_room(self, run_id: str, deadline: float) -> None:
        """Stop a run left behind by this study or by a study that is over; wait for any other run to end.

        Raises: ServerUnfit at the deadline; StudyHalted.
        """
        try:
            study_id = (await self.swarm.run(run_id)).spec.labels.get("study")
        except NotFound:
            return
        left_s, over = deadline - self._clock.monotonic(), self._is_over(study_id)
        if left_s <= 0:
            raise await self._unstoppable(run_id) if over else self._taken(run_id)
        whose = f"of study {study_id}" if study_id else "of somebody else"
        told = f"{self.server.url} is busy with run {run_id} {whose}; waiting up to {left_s:.0f} s for it to end"
        if over:
            await self._stop(run_id)
            self._tell_once(run_id, f"{told}, as requested")
        else:
            self._tell_once(
                run_id,
                f"{told}. Instead of waiting, end it with `swarm run stop --url {self.server.url}`; or press Ctrl-C and start on "
                "another --server",
            )
        await self._released(run_id, deadline, self._waiting)

    def _waiting(self, status: ServerStatus) -> None:
        self._check_halt()
        if status.storage_full is not None:
            self._tell_once("storage_full", f"{self.server.url}: {status.storage_full.reason}")

    def _tell_once(self, about: str, text: str) -> None:
        if about not in self._told:
            self._told.add(about)
            self._tell(text)

    def _taken(self, run_id: str) -> ServerUnfit:
        return ServerUnfit(
            f"{self.server.url} is busy with run {run_id}, which belongs to another study: end it with "
            f"`swarm run stop --url {self.server.url}`, or give another --server",
            self.server.url,
        )

    async def _unstoppable(self, run_id: str) -> ServerUnfit:
        full = (await self.swarm.status()).storage_full
        why = "" if full is None else f": {full.reason}"
        return ServerUnfit(f"{self.server.url}: run {run_id} was asked to stop but has not{why}", self.server.url)

    def _is_over(self, study_id: str | None) -> bool:
        if study_id is None or study_id == self._study_id:
            return study_id is not None
        try:
            status = self._store.studies.get(study_id).status
        except NoStudy:
            return False
        return status in (StudyStatus.DONE, StudyStatus.STOPPED, StudyStatus.FAILED)

    async def _released(
        self, run_id: str, deadline: float, see: Callable[[ServerStatus], None] = lambda _: None
    ) -> None:
        """Wait until the run has left the server, or until the deadline. `see` is called with each status, and may raise to end the
        wait."""
        async for status in self.swarm.statuses(wait_s=max(0.0, min(10.0, deadline - self._clock.monotonic()))):
            if status.run_id != run_id or self._clock.monotonic() >= deadline:
                return
            self.server.check()
            see(status)
            await self._clock.sleep(self._look_s)

    async def _stop(self, run_id: str) -> None:
        """Stop a run whose client is gone, without waiting for its open episodes."""
        report = await self.swarm.run(run_id)
        if report.status == "running":
            await self.swarm.patch_run(run_id, {"limits": {"drain_limit_s": _ABANDONED_DRAIN_S}})
        await self.swarm.stop_run(run_id)


def _details(error: Refusal) -> str:
    problems = error.fields.get("errors") or []
    return f"{error.detail} {problems}" if problems else error.detail


_EVENT = "weights"
_SHOWN = 12
"""Number of hexadecimal digits shown of a fingerprint, the same number that servers show."""


def misfit(model: PlanModel, url: str, status: ServerStatus, seen: str | None = None) -> str | None:
    """Return why trials of `model` cannot run on the server at `url`, or None if they can.

    `seen` is the fingerprint of the weights that the study's earlier trials of this model started from.
    """
    found = status.model_fingerprint
    if not model.is_hosted(status.model, found, status.engine.backend):
        return (
            f"the plan trains {model.title} ({url} hosts {hosted(status)}): start a server with {serving(model, status)}, or plan a "
            f"study of {hosted_name(status.model)} with --model"
        )
    if None not in (seen, found) and seen != found:
        return (
            f"{url} hosts other weights than this study trains as {model.name}: {hosted(status)}, not {str(seen)[:_SHOWN]}; "
            "serve the weights of its first trials again, or start a new study"
        )
    return None


def hosted(status: ServerStatus) -> str:
    """Return the name of the hosted model, with the beginning of its fingerprint if it has weights."""
    name = hosted_name(status.model)
    if status.model_fingerprint is None or status.engine.backend == "echo":
        return name
    return f"{name}@{status.model_fingerprint[:_SHOWN]}"


def serving(model: PlanModel, status: ServerStatus | None = None) -> str:
    """Return the command that serves the model. `status` is that of a server with the same engine, if known."""
    if status is not None and status.engine.backend == "echo":
        return f"`swarm serve --model {model.name} --engine echo`"
    return f"`swarm serve --model {model.source}`"


def weights_seen(store: Store, study_id: str) -> dict[str, str]:
    """Return the fingerprints of the weights that the study's trials started from, by model name."""
    return {event.detail["model"]: event.detail["fingerprint"] for event in store.journal.events(study_id, _EVENT)}


def note_weights(store: Store, study_id: str, model: PlanModel, status: ServerStatus) -> None:
    """Record the server's weights as this study's weights under the model's name."""
    detail = {"model": model.name, "fingerprint": status.model_fingerprint, "hosted": status.model}
    store.journal.record(study_id, _EVENT, detail)
