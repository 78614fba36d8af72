"""The rows that storage keeps, and the changes to them that a transition makes. A list of changes is written atomically."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from swarm.protocol.episodes import Cause, DropReason, EpisodeKind, EpisodeState, LedgerEntry
from swarm.protocol.status import RunStatus
from swarm.protocol.teams import TeamOutcome


@dataclass(slots=True, kw_only=True)
class EpisodeRow:
    """The ledger row of one episode, with the fields that late and repeated requests are checked against."""

    seq: int
    """Position of its claim among the claims of all runs."""
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
    ordinal: int
    """For train episodes, the number of its group within the task and run; for evaluations, its number within the task and step."""
    claimed_step: int
    claimed_at: float
    lease_digest: str
    state: EpisodeState = EpisodeState.RUNNING
    reason: DropReason | None = None
    detail: str | None = None
    step: int | None = None
    """Step whose journalled batch contains the episode, whatever became of the step."""
    reward: float | None = None
    agent_rewards: dict[str, float] | None = None
    success: bool | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    calls: int = 0
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    restricted_tokens: int = 0
    """Number of tokens whose sampling was restricted by more than a temperature."""
    oldest_step: int = 0
    """Step of the weights that sampled its oldest token."""
    step_tokens: int = 0
    """Sum over its sampled tokens: for each, the step of the weights that sampled it."""
    end_digest: str | None = None
    """Digest of the result that ended it."""
    end_key: str | None = None
    ended_at: float | None = None
    cause: Cause | None = None
    """Who is to blame for losing the attempt; None if unknown or if it was not lost."""
    tainted: bool = False
    """Whether one of its calls failed because of the server, and no later call made up for it."""
    despite: str | None = None
    """Why its client wants it to count even if tainted. Kept after its end, because we may learn only later that a call failed."""
    suspected: dict[str, Any] | None = None
    """Record of its requests (`calls.suspicion`), if its client gave up on a call and the engine may have been hanging."""
    api_key_digest: str | None = None
    """Digest of its API key; None if an older server signed the key (`keys.Keyring.episode_of_old_key`)."""

    @property
    def ungrouped(self) -> bool:
        """Whether the episode's group is chosen only when it ends; see `state.ungrouped`."""
        return self.kind == "train" and self.group_id is None

    def entry(self) -> LedgerEntry:
        """Return the ledger entry that clients see."""
        shared = {name: getattr(self, name) for name in _SHARED}
        shared["despite"] = self.despite if self.tainted else None
        shared["step"] = self.step if self.state in (EpisodeState.IN_STEP, EpisodeState.TRAINED) else None
        return LedgerEntry(**shared)


_SHARED = [name for name in EpisodeRow.__dataclass_fields__ if name in LedgerEntry.model_fields]


@dataclass(slots=True, kw_only=True)
class VersionRow:
    """Reward statistics of the train episodes of one client version and one family of tasks, updated whenever an episode ends."""

    run_id: str
    mix: str | None
    client_version: str
    first_at: float
    last_at: float = 0.0
    """Unix time at which its last episode ended."""
    ended: int = 0
    reward_sum: float = 0.0
    square_sum: float = 0.0
    opening: list[float] = field(default_factory=list)
    """The rewards of the version's first episodes."""
    recent: list[float] = field(default_factory=list)
    """The rewards of the version's most recent episodes."""
    before: str | None = None
    baseline: list[float] = field(default_factory=list)
    """The most recent rewards of the previous version when the first episode of this version ended."""


@dataclass(slots=True, kw_only=True)
class MixRow:
    """Counts of each family's groups in the run's steps. A family is a claim's `mix`; without a mix, "" is the only family."""

    ratios: dict[str, float] = field(default_factory=dict)
    """The ratios at the newest step."""
    carried: dict[str, int] = field(default_factory=dict)
    """Number of groups that each family was owed when these ratios took effect."""
    entered: dict[str, int] = field(default_factory=dict)
    """Number of each family's groups in steps since these ratios took effect."""
    trained: dict[str, int] = field(default_factory=dict)
    """Number of each family's groups in steps since the run began."""


@dataclass(slots=True, kw_only=True)
class TeamRow:
    """Binds one episode to its team's decision. Never deleted, because a participant may ask at any later time."""

    seq: int
    """The episode's `seq`."""
    episode_id: str
    decider_url: str
    decider_id: str
    sealed_key: str
    """The decider's team key, sealed by this server's keyring."""
    patience_s: float
    prepared_at: float
    prepare_digest: str
    """Digest of the whole preparation, to recognise a repetition."""
    result: dict[str, Any]
    """The fields of a `TeamResult`."""
    outcome: TeamOutcome | None = None
    """The team's decision; None while the episode is prepared."""
    how: str | None = None
    """What decided the outcome: client, silence, decider, operator or run_ended."""

    @property
    def decides(self) -> bool:
        return self.decider_id == self.episode_id


GroupState = Literal["open", "ready", "closed"]
"""A group is "open" while it has slots to fill, "ready" while it waits for a batch, and "closed" once it is in a journalled batch or
dropped."""


@dataclass(slots=True, kw_only=True)
class GroupRow:
    seq: int
    group_id: str
    run_id: str
    task_id: str
    mix: str | None
    client_version: str
    config_version: int
    ordinal: int
    size: int
    state: GroupState = "open"


