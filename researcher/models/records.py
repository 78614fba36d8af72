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
    """What was wrong, as the author of the repair says."""
    by: str
    """`person`, or the LLM's name with `LLM` before it."""
    rehearsed: str
    """How it was tested before use, in words."""
    at: float = 0.0

    @property
    def by_person(self) -> bool:
        return self.by == PERSON


PERSON = "person"
RULES = "rules"
"""Author of a campaign's decisions that follow from the budget or the calendar."""


OVER_BUDGET = "over_budget"
"""The event of a study that was stopped since its budget is spent."""
LONGEST_TOPIC = 10_000
"""Longest topic in characters. It is stored with findings and in copies of the records."""
MODELS_KEPT, MODELS_NOT_KEPT = "models_kept", "models_not_kept"
"""Events of a study that is done: what its trials have trained is in folders of its own, or could not be written there."""


SEAL = "seal"
"""Key of the seal in the journal's `report` events."""


class StudyStatus(StrEnum):
    PLANNING = "planning"
    RUNNING = "running"
    WAITING = "waiting"
    DONE = "done"
    STOPPED = "stopped"
    FAILED = "failed"

    @property
    def ended(self) -> bool:
        """Whether the study is over."""
        return self in (StudyStatus.DONE, StudyStatus.STOPPED, StudyStatus.FAILED)


class TrialStatus(StrEnum):
    PLANNED = "planned"
    SUBMITTED = "submitted"
    """Intent is written; the server may or may not have heard of it."""
    RUNNING = "running"
    PAUSED = "paused"
    """Its run is paused on its server with a checkpoint."""
    DONE = "done"
    FAILED = "failed"

    @property
    def ended(self) -> bool:
        """Whether nothing more becomes of it."""
        return self in (TrialStatus.DONE, TrialStatus.FAILED)


class HostedModel(BaseModel):
    """The hosted model as the server states it: name, and SHA-256 of its weights if it has any."""

    name: str
    fingerprint: str | None = None
    dtype: Annotated[ComputeType | None, Field(exclude_if=lambda found: found is None)] = None
    """Sampling dtype; None in older records."""
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
    """The spec that really ran, by server and client; sentinels compare it with the plan. None if not recorded."""

    spec: dict[str, Any] | None = None
    """The RunSpec as the server holds it (`RunReport.spec`)."""
    roles: dict[str, dict[str, Any]] | None = None
    """The specs of the other roles' runs."""
    changes: list[dict[str, Any]] | None = None
    """Config changes that the server kept after the run began (`RunReport.changes`, without the first)."""
    parameters: dict[str, Any] | None = None
    """Arguments of the instrument's `tasks`."""
    train_tasks: list[str] | None = None
    heldout_tasks: list[str] | None = None
    model: Annotated[HostedModel | None, Field(exclude_if=lambda found: found is None)] = None
    """The trained model as its server names it; None in older records."""
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
    """Step of the weights that sampled its first token."""
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
    """Step of the served weights when it began."""
    fate: str
    """Its end, as in the ledger."""
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
    """The request: the study spec and its origin.

    author: `builtin`, `file`, `options`, or an LLM's name. sources: of each setting, by dotted path. because: the
    planner's reason. uncovered: parts of the topic that the spec does not cover.
    """

    spec: dict[str, Any]
    author: str
    sources: dict[str, str] = {}
    because: str = ""
    uncovered: tuple[str, ...] = ()


