"""The messages about an episode: claim, lease, result, receipt, ledger entry and recorded calls."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Literal, TypedDict

from pydantic import AfterValidator, BaseModel, Field

from swarm.protocol.errors import Cause as Cause
from swarm.protocol.problem import ClientModel
from swarm.protocol.quantities import NotBoolean
from swarm.protocol.sampling_mask import LEAST_TEMPERATURE, RestrictedTraining, SamplingMask

POLICY_MODEL = "policy"
"""A name that every server accepts for its hosted model, so that agents need not know which model it is."""

EpisodeKind = Literal["train", "eval"]
MOST_REWARD = 1e12
"""Maximum absolute value of a reward."""
Finite = Annotated[float, Field(allow_inf_nan=False), NotBoolean]
Reward = Annotated[float, Field(ge=-MOST_REWARD, le=MOST_REWARD, allow_inf_nan=False), NotBoolean]
"""A reward. It is bounded so that sums and squares stay finite even in single precision."""
LONGEST_NAME = 1_000
Name = Annotated[str, Field(max_length=LONGEST_NAME)]
"""An id chosen by a client. Its length is limited because every row and every response about the episode repeats it."""
_LEFT_OUT = Field(exclude_if=lambda value: value is None)
"""Omit the field when None: older servers refuse unknown fields."""
Despite = Annotated[Annotated[str, Field(min_length=1, max_length=LONGEST_NAME)] | None, _LEFT_OUT]
SessionId = Annotated[str, Field(min_length=1, max_length=LONGEST_NAME)]
"""A random name that each process of a client chooses for itself."""
_EMPTY_IS_NONE = AfterValidator(lambda text: text or None)
IdempotencyKey = Annotated[str | None, _EMPTY_IS_NONE]


class WeightsVersion(BaseModel, frozen=True):
    """Which weights sampled a token."""

    run_id: str
    branch: int = 0
    step: int = 0


class EpisodeClaim(ClientModel):
    """Asks for one attempt at a task."""

    run_id: str
    client_id: Name
    client_version: Name = "0"
    kind: EpisodeKind = "train"
    task_id: Annotated[Name, Field(min_length=1)]
    mix: Annotated[Name | None, _EMPTY_IS_NONE] = None
    idle_limit_s: Annotated[float, Field(gt=0, le=86_400), NotBoolean] = 240.0
    max_episode_s: Annotated[float, Field(gt=0), NotBoolean] | None = None
    """Maximum duration of the episode. None means the run's `limits.max_episode_s`."""
    max_call_s: Annotated[float, Field(gt=0), NotBoolean] | None = None
    """Maximum duration of one LLM call. The idle limit is suspended while a call is open."""
    wait_s: Annotated[float, Field(ge=0, le=120), NotBoolean] = 30.0
    session: Annotated[SessionId | None, _LEFT_OUT] = None
    """Session of the client that plays the episode. If None, no later session closes the episode."""
    idempotency_key: IdempotencyKey = None


class SessionRequest(ClientModel):
    """Gives one process of a client the sole right to play a run."""

    run_id: str
    client_id: Name
    session: SessionId
    reason: str = "a newer session of the client began"
    """Why the episodes of earlier sessions are aborted."""


class SessionBegun(BaseModel):
    closed: list[str]
    """Ids of the episodes that earlier sessions had left open. The server closed them and blamed the client for the loss."""


class EpisodeOptions(TypedDict, total=False):
    """Keyword arguments for the fields of `EpisodeClaim` that a caller may choose. Omitted fields keep the claim's defaults."""

    run_id: str | None
    """The run to play; None means the server's current run."""
    mix: str | None
    kind: EpisodeKind
    idle_limit_s: float
    max_episode_s: float | None
    max_call_s: float | None
    wait_s: float
    sampling: Mapping[str, Any] | None
    """Request parameters for every call of the episode, such as an evaluation's temperature. Not sent with the claim."""


class RolloutOptions(EpisodeOptions, total=False):
    """Keyword arguments of `run_tasks`."""

    concurrency: int
    """Number of concurrent episodes; 16 by default."""
    retries: int
    """How often to retry an attempt that failed because of the rollout, the grader or a limit; 2 by default."""
    episodes_per_task: int | None
    """Number of episodes per task. None means the run's group_size for training, and 1 for evaluation."""
    progress: bool | None
    """Whether to show a progress bar. None means to show it only if standard error is a terminal."""