@dataclass(slots=True, kw_only=True)
class RunRow:
    seq: int
    run_id: str
    holder: str
    started_at: float
    branch: int = 0
    idempotency_key: str | None = None
    request_digest: str = ""
    status: RunStatus = "running"
    reason: str | None = None
    ended_at: float | None = None
    stop_requested_at: float | None = None
    released: bool = False
    """Whether the run's weights are no longer served, because it was stopped, failed or was replaced."""
    checkpoints: list[int] = field(default_factory=list)
    """Steps of the checkpoints that are kept, ascending; the hosted model itself is step 0."""
    branched_at: int = 0
    """The step that the current branch began from."""
    restore_key: str | None = None
    """Idempotency key of the restore that began the current branch."""
    restored_by: dict[str, int] = field(default_factory=dict)
    """Maps the idempotency key of each restore so far to the step that it went back to."""
    quarantined: dict[str, str] = field(default_factory=dict)
    """Maps each client version that must not be trained on to the reason."""
    mix: MixRow = field(default_factory=MixRow)

    def restored_to(self, key: str) -> int | None:
        """Return the step that the restore with this key went back to; None if there was no such restore."""
        # An older server recorded only the newest restore.
        newest = self.branched_at if key == self.restore_key else None
        return self.restored_by.get(key, newest)


@dataclass(slots=True, kw_only=True)
class ConfigRow:
    run_id: str
    config_version: int
    at: float
    by: str
    patch: dict[str, Any]
    spec: dict[str, Any]


StepState = Literal["journalled", "done", "abandoned", "superseded"]
"""A step is "journalled" once its batch is fixed, "done" once it is trained and served, "abandoned" if the run failed on it, and
"superseded" if a restore went back to an earlier step."""


@dataclass(slots=True, kw_only=True)
class PlannedGroup:
    group_id: str
    task_id: str
    episode_ids: list[str]


@dataclass(slots=True, kw_only=True)
class StepRow:
    run_id: str
    branch: int
    step: int
    config_version: int
    groups: list[PlannedGroup]
    values: dict[str, float]
    """The step's metrics: only those of the pool while it is journalled, all of them once it is done."""
    state: StepState = "journalled"
    at: float = 0.0
    """Unix time at which it entered its state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutRow:
    """Results of the eval episodes at one step of a run."""

    step: int
    reward: float
    """Mean reward of these episodes."""
    episodes: int


# -- changes ----------------------------------------------------------------------------------------------------------
# A row is a change too: it is inserted, or it replaces the row with the same key.


@dataclass(frozen=True, slots=True)
class PutCalls:
    seq: int
    body: bytes


LIVED_AT = "lived_at"
"""Name of the note that holds the last time at which the engine was known to be alive."""


@dataclass(frozen=True, slots=True)
class PutMeta:
    name: str
    value: str


def session_note(run_id: str, client_id: str = "") -> str:
    """Return the name of the note that holds a client's newest session. Without a client, return the prefix of the run's notes."""
    return f"session/{run_id}/{client_id}"


@dataclass(frozen=True, slots=True)
class SetFate:
    """Sets the state of an ended episode."""

    episode_id: str
    state: EpisodeState
    reason: DropReason | None = None
    step: int | None = None
    """Step to set; None leaves it unchanged."""
    detail: str | None = None


@dataclass(frozen=True, slots=True)
class KeepSteps:
    """A new checkpoint holds all steps of the run up to `through`; the previous checkpoint held the steps up to `after`. The
    episodes of the steps in between are now permanently trained."""

    run_id: str
    after: int
    through: int


@dataclass(frozen=True, slots=True)
class DropUnkept:
    """The run's steps after `after`, the step of its last checkpoint, are lost: their episodes are dropped as run_ended."""

    run_id: str
    after: int
    detail: str


@dataclass(frozen=True, slots=True)
class SupersedeAfter:
    """The run continues from `step` on a new branch: later steps, and the episodes trained or evaluated in them, are superseded."""

    run_id: str
    step: int
    detail: str


@dataclass(frozen=True, slots=True)
class FreeCalls:
    """Delete calls that no replay needs: of settled episodes in other runs, and of this run's steps up to `through`.

    Episodes with a seq of at least `traces_from` keep their calls, so that people can look at recent traces.
    """

    run_id: str
    through: int
    traces_from: int


Row = EpisodeRow | TeamRow | GroupRow | RunRow | ConfigRow | StepRow | VersionRow
Change = Row | PutCalls | PutMeta | SetFate | KeepSteps | DropUnkept | SupersedeAfter | FreeCalls


@dataclass(slots=True, kw_only=True)
class Snapshot:
    """Everything on disk that is still open. The state in memory starts from it."""

    server_id: str | None
    next_episode_seq: int
    next_group_seq: int
    run: RunRow | None
    """The newest run; None if no run was ever started."""
    configs: list[ConfigRow]
    step: int
    """The run's newest step that is done; 0 before the first."""
    journalled: StepRow | None
    """The run's step that is journalled but not done."""
    groups: list[GroupRow]
    """Open and ready groups."""
    episodes: list[EpisodeRow]
    """Running, prepared and ended episodes."""
    teams: list[TeamRow]
    """Teams of the prepared episodes."""
    sessions: dict[str, str]
    """Maps each client of the run to its newest session."""
    groups_by_task: dict[str, int]
    """Number of groups that the run has opened for each task."""
    eval_ordinals: list[tuple[str, int]]
    """(task_id, ordinal) of each of the run's evaluations at `step` whose result counts."""
    tokens: int
    """Number of tokens sampled by closed episodes of the run."""
    versions: list[VersionRow]
    """The run's client versions, in the order of their first groups."""
    lived_at: float
    """Unix time at which the engine was last known to be alive, so a hang cannot be why clients gave up earlier."""
