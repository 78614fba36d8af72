"""The gates of a study: where a person's word is waited for, as `--approve` says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from foundation.locks import locked
from foundation.paths import user_data_dir
from researcher.models import StudyStatus
from researcher.ownership import owned_now
from researcher.store.checkpoints import Answer, Gate
from researcher.store.errors import LeaseHeld, WrongState
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


_WORDS = {"approve": "approved", "reject": "rejected"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Amendment:
    """What a new version of a plan changes; None leaves it. Raises: ValueError when it changes nothing, or to nothing."""

    seeds: int | None = None
    """Per arm, as `researcher start --seeds` means it."""
    wall_s: float | None = None

    def __post_init__(self) -> None:
        if self.seeds is None and self.wall_s is None:
            raise ValueError("say what to amend: the seeds per arm, or the budget")
        if (self.seeds is not None and self.seeds < 1) or (self.wall_s is not None and not self.wall_s > 0):
            raise ValueError("seeds and budget must be above zero")
        if self.seeds == 1:
            raise ValueError("1 seed per arm shows no spread: at least 2 are needed, 3 or more are better")

    @property
    def told(self) -> str:
        """What changes, in words."""
        seeds = "" if self.seeds is None else f"{self.seeds} seeds per arm"
        budget = "" if self.wall_s is None else f"budget {self.wall_s:g} s"
        return ", ".join(filter(None, (seeds, budget)))


def answer_gate(store: Store, checkpoints: str, study_id: str, answer: Answer, *, gate: str | None = None) -> str:
    """Answer where the study waits; returns the gate's name.

    gate: the one that the person was shown. Another one by now is not answered in its place.
    Raises: WrongState when the study waits for no answer, for one at another gate, or was answered before.
    """
    with _one_at_a_time():
        name = open_gate(store, study_id)
        if gate is not None and name != gate:
            now = f"waits at {name}" if name else f"is {store.study(study_id).status}"
            raise WrongState(f"{study_id} no longer waits at {gate}: it {now}; nothing was answered, look again")
        if name is None:
            raise WrongState(f"{study_id} waits for no answer; it is {store.study(study_id).status}")
        asked = Gate(checkpoints, study_id, name)
        earlier = asked.answer()
        try:
            counts = earlier or asked.give(answer)
        except LookupError as error:  # its process died between the journal and the question
            raise WrongState(f"{name} of {study_id} is not asked yet; `researcher resume {study_id}` asks") from error
        if earlier is not None or counts != answer:  # the second: from another machine, a moment ago
            raise WrongState(f"{name} of {study_id} was answered already: {answer_text(counts)}")
    _note(store, study_id, name, answer)
    return name


def amend(
    store: Store,
    checkpoints: str,
    study_id: str,
    change: Amendment,
    *,
    because: str,
    by: str,
    version: int | None = None,
) -> Plan:
    """Make a new version of a plan of which no trial has begun; a gate that was open asks about the new version.

    version: of the plan that the person was shown. Where another one stands by now, nothing is amended.
    Raises: WrongState; PlanningRefused (BudgetTooSmall) as for a new study; LeaseHeld while somebody works on the study.
    """
    study, plan = store.study(study_id), store.plan(study_id)
    if study.status.ended:
        raise WrongState(f"{study.id} is {study.status}; what it found stays as it is. Start another study")
    if store.trials(study_id, series=()):
        raise WrongState(
            f"trials of {study.id} have begun: their plan is what makes their numbers evidence. Stop it and start another study"
        )
    if version is not None and version != plan.version:
        raise WrongState(f"{study.id} has plan version {plan.version} by now, not {version}; look again")
    amended = _amended(plan, change)
    if amended == plan.model_copy(update={"version": amended.version}):
        raise WrongState(
            f"the plan of {study.id} (version {plan.version}) says that already: {change.told}; nothing was amended"
        )
    _check(amended, study.options)
    with owned_now(store, study_id) as mine:
        told = {"version": amended.version, "because": because, "by": by, "changed": change.told}
        mine.save_plan(study_id, amended, amended=told)
        if open_gate(mine, study_id) is not None:  # what was asked about is no more: ask about what is now
            gates = Gates(mine, lambda name, asked: Gate(checkpoints, study_id, name).ask(asked))
            _ask_again(mine, gates, study_id, amended)
    return amended


def answer_text(answer: Answer) -> str:
    """`approved by ada: go ahead`."""
    by = f" by {answer.by}" if answer.by else ""
    return f"{_WORDS[answer.verdict]}{by}{f': {answer.words}' if answer.words else ''}"


def _ask_again(mine: Store, gates: Gates, study_id: str, plan: Plan) -> None:
    try:
        gates.before_plan(study_id, plan)
    except Halted as halt:
        if mine.study(study_id).status is halt.status:
            mine.set_study_status(study_id, halt.status, halt.reason)


def _note(store: Store, study_id: str, gate: str, answer: Answer) -> None:
    """Have the records say that the answer is there, unless somebody works on the study, who says so when he meets it.

    A no stops the study at once, but where one died over it: what runs for it is ended by `resume`, which stops it then.
    """
    at_rest = store.lease(study_id) is None
    with suppress(LeaseHeld), owned_now(store, study_id) as mine:
        mine.record_event(study_id, GIVEN, {"gate": gate, **answer.model_dump()})
        if store.study(study_id).status is not StudyStatus.WAITING:
            return
        if answer.verdict == "reject" and at_rest:
            mine.set_study_status(study_id, StudyStatus.STOPPED, rejection(gate, answer))
        else:
            mine.set_study_status(study_id, StudyStatus.WAITING, answer_text(answer))


def _amended(plan: Plan, change: Amendment) -> Plan:
    from researcher.design.own_seeds import with_own_seeds
    from researcher.design.stages import cost, with_seeds  # scipy takes longer to import than most answers take

    amended = plan.model_copy(update={"version": plan.version + 1})
    if change.wall_s is not None:
        amended = amended.model_copy(update={"budget": plan.budget.model_copy(update={"wall_s": change.wall_s})})
    if change.seeds is not None:
        amended = with_own_seeds(amended.model_copy(update={"stages": with_seeds(plan.stages, change.seeds)}))
        trials, _ = cost(amended, {arm.name: 1.0 for arm in plan.arms}, at_most=True)
        amended = amended.model_copy(update={"budget": amended.budget.model_copy(update={"trials": trials})})
    return amended


def _check(plan: Plan, choices: Mapping[str, Any]) -> None:
    """Raises: BudgetTooSmall; PlanningRefused where seeds run out, or the instrument is not there any more."""
    from researcher.design.pricing import check_budget
    from researcher.design.stages import check_seeds
    from researcher.instruments.catalogue import open_instrument

    check_seeds(plan)
    folder = open_instrument(choices.get("instrument") or plan.instrument)
    check_budget(plan, folder.instrument, servers=max(1, len(choices.get("servers", ()))))


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """On this machine: between looking at a gate and answering it nobody else answers."""
    path = user_data_dir() / "answers.lock"
    with path.open("a") as opened:
        locked(opened, path)
        yield
