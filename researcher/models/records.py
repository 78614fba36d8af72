"""Changes of an instrument's code while a study ran: what failed, what was changed, by whom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from foundation.strict import StrictModel
from researcher.models.attrition import Attrition
from researcher.models.conclusions import Finding, VerdictRecord
from researcher.study.plan import Plan, PlanModel
from swarm.protocol.runspec import ComputeType


class RepairRecord(BaseModel):
    """One mended version that a study took up. Trials that began before it ran on the old one."""

    trial: str
    """Key of the trial whose client had failed."""
    attempt: int
    old: str
    """SHA-256 over the instrument's files before, and after."""
    new: str
    files: tuple[str, ...]
    diff: str
    """Unified, whole."""
    failed: str
    """The failure that led to it: where, and the exception's last line."""
    reason: str
    """What was wrong, in the words of whoever mended it."""
    by: str
    """`person`, or the LLM's name with `LLM` before it."""
    rehearsed: str
    """What was tried before it was taken up, in words."""
    at: float = 0.0

    @property
    def by_person(self) -> bool:
        return self.by == PERSON


PERSON = "person"


OVER_BUDGET = "over_budget"
"""The event of a study that was stopped since its budget is spent."""
LONGEST_TOPIC = 10_000
"""Characters. A finding is shared with its question, and copies of the records hold it beside other text."""
MODELS_KEPT, MODELS_NOT_KEPT = "models_kept", "models_not_kept"
"""Events of a study that is done: what its trials have trained is in folders of its own, or could not be written there."""


SEAL = "seal"
"""Beside the files, by kind, in what the journal says of a report."""


class StudyStatus(StrEnum):
    PLANNING = "planning"
    RUNNING = "running"
    WAITING = "waiting"
    DONE = "done"
    STOPPED = "stopped"
    FAILED = "failed"

    @property
    def ended(self) -> bool:
        """Whether nobody goes on with it by itself."""
        return self in (StudyStatus.DONE, StudyStatus.STOPPED, StudyStatus.FAILED)


class TrialStatus(StrEnum):
    PLANNED = "planned"
    SUBMITTED = "submitted"
    """Intent is written; the server may or may not have heard of it."""
    RUNNING = "running"
    PAUSED = "paused"
    """Its run rests on its server with a checkpoint, and goes on from there."""
    DONE = "done"
    FAILED = "failed"

    @property
    def ended(self) -> bool:
        """Whether nothing more becomes of it."""
        return self in (TrialStatus.DONE, TrialStatus.FAILED)


class HostedModel(BaseModel):
    """What a server says that it hosts: the model's name, and the SHA-256 over its weights where it has some."""

    name: str
    fingerprint: str | None = None
    dtype: Annotated[ComputeType | None, Field(exclude_if=lambda found: found is None)] = None
    """What it is sampled in. None: recorded before that was asked."""
    engine: Annotated[str | None, Field(exclude_if=lambda found: found is None)] = None
    """`local`, `verl` or `echo`, which answers without the model whose name it bears. None: recorded before that was asked."""

    @property
    def trained(self) -> str:
        """The name of what learns: the model's own, or `echo`."""
        return "echo" if self.engine == "echo" else self.name

    def is_of(self, model: PlanModel) -> bool:
        """Whether what learns is that model, and nothing that stands in for it."""
        if self.trained != self.name:
            return self.trained == model.name
        return model.is_hosted(self.name, self.fingerprint, self.engine)


class TrialEvidence(BaseModel):
    """What the server and the client say was really run; sentinels compare it with the plan. None: not recorded."""

    spec: dict[str, Any] | None = None
    """The RunSpec as the server holds it (`RunReport.spec`)."""
    roles: dict[str, dict[str, Any]] | None = None
    """The same of the runs of further models."""
    changes: list[dict[str, Any]] | None = None
    """Config changes that the server kept after the run began (`RunReport.changes`, without the first)."""
    parameters: dict[str, Any] | None = None
    """What the instrument's `tasks` was called with."""
    train_tasks: list[str] | None = None
    heldout_tasks: list[str] | None = None
    model: Annotated[HostedModel | None, Field(exclude_if=lambda found: found is None)] = None
    """What was trained, as its server names it. None: recorded before models were compared."""
    code_versions: Annotated[dict[str, int] | None, Field(exclude_if=lambda found: found is None)] = None
    """Versions of the instrument's code that made the episodes, and how many each; None: the plan's own alone."""
    joined: Annotated[dict[str, int] | None, Field(exclude_if=lambda found: found is None)] = None
    """Other clients whose episodes were trained, and how many each; None: nobody joined."""
    attrition: Annotated[Attrition | None, Field(exclude_if=lambda found: found is None)] = None
    """Attempts at episodes, and what lost them. None: recorded before that was counted."""


