"""Records of studies: requests and options, trials and attempts, events, repairs, and everything a report reads."""

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
    """One repair of the instrument's code that a study adopted. Trials that ended earlier ran on the old version."""

    trial: str
    """Key of the trial whose client had failed."""
    attempt: int
    old: str
    """SHA-256 of the instrument's files before the repair. `new` is the SHA-256 after it."""
    new: str
    files: tuple[str, ...]
    diff: str
    """The complete unified diff."""
    failed: str
    """The failure that led to the repair: its place, and the last line of the exception."""
    reason: str
    """What was wrong, in the words of the repair's author."""
    by: str
    """`person`, or `LLM` followed by the LLM's name."""
    rehearsed: str
    """How the repair was tested before use, in words."""
    at: float = 0.0

    @property
    def by_person(self) -> bool:
        return self.by == PERSON


PERSON = "person"
RULES = "rules"
"""Author of campaign decisions that follow from the budget or the calendar."""


OVER_BUDGET = "over_budget"
"""Kind of the event that records a stop because the budget is spent."""
LONGEST_TOPIC = 10_000
"""Maximum length of a topic, in characters. Findings and copies of the records store the topic too."""
MODELS_KEPT, MODELS_NOT_KEPT = "models_kept", "models_not_kept"
"""Kinds of events of a finished study: its trained models were copied to its folder, or could not be copied."""


SEAL = "seal"
"""Key under which the journal's `report` events hold the report's seal."""


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
    """The intent is recorded; the server may or may not know of the run."""
    RUNNING = "running"
    PAUSED = "paused"
    """The trial's run is paused on its server and has a checkpoint."""
    DONE = "done"
    FAILED = "failed"

    @property
    def ended(self) -> bool:
        """Whether this status is final."""
        return self in (TrialStatus.DONE, TrialStatus.FAILED)


class HostedModel(BaseModel):
    """The hosted model as the server reports it: its name, and the SHA-256 of its weights if it has any."""

    name: str
    fingerprint: str | None = None
    dtype: Annotated[ComputeType | None, Field(exclude_if=lambda found: found is None)] = None
    """Data type used for sampling; None in older records."""
    engine: Annotated[str | None, Field(exclude_if=lambda found: found is None)] = None
    """`local`, `verl` or `echo` (which answers without the named model). None in older records."""

    @property
    def trained(self) -> str:
        """Name of what was trained: the model's name, or `echo`."""
        return "echo" if self.engine == "echo" else self.name

    def is_of(self, model: PlanModel) -> bool:
        """Return whether that model itself was trained, not a stand-in."""
        if self.trained != self.name:
            return self.trained == model.name
        return model.is_hosted(self.name, self.fingerprint, self.engine)


class TrialEvidence(BaseModel):
    """What really ran, as reported by server and client. Sentinels compare it with the plan. Fields are None if not recorded."""

    spec: dict[str, Any] | None = None
    """The server's RunSpec (`RunReport.spec`)."""
    roles: dict[str, dict[str, Any]] | None = None
    """RunSpecs of the runs of further roles."""
    changes: list[dict[str, Any]] | None = None
    """Config changes that the server recorded after the run began (`RunReport.changes`, without the first)."""
    parameters: dict[str, Any] | None = None
    """Arguments passed to the instrument's `tasks`."""
    train_tasks: list[str] | None = None
    heldout_tasks: list[str] | None = None
    model: Annotated[HostedModel | None, Field(exclude_if=lambda found: found is None)] = None
    """The trained model as its server reports it; None in older records."""
    code_versions: Annotated[dict[str, int] | None, Field(exclude_if=lambda found: found is None)] = None
    """Number of episodes by version of the instrument's code; None: the plan's version produced them all."""
    joined: Annotated[dict[str, int] | None, Field(exclude_if=lambda found: found is None)] = None
    """Number of trained episodes of each other client that joined; None: nobody joined."""
    attrition: Annotated[Attrition | None, Field(exclude_if=lambda found: found is None)] = None
    """Attempts at episodes, and the causes of lost ones. None in older records."""


