"""The gates of a study: where a person's word is waited for, as `--approve` says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from researcher.models import StudyStatus
from researcher.store.checkpoints import Answer
from researcher.store.store import Store
from researcher.study.plan import Plan, Stage

APPROVE = ("never", "plan", "stage")
"""At which gates a person is asked: at none, once the plan is made, or before every stage as well."""

STOPPED_ON_REQUEST = "stopped on request; `researcher resume` goes on with it"
STOPPED_UNPLANNED = "stopped on request, before it had a plan; `researcher start` asks anew"

GIVEN = "answer_given"
"""The event of an answer that a person gives while nobody works on the study; `answered` follows once it is met."""

Ask = Callable[[str, dict[str, Any]], Answer | None]
"""(gate's name, question) → a person's answer, None while there is none."""


class Halted(Exception):
    """The study rests: stopped, or waiting for a person or a window. `reason` says what for."""

    def __init__(self, status: StudyStatus, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


class WindowClosed(Halted):
    """The study rests until its next window, and for nothing else."""

    def __init__(self) -> None:
        super().__init__(StudyStatus.WAITING, "waits for its next window")


def heed(store: Store, study_id: str) -> None:
    """Raises: Halted when a person asked for a stop or a pause."""
    study = store.study(study_id)
    if study.stop_requested:
        raise Halted(StudyStatus.STOPPED, STOPPED_ON_REQUEST)
    if study.pause_requested:
        raise Halted(StudyStatus.WAITING, "paused on request; `researcher resume` goes on with it")


class Gates:
    """`store` is the owner's. An answer is journalled when it is first met."""

    def __init__(self, store: Store, ask: Ask) -> None:
        self._store = store
        self._ask = ask

    def before_plan(self, study_id: str, plan: Plan) -> None:
        """Raises: Halted."""
        if self._wanted(study_id) in ("plan", "stage"):
            self._pass(study_id, f"plan/{plan.version}", {"question": plan.question, "hash": plan.digest()})

    def before_stage(self, study_id: str, plan: Plan, stage: Stage, seeds: int) -> None:
        """Raises: Halted."""
        if self._wanted(study_id) == "stage" and stage is not plan.stages[0]:
            question = {"stage": stage.id, "arms": list(stage.arms), "seeds": seeds}
            self._pass(study_id, f"stage/{plan.version}/{stage.id}", question)

    def _wanted(self, study_id: str) -> str:
        return str(self._store.study(study_id).options.get("approve", "never"))

    def _pass(self, study_id: str, name: str, question: dict[str, Any]) -> None:
        self._journal(study_id, "asked", {"gate": name, **question})
        answer = self._ask(name, question)
        if answer is None:
            how = f"`researcher approve {study_id}`, `reject` or `amend`"
            raise Halted(StudyStatus.WAITING, f"waits for a person's word on {_subject(name)}: {how}")
        self._journal(study_id, "answered", {"gate": name, **answer.model_dump()})
        if answer.verdict == "reject":
            raise Halted(StudyStatus.STOPPED, rejection(name, answer))

    def _journal(self, study_id: str, kind: str, detail: dict[str, Any]) -> None:
        known = self._store.events(study_id, limit=100_000, kind=kind)
        if all(event.detail != detail for event in known):
            self._store.record_event(study_id, kind, detail)


def open_gate(store: Store, study_id: str) -> str | None:
    """The name of the gate at which the study waits, None when it waits at none. A newer question replaces an older one."""
    asked = [event.detail["gate"] for event in store.events(study_id, limit=100_000, kind="asked")]
    answered = {event.detail["gate"] for event in store.events(study_id, limit=100_000, kind="answered")}
    return asked[-1] if asked and asked[-1] not in answered else None


def unanswered_gate(store: Store, study_id: str) -> str | None:
    """The same, None also where the answer is there and nobody went on with it yet."""
    gate = open_gate(store, study_id)
    given = {event.detail["gate"] for event in store.events(study_id, limit=100_000, kind=GIVEN)}
    return None if gate in given else gate


def rejection(gate: str, answer: Answer) -> str:
    """Why a study is stopped that was rejected at this gate."""
    by = f" by {answer.by}" if answer.by else ""
    return f"{_subject(gate)} was rejected{by}: {answer.words}"


def _subject(gate: str) -> str:
    """What is asked about at it, by its name: `plan/1`, `stage/1/compare`."""
    return f"stage {gate.split('/', 2)[2]}" if gate.startswith("stage/") else "the plan"