class EpisodeGrant(BaseModel):
    """The response to a claim: a lease, and where the agent finds its model."""

    episode_id: str
    lease: str
    group_id: str | None
    slot: int | None
    base_url: str
    api_key: str
    weights_version: WeightsVersion
    expires_at: float
    """Unix time at which the lease expires, unless a call or a renewal extends it."""
    team_key: str = ""
    """A key with which the other servers of a team can ask for this episode's decision, and do nothing else."""


COUNTED = frozenset({Cause.ROLLOUT, Cause.GRADER, Cause.CLIENT, Cause.LIMIT})
"""Causes that may depend on the attempt itself: on the agent's actions, its grading or its duration. Attempts lost for other causes
say nothing about the agent and are retried without limit."""


class EpisodeResult(ClientModel):
    """Ends an episode."""

    lease: str
    reward: Reward
    agent_rewards: dict[str, Reward] | None = None
    success: bool | None = None
    metrics: dict[str, Finite] = {}
    metadata: dict[str, Any] = {}
    despite: Despite = None
    """How the agent recovered from a call that failed on the server. Without it, such an episode is `tainted` and is not trained on."""
    by_hand: Annotated[bool, Field(exclude_if=lambda value: not value)] = False
    """True if a person answered instead of the model. An evaluation then counts even without a call."""
    idempotency_key: IdempotencyKey = None


class EpisodeReceipt(BaseModel):
    """Confirms that the episode's result is stored durably."""

    episode_id: str
    status: Literal["pooled", "already_ended"]
    dropped: DropReason | None = None
    """Set if the episode was dropped when it ended (`tainted`, `no_calls`); its slot is offered again."""


class EpisodeAbort(ClientModel):
    """Aborts an episode. A `cause` of None means `rollout`."""

    lease: str
    reason: str
    cause: Annotated[Cause | None, _LEFT_OUT] = None


class EpisodeRenewal(ClientModel):
    lease: str


class EpisodeState(StrEnum):
    RUNNING = "running"
    PREPARED = "prepared"
    """Bound to its team's decision. It is stored durably and keeps its slot, but is not trained on until the team commits."""
    ENDED = "ended"
    """Acknowledged, and waiting in the sample pool."""
    IN_STEP = "in_step"
    """In a journaled batch. Training on it is final once a checkpoint includes it."""
    TRAINED = "trained"
    DROPPED = "dropped"


class DropReason(StrEnum):
    """Why an episode was not trained on. Evaluation episodes have the reason `eval`, because they are never trained on."""

    EVAL = "eval"
    ABORTED = "aborted"
    EXPIRED = "expired"
    SERVER_RESTARTED = "server_restarted"
    STALE = "stale"
    ZERO_VARIANCE = "zero_variance"
    PARTIAL_GROUP = "partial_group"
    NO_CALLS = "no_calls"
    TRUNCATED = "truncated"
    GREEDY = "greedy"
    """Every call used a temperature of 0 or nearly 0, so no token was sampled at random."""
    UNREPRODUCIBLE_SAMPLING = "unreproducible_sampling"
    RUN_ENDED = "run_ended"
    SUPERSEDED = "superseded"
    """A restore branched the run at an earlier step, or the mix no longer contains the episode's family."""
    QUARANTINED = "quarantined"
    """The episode's client version was quarantined before a batch included it."""
    TEAM_ABORTED = "team_aborted"
    TAINTED = "tainted"
    """One of the episode's calls failed on the server, and its client did not set `despite`."""