class SampledCall(BaseModel):
    """One LLM call of a sampled episode, with long texts cut."""

    index: int
    agent: str | None
    request: Any
    answer: Any
    prompt_tokens: int
    sampled_tokens: int
    mean_logprob: float | None
    temperature: float
    step: int | None
    """Optimizer step of the weights that sampled the first token."""
    finish_reason: str | None
    complete: bool
    fork_cause: str | None
    started_at: float
    latency_s: float


class SampledEpisode(BaseModel):
    """One of the few episodes of a trial that are kept for people to read, call by call, with long texts cut."""

    id: str
    kind: Literal["train", "eval"]
    task_id: str
    step: int
    """Optimizer step of the weights that were served when the episode began."""
    fate: str
    """The episode's outcome, as in the ledger."""
    reward: float | None
    agent_rewards: dict[str, float] | None
    success: bool | None
    prompt_tokens: int
    sampled_tokens: int
    claimed_at: float
    ended_at: float | None
    calls: int
    """Number of all calls; `sampled` may hold fewer."""
    sampled: tuple[SampledCall, ...]


class TrialRecord(BaseModel):
    """One trial with its final metrics and series, as analysis and report read it."""

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
    """Per-step metrics by name (docs/reference/metrics.md), and `eval_reward_before|after`, `eval_success_before|after` by episode
    index.
    """
    started_at: float | None = None
    ended_at: float | None = None
    evidence: TrialEvidence | None = None


class StudyRequest(BaseModel):
    """A request for a study: the spec and where it came from.

    Args:
        author: `builtin`, `file`, `options`, or an LLM's name.
        sources: where each setting comes from, by dotted path.
        because: the planner's reason.
        uncovered: parts of the topic that the spec does not cover.
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
    """The instrument's folder; None for instruments that the repository ships."""
    request: StudyRequest | None = None
    """The study's request; None in studies without a spec."""
    servers: tuple[str, ...] = ()
    """Addresses of the swarm servers to use; if empty, servers with `engine` are started on this machine."""
    engine: str = "local"
    machine: str = ""
    """Host name of the machine that started the study. Unless `servers` were given, its trial times show the pace of this machine."""
    clients: str = "local"
    """Where clients run: `local`, `ray` or `ray=http://HOST:8265`."""
    max_parallel: int | None = None
    sinks: tuple[str, ...] = ()
    """Sinks in addition to MLflow."""
    approve: Literal["never", "plan", "stage"] = "never"
    repairs: int = 0
    """How often the planner LLM may repair the instrument's code."""
    keep_models: bool = False
    calibrates: bool = False
    """Whether `researcher calibrate` started it: short trials that only measure a pace."""

    @property
    def notify(self) -> tuple[str, ...]:
        """Names of the notification services."""
        return () if self.request is None else tuple(self.request.spec.get("notify", ()))


class Answer(StrictModel):
    """A person's answer at a gate. `words` give the reason, which a rejection requires."""

    verdict: Literal["approve", "reject"]
    words: str = ""
    by: str = ""


class OpenGate(BaseModel):
    """A gate where a study waits. `answer` is set once given, even if the study's worker has not seen it yet."""

    name: str
    question: dict[str, Any]
    answer: Answer | None = None


class StudyRecord(BaseModel):
    """One study as stored in SQL."""

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
    """Campaign that the study belongs to; None if it has none. `hypothesis_id` and `role` say what it is for in that campaign."""
    hypothesis_id: str | None = None
    role: Literal["explore", "confirm"] | None = None

    @property
    def request(self) -> StudyRequest | None:
        """The study's request; None in studies of earlier versions, and in reproductions."""
        return self.options.request

    def planned_by(self, plan: Plan) -> str:
        """Return the author of the spec, or of the plan if there is no spec."""
        return plan.planner if self.request is None else self.request.author


