"""The words of a study: instrument, plan, arms, trials, effects, verdicts. Data only; no SQL, no HTTP, no LLM.

A `Plan` is frozen: its canonical JSON is hashed before the first trial, and every trial key is made from that hash.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from foundation.strict import StrictModel

Scalar = bool | int | float | str
Direction = Literal["increase", "decrease"]


# -- instruments ------------------------------------------------------------------------------------------------------


class Factor(StrictModel):
    """Something that a study may vary.

    target: `run.<path>` sets a field of the RunSpec (`run.optimizer.learning_rate`); `task.<name>` is passed to the
    instrument's `tasks`; `study.steps` is the length of a trial.
    """

    name: str
    target: str
    type: Literal["float", "int", "bool", "choice"]
    default: Scalar
    low: float | None = None
    high: float | None = None
    choices: tuple[Scalar, ...] = ()
    scale: Literal["linear", "log"] = "linear"
    aliases: tuple[str, ...] = ()
    description: str = ""


class Metric(StrictModel):
    """One number of a trial, computed by `researcher.analysis.metrics` from recorded series, never by a client.

    kind: heldout_accuracy, heldout_reward (each with `when` before, after or gain), auc_reward, final_reward,
    steps_to_threshold (with `threshold`), wall_s.
    """

    name: str
    kind: Literal["heldout_accuracy", "heldout_reward", "auc_reward", "final_reward", "steps_to_threshold", "wall_s"]
    when: Literal["before", "after", "gain"] = "after"
    threshold: float | None = None
    direction: Direction = "increase"
    """Which way is better."""
    margin: float
    """Smallest effect of interest, in the metric's own unit."""
    sigma: float | None = None
    """Standard deviation between seeds at the defaults, as measured; a price estimate, never a substitute for the noise floor."""
    aliases: tuple[str, ...] = ()
    description: str = ""


class InstrumentDefaults(StrictModel):
    """What a trial is unless the plan says otherwise. Sized for two CPU cores."""

    steps: Annotated[int, Field(ge=1)]
    seeds: Annotated[int, Field(ge=2)] = 3
    max_seeds: Annotated[int, Field(ge=2)] = 5
    metric: str
    """Primary metric when the topic names none."""
    concurrency: Annotated[int, Field(ge=1)] = 64
    heldout_tasks: Annotated[int, Field(ge=1)] = 32
    heldout_episodes: Annotated[int, Field(ge=1)] = 2
    """Episodes per held-out task, sampled at the run's own sampling defaults."""
    heldout_temperature: float = 0.0
    trial_s: float
    """Expected wall time of a trial on two cores: prices a study before anything is measured."""
    run: dict[str, Any] = {}
    """Merged over the RunSpec's defaults."""
    task: dict[str, Scalar] = {}
    """Parameters of the instrument's `tasks`."""


class Instrument(StrictModel):
    """A study environment under `studies/`: read from its `study.toml`."""

    name: str
    version: str
    title: str
    description: str = ""
    workflow: str = "workflow.py"
    """File in the instrument's folder that defines `tasks` and `rollout`."""
    model: str
    keywords: tuple[str, ...] = ()
    factors: tuple[Factor, ...]
    metrics: tuple[Metric, ...]
    defaults: InstrumentDefaults


def _is_unset(value: object) -> bool:
    """Fields that came later leave no trace in plans that do not use them, so that earlier plans keep their hashes."""
    return not value


# -- plan -------------------------------------------------------------------------------------------------------------


class Arm(StrictModel):
    """One setting under comparison: levels of factors; everything else stands at the instrument's defaults."""

    name: str
    levels: dict[str, Scalar]


class Hypothesis(StrictModel):
    """`treatment` beats `baseline` on `metric` in `direction` by at least `margin`."""

    id: str
    statement: str
    factor: str
    baseline: str
    treatment: str
    metric: str
    direction: Direction
    """The direction in which the treatment's metric is said to move."""
    direction_assumed: Annotated[bool, Field(exclude_if=_is_unset)] = False
    """Nobody claimed a direction: the planner chose the one that is better, so that there is a claim to test."""
    margin: Annotated[float, Field(gt=0)]
    alpha: Annotated[float, Field(gt=0, lt=0.5)] = 0.05


