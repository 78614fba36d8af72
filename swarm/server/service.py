"""The server's internal API for routes, gateway and training loop. Knows asyncio, but neither HTTP nor torch.

A request for a change is answered only once the change is on disk.
"""

from __future__ import annotations

import asyncio
import hmac
import math
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from pydantic import ValidationError

from foundation.clock import Clock
from foundation.event_loop import take_exception, within
from foundation.ids import Ids
from swarm.engine.seam import EngineHealth, EngineInfo
from swarm.protocol.episodes import (
    CallFailure,
    Cause,
    EpisodeAbort,
    EpisodeClaim,
    EpisodeGrant,
    EpisodeReceipt,
    EpisodeRenewal,
    EpisodeResult,
    EpisodeTrace,
    LedgerEntry,
    LedgerPage,
    RecordedCall,
    SessionBegun,
    SessionRequest,
    TaskProgress,
)
from swarm.protocol.errors import ErrorCode, Refusal
from swarm.protocol.runspec import AS_STORED, RunSpec
from swarm.protocol.status import (
    CheckpointRef,
    Phase,
    QuarantineRequest,
    RestoreRequest,
    RunCreated,
    RunReport,
    RunRequest,
    ServerStatus,
)
from swarm.protocol.summary import LedgerFields, LedgerFilter, LedgerSummary
from swarm.protocol.teams import EpisodeCommit, EpisodePreparation, EpisodeResolution, TeamDecision, TeamReceipt
from swarm.server.durable_state import DurableState
from swarm.server.events import ServerEvent
from swarm.server.keys import EpisodeKey, KeyRefused
from swarm.server.state import claims, episodes, health, run_lifecycle, teams
from swarm.server.state.calls import CallAttempt, Ending, FailedCall, OpenCall
from swarm.server.state.claim_queue import NotYet
from swarm.server.state.leases import API_KEY_PREFIX, LiveEpisode, digest
from swarm.server.state.machine import Outcome
from swarm.server.state.rows import EpisodeRow, RunRow, TeamRow, VersionRow
from swarm.server.state.runs import VersionKey, shifts
from swarm.server.state.server_state import LogLevel, Restoration
from swarm.server.state.status import report
from swarm.server.storage.store import Store

__all__ = ["OpenCall", "ServerEvent", "Service"]

PAGE_DIGITS = 18
"""Maximum number of digits in the `next` of a page."""
_CLOSING = Refusal(ErrorCode.NOT_ROLLING, "the server is shutting down", retry_after_s=5.0)


@dataclass(slots=True, eq=False)
class _Waiter:
    """One waiting claim. All repetitions of the claim share it."""

    answer: asyncio.Future[EpisodeGrant]
    claimants: int = 0
    granted: EpisodeGrant | None = None
    """The grant, once there is one; `answer` gets it when it is on disk."""


