"""What a server knows, and the record of one change to it. The modules beside this one hold the commands; `machine` applies them."""

from __future__ import annotations

from dataclasses import dataclass, field

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
    """When a command is carried out."""

    unix: float
    monotonic: float
    """Seconds that never go back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restoration:
    """A request to go back to a checkpoint, which the training loop carries out when it has nothing else in hand."""

    run_id: str
    step: int
    by: str
    key: str | None = None


@dataclass(slots=True, kw_only=True)
class Situation:
    """What only this process knows. It survives a failed write, and no restart."""

    lease_clock: LeaseClock = field(default_factory=LeaseClock)
    phase: Phase = Phase.IDLE
    """What the training loop is doing; the engine's health overrides it."""
    engine_ready: bool = False
    engine_failed: Failure | None = None
    engine_failures: int = 0
    replicas: tuple[ReplicaHealth, ...] = ()
    hang: Hang | None = None
    """The engine's newest one."""
    opened_run: str | None = None
    """Whose weights the engine serves, at its newest step."""
    run_directory: str = ""
    """Where that run's checkpoints lie."""
    serve_again: bool = False
    """Inference was restarted: the weights must be served again before anything else."""
    collecting_since: float = 0.0
    """Monotonic time since which the next batch is being collected."""
    quiet_since: float = 0.0
    """Unix time of the newest claim, end, step, or other event that brings the next step nearer or farther."""
    waiting_for: WaitingFor | None = None
    """What holds the run up since then."""
    suspected_at: float = 0.0
    """Unix time at which a client last gave up on a call that the engine may turn out to have left without an answer."""
    lived_at: float = 0.0
    """Unix time: whoever gave up before this met no hang. Also on disk, for the time after a restart."""
    no_room: dict[str, Failure] = field(default_factory=dict)
    """What could not be written when it was last tried (the pool, checkpoints), and why."""
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
    """Everything that is open: runs, groups, episodes, claims. What is over is on disk alone."""

    info: EngineInfo
    ids: Ids
    allow_algorithms: bool = False
    """Whether runs may bring functions of their own, which the trainer executes."""
    situation: Situation = field(default_factory=Situation)
    queue: ClaimQueue = field(default_factory=ClaimQueue)
    closing: dict[str, LiveEpisode] = field(default_factory=dict)
    """Closed, and not yet on disk."""
    claims_decided_by: tuple[object, ...] = ()
    """See `claims.is_decided_by`, when waiting claims were last tried."""
    closed_count: int = 0
    """Episodes that were closed, or decided, since the process started."""
    # -- read from disk at start, and again after a failed write ------------------------------------------------------
    run: Run | None = None
    journalled: StepRow | None = None
    """The step that is journalled and not done."""
    next_episode_seq: int = 1
    next_group_seq: int = 1
    groups_by_task: dict[str, int] = field(default_factory=dict)
    groups: Groups = field(default_factory=Groups)
    live: dict[str, LiveEpisode] = field(default_factory=dict)
    prepared: dict[str, Prepared] = field(default_factory=dict)
    """Bound to the decision of a team."""
    pooled: dict[str, EpisodeRow] = field(default_factory=dict)
    """Ended, not yet in a step."""
    claim_keys: dict[str, str] = field(default_factory=dict)
    """Idempotency key of a claim → its open episode."""
    sessions: dict[str, str] = field(default_factory=dict)
    """Client of the run → its newest session."""
    eval_ordinals: dict[str, set[int]] = field(default_factory=dict)
    """By task: which ordinals at the current step are taken."""
    versions: Versions = field(default_factory=Versions)
    awaited: Awaited = field(default_factory=Awaited)
    deadlines: Deadlines = field(default_factory=Deadlines)
    """Of episodes, groups and the patience with families."""
    team_deadlines: Deadlines = field(default_factory=Deadlines)
    flat_groups: int = 0
    """Dropped for equal rewards since the newest batch was made, or the server started."""

    @property
    def next_deadline(self) -> float:
        """Lease time at which to call `machine.expire`; infinite when nothing can run out."""
        return min(self.deadlines.next(), self.team_deadlines.next())

    @property
    def serving(self) -> bool:
        """Whether the engine samples from the current run's weights."""
        situation = self.situation
        ready = situation.engine_ready and not situation.serve_again
        return ready and self.run is not None and situation.opened_run == self.run.run_id

    @property
    def weights_version(self) -> WeightsVersion | None:
        """What is served; None when no run's weights are."""
        if self.run is None or not self.serving:
            return None
        return WeightsVersion(run_id=self.run.run_id, branch=self.run.row.branch, step=self.run.step)

    def is_at_this_step(self, row: EpisodeRow) -> bool:
        return self.run is not None and row.run_id == self.run.run_id and row.claimed_step == self.run.step

    def row(self, episode_id: str) -> EpisodeRow | None:
        """An episode's row, when memory still has it."""
        held = self.live.get(episode_id) or self.closing.get(episode_id) or self.prepared.get(episode_id)
        return held.row if held is not None else self.pooled.get(episode_id)

    def passed(self, lease_time: float) -> frozenset[str]:
        """Families whose patience ran out."""
        mix = self.run.spec.batch.mix if self.run is not None else {}
        return self.awaited.passed(mix, lease_time) if mix else frozenset()

    def debts(self) -> dict[str, float]:
        """Groups that each family of the run's mix is behind; empty without a mix."""
        if self.run is None or not self.run.spec.batch.mix:
            return {}
        return Turns(balance_under(self.run.row.mix, self.run.spec.batch.mix)).debts()


@dataclass(slots=True)
class Transition:
    """One command under way: the state that it changes, when, and what must be done about it afterwards."""

    state: ServerState
    now: Moment
    changes: list[Change] = field(default_factory=list)
    """To be written, whole or not at all."""
    log: list[str] = field(default_factory=list)
    """Lines for people."""
    closed: list[str] = field(default_factory=list)
    """Episodes that left the open ones: `changes` has their ends."""
    broken_off: list[str] = field(default_factory=list)
    """Episodes whose open calls must end: they are over, or about to be."""
    in_doubt: bool = False
    """A prepared episode must ask its decider."""

    @property
    def lease_time(self) -> float:
        return self.state.situation.lease_clock.time(self.now.monotonic)