class LedgerEntry(BaseModel):
    """The permanent record of one episode: the step that trained on it, or why it was dropped. There is exactly one per episode."""

    episode_id: str
    run_id: str
    kind: EpisodeKind
    task_id: str
    mix: str | None
    client_id: str
    client_version: str
    config_version: int
    group_id: str | None
    slot: int | None
    state: EpisodeState
    reason: DropReason | None = None
    detail: str | None = None
    """Details about the reason; for `aborted`, the client's own words. If the server refused the last request, this names the error."""
    cause: Cause | None = None
    """Who or what is to blame for losing the attempt. None while the episode is open, or if it ended with a reward that counts."""
    tainted: bool = False
    """True if one of the episode's calls failed on the server."""
    despite: str | None = None
    """Why the client wants a tainted episode to count."""
    step: int | None = None
    """The optimizer step that trained on the episode."""
    claimed_step: int
    """Step of the weights served when the episode was claimed."""
    reward: float | None = None
    agent_rewards: dict[str, float] | None = None
    success: bool | None = None
    metrics: dict[str, float] = {}
    metadata: dict[str, Any] = {}
    calls: int = 0
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    restricted_tokens: int = 0
    """Number of sampled tokens restricted by a grammar, a forced tool, top-p, penalties etc. See `sampling.train`."""
    claimed_at: float
    ended_at: float | None = None
    version_shift: float | None = None
    """How much the mean reward changed with the episode's client version (`RunReport.versions`); None if unknown."""


class VersionSpan(BaseModel, frozen=True):
    """The weights that sampled tokens [start, end) of a call."""

    start: int
    end: int
    version: WeightsVersion


class RecordedSampling(BaseModel, frozen=True):
    """The sampling parameters that the engine used."""

    temperature: float
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int | None = None
    seed: int | None = None
    reproducible: bool = True
    """Whether tokens were sampled from softmax(logits / temperature) over the whole vocabulary."""

    @property
    def restricted(self) -> bool:
        """Whether tokens were sampled at random, but only from part of the vocabulary or from modified logits."""
        return self.temperature >= LEAST_TEMPERATURE and not self.reproducible


class CallFailure(BaseModel, frozen=True):
    """Why a call got no response, or only part of one, although its client did nothing wrong."""

    cause: Cause
    """`network` if the connection broke during the call, else `server`."""
    reason: Literal["engine_down", "engine_hung", "refused", "cut_off"]
    """refused: the server accepted no calls. cut_off: the response stopped after it had begun."""
    detail: str = ""


class RecordedCall(BaseModel):
    """One LLM call, token by token (invariant I1)."""

    call_id: str
    episode_id: str
    index: int
    agent: str | None
    dialect: str
    prompt_ids: list[int]
    sampled_ids: list[int]
    logprobs: list[float]
    """Log-probability of each sampled id under the distribution it was sampled from (after temperature)."""
    mask: SamplingMask | None = None
    """The candidate tokens for each sampled token. None if unknown, or if it was always the whole vocabulary."""
    sampling: RecordedSampling
    versions: list[VersionSpan]
    finish_reason: str | None
    complete: bool = True
    """False if the client disconnected and sampling stopped."""
    failure: CallFailure | None = None
    """Set if the call failed on the server; its tokens are never trained on."""
    parent_call_id: str | None = None
    """The earlier call whose sampled ids this prompt continues. None if the prompt starts a conversation or forks from one."""
    fork_cause: str | None = None
    started_at: float
    latency_s: float
    request: dict[str, Any] = {}
    answer: dict[str, Any] = {}


class EpisodeTrace(BaseModel):
    """Everything known about one episode."""

    entry: LedgerEntry
    calls: list[RecordedCall]
    untrained: dict[str, str] = {}
    """The loss mask, by call id: why the sampled tokens of a call have no loss. Sampled tokens of all other calls have a loss once
    their episode is in a step; prompt tokens never do."""
    restricted: dict[str, RestrictedTraining] = {}
    """How to train on calls whose sampling was restricted, by call id."""
    vocabulary: dict[str, str] = {}
    """The text of each token id, and of each id sequence ("195,164") that forms one character. Included only on request."""


class LedgerPage(BaseModel):
    entries: list[LedgerEntry]
    next: str | None = None
    """Pass this as `after` to get the following page; None on the last page."""


class TaskProgress(BaseModel):
    """How many episodes of a task have ended, so that a restarted client can continue where it stopped."""

    task_id: str
    mix: str | None = None
    """Family for which the episodes were claimed. Another family may have a task with the same id."""
    kind: EpisodeKind
    step: int | None
    """For evaluation episodes, the step of the evaluated weights; None for training episodes."""
    ended: int