class AttemptRecord(BaseModel):
    """One attempt at a trial: its intent, the run and client that were started, and its progress."""

    study_id: str
    trial_key: str
    number: int
    server_url: str
    idempotency_key: str
    spec: dict[str, Any]
    """The RunSpec that was or will be sent to the server."""
    run_id: str | None = None
    blueprint: dict[str, Any] | None = None
    client_pid: int | None = None
    client_started: float | None = None
    """Start time of the client process; distinguishes it from another process that reuses the pid."""
    step: int = 0
    outcome: Literal["open", "done", "failed", "withdrawn"] = "open"
    """`failed` counts against the trial. `withdrawn` does not: a person stopped it, or its server was lost."""
    reason: str | None = None
    intent_at: float
    heartbeat_at: float
    """When the attempt last made progress."""
    ended_at: float | None = None


class Event(BaseModel):
    """One event of the append-only journal."""

    seq: int
    study_id: str
    at: float
    kind: str
    detail: dict[str, Any] = {}


class ReportSeal(BaseModel):
    """SHA-256 digests of a report, taken when it was written, so that other versions can check it."""

    files: dict[str, str]
    """Digests by kind of file (`markdown`, `html`, …)."""
    claims: str
    wording: str
    """Digest of the code that rendered the report."""


class LlmCall(BaseModel):
    """One raw request to a planner LLM and its answer, recorded so that a plan can be replayed."""

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
    """All data of a study that analysis and report need. The store reads it from SQL."""

    study_id: str
    topic: str
    plan: Plan
    plan_hash: str
    """The plan's hash as recorded when the plan was frozen; `verify` compares it with `plan.digest()`."""
    trials: tuple[TrialRecord, ...]
    """Trials of this plan, in order of creation."""
    request: StudyRequest | None = None
    """The study's request; None if there was no spec, or it was not loaded."""
    status: StudyStatus | None = None
    """The study's status; None if it was not loaded."""
    reason: str | None = None
    """Recorded reason for the status."""
    verdicts: tuple[VerdictRecord, ...] = ()
    events: tuple[Event, ...] = ()
    repairs: tuple[RepairRecord, ...] = ()
    """Changes of the instrument's code while the study ran."""
    altered: Mapping[str, Sequence[tuple[str, Any, Any]]] = field(default_factory=dict)
    """Rows that differ from the plan, by name such as `hypothesis H1`: column, stored value, planned value."""
    decided: Mapping[str, Sequence[str]] | None = None
    """The stages after which a verdict was recorded, by hypothesis. None: not loaded."""
    attempts: Mapping[str, Sequence[AttemptRecord]] | None = None
    """Attempts by the trial's key, oldest first. None: not loaded."""
    attrition: Mapping[str, Mapping[tuple[str, str, str], int]] | None = None
    """Rows of `trial_attrition`: numbers of attempts by the trial's key, then by arm, kind and cause. None: not loaded."""
    budgets: Mapping[str, float] | None = None
    """Enforced limits by kind (`wall_s`, `trials`). None: not loaded."""
    stage_times: Mapping[str, tuple[float | None, float | None]] | None = None
    """Start and end of each stage in Unix seconds; None if it has not begun or ended. None for the whole field: not loaded."""
    findings: tuple[Finding, ...] = ()
    """Findings that the study produced."""
    llm_calls: tuple[LlmCall, ...] = ()
    """LLM calls for the plan, the instrument and its repairs."""
    samples: Mapping[str, Sequence[SampledEpisode]] = field(default_factory=dict)
    """Sampled episodes of finished trials, by the trial's key, in stored order. Early versions did not store any."""


class LeaseInfo(BaseModel):
    """Lease on a study or server: its owner, when it expires (Unix seconds), and the fencing token."""

    owner: str
    token: int
    expires_at: float


class BudgetState(BaseModel):
    """Budget of a study for one kind of spending: `trials`, `wall_s`, `tokens`, `llm_cost` or `repairs`."""

    kind: str
    limit: float
    reserved: float
    """Amount reserved for running work."""
    spent: float