class StageKind(StrEnum):
    NOISE_FLOOR = "noise_floor"
    COMPARE = "compare"
    CONFIRM = "confirm"


class Stage(StrictModel):
    """Which arms run on how many seeds. Seeds are `first_seed … first_seed + seeds - 1`, shared by all arms."""

    id: str
    kind: StageKind
    arms: tuple[str, ...]
    seeds: Annotated[int, Field(ge=1)]
    max_seeds: Annotated[int, Field(ge=1)]
    """The stage may grow to this many seeds where the noise floor asks for them, before any effect is looked at."""
    first_seed: Annotated[int, Field(ge=0)] = 0


class Condition(StrictModel):
    """A typed condition on an effect or verdict, evaluated by code: `verdict(H1) in {supported}`, `diff(H1) >= 0.1`."""

    kind: Literal["verdict_in", "diff_at_least", "diff_at_most", "power_below", "always"]
    hypothesis: str | None = None
    verdicts: tuple[str, ...] = ()
    value: float | None = None


class Branch(StrictModel):
    """After `stage`, the first branch whose condition holds decides: go to a stage, stop and report, or refuse."""

    stage: str
    when: Condition
    then: Literal["stage", "stop", "underpowered"]
    to: str | None = None
    reason: str


class Budget(StrictModel):
    wall_s: Annotated[float, Field(gt=0)]
    trials: Annotated[int, Field(ge=1)]
    tokens: int | None = None


class PlanModel(StrictModel):
    name: str
    fingerprint: str | None = None


class Plan(StrictModel):
    """Everything that decides a study, fixed before its first trial (invariant I6)."""

    schema_version: Literal[1] = 1
    version: Annotated[int, Field(ge=1)] = 1
    question: str
    instrument: str
    instrument_version: str
    instrument_code: str
    """SHA-256 over the files of the instrument's folder."""
    model: PlanModel
    hypotheses: tuple[Hypothesis, ...]
    arms: tuple[Arm, ...]
    factors: tuple[Factor, ...] = ()
    """The factors that arms vary, as the instrument declared them: a plan can be read without its instrument."""
    stages: tuple[Stage, ...]
    branches: tuple[Branch, ...]
    steps: Annotated[int, Field(ge=1)]
    run: dict[str, Any]
    """Partial RunSpec shared by all arms."""
    task: dict[str, Scalar]
    heldout_tasks: int
    heldout_episodes: int
    heldout_temperature: float
    trial_s: Annotated[float | None, Field(gt=0, exclude_if=_is_unset)] = None
    """Expected wall time of the longest trial; time limits follow from it. None: not known."""
    metrics: tuple[Metric, ...]
    power: Annotated[float, Field(gt=0, lt=1)] = 0.8
    planned_effect: float
    """Effect at which the power must be reached: 1.5 × margin unless stated."""
    sigma_confidence: Annotated[float, Field(gt=0, lt=1)] = 0.8
    """One-sided confidence of the upper bound on σ that the noise floor gives; seeds are counted on that bound."""
    sentinels: tuple[str, ...] = ()
    budget: Budget
    known: tuple[str, ...] = ()
    """Ids of findings that were known when planning."""
    planner: str
    """`builtin`, or the LLM's name."""
    assumptions: tuple[str, ...] = ()
    """What the topic left open and how the planner filled it, in words."""

    def canonical(self) -> str:
        """Canonical JSON: sorted keys, no white space."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), ensure_ascii=False)

    def digest(self) -> str:
        """SHA-256 of the canonical JSON, hexadecimal."""
        return hashlib.sha256(self.canonical().encode()).hexdigest()

    def arm(self, name: str) -> Arm:
        return next(arm for arm in self.arms if arm.name == name)

    def metric(self, name: str) -> Metric:
        return next(metric for metric in self.metrics if metric.name == name)


def trial_key(plan_hash: str, arm: str, seed: int) -> str:
    """Deterministic: the same trial of the same plan has the same key, wherever and whenever it is asked for."""
    return f"{plan_hash[:16]}/{arm}/{seed}"


# -- what comes out ---------------------------------------------------------------------------------------------------


class StudyStatus(StrEnum):
    PLANNING = "planning"
    RUNNING = "running"
    WAITING = "waiting"
    DONE = "done"
    STOPPED = "stopped"
    FAILED = "failed"


class TrialStatus(StrEnum):
    PLANNED = "planned"
    SUBMITTED = "submitted"
    """Intent is written; the server may or may not have heard of it."""
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


class TrialEvidence(BaseModel):
    """What the server and the client say was really run; sentinels compare it with the plan. None: not recorded."""

    spec: dict[str, Any] | None = None
    """The RunSpec as the server holds it (`RunReport.spec`)."""
    changes: list[dict[str, Any]] | None = None
    """Config changes that the server kept after the run began (`RunReport.changes`, without the first)."""
    parameters: dict[str, Any] | None = None
    """What the instrument's `tasks` was called with."""
    train_tasks: list[str] | None = None
    heldout_tasks: list[str] | None = None


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
    """Per-step metrics by name (docs/metrics.md), and `eval_reward_before|after`, `eval_success_before|after` by episode index."""
    started_at: float | None = None
    ended_at: float | None = None
    evidence: TrialEvidence | None = None