class SampledCall(BaseModel):
    """One LLM call of a sampled episode; what was said is cut to a bounded size."""

    index: int
    agent: str | None
    request: Any
    answer: Any
    prompt_tokens: int
    sampled_tokens: int
    mean_logprob: float | None
    temperature: float
    step: int | None
    """Of the weights that sampled its first token."""
    finish_reason: str | None
    complete: bool
    fork_cause: str | None
    started_at: float
    latency_s: float


class SampledEpisode(BaseModel):
    """One of the few episodes of a trial that are kept whole enough to be read."""

    id: str
    kind: Literal["train", "eval"]
    task_id: str
    step: int
    """Of the weights that were served when it began."""
    fate: str
    """What the ledger says became of it."""
    reward: float | None
    agent_rewards: dict[str, float] | None
    success: bool | None
    prompt_tokens: int
    sampled_tokens: int
    claimed_at: float
    ended_at: float | None
    calls: int
    """All of them; `sampled` may have fewer."""
    sampled: tuple[SampledCall, ...]


class TrialRecord(BaseModel):
    """One trial with its finals and series, as analysis and report see it."""

    key: str
    study_id: str
    stage: str
    arm: str
    seed: int
    status: TrialStatus
    attempt: int = 0
    reason: str | None = None
    finals: dict[str, float] = {}
    series: dict[str, list[tuple[int, float]]] = {}
    """Per-step metrics by name (docs/reference/metrics.md), and `eval_reward_before|after`, `eval_success_before|after` by episode index."""
    started_at: float | None = None
    ended_at: float | None = None
    evidence: TrialEvidence | None = None


class StudyRequest(BaseModel):
    """What was asked: the study spec, and where it came from.

    author: `builtin`, `file`, `options`, or an LLM's name. sources: of each setting, by dotted path. because: the planner's reason.
    uncovered: what the topic asks and the spec does not cover.
    """

    spec: dict[str, Any]
    author: str
    sources: dict[str, str] = {}
    because: str = ""
    uncovered: tuple[str, ...] = ()


class StudyOptions(BaseModel):
    """How a study is carried out, as `researcher start` was asked. Rows of other versions may hold more."""

    model_config = ConfigDict(frozen=True, extra="allow")

    instrument: str | None = None
    """The instrument's folder; None for those that the repository ships."""
    request: StudyRequest | None = None
    """None: no spec was made for it."""
    servers: tuple[str, ...] = ()
    """Swarm servers that were given; none: they are started on this machine, with `engine`."""
    engine: str = "local"
    clients: str = "local"
    """Where clients live: `local`, `ray` or `ray=http://HOST:8265`."""
    max_parallel: int | None = None
    sinks: tuple[str, ...] = ()
    """Copies of the records beside MLflow's."""
    approve: Literal["never", "plan", "stage"] = "never"
    repairs: int = 0
    """How often the planner LLM may mend the instrument's code."""
    keep_models: bool = False


class Answer(StrictModel):
    """What a person said at a gate. words: why; what a rejection is for."""

    verdict: Literal["approve", "reject"]
    words: str = ""
    by: str = ""


class OpenGate(BaseModel):
    """A gate at which a study waits. answer: given already, and not yet met by whoever works on the study."""

    name: str
    question: dict[str, Any]
    answer: Answer | None = None


class StudyRecord(BaseModel):
    """One study as SQL has it."""

    id: str
    topic: str
    options: StudyOptions = StudyOptions()
    status: StudyStatus
    reason: str | None = None
    plan_version: int | None = None
    """Of the newest plan; None before there is one."""
    stop_requested: bool = False
    pause_requested: bool = False
    created_at: float
    updated_at: float
    ended_at: float | None = None

    @property
    def request(self) -> StudyRequest | None:
        """None of studies that no spec was made for: those of earlier versions, and reproductions."""
        return self.options.request

    def planned_by(self, plan: Plan) -> str:
        """Who wrote what the plan was made from."""
        return plan.planner if self.request is None else self.request.author


