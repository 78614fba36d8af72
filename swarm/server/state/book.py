"""The whole book of one server: episodes, steps and runs over one state, and the status that it adds up to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from foundation.clock import Clock
from foundation.ids import Ids
from swarm.engine.seam import EngineInfo
from swarm.protocol.episodes import WeightsVersion
from swarm.protocol.runspec import AS_STORED, RunSpec
from swarm.protocol.status import (
    ConfigChange,
    EngineStatus,
    MixStatus,
    Phase,
    PoolStatus,
    RunReport,
    ServerStatus,
    StepMetrics,
)
from swarm.server.state import held_out, versions
from swarm.server.state.batches import groups_needed
from swarm.server.state.episodes import EpisodeBook
from swarm.server.state.interventions import Interventions
from swarm.server.state.leases import LiveEpisode
from swarm.server.state.rows import ConfigRow, HeldOutRow, RunRow, Snapshot, StepRow, VersionRow
from swarm.server.state.state import BookState, Situation
from swarm.server.state.steps import StepBook
from swarm.server.state.teams import TeamBook


class Book:
    """Pure and synchronous. After each call, give `state.take_changes()` to the pool before anybody is answered."""

    def __init__(self, state: BookState) -> None:
        self.state = state
        self.episodes = EpisodeBook(state)
        self.teams = TeamBook(state, self.episodes)
        self.steps = StepBook(state)
        self.interventions = Interventions(state)

    @classmethod
    def load(
        cls,
        snapshot: Snapshot,
        *,
        info: EngineInfo,
        clock: Clock,
        ids: Ids,
        situation: Situation,
        live: Mapping[str, LiveEpisode] | None = None,
    ) -> Book:
        """The book as the pool has it; `live` are the open leases that this process still knows, none after a restart."""
        return cls(BookState.load(snapshot, info=info, clock=clock, ids=ids, situation=situation, live=live or {}))

    def expire(self) -> None:
        """See to everything whose time has come: leases, groups' patience, silent teams."""
        self.episodes.expire()
        self.teams.expire()

    def status(self, server_id: str, *, revision: int, tokens_per_s: float) -> ServerStatus:
        state = self.state
        run, situation, info = state.run, state.situation, state.info
        held = run if run is not None and not run.row.released else None
        return ServerStatus(
            server_id=server_id,
            revision=revision,
            phase=situation.shown_phase,
            failed=situation.engine_failed,
            storage_full=situation.storage_full,
            run_id=held.run_id if held else None,
            step=held.step if held else 0,
            weights_version=self.weights_version(),
            model=info.model,
            model_fingerprint=info.fingerprint,
            pool=self._pool_status(),
            waiting_for=situation.waiting_for,
            engine=EngineStatus(
                backend=info.backend,
                device=info.device,
                dtype=info.dtype,
                tokens_per_s=tokens_per_s,
                warm=situation.engine_ready,
                failures=situation.engine_failures,
                hang=situation.hang,
            ),
            limits=dict(held.spec.limits) if held else {},
        )

    def weights_version(self) -> WeightsVersion | None:
        """What is served; None when no run's weights are."""
        run = self.state.run
        if run is None or not self.state.serving:
            return None
        return WeightsVersion(run_id=run.run_id, branch=run.row.branch, step=run.step)

    def _pool_status(self) -> PoolStatus:
        state = self.state
        run = state.run
        ready = len(state.groups.ready())
        running = run is not None and run.row.status == "running"
        return PoolStatus(
            running=len(state.live),
            prepared=len(state.prepared),
            ended=len(state.pooled),
            groups_open=len(state.groups) - ready,
            groups_ready=ready,
            groups_needed=groups_needed(run.spec.batch) if run is not None and running else 0,
            by_mix=self._by_mix(),
        )

    def _by_mix(self) -> dict[str, MixStatus]:
        state = self.state
        found = state.groups.by_mix()
        if state.run is None or state.run.row.released:
            return found
        for name, groups in state.run.row.mix.trained.items():
            found.setdefault(name, MixStatus()).trained_groups = groups
        passed = state.passed()
        for name, debt in state.debts().items():
            status = found.setdefault(name, MixStatus())
            status.debt, status.passed = debt, name in passed
        return found


def report(
    row: RunRow,
    configs: Sequence[ConfigRow],
    steps: Sequence[StepRow],
    seen: Sequence[VersionRow],
    evaluated: Sequence[HeldOutRow],
    *,
    phase: Phase,
    step: int,
) -> RunReport:
    """A run in the protocol's words."""
    spec = RunSpec.model_validate(configs[-1].spec, context=AS_STORED)
    return RunReport(
        run_id=row.run_id,
        branch=row.branch,
        spec=spec,
        status=row.status,
        reason=row.reason,
        phase=phase,
        step=step,
        config_version=configs[-1].config_version,
        changes=[
            ConfigChange(config_version=config.config_version, at=config.at, by=config.by, patch=config.patch)
            for config in configs[1:]
        ],
        steps=[
            StepMetrics(
                step=done.step, branch=done.branch, at=done.at, config_version=done.config_version, values=done.values
            )
            for done in steps
            if done.state == "done"
        ],
        started_at=row.started_at,
        ended_at=row.ended_at,
        versions=versions.reports(seen, row.quarantined),
        checkpoints=held_out.reports(row.checkpoints, evaluated),
        notes=spec.sampling.untrained,
    )
