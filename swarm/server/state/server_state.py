"""A server's state, and the transition that a command makes. The neighbouring modules define commands; `machine` applies them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from foundation.ids import Ids
from swarm.engine.seam import EngineInfo, ReplicaHealth
from swarm.protocol.episodes import WeightsVersion
from swarm.protocol.status import Failure, Hang, Phase, WaitingFor
from swarm.server.state.batching import Awaited, Turns, balance_under
from swarm.server.state.claim_queue import ClaimQueue
from swarm.server.state.groups import Groups
from swarm.server.state.leases import Deadlines, LeaseClock, LiveEpisode, Prepared
from swarm.server.state.rows import Change, EpisodeRow, StepRow
from swarm.server.state.runs import Run, Versions


@dataclass(frozen=True, slots=True)
class Moment:
    """The time at which a command runs."""

    unix: float
    monotonic: float
    """Monotonic time, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restoration:
    """A request to go back to a checkpoint. The training loop does so when it is free."""

    run_id: str
    step: int
    by: str
    key: str | None = None


@dataclass(slots=True, kw_only=True)
class Situation:
    """State that exists only in this process. It survives a failed write, but not a restart."""

    lease_clock: LeaseClock = field(default_factory=LeaseClock)
    phase: Phase = Phase.IDLE
    """What the training loop is doing. `shown_phase` also takes the engine's health into account."""
    engine_ready: bool = False
    engine_failed: Failure | None = None
    engine_failures: int = 0
    replicas: tuple[ReplicaHealth, ...] = ()
    hang: Hang | None = None
    """The engine's most recent hang."""
    opened_run: str | None = None
    """The run whose newest weights the engine serves."""
    run_directory: str = ""
    """Folder of the checkpoints of `opened_run`."""
    serve_again: bool = False
    """Whether inference was restarted, so that the weights must be served again before anything else."""
    collecting_since: float = 0.0
    """Monotonic time at which collecting the next batch began."""
    quiet_since: float = 0.0
    """Unix time of the last claim, end, step, or other event that brings the next step closer or sets it back."""
    waiting_for: WaitingFor | None = None
    """What has held the run up since `quiet_since`; None if nothing has."""
    suspected_at: float = 0.0
    """Unix time at which a client last gave up on a call, possibly because the engine was hanging."""
    lived_at: float = 0.0
    """Unix time at which the engine was last known to be alive, so a hang cannot be why clients gave up earlier. Also kept on disk."""
    no_room: dict[str, Failure] = field(default_factory=dict)
    """What could not be written at the last attempt (the pool, checkpoints), and why."""
    checkpoint_wanted: bool = False
    restoration: Restoration | None = None

    @property
    def storage_full(self) -> Failure | None:
        return next(iter(self.no_room.values()), None)

    @property
    def shown_phase(self) -> Phase:
        if self.engine_failed is not None:
            return Phase.FAILED
        if not self.engine_ready:
            return Phase.BOOTING
        served = self.opened_run is not None and not self.serve_again
        return Phase.UPDATING if self.phase is Phase.ROLLING and not served else self.phase