class StudyOptions(BaseModel):
    """Options of `researcher start`. Rows written by other versions may have more."""

    model_config = ConfigDict(frozen=True, extra="allow")

    instrument: str | None = None
    """The instrument's folder; None for those that the repository ships."""
    request: StudyRequest | None = None
    """None in studies without a spec."""
    servers: tuple[str, ...] = ()
    """Swarm servers that were given; none: they are started on this machine, with `engine`."""
    engine: str = "local"
    machine: str = ""
    """The host name of where it was started, whose pace its trials show where no servers were given."""
    clients: str = "local"
    """Where clients run: `local`, `ray` or `ray=http://HOST:8265`."""
    max_parallel: int | None = None
    sinks: tuple[str, ...] = ()
    """Sinks besides MLflow."""
    approve: Literal["never", "plan", "stage"] = "never"
    repairs: int = 0
    """How often the planner LLM may repair the instrument's code."""
    keep_models: bool = False

    @property
    def notify(self) -> tuple[str, ...]:
        """Names of the services that people are notified by."""
        return () if self.request is None else tuple(self.request.spec.get("notify", ()))


class Answer(StrictModel):
    """A person's answer at a gate. words: the reason; required for a rejection."""

    verdict: Literal["approve", "reject"]
    words: str = ""
    by: str = ""


class OpenGate(BaseModel):
    """A gate where a study waits. answer: given, but not yet seen by the study's worker."""

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
    """Version of the newest plan; None before there is one."""
    stop_requested: bool = False
    pause_requested: bool = False
    created_at: float
    updated_at: float
    ended_at: float | None = None
    campaign_id: str | None = None
    """The campaign that it is part of, with its hypothesis there and its role."""
    hypothesis_id: str | None = None
    role: Literal["explore", "confirm"] | None = None

    @property
    def request(self) -> StudyRequest | None:
        """None in studies of earlier versions, and in reproductions."""
        return self.options.request

    def planned_by(self, plan: Plan) -> str:
        """Author of the spec or plan."""
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
    """Start time of the client process; tells it from another one with a reused pid."""
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
    """SHA-256 digests of a report when it was written, so that other versions can check it."""

    files: dict[str, str]
    """By kind (`markdown`, `html`, …)."""
    claims: str
    wording: str
    """Digest of the code that rendered it."""


class LlmCall(BaseModel):
    """One raw request to a planner LLM, so that a plan can be replayed."""

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
    """Trials of this plan, in the order of creation."""
    request: StudyRequest | None = None
    """None if there was no spec, or it was not loaded."""
    status: StudyStatus | None = None
    """None if it was not loaded."""
    reason: str | None = None
    """Recorded reason of the status."""
    verdicts: tuple[VerdictRecord, ...] = ()
    events: tuple[Event, ...] = ()
    repairs: tuple[RepairRecord, ...] = ()
    """Changes of the instrument's code while the study ran."""
    altered: Mapping[str, Sequence[tuple[str, Any, Any]]] = field(default_factory=dict)
    """Rows of hypotheses and stages that differ from the plan, by `hypothesis H1`: column, as stored, as planned."""
    decided: Mapping[str, Sequence[str]] | None = None
    """Stages after which each hypothesis has a verdict on record. None: not asked."""
    attempts: Mapping[str, Sequence[AttemptRecord]] | None = None
    """By the trial's key, oldest first; None if not loaded."""
    attrition: Mapping[str, Mapping[tuple[str, str, str], int]] | None = None
    """Rows of `trial_attrition`: attempts at episodes by the trial's key, then arm, kind and cause. None: not asked."""
    budgets: Mapping[str, float] | None = None
    """Limits by kind (`wall_s`, `trials`), as spending was held to. None: not asked."""
    stage_times: Mapping[str, tuple[float | None, float | None]] | None = None
    """When each stage began and ended, in Unix seconds; None where it has not. None for all: not asked."""
    findings: tuple[Finding, ...] = ()
    """Which the study left behind."""
    llm_calls: tuple[LlmCall, ...] = ()
    """LLM calls for the plan, the instrument and its repairs."""
    samples: Mapping[str, Sequence[SampledEpisode]] = field(default_factory=dict)
    """Sampled episodes of finished trials, by the trial's key, in stored order. Early versions kept none."""


class LeaseInfo(BaseModel):
    """Holder of a study or server, expiry, and fencing token."""

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
