"""An episode as it travels: claim, lease, result, receipt, fate, recorded calls."""

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
"""The largest reward, positive or negative."""
Finite = Annotated[float, Field(allow_inf_nan=False), NotBoolean]
Reward = Annotated[float, Field(ge=-MOST_REWARD, le=MOST_REWARD, allow_inf_nan=False), NotBoolean]
"""Bounded so that sums and squares stay finite even in single precision."""
LONGEST_NAME = 1_000
Name = Annotated[str, Field(max_length=LONGEST_NAME)]
"""An id chosen by a client. Every row and every answer about the episode repeats it."""
_LEFT_OUT = Field(exclude_if=lambda value: value is None)
"""Omit the field when None: older servers refuse unknown fields."""
Despite = Annotated[Annotated[str, Field(min_length=1, max_length=LONGEST_NAME)] | None, _LEFT_OUT]
SessionId = Annotated[str, Field(min_length=1, max_length=LONGEST_NAME)]
"""A random name that each process of a client draws for itself."""
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
    """Longest duration of the episode. None: the run's `limits.max_episode_s`."""
    max_call_s: Annotated[float, Field(gt=0), NotBoolean] | None = None
    """Longest duration of one LLM call. The idle limit is suspended while a call is open."""
    wait_s: Annotated[float, Field(ge=0, le=120), NotBoolean] = 30.0
    session: Annotated[SessionId | None, _LEFT_OUT] = None
    """Session of the client that plays the episode. None: no later session closes the episode."""
    idempotency_key: IdempotencyKey = None


class SessionRequest(ClientModel):
    """Makes one process of a client the only one that may play a run."""

    run_id: str
    client_id: Name
    session: SessionId
    reason: str = "a newer session of the client began"
    """Why the episodes of earlier sessions are aborted."""


class SessionBegun(BaseModel):
    closed: list[str]
    """Episodes that earlier sessions left open; the server closed them as lost by the client."""


class EpisodeOptions(TypedDict, total=False):
    """The fields of `EpisodeClaim` that a caller may choose, as keyword arguments. Omitted fields keep the claim's defaults."""

    run_id: str | None
    """None: the current run of the server."""
    mix: str | None
    kind: EpisodeKind
    idle_limit_s: float
    max_episode_s: float | None
    max_call_s: float | None
    wait_s: float
    sampling: Mapping[str, Any] | None
    """Request parameters for every call of the episode, such as an evaluation's temperature. Not sent with the claim."""


class RolloutOptions(EpisodeOptions, total=False):
    """How `run_tasks` works through its tasks, as keyword arguments."""

    concurrency: int
    """Number of concurrent episodes; 16 by default."""
    retries: int
    """How often to repeat an attempt that failed through rollout, grader or a limit; 2 by default."""
    episodes_per_task: int | None
    """Episodes per task. None: the run's group_size (train) or 1 (eval)."""
    progress: bool | None
    """Whether to show a progress bar. None: if standard error is a terminal."""


class EpisodeGrant(BaseModel):
    """The answer to a claim: a lease, and where the agent finds its model."""

    episode_id: str
    lease: str
    group_id: str | None
    slot: int | None
    base_url: str
    api_key: str
    weights_version: WeightsVersion
    expires_at: float
    """Unix time at which the idle limit ends, unless a call or a renewal moves it."""
    team_key: str = ""
    """Lets the other servers of a team ask what this episode decided, and nothing else."""


COUNTED = frozenset({Cause.ROLLOUT, Cause.GRADER, Cause.CLIENT, Cause.LIMIT})
"""Causes that may depend on the attempt: the agent's actions, its grading, its duration. Attempts lost to other causes say
nothing about the agent and are repeated without limit."""


class EpisodeResult(ClientModel):
    """Ends an episode."""

    lease: str
    reward: Reward
    agent_rewards: dict[str, Reward] | None = None
    success: bool | None = None
    metrics: dict[str, Finite] = {}
    metadata: dict[str, Any] = {}
    despite: Despite = None
    """How the agent recovered from a call that failed on the server's side. Without it the episode is `tainted` and not trained."""
    by_hand: Annotated[bool, Field(exclude_if=lambda value: not value)] = False
    """A person answered instead of the model, so an evaluation counts even without a call."""
    idempotency_key: IdempotencyKey = None


class EpisodeReceipt(BaseModel):
    """Stored durably before this was sent."""

    episode_id: str
    status: Literal["pooled", "already_ended"]
    dropped: DropReason | None = None
    """Set if the episode was dropped when it ended (`tainted`, `no_calls`); its slot is offered again."""


