"""The gates where a study waits for a person, and what a person can decide there: an answer, or an amended plan.

`--approve` says which gates a study has: one for its plan, one before each later stage. The first answer counts.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from researcher.halts import StudyHalted
from researcher.models import Answer, StudyOptions, StudyStatus
from researcher.notify.study import study_gate
from researcher.ownership import owned_now
from researcher.store.errors import LeaseHeld, WrongState
from researcher.store.store import Store
from researcher.study.plan import Plan, Stage

_WORDS = {"approve": "approved", "reject": "rejected"}


def pass_plan(store: Store, study_id: str, plan: Plan) -> None:
    """Pass the gate of the plan. `store` is the owner's. Raises: StudyHalted while there is no answer, or when the plan is
    rejected.
    """
    if store.studies.get(study_id).options.approve in ("plan", "stage"):
        _pass(store, study_id, f"plan/{plan.version}", {"question": plan.question, "hash": plan.digest()})


def pass_stage(store: Store, study_id: str, plan: Plan, stage: Stage, seeds: int) -> None:
    """Pass the gate before each stage but the first. Raises: StudyHalted as `pass_plan` does."""
    if store.studies.get(study_id).options.approve == "stage" and stage is not plan.stages[0]:
        question = {"stage": stage.id, "arms": list(stage.arms), "seeds": seeds}
        _pass(store, study_id, f"stage/{plan.version}/{stage.id}", question)


def _pass(store: Store, study_id: str, name: str, question: dict[str, object]) -> None:
    answer = store.gates.ask(study_id, name, question)
    if answer is None:
        how = f"`researcher approve {study_id}`, `reject` or `amend`"
        raise StudyHalted("gate", f"waits for a person's word on {_subject(name)}: {how}")
    if answer.verdict == "reject":
        raise StudyHalted("rejected", rejection(name, answer))


def waits_for_an_answer(store: Store, study_id: str) -> bool:
    """Return whether the study waits at a gate that nobody has answered."""
    gate = store.gates.open(study_id)
    return gate is not None and gate.answer is None


def rejection(gate: str, answer: Answer) -> str:
    """Return the reason recorded for a study that was rejected at this gate."""
    by = f" by {answer.by}" if answer.by else ""
    return f"{_subject(gate)} was rejected{by}: {answer.words}"


def _subject(gate: str) -> str:
    """Name what this gate (`plan/1`, `stage/1/compare`) is about, in words."""
    return f"stage {gate.split('/', 2)[2]}" if gate.startswith("stage/") else "the plan"


# -- what people decide -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Amendment:
    """A change to a plan; None keeps the value. Raises: ValueError for an empty or invalid change."""

    seeds: int | None = None
    """Seeds per arm, as in `researcher start --seeds`."""
    wall_s: float | None = None

    def __post_init__(self) -> None:
        if self.seeds is None and self.wall_s is None:
            raise ValueError("say what to amend: the seeds per arm, or the budget")
        if (self.seeds is not None and self.seeds < 1) or (self.wall_s is not None and not self.wall_s > 0):
            raise ValueError("seeds and budget must be above zero")
        if self.seeds == 1:
            raise ValueError("1 seed per arm shows no spread: at least 2 are needed, 3 or more are better")

    @property
    def text(self) -> str:
        """The change in words."""
        seeds = "" if self.seeds is None else f"{self.seeds} seeds per arm"
        budget = "" if self.wall_s is None else f"budget {self.wall_s:g} s"
        return ", ".join(filter(None, (seeds, budget)))


def answer_gate(store: Store, study_id: str, answer: Answer, *, gate: str | None = None) -> str:
    """Answer the gate where the study waits, and return the gate's name.

    `gate` is the one that the person was shown. If the study now waits at another gate, the answer is refused.

    Raises: WrongState when the study waits for no answer, waits at another gate, or was already answered.
    """
    waiting = store.gates.open(study_id)
    name = None if waiting is None else waiting.name
    if gate is not None and name != gate:
        now = f"waits at {name}" if name else f"is {store.studies.get(study_id).status}"
        raise WrongState(f"{study_id} no longer waits at {gate}: it {now}. Nothing was recorded; look again")
    if waiting is None or name is None:
        study = store.studies.get(study_id)
        why = f" ({study.reason})" if study.reason else ""
        raise WrongState(f"{study_id} is not waiting for an answer: it is {study.status}{why}")
    counts = waiting.answer or store.gates.give(study_id, name, answer)
    if waiting.answer is not None or counts != answer:  # they differ if somebody else answered a moment ago
        raise WrongState(f"{name} of {study_id} was answered already: {answer_text(counts)}")
    _settle(store, study_id, name, answer)
    return name


def amend(store: Store, study_id: str, change: Amendment, *, because: str, by: str, version: int | None = None) -> Plan:
    """Make a new version of a plan before its first trial. An open gate then asks about the new version.

    `version` is the plan version that the person was shown. If there is a newer one, nothing is amended.

    Raises: WrongState; PlanningRefused (BudgetTooSmall) as for a new study; LeaseHeld while a worker holds the study.
    """
    study, plan = store.studies.get(study_id), store.plans.get(study_id)
    if study.status.ended:
        raise WrongState(f"{study.id} is {study.status}; start a new study instead")
    if study.campaign_id is not None:
        raise WrongState(
            f"the plan of {study.id} was decided by campaign {study.campaign_id}: veto it there, and tell the campaign what you want"
        )
    if store.trials.all(study_id, series=()):
        raise WrongState(
            f"trials of {study.id} have begun, so its plan can no longer change. Stop it and start another study"
        )
    if version is not None and version != plan.version:
        raise WrongState(f"{study.id} now has plan version {plan.version}, not {version}; look again")
    amended = _amended(plan, change)
    if amended == plan.model_copy(update={"version": amended.version}):
        raise WrongState(
            f"the plan of {study.id} (version {plan.version}) already says so: {change.text}; nothing was amended"
        )
    _check(amended, study.options)
    with owned_now(store, study_id) as mine:
        line = {"version": amended.version, "because": because, "by": by, "changed": change.text}
        mine.plans.save(study_id, amended, amended=line)
        if mine.gates.open(study_id) is not None:  # the plan in question is gone: ask about the new one
            try:
                pass_plan(mine, study_id, amended)
            except StudyHalted as halt:
                gate = mine.gates.open(study_id)
                if mine.studies.get(study_id).status is halt.status and gate is not None:
                    mine.studies.set_status(study_id, halt.status, halt.reason, study_gate(study, gate))
    return amended


def answer_text(answer: Answer) -> str:
    """Format an answer: `approved by ada: go ahead`."""
    by = f" by {answer.by}" if answer.by else ""
    return f"{_WORDS[answer.verdict]}{by}{f': {answer.words}' if answer.words else ''}"


def _settle(store: Store, study_id: str, gate: str, answer: Answer) -> None:
    """Put the answer into the study's status, unless a worker holds the study: the worker will find the answer by itself.

    A rejection stops the study immediately, unless its worker died. In that case `resume` ends its running trials and stops it.
    """
    at_rest = store.leases.holder(study_id) is None
    with suppress(LeaseHeld), owned_now(store, study_id) as mine:
        if store.studies.get(study_id).status is not StudyStatus.WAITING:
            return
        if answer.verdict == "reject" and at_rest:
            mine.studies.set_status(study_id, StudyStatus.STOPPED, rejection(gate, answer))
        else:
            mine.studies.set_status(study_id, StudyStatus.WAITING, answer_text(answer))


def _amended(plan: Plan, change: Amendment) -> Plan:
    from researcher.design.arms import with_own_seeds
    from researcher.design.stages import cost, with_seeds  # scipy takes longer to import than most answers take

    amended = plan.model_copy(update={"version": plan.version + 1})
    if change.wall_s is not None:
        amended = amended.model_copy(update={"budget": plan.budget.model_copy(update={"wall_s": change.wall_s})})
    if change.seeds is not None:
        amended = with_own_seeds(amended.model_copy(update={"stages": with_seeds(plan.stages, change.seeds)}))
        trials, _ = cost(amended, {arm.name: 1.0 for arm in plan.arms}, at_most=True)
        amended = amended.model_copy(update={"budget": amended.budget.model_copy(update={"trials": trials})})
    return amended


def _check(plan: Plan, options: StudyOptions) -> None:
    """Check an amended plan.

    Raises: BudgetTooSmall; PlanningRefused when it needs seeds above the largest one, or when the instrument is gone.
    """
    from researcher.design.pricing import check_budget
    from researcher.design.stages import check_seeds
    from researcher.instruments.catalogue import open_instrument

    check_seeds(plan)
    folder = open_instrument(options.instrument or plan.instrument)
    check_budget(plan, folder.instrument, servers=max(1, len(options.servers)))
