"""Base class of sinks, which copy the records elsewhere. They read changes from the outbox, look up the current state when sending,
and may send a change twice.

SQL is the source of truth. An outage ends the attempt but raises nothing, and affects only one sink: each has its own deliveries.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from foundation.logs import redact
from researcher.models import KINDS, TrialRecord
from researcher.store.errors import NotFound
from researcher.store.outbox import Message
from researcher.store.store import Store
from researcher.study.plan import Plan
from swarm.protocol.episodes import Cause

_log = logging.getLogger(__name__)
_LONGEST_ERROR = 500


class CopyFailed(Exception):
    """A sink cannot copy a change now, so the message waits in the outbox. The text says why."""


class CopySink(ABC):
    """A copy of the records. Call `drain` regularly and once at the end. It may run in a separate thread."""

    name: ClassVar[str]
    """Name under which this sink's deliveries are recorded. It must never change."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def _plan(self, study_id: str) -> Plan | None:
        """Return the study's newest plan, if it has one."""
        try:
            return self._store.plans.get(study_id)
        except NotFound:
            return None

    def drain(self, study_id: str | None = None) -> int:
        """Send the waiting messages of a study, oldest first, and return how many were sent.

        Without `study_id`, do so for every study; a failure in one does not hold up the others. A message that cannot be sent
        waits, with all later ones of its study; `store.outbox.state` has the error. Concurrent calls wait for each other.
        """
        waiting = self._store.outbox.unsent(self.name) if study_id is None else ()
        chosen = dict.fromkeys(message.study_id for message in waiting) if study_id is None else [study_id]
        return sum(self._drain(each) for each in chosen)

    def _drain(self, study_id: str) -> int:
        if not self._store.outbox.unsent(self.name, study_id):  # the usual case; needs no lock
            return 0
        sent = 0
        with self._store.outbox.turn(self.name, study_id):
            for messages in _same(self._store.outbox.unsent(self.name, study_id)):
                if not self._sent(messages[0]):
                    break
                for message in messages:
                    self._store.outbox.mark_sent(self.name, message.seq)
                sent += len(messages)
        return sent

    def _sent(self, message: Message) -> bool:
        """Send one message and return whether that worked. If not, record the error; the message keeps waiting."""
        try:
            self._send(message)
        except CopyFailed as error:
            why = redact(str(error))
        except Exception as error:  # noqa: BLE001 - a sink's library may raise anything, and that must not end the study
            why = redact(f"{type(error).__name__}: {error}")
        else:
            return True
        _log.warning("%s could not copy %s: %s", self.name, message.kind, why.partition("\n")[0])
        self._store.outbox.mark_unsent(self.name, message.seq, why[:_LONGEST_ERROR])
        return False

    @abstractmethod
    def _send(self, message: Message) -> None:
        """Copy the current state of the message's subject. Raises: CopyFailed, or the library's errors; then nothing is
        marked as sent.
        """

    @abstractmethod
    def place(self) -> str:
        """Return where a person finds the copy."""


def _same(waiting: list[Message]) -> Iterator[list[Message]]:
    """Group messages about the same subject. Its current state is what is sent, so sending it once is enough."""
    grouped: dict[tuple[str, str, str], list[Message]] = {}
    for message in waiting:
        grouped.setdefault((message.study_id, message.kind, message.ref), []).append(message)
    yield from grouped.values()


_LONGEST_REASON = 5000


def params_of(plan: Plan | None, trial: TrialRecord) -> dict[str, object]:
    """Return the parameters of a trial: arm, seed, and the level of each factor."""
    levels = {} if plan is None else next((arm.levels for arm in plan.arms if arm.name == trial.arm), {})
    return {"arm": trial.arm, "seed": trial.seed, **levels}


def tags_of(plan: Plan | None, trial: TrialRecord, blueprint: Mapping[str, Any]) -> dict[str, str]:
    """Return the tags for finding a trial: hypotheses, stage, plan, model, code, status."""
    tags = {"swarm.arm": trial.arm, "swarm.seed": str(trial.seed), "swarm.stage": trial.stage}
    tags["swarm.status"] = trial.status.value
    tags["swarm.attempts"] = str(trial.attempt)
    if trial.reason:
        tags["swarm.reason"] = trial.reason[:_LONGEST_REASON]
    if plan is not None:
        concerned = [one.id for one in plan.hypotheses if trial.arm in one.sides]
        tags["swarm.hypothesis"] = ",".join(concerned)
        tags["swarm.plan_hash"] = plan.digest()
        tags["swarm.model"] = plan.model_of(trial.arm).title
    hosted = trial.evidence.model if trial.evidence is not None else None
    if hosted is not None:
        if hosted.engine is not None:
            tags["swarm.engine"] = hosted.engine
        planned = None if plan is None else plan.model_of(trial.arm)
        known = planned is not None and planned.is_hosted(hosted.name, hosted.fingerprint, hosted.engine)
        name = planned.name if planned is not None and known else hosted.name
        tags["swarm.model"] = name if hosted.fingerprint is None else f"{name}@{hosted.fingerprint[:12]}"
    if "code_version" in blueprint:
        tags["swarm.code_version"] = str(blueprint["code_version"])
    return tags


def losses_of(trial: TrialRecord) -> dict[str, float]:
    """Count the attempts at episodes, the losses by cause and the tasks set aside, in training and on held-out tasks together.

    Empty if they were not recorded.
    """
    found = trial.evidence.attrition if trial.evidence is not None else None
    if found is None:
        return {}
    counts = [found.of(kind) for kind in KINDS]
    return {
        "attempts": float(sum(each.attempts for each in counts)),
        **{f"lost_{cause}": float(sum(each.lost.get(cause, 0) for each in counts)) for cause in Cause},
        "tasks_set_aside": float(sum(each.set_aside for each in counts)),
    }


def points_of(trial: TrialRecord, started: float) -> Iterator[tuple[str, float, int, int]]:
    """Yield each point as (name, value, time in ms, step). Times are spread over the trial, and are the same each time the trial
    is sent."""
    began, ended = int(started * 1000), int((trial.ended_at or started) * 1000)
    for name, value in trial.finals.items():
        yield f"final.{name}", value, ended, 0
    for name, value in losses_of(trial).items():
        yield name, value, ended, 0
    for name, line in trial.series.items():
        for index, (step, value) in enumerate(line, start=1):
            yield name, value, began + (ended - began) * index // len(line), step