class EpisodeAbort(ClientModel):
    """Gives an episode up. cause: None means `rollout`."""

    lease: str
    reason: str
    cause: Annotated[Cause | None, _LEFT_OUT] = None


class EpisodeRenewal(ClientModel):
    lease: str


class EpisodeState(StrEnum):
    RUNNING = "running"
    PREPARED = "prepared"
    """Bound to its team's decision: durable, holds its slot, is not trained until committed."""
    ENDED = "ended"
    """Acknowledged; waits in the sample pool."""
    IN_STEP = "in_step"
    """In a journalled batch; trained for good once a checkpoint holds it."""
    TRAINED = "trained"
    DROPPED = "dropped"


class DropReason(StrEnum):
    """Why an episode was not trained. `eval` episodes are never trained, so they end here too."""

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
    """Every call used temperature 0 or nearly 0, so no token was drawn at random."""
    UNREPRODUCIBLE_SAMPLING = "unreproducible_sampling"
    RUN_ENDED = "run_ended"
    SUPERSEDED = "superseded"
    """A restore branched the run at an earlier step, or the mix no longer contains its family."""
    QUARANTINED = "quarantined"
    """Its client version was quarantined before a batch took it."""
    TEAM_ABORTED = "team_aborted"
    TAINTED = "tainted"
    """One of its calls failed on the server's side, and its client did not say `despite`."""


class LedgerEntry(BaseModel):
    """What became of one episode: trained at a step, or dropped and why. One per episode, for ever."""

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
    """More about the reason; for `aborted` the client's own. Names the refusal if the server refused its newest request."""
    cause: Cause | None = None
    """Who or what lost the attempt; None while the episode is open, or if it ended with a reward that counts."""
    tainted: bool = False
    """One of its calls failed on the server's side."""
    despite: str | None = None
    """Why the client let a tainted episode count."""
    step: int | None = None
    """The optimiser step that trained it."""
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
    """How many of these were drawn under a grammar, a forced tool, top-p, penalties etc. See `sampling.train` for their training."""
    claimed_at: float
    ended_at: float | None = None
    version_shift: float | None = None
    """How much the mean reward changed with its client version (`RunReport.versions`); None if unknown."""


class VersionSpan(BaseModel, frozen=True):
    """Sampled tokens [start, end) of a call came from these weights."""

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
    """Whether tokens were drawn from softmax(logits / temperature), of the whole vocabulary."""

    @property
    def restricted(self) -> bool:
        """Whether tokens were drawn at random, but from a part of the vocabulary or from changed logits."""
        return self.temperature >= LEAST_TEMPERATURE and not self.reproducible


class CallFailure(BaseModel, frozen=True):
    """Why a call got no answer, or only part of one, though its client did nothing wrong."""

    cause: Cause
    """`server`, or `network` if the connection broke during the call."""
    reason: Literal["engine_down", "engine_hung", "refused", "cut_off"]
    """refused: the server took no calls. cut_off: the answer broke off after it had begun."""
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
    """Log-probability of each sampled id under the distribution that it was drawn from (after temperature)."""
    mask: SamplingMask | None = None
    """The candidate tokens of each draw. None: unknown, or always the whole vocabulary."""
    sampling: RecordedSampling
    versions: list[VersionSpan]
    finish_reason: str | None
    complete: bool = True
    """False if the client disconnected and sampling stopped."""
    failure: CallFailure | None = None
    """Set when the server failed the call; its tokens are never trained."""
    parent_call_id: str | None = None
    """The earlier call whose sampled ids this prompt continues; None at a root or a fork."""
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
    """The loss mask: why the sampled tokens of a call carry no loss, by call id. Sampled tokens of all other calls carry loss
    once their episode is in a step; prompt tokens never do."""
    restricted: dict[str, RestrictedTraining] = {}
    """How calls sampled under a restriction are trained, by call id."""
    vocabulary: dict[str, str] = {}
    """The text of each token id, and of each id sequence ("195,164") that forms one character. Only on request."""


class LedgerPage(BaseModel):
    entries: list[LedgerEntry]
    next: str | None = None
    """Pass as `after` for the following page."""


class TaskProgress(BaseModel):
    """How many episodes of a task are ended, so that a restarted client goes on where it stopped."""

    task_id: str
    mix: str | None = None
    """Family for which the episodes were claimed; another family may have a task with the same id."""
    kind: EpisodeKind
    step: int | None
    """Step of the evaluated weights for eval episodes; None for train episodes."""
    ended: int