@dataclass(slots=True, kw_only=True)
class ServerState:
    """Everything that is open: runs, groups, episodes, claims. Whatever is finished is only on disk."""

    info: EngineInfo
    ids: Ids
    allow_algorithms: bool = False
    """Whether runs may bring their own functions, which the trainer executes."""
    situation: Situation = field(default_factory=Situation)
    queue: ClaimQueue = field(default_factory=ClaimQueue)
    closing: dict[str, LiveEpisode] = field(default_factory=dict)
    """Closed episodes whose ends are not on disk yet."""
    claims_decided_by: tuple[object, ...] = ()
    """Value of `claims.is_decided_by` when waiting claims were last tried."""
    closed_count: int = 0
    """Number of episodes closed or decided since the process started."""
    # -- read from disk at start, and again after a failed write ------------------------------------------------------
    run: Run | None = None
    journalled: StepRow | None = None
    """The step that is journalled but not done."""
    next_episode_seq: int = 1
    next_group_seq: int = 1
    groups_by_task: dict[str, int] = field(default_factory=dict)
    groups: Groups = field(default_factory=Groups)
    live: dict[str, LiveEpisode] = field(default_factory=dict)
    prepared: dict[str, Prepared] = field(default_factory=dict)
    """Episodes that wait for their team's decision."""
    pooled: dict[str, EpisodeRow] = field(default_factory=dict)
    """Ended episodes that no step has used yet."""
    claim_keys: dict[str, str] = field(default_factory=dict)
    """Maps a claim's idempotency key to its open episode."""
    sessions: dict[str, str] = field(default_factory=dict)
    """Maps each client of the run to its newest session."""
    eval_ordinals: dict[str, set[int]] = field(default_factory=dict)
    """For each task, the evaluation ordinals already in use at the current step."""
    versions: Versions = field(default_factory=Versions)
    awaited: Awaited = field(default_factory=Awaited)
    deadlines: Deadlines = field(default_factory=Deadlines)
    """Deadlines of episodes and groups, and of patience with families."""
    team_deadlines: Deadlines = field(default_factory=Deadlines)
    flat_groups: int = 0
    """Number of groups dropped for equal rewards since the last batch, or since the server started."""

    @property
    def next_deadline(self) -> float:
        """Lease time at which to call `machine.expire`; infinite if nothing can expire."""
        return min(self.deadlines.next(), self.team_deadlines.next())

    @property
    def serving(self) -> bool:
        """Whether the engine samples from the current run's weights."""
        situation = self.situation
        ready = situation.engine_ready and not situation.serve_again
        return ready and self.run is not None and situation.opened_run == self.run.run_id

    @property
    def weights_version(self) -> WeightsVersion | None:
        """The weights version that is served; None if no run's weights are served."""
        if self.run is None or not self.serving:
            return None
        return WeightsVersion(run_id=self.run.run_id, branch=self.run.row.branch, step=self.run.step)

    def is_at_this_step(self, row: EpisodeRow) -> bool:
        return self.run is not None and row.run_id == self.run.run_id and row.claimed_step == self.run.step

    def row(self, episode_id: str) -> EpisodeRow | None:
        """Return an episode's row; None if it is not in memory."""
        held = self.live.get(episode_id) or self.closing.get(episode_id) or self.prepared.get(episode_id)
        return held.row if held is not None else self.pooled.get(episode_id)

    def passed(self, lease_time: float) -> frozenset[str]:
        """Return the families with which patience has run out."""
        mix = self.run.spec.batch.mix if self.run is not None else {}
        return self.awaited.passed(mix, lease_time) if mix else frozenset()

    def debts(self) -> dict[str, float]:
        """Return the number of groups by which each family of the run's mix is behind; empty without a mix."""
        if self.run is None or not self.run.spec.batch.mix:
            return {}
        return Turns(balance_under(self.run.row.mix, self.run.spec.batch.mix)).debts()


LogLevel = Literal["debug", "info", "warning", "error"]


@dataclass(frozen=True, slots=True)
class LogLine:
    """A log line for people. `one_of` names a kind of line that may come by the hundred; the server's log sums those up."""

    text: str
    level: LogLevel = "info"
    one_of: str | None = None


@dataclass(slots=True)
class Transition:
    """A running command: the state that it changes, its time, and the work that it leaves for the caller."""

    state: ServerState
    now: Moment
    changes: list[Change] = field(default_factory=list)
    """Changes to write to disk atomically."""
    log: list[LogLine] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)
    """Episodes that are no longer open; `changes` has their ends."""
    broken_off: list[str] = field(default_factory=list)
    """Episodes whose open calls must be cut off, because the episodes are about to end."""
    in_doubt: bool = False
    """Whether the decider of a prepared episode has to be asked."""

    @property
    def lease_time(self) -> float:
        return self.state.situation.lease_clock.time(self.now.monotonic)

    def say(self, text: str, level: LogLevel = "info", *, one_of: str | None = None) -> None:
        """Add a log line for people; see `LogLine`."""
        self.log.append(LogLine(text, level, one_of))