class AttemptRecord(BaseModel):
    """One try at a trial: what was intended, what was started, how far it got."""

    study_id: str
    trial_key: str
    number: int
    server_url: str
    idempotency_key: str
    spec: dict[str, Any]
    """The RunSpec that was or will be posted."""
    run_id: str | None = None
    blueprint: dict[str, Any] | None = None
    client_pid: int | None = None
    client_started: float | None = None
    """When the client process began, so that a recycled pid is not taken for it."""
    step: int = 0
    outcome: Literal["open", "done", "failed", "withdrawn"] = "open"
    """failed counts against the trial; withdrawn does not: a person stopped it, or its server was lost."""
    reason: str | None = None
    intent_at: float
    heartbeat_at: float
    """When it was last seen to make progress."""
    ended_at: float | None = None


class Event(BaseModel):
    """One line of the append-only journal."""

    seq: int
    study_id: str
    at: float
    kind: str
    detail: dict[str, Any] = {}


class ReportSeal(BaseModel):
    """What a report was when it was written: digests (SHA-256), so that a later version that words it otherwise can tell."""

    files: dict[str, str]
    """By kind (`markdown`, `html`, …)."""
    claims: str
    wording: str
    """Of what rendered it."""


class LlmCall(BaseModel):
    """One question to a planner LLM, raw, so that a plan can be replayed."""

    purpose: str
    model: str
    request: dict[str, Any]
    answer: dict[str, Any] | None = None
    error: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float | None = None
    latency_s: float = 0.0
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyData:
    """All that analysis and report need of a study, read from SQL by the store."""

    study_id: str
    topic: str
    plan: Plan
    plan_hash: str
    """As recorded when the plan was frozen; `verify` compares it with `plan.digest()`."""
    trials: tuple[TrialRecord, ...]
    """Under this plan, in the order in which they were made."""
    request: StudyRequest | None = None
    """None: no spec was made for it, or not asked."""
    status: StudyStatus | None = None
    """None: not asked."""
    reason: str | None = None
    """Of that status, as recorded."""
    verdicts: tuple[VerdictRecord, ...] = ()
    events: tuple[Event, ...] = ()
    repairs: tuple[RepairRecord, ...] = ()
    """Changes of the instrument's code while the study ran."""
    altered: Mapping[str, Sequence[tuple[str, Any, Any]]] = field(default_factory=dict)
    """Of rows of hypotheses and stages that do not say what the plan says: columns, as stored, as planned, by `hypothesis H1`."""
    decided: Mapping[str, Sequence[str]] | None = None
    """Stages after which each hypothesis has a verdict on record. None: not asked."""
    attempts: Mapping[str, Sequence[AttemptRecord]] | None = None
    """By the trial's key, the first one first. None: not asked."""
    attrition: Mapping[str, Mapping[tuple[str, str, str], int]] | None = None
    """Rows of `trial_attrition`: attempts at episodes by the trial's key, then arm, kind and cause. None: not asked."""
    budgets: Mapping[str, float] | None = None
    """Limits by kind (`wall_s`, `trials`), as spending was held to. None: not asked."""
    stage_times: Mapping[str, tuple[float | None, float | None]] | None = None
    """When each stage began and ended, in Unix seconds; None where it has not. None for all: not asked."""
    findings: tuple[Finding, ...] = ()
    """Which the study left behind."""
    llm_calls: tuple[LlmCall, ...] = ()
    """To a planner LLM: for the plan, the instrument and its repairs."""
    samples: Mapping[str, Sequence[SampledEpisode]] = field(default_factory=dict)
    """Of finished trials' episodes, by the trial's key, in the order in which they were kept; none of trials of early versions."""


class LeaseInfo(BaseModel):
    """Who holds a study or a server, until when, under which fencing token."""

    owner: str
    token: int
    expires_at: float


class BudgetState(BaseModel):
    """One kind of spending of a study (`trials`, `wall_s`, `tokens`, `llm_cost`, `repairs`)."""

    kind: str
    limit: float
    reserved: float
    """Set aside for what runs now."""
    spent: float