class Verdict(StrEnum):
    INVALID = "invalid"
    SUPPORTED = "supported"
    REFUTED = "refuted"
    EQUIVALENT = "equivalent"
    INCONCLUSIVE = "inconclusive"


class Effect(BaseModel):
    """Treatment minus baseline on one metric, over trials."""

    hypothesis: str
    metric: str
    n_baseline: int
    n_treatment: int
    failed_baseline: int = 0
    failed_treatment: int = 0
    mean_baseline: float
    mean_treatment: float
    diff: float
    low: float
    high: float
    level: float
    method: Literal["welch", "paired", "bootstrap_iqm"]
    """bootstrap_iqm: `mean_*` and `diff` are interquartile means, not means."""
    p_value: float
    p_adjusted: float
    p_equivalence: float = 1.0
    """Two one-sided tests: that the true difference lies outside ± margin."""


class VerdictRecord(BaseModel):
    hypothesis: str
    verdict: Verdict
    reason: str
    effect: Effect | None


class StudyRecord(BaseModel):
    """One study as SQL has it."""

    id: str
    topic: str
    options: dict[str, Any] = {}
    """What `researcher start` was asked for, as JSON."""
    status: StudyStatus
    reason: str | None = None
    plan_version: int | None = None
    """Of the newest plan; None before there is one."""
    stop_requested: bool = False
    pause_requested: bool = False
    created_at: float
    updated_at: float
    ended_at: float | None = None


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


class Claim(BaseModel):
    """A named value of the report: an expression over recorded trials, and what it was when the report was built."""

    name: str
    expression: str
    value: float | str | None
    text: str = ""
    """How the report prints it."""


class Finding(BaseModel):
    """What a study leaves to the next one: nulls too."""

    id: str
    study_id: str
    plan_hash: str
    instrument: str
    model: str
    factor: str
    metric: str
    statement: str
    verdict: Verdict
    effect: Effect | None = None
    scope: dict[str, Any] = {}
    at: float


class Event(BaseModel):
    """One line of the append-only journal."""

    seq: int
    study_id: str
    at: float
    kind: str
    detail: dict[str, Any] = {}


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
    verdicts: tuple[VerdictRecord, ...] = ()
    events: tuple[Event, ...] = ()
    notes: tuple[str, ...] = ()
    """What a reader must know and the records do not say: amendments, a server that was replaced."""


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


class LeaseInfo(BaseModel):
    """Who holds a study or a server, until when, under which fencing token."""

    owner: str
    token: int
    expires_at: float


class BudgetState(BaseModel):
    """One kind of spending of a study (`trials`, `wall_s`, `tokens`, `llm_cost`)."""

    kind: str
    limit: float
    reserved: float
    """Set aside for what runs now."""
    spent: float


class StudyPaths(BaseModel):
    """Where one study keeps its files, under the user data directory."""

    root: Path