class Service(DurableState):
    """A server's service. Create one per server in a running event loop, and call all its methods from that loop.

    With `allow_algorithms`, runs may bring their own functions, which the trainer executes.

    Methods may raise a Refusal; their docstrings list its codes. After STORAGE_FULL nothing has changed, in memory or on disk.
    """

    def __init__(
        self, store: Store, info: EngineInfo, *, clock: Clock, ids: Ids, allow_algorithms: bool = False
    ) -> None:
        self.failed_calls: Counter[str] = Counter()
        """Number of calls that failed because of the server since it started, by reason."""
        self._work = asyncio.Event()
        self._call_closed = asyncio.Event()
        self._waiters: dict[int, _Waiter] = {}
        self._endings: dict[str, Ending] = {}
        """For each open episode that has had calls: the ending that tells its calls when the episode is over."""
        self._checkpoints_wanted: list[tuple[str, int, asyncio.Future[CheckpointRef]]] = []
        self._restored: asyncio.Future[None] | None = None
        super().__init__(
            store,
            info,
            clock=clock,
            ids=ids,
            allow_algorithms=allow_algorithms,
            wake=self._see_to,
            on_failure=self._work.set,
        )

    @classmethod
    def open(
        cls, state_dir: Path, info: EngineInfo, *, clock: Clock, ids: Ids, allow_algorithms: bool = False
    ) -> Service:
        """Open the service on `state_dir`, which is created if missing. Closes episodes that were open, as server_restarted.

        Raises: StorageUnreadable, Refusal(STORAGE_FULL).
        """
        store = Store(state_dir / "pool.sqlite")
        return cls(store, info, clock=clock, ids=ids, allow_algorithms=allow_algorithms)

    async def close(self) -> None:
        """Stop the timers, finish pending writes, and close the storage. Waiting claims are refused with not_rolling."""
        for ticket in list(self._waiters):
            self._answer_claim(ticket, _CLOSING)
        self._answer_checkpoints(closing=True)
        self.restored(_CLOSING)
        await super().close()

    def _see_to(self, outcome: Outcome[object], written: asyncio.Future[None]) -> None:
        """Wake everything that a command's outcome affects: waiting claims, open calls, training loop, team resolver."""
        for ticket, answer in outcome.claims:
            self._answer_claim(ticket, answer, written)
        for episode_id in outcome.broken_off:
            ending = self._endings.pop(episode_id, None)
            if ending is not None:
                ending.come()
        if outcome.wakes_loop:
            self._work.set()
            self._answer_checkpoints()
        if outcome.wakes_resolver:
            self.doubt.set()

    # -- runs -----------------------------------------------------------------------------------------------------

    async def create_run(self, request: RunRequest, by: str) -> RunCreated:
        """Start a run. Codes: server_busy{run_id, holder}, invalid_spec{errors}, idempotency_conflict, engine_failed."""
        asked = digest(request.spec.model_dump_json())
        key = request.idempotency_key
        known = self._run_by_key(key) if key is not None else None
        if known is not None:
            if known.request_digest != asked and not self._began_with(known.run_id, request.spec):
                detail = f"key {key!r} started {known.run_id} with a different spec; use a new key for each run"
                raise Refusal(ErrorCode.IDEMPOTENCY_CONFLICT, detail)
            await self.settled()
            return RunCreated(run_id=known.run_id)
        run = await self.carry_out(
            lambda t: run_lifecycle.create(t, request.spec, by=by, key=key, request_digest=asked)
        )
        self._warn(run.run_id, run.spec.sampling.untrained)
        return RunCreated(run_id=run.run_id)

    def _warn(self, run_id: str, notes: Sequence[str]) -> None:
        for note in notes:
            self.log(f"run {run_id}: {note}")

    def _began_with(self, run_id: str, spec: RunSpec) -> bool:
        """True if the run was started with this spec. Compares fields, because an older version's digest covers fewer of them."""
        run = self.state.run
        configs = run.configs if run is not None and run.run_id == run_id else self.reader.configs(run_id)
        try:
            first = RunSpec.model_validate(configs[0].spec, context=AS_STORED)
        except ValidationError:  # stored by a different version: no request can match it now
            return False
        asked = spec if first.dtype == "auto" else spec.computed_in(first.dtype)
        return first == (asked if first.sampling.train == "auto" else asked.trained_as(first.sampling.train))

    def _run_by_key(self, key: str) -> RunRow | None:
        run = self.state.run
        if run is not None and run.row.idempotency_key == key:
            return run.row
        return self.reader.run_by_key(key)

    async def report(self, run_id: str, since_step: int = 0) -> RunReport:
        """Report on a run, with the metrics of the steps after `since_step`. Codes: not_found."""
        await self.settled()  # include every step that `status` has shown
        steps = await self.read(lambda reader: reader.steps(run_id, since_step))
        evaluated = await self.read(lambda reader: reader.held_out(run_id))
        run = self.state.run
        if run is not None and run.run_id == run_id:
            phase = Phase.IDLE if run.row.released else self.state.situation.shown_phase
            seen = self.state.versions.rows
            return report(run.row, run.configs, steps, seen, evaluated, phase=phase, step=run.step)
        row = self.reader.run(run_id)
        if row is None:
            raise _no_run(run_id)
        newest = self.reader.newest_step(run_id)
        configs, seen = self.reader.configs(run_id), self.reader.versions(run_id)
        return report(row, configs, steps, seen, evaluated, phase=Phase.IDLE, step=newest)

    async def patch_run(self, run_id: str, patch: Mapping[str, Any], if_match: int | None, by: str) -> RunReport:
        """Change tunable fields. Codes: not_found, config_conflict{config_version}, invalid_spec{errors}, over_limit."""
        await self._require_run(run_id)
        if self._is_newest(run_id):
            known = self.spec(run_id).sampling.untrained
            await self.carry_out(lambda t: run_lifecycle.patch(t, patch, if_match=if_match, by=by))
            report = await self.report(run_id)
            self._warn(run_id, [note for note in report.notes if note not in known])
            return report
        raise Refusal(ErrorCode.OVER_LIMIT, f"run {run_id} is over; only a running run can be changed")

    async def stop_run(self, run_id: str) -> RunReport:
        """Request that the run drains, writes a checkpoint and stops. Returns once the request is on disk; `status` shows the progress.

        Does nothing if a stop was already requested or the run is over. Codes: not_found.
        """
        await self._require_run(run_id)
        if self._is_newest(run_id):
            await self.carry_out(run_lifecycle.request_stop)
        return await self.report(run_id)

    async def request_checkpoint(self, run_id: str) -> CheckpointRef:
        """Request a full checkpoint of the newest step, and wait until it is written. Codes: not_found, over_limit, engine_failed."""
        await self._require_run(run_id)
        run = self.state.run
        if run is None or run.run_id != run_id or run.row.released:
            raise Refusal(
                ErrorCode.OVER_LIMIT, f"run {run_id} is over and no longer served; its checkpoints are on disk"
            )
        self._require_engine()
        answer: asyncio.Future[CheckpointRef] = asyncio.get_running_loop().create_future()
        step = self.tell(run_lifecycle.want_checkpoint)
        self._checkpoints_wanted.append((run_id, step, answer))
        self._answer_checkpoints()
        return await answer

    async def restore_run(self, run_id: str, wish: RestoreRequest, by: str) -> RunReport:
        """Go back to a checkpoint, on a new branch of the run, and wait until the training loop has done so.

        Codes: not_found{checkpoints}, over_limit, server_busy, idempotency_conflict, engine_failed.
        """
        await self._require_run(run_id)
        run, key = self.state.run, wish.idempotency_key
        done = run.row.restored_to(key) if run is not None and run.run_id == run_id and key is not None else None
        if done is not None:
            if done != wish.step:
                detail = f"key {key!r} already restored {run_id} to step {done}; use a new key for each restoration"
                raise Refusal(ErrorCode.IDEMPOTENCY_CONFLICT, detail)
            return await self.report(run_id)
        asked = Restoration(run_id=run_id, step=wish.step, by=by, key=key)
        run_lifecycle.restorable(self.state, asked)
        self._require_engine()
        self.tell(lambda t: run_lifecycle.want_restoration(t, asked))
        if self._restored is None:
            self._restored = asyncio.get_running_loop().create_future()
            self._restored.add_done_callback(take_exception)
        await asyncio.shield(self._restored)
        return await self.report(run_id)

    async def quarantine(self, run_id: str, wish: QuarantineRequest, by: str) -> RunReport:
        """Exclude a client version from training, or allow it again. Codes: not_found, over_limit."""
        await self._require_run(run_id)
        if not self._is_newest(run_id):
            raise Refusal(ErrorCode.OVER_LIMIT, f"run {run_id} is over, so it no longer trains on any client version")
        version, wanted, reason = wish.client_version, wish.quarantined, wish.reason
        await self.carry_out(lambda t: run_lifecycle.quarantine(t, version, wanted=wanted, reason=reason, by=by))
        return await self.report(run_id)

    async def _require_run(self, run_id: str) -> None:
        if not self._is_newest(run_id) and self.reader.run(run_id) is None:
            raise _no_run(run_id)

    def _is_newest(self, run_id: str) -> bool:
        run = self.state.run
        return run is not None and run.run_id == run_id

    def restored(self, refusal: Refusal | None = None) -> None:
        """Answer the requests for a restoration. The training loop calls this when the restoration is done or refused."""
        answer, self._restored = self._restored, None
        self.tell(run_lifecycle.restoration_over)
        if answer is not None and not answer.done():
            if refusal is None:
                answer.set_result(None)
            else:
                answer.set_exception(refusal)

    def _require_engine(self) -> None:
        failed = self.state.situation.engine_failed
        if failed is not None:
            raise Refusal(ErrorCode.ENGINE_FAILED, f"the engine failed: {failed.reason}")

    def _answer_checkpoints(self, *, closing: bool = False) -> None:
        """Answer each request for a checkpoint that has been written or can no longer be written."""
        run, situation = self.state.run, self.state.situation
        still: list[tuple[str, int, asyncio.Future[CheckpointRef]]] = []
        for run_id, step, answer in self._checkpoints_wanted:
            if answer.done():
                continue
            known = run if run is not None and run.run_id == run_id else None
            if known is not None and known.kept_step >= step and situation.opened_run == run_id:
                answer.set_result(CheckpointRef(step=known.kept_step, path=situation.run_directory))
            elif closing or known is None or known.row.released or known.step < step or situation.engine_failed:
                what = f"run {run_id} ended or was restored, or the engine failed"
                detail = f"{what}, before the checkpoint of step {step} was written"
                answer.set_exception(Refusal(ErrorCode.ENGINE_FAILED, detail))
            else:
                still.append((run_id, step, answer))
        self._checkpoints_wanted = still

    # -- episodes -------------------------------------------------------------------------------------------------

    async def claim(self, wanted: EpisodeClaim) -> EpisodeGrant:
        """Claim an episode, which is an attempt at a task. Waits up to `wait_s`.

        Codes: not_found (another run), over_limit (complete or stopped), engine_failed, idempotency_conflict, lease_lost (the
        client has begun a newer session); after the wait also not_rolling or draining, both with retry_after_s.
        """
        outcome, written = self.apply(lambda t: claims.claim(t, wanted))
        answer = outcome.answer()
        if isinstance(answer, NotYet):
            return await self._wait_for_slot(wanted, answer)
        try:
            await asyncio.shield(written)
        except asyncio.CancelledError:
            self._abandon(wanted, answer)
            raise
        return answer

    async def begin_session(self, wanted: SessionRequest) -> SessionBegun:
        """Make one process of a client the only one that may claim; see `episodes.begin_session`. Codes: not_found (run)."""
        await self._require_run(wanted.run_id)
        return SessionBegun(closed=await self.carry_out(lambda t: episodes.begin_session(t, wanted)))

    async def _wait_for_slot(self, wanted: EpisodeClaim, reason: NotYet) -> EpisodeGrant:
        if wanted.wait_s <= 0:
            raise reason.refusal()
        ticket = self.tell(lambda t: t.state.queue.join(wanted, reason))
        waiter = self._waiter(ticket)
        waiter.claimants += 1
        try:
            await within(self._clock, wanted.wait_s, asyncio.shield(waiter.answer))
            if waiter.granted is None and not waiter.answer.done():
                raise (self.state.queue.reason(ticket) or reason).refusal()
            return await asyncio.shield(waiter.answer)
        except asyncio.CancelledError:
            if waiter.granted is not None:
                self._abandon(wanted, waiter.granted)
            raise
        finally:
            waiter.claimants -= 1
            if not waiter.claimants:
                self._waiters.pop(ticket, None)
                self.tell(lambda t: t.state.queue.leave(ticket))

    def _waiter(self, ticket: int) -> _Waiter:
        if ticket not in self._waiters:
            self._waiters[ticket] = _Waiter(asyncio.get_running_loop().create_future())
            self._waiters[ticket].answer.add_done_callback(take_exception)
        return self._waiters[ticket]

    def _answer_claim(
        self, ticket: int, answer: EpisodeGrant | Refusal, written: asyncio.Future[None] | None = None
    ) -> None:
        """Answer a waiting claim: with a grant once it is on disk, or with a refusal immediately."""
        waiter = self._waiter(ticket)  # the first change after `join` may answer it at once
        if isinstance(answer, Refusal):
            if not waiter.answer.done():
                waiter.answer.set_exception(answer)
            return
        waiter.granted = answer
        assert written is not None
        written.add_done_callback(partial(_pass_on, waiter.answer, answer))

    def _abandon(self, wanted: EpisodeClaim, granted: EpisodeGrant) -> None:
        """Give the slot back if the claimant left just as its claim was granted, unless a retry can still fetch the grant."""
        if wanted.idempotency_key is None and granted.episode_id in self.state.live:
            words = "the claimant went away before the answer"
            self.apply(lambda t: episodes.abort(t, granted.episode_id, granted.lease, words, Cause.CLIENT))

    async def end(self, episode_id: str, result: EpisodeResult, task_id: str | None = None) -> EpisodeReceipt:
        """End an episode: store its reward and calls durably.

        Cuts off its open calls and records them as such, because the client may have just hung up on them. `task_id` names the
        task if the episode was claimed without one.

        Codes: not_found, lease_lost, idempotency_conflict, invalid_spec, storage_full.
        """
        await self._break_off_calls(episode_id, result.lease)
        if episode_id not in self.state.live:
            return episodes.late_end(await self._closed(episode_id), episode_id, result)
        return await self.carry_out(lambda t: episodes.end(t, episode_id, result, task_id))

    async def abort(self, episode_id: str, abort: EpisodeAbort) -> LedgerEntry:
        """Drop the episode and offer its slot again. Codes: not_found, lease_lost."""
        if episode_id in self.state.prepared:
            return await self.carry_out(lambda t: teams.abort(t, episode_id, abort.lease, abort.reason, abort.cause))
        if episode_id not in self.state.live:
            return episodes.late_abort(await self._closed(episode_id), episode_id, abort.lease)
        return await self.carry_out(lambda t: episodes.abort(t, episode_id, abort.lease, abort.reason, abort.cause))

    async def renew(self, episode_id: str, renewal: EpisodeRenewal) -> float:
        """Extend the lease, and return the Unix time at which it now expires. Codes: not_found, lease_lost."""
        if episode_id in self.state.prepared:
            return self.tell(lambda t: teams.renew(t, episode_id, renewal.lease))
        if episode_id not in self.state.live:
            raise episodes.lost(await self._closed(episode_id), episode_id)
        return self.tell(lambda t: episodes.renew(t, episode_id, renewal.lease))

    async def access(self, api_key: str) -> EpisodeKey:
        """Return the open episode that an API key belongs to, and its lease. Raises: KeyRefused. Codes: lease_lost once it is over."""
        if not api_key.startswith(API_KEY_PREFIX):
            raise KeyRefused("this is not an episode's API key; use the api_key of a claimed episode")
        episode_id = api_key.removeprefix(API_KEY_PREFIX).partition(".")[0]
        live = self.state.live.get(episode_id)
        if live is not None and hmac.compare_digest(live.api_key.encode(), api_key.encode()):
            return EpisodeKey(episode_id, live.lease, any_model=live.guest)
        row = await self._closed(episode_id)
        if row is None or not hmac.compare_digest(row.api_key_digest or "", digest(api_key)):
            raise KeyRefused("this server did not issue this API key; use the api_key of an episode claimed here")
        raise episodes.lost(row, episode_id)

    async def why_lost(self, episode_id: str) -> Refusal:
        """Return the error for a request about an episode that is over."""
        return episodes.lost(await self._closed(episode_id), episode_id)

    async def _closed(self, episode_id: str) -> EpisodeRow | None:
        """Read a closed episode's row from disk, once all earlier changes are written; None if there is no such episode."""
        await self.settled()
        return self.reader.episode(episode_id)

    async def _break_off_calls(self, episode_id: str, lease: str) -> None:
        """Cut off the open calls of an episode that is about to end, and wait until they are recorded. Codes: lease_lost."""
        live = self.state.live.get(episode_id)
        if live is not None and live.open_since:
            calls = set(live.open_since)
            self.tell(lambda t: episodes.break_off(t, episode_id, lease))
            await within(self._clock, episodes.RECORD_LIMIT_S, self._until_closed(live, calls))

    async def _until_closed(self, live: LiveEpisode, calls: set[int]) -> None:
        while not calls.isdisjoint(live.open_since):
            self._call_closed.clear()
            await self._call_closed.wait()

    # -- teams ----------------------------------------------------------------------------------------------------

    async def prepare(self, episode_id: str, wish: EpisodePreparation, sealed_key: str) -> TeamReceipt:
        """Bind an episode to its team's decision. Cuts off its open calls, as ending the episode does.

        Codes: not_found, lease_lost, idempotency_conflict, invalid_spec, storage_full.
        """
        await self._break_off_calls(episode_id, wish.lease)
        if not self._is_undecided(episode_id):
            return teams.late_prepare(*await self._closed_team(episode_id), episode_id, wish)
        return await self.carry_out(lambda t: teams.prepare(t, episode_id, wish, sealed_key))

    async def commit(self, episode_id: str, commit: EpisodeCommit) -> TeamReceipt:
        """Commit a prepared episode. Codes: not_found, lease_lost, invalid_spec (not prepared), storage_full."""
        if not self._is_undecided(episode_id):
            return teams.late_commit(*await self._closed_team(episode_id), episode_id, commit.lease)
        return await self.carry_out(lambda t: teams.commit(t, episode_id, commit.lease))

    async def resolve(self, episode_id: str, resolution: EpisodeResolution) -> TeamReceipt:
        """Apply an operator's decision on a prepared episode.

        Codes: not_found, lease_lost (already decided differently), invalid_spec (not prepared), storage_full.
        """
        if episode_id in self.state.prepared:
            return await self.carry_out(lambda t: teams.resolve(t, episode_id, resolution))
        if episode_id in self.state.live:
            detail = f"episode {episode_id!r} is still running, not prepared; it ends by its client or when its lease expires"
            raise Refusal(ErrorCode.INVALID_SPEC, detail, errors=[])
        return teams.late_resolve(*await self._closed_team(episode_id), episode_id, resolution)

    async def decision(self, episode_id: str) -> TeamDecision:
        """Return the team's decision, once it is on disk. The caller must hold the episode's team key. Codes: storage_full.

        We issue a team key only for an episode that is on disk, and never delete a row. If the row is missing, somebody restored
        an older copy of the state directory; since ids are never reused, nothing can be committed under this one any more.
        """
        if self._is_undecided(episode_id):
            return TeamDecision(episode_id=episode_id, decision="undecided")
        row, team = await self._closed_team(episode_id)
        return teams.late_decision(team, episode_id, row.cause if row is not None else None)

    def _is_undecided(self, episode_id: str) -> bool:
        return episode_id in self.state.live or episode_id in self.state.prepared

    async def _closed_team(self, episode_id: str) -> tuple[EpisodeRow | None, TeamRow | None]:
        """Read the rows of an episode that is neither open nor prepared from disk; None for missing rows."""
        row = await self._closed(episode_id)
        return row, self.reader.team(row.seq) if row is not None else None

    # -- calls (for the gateway) --------------------------------------------------------------------------------------

    def is_open(self, episode_id: str) -> bool:
        """True if the episode may still have calls. It may until its end is on disk, because a failed write reopens it."""
        return episode_id in self.state.live or episode_id in self.state.closing

    def open_call(self, episode_id: str, lease: str) -> OpenCall:
        """Begin a call. Renews the lease and pauses its idle limit until `close_call`. Codes: not_found, lease_lost."""
        if self.state.row(episode_id) is None:
            raise episodes.lost(self.reader.episode(episode_id), episode_id)
        ending = self._endings.get(episode_id) or Ending()
        call = self.tell(lambda t: episodes.open_call(t, episode_id, lease, ending))
        self._endings[episode_id] = ending
        return call

    def close_call(
        self,
        call: OpenCall,
        recorded: RecordedCall | Sequence[RecordedCall] | None,
        attempt: CallAttempt | None = None,
    ) -> bool:
        """End a call with what was sampled. Call this exactly once per `open_call`.

        Args:
            call: the open call.
            recorded: its records, several for n > 1; None if nothing was sampled.
            attempt: the request's outcome; None for an invalid request.

        Returns: False if the lease was lost or the episode has ended, so that nothing was recorded.
        """
        records = [recorded] if isinstance(recorded, RecordedCall) else list(recorded or ())
        self.throughput.add(sum(len(record.sampled_ids) for record in records))
        for record in records:
            if record.failure is not None:
                self._count_failed(call.episode_id, record.failure)
        self._call_closed.set()
        return self.tell(lambda t: episodes.close_call(t, call, records, attempt))

    def spec_of(self, episode_id: str) -> RunSpec:
        """Return the run's spec at the config version of this open episode. Codes: not_found, lease_lost."""
        live, run = self.state.live.get(episode_id), self.state.run
        if live is None or run is None:
            raise episodes.lost(self.reader.episode(episode_id), episode_id)
        return run.specs[live.row.config_version]

    def attempted(self, episode_id: str, attempt: CallAttempt) -> None:
        """Note the outcome of a request that is not recorded."""
        self.tell(lambda t: episodes.attempted(t, episode_id, attempt))

    def refused(self, episode_id: str, why: str) -> None:
        """Note why a bad request was refused."""
        self.tell(lambda t: episodes.refused(t, episode_id, why))

    def suspect(self, attempt: CallAttempt, at: float, call_ids: frozenset[str]) -> None:
        """Note that a client gave up on a recorded call at Unix time `at`. We may learn later that the engine was hanging by then."""
        self.tell(lambda t: episodes.suspect(t, attempt, at, call_ids))

    def engine_lived(self, at: float) -> None:
        """Note that the engine was alive at this Unix time, so a hang cannot be why clients gave up earlier."""
        if self.state.situation.lived_at < self.state.situation.suspected_at:  # otherwise no call is under suspicion
            self.tell(lambda t: health.engine_lived(t, at))

    def fail_open(self, found: FailedCall) -> bool:
        """Mark a recorded call as failed because of the server. Return False if its episode has ended; then call `fail_closed`."""
        self._count_failed(found.episode_id, found.failure)
        return self.tell(lambda t: episodes.fail_open(t, found))

    def _count_failed(self, episode_id: str, failure: CallFailure) -> None:
        self.failed_calls[failure.reason] += 1
        kind = f"calls failed on the server's side ({failure.reason})"
        self.watchers.log(f"a call of episode {episode_id}: {failure.detail}", "warning", one_of=kind)

    async def fail_closed(self, found: FailedCall) -> None:
        """Mark a recorded call of an ended episode as failed, after `fail_open` returned False.

        The episode is dropped unless a step already uses it. Codes: storage_full.
        """
        # If its episode left the pool while we waited, look again once that is on disk.
        if not await self._fail_settled(found):
            await self._fail_settled(found)

    async def _fail_settled(self, found: FailedCall) -> bool:
        """Mark the call once what is known of its episode is on disk. Return False if that changed while we waited."""
        await self.settled()
        while found.episode_id in self.state.closing:
            await self.settled()
        if self.tell(lambda t: episodes.fail_open(t, found)):  # its end could not be written, so it is open again
            return True
        row = self.reader.episode(found.episode_id)
        calls = (self.reader.calls(row.seq) if row is not None else None) or []
        return await self.carry_out(lambda t: episodes.fail_closed(t, found, row, calls))

    # -- what happened ----------------------------------------------------------------------------------------------

    async def entry(self, episode_id: str) -> LedgerEntry:
        """Return the ledger entry of an episode. Codes: not_found."""
        live = self.state.live.get(episode_id)
        if live is not None:
            return live.entry()
        row = await self._closed(episode_id)
        if row is None:
            raise episodes.lost(None, episode_id)
        return _entry_of(row, shifts(self._versions(row.run_id)))

    async def trace(self, episode_id: str) -> EpisodeTrace:
        """Return every recorded call of an episode, token by token; no calls if they were deleted. Codes: not_found."""
        live = self.state.live.get(episode_id)
        if live is not None:
            return EpisodeTrace(entry=live.entry(), calls=list(live.calls))
        row = await self._closed(episode_id)
        if row is None:
            raise episodes.lost(None, episode_id)
        return EpisodeTrace(entry=row.entry(), calls=self.reader.calls(row.seq) or [])

    async def ledger(self, *, after: str | None = None, limit: int = 100, **fields: Unpack[LedgerFields]) -> LedgerPage:
        """List episodes in the order of their claims. `after` is the `next` of the previous page. Codes: not_found (run, `after`)."""
        wanted = LedgerFilter(**fields)
        if wanted.run_id is not None:
            await self._require_run(wanted.run_id)
        if after is not None and (not after.isdecimal() or len(after) > PAGE_DIGITS):
            raise Refusal(ErrorCode.NOT_FOUND, f"no page after {after[:80]!r}; pass the `next` of the previous page")
        start = int(after) if after is not None else 0
        await self.settled()
        rows = await self.search(lambda reader: reader.ledger(wanted, start, limit + 1))
        more = str(rows[limit - 1].seq) if len(rows) > limit else None
        moved = {run_id: shifts(self._versions(run_id)) for run_id in {row.run_id for row in rows}}
        return LedgerPage(entries=[_entry_of(row, moved[row.run_id]) for row in rows[:limit]], next=more)

    def _versions(self, run_id: str) -> list[VersionRow]:
        return self.state.versions.rows if self._is_newest(run_id) else self.reader.versions(run_id)

    async def summary(self, wanted: LedgerFilter) -> LedgerSummary:
        """Return totals over the matching rows of the ledger. Codes: not_found (run)."""
        if wanted.run_id is not None:
            await self._require_run(wanted.run_id)
        await self.settled()
        return await self.search(lambda reader: reader.summary(wanted))

    async def lost(self, run_id: str) -> dict[Cause, int]:
        """Count the lost attempts of an existing run by cause; the result includes every cause."""
        await self.settled()
        found = await self.search(lambda reader: reader.lost(run_id))
        return {cause: found.get(cause, 0) for cause in Cause}

    async def tasks(
        self, *, run_id: str | None = None, client_id: str | None = None, mix: str | None = None
    ) -> list[TaskProgress]:
        """Count ended episodes by task and, for evaluations, by step of the weights. Without `run_id`, use the current run.

        Codes: not_found (run).
        """
        if run_id is not None:
            await self._require_run(run_id)
        run = self.state.run
        asked = run_id or (run.run_id if run else "")
        await self.settled()
        return await self.search(lambda reader: reader.tasks(asked, client_id, mix))

    # -- status -----------------------------------------------------------------------------------------------------

    async def status(self, since: int | None = None, wait_s: float = 0.0) -> ServerStatus:
        """Return the server's status. With `since`, first wait up to `wait_s` for a revision other than `since`."""
        if since is not None:
            await self.watchers.wait(since, wait_s)
        return self.current_status()

    def events(self) -> AsyncIterator[ServerEvent]:
        """Yield statuses and log lines from now on. A slow reader loses the oldest ones. Close the iterator to unsubscribe."""
        return self.watchers.subscribe()

    def log(self, line: str, level: LogLevel = "warning") -> None:
        """Write a line to the server's log, and send it to subscribers of `events`."""
        self.watchers.log(line, level)

    def spec(self, run_id: str) -> RunSpec:
        """Return the current run's spec at its newest config version. Codes: not_found for any other run."""
        run = self.state.run
        if run is None or run.run_id != run_id:
            raise _no_run(run_id)
        return run.spec

    # -- for the training loop ----------------------------------------------------------------------------------------

    async def wait_for_work(self, until: float) -> None:
        """Wait until something happens that the training loop should look at, or until `until` (Unix time, may be infinite).

        Raises: the error that ended a timer or broke the storage.
        """
        self.check()
        left_s = until - self._clock.now()
        await within(self._clock, None if left_s == math.inf else left_s, self._work.wait())
        self._work.clear()

    def engine_health(self, found: EngineHealth) -> None:
        """Record the engine's health."""
        self.tell(lambda t: health.engine_health(t, found))
        if found.failed_for_good and not found.ready and self._restored is not None:
            reason = f"the engine failed for good: {found.reason or 'the engine gave no reason'}"
            self.restored(Refusal(ErrorCode.ENGINE_FAILED, reason))

    async def ended_evals(self, run_id: str, step: int) -> list[tuple[str, int]]:
        """Return (task_id, ordinal) of each evaluation at this step whose result counts. No command runs between query and return."""
        await self.settled()
        return self.reader.eval_ordinals(run_id, step)


def _pass_on(answer: asyncio.Future[EpisodeGrant], lease: EpisodeGrant, written: asyncio.Future[None]) -> None:
    """Answer a waiting claim once its grant has been written, or with the error if the write failed."""
    if answer.done():
        return
    error = written.exception()
    if error is None:
        answer.set_result(lease)
    else:
        answer.set_exception(error)


def _entry_of(row: EpisodeRow, moved: Mapping[VersionKey, float | None]) -> LedgerEntry:
    entry = row.entry()
    entry.version_shift = moved.get((row.mix, row.client_version))
    return entry


def _no_run(run_id: str) -> Refusal:
    return Refusal(ErrorCode.NOT_FOUND, f"no run {run_id!r} on this server")
