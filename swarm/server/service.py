"""The face of the coordinator: what routes, gateway and training loop ask of the book. Knows asyncio, but neither HTTP nor torch.

Every answer to a change is given after it is on disk. Waits are events, limits are timers on the Clock.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, Unpack

from pydantic import ValidationError

from foundation.clock import Clock
from foundation.event_loop import within
from foundation.ids import Ids
from swarm.engine.seam import EngineInfo
from swarm.protocol.episodes import (
    Cause,
    EpisodeAbort,
    EpisodeClaim,
    EpisodeReceipt,
    EpisodeRenewal,
    EpisodeResult,
    EpisodeTrace,
    LedgerEntry,
    LedgerPage,
    RecordedCall,
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
from swarm.server.clerk import Clerk
from swarm.server.events import ServerEvent
from swarm.server.keys import EpisodeKey, KeyRefused
from swarm.server.state import book as books
from swarm.server.state.admission import NotYet
from swarm.server.state.book import Book
from swarm.server.state.calls import CallAttempt, FailedCall, OpenCall
from swarm.server.state.episodes import GrantedLease, late_abort, late_end, lost
from swarm.server.state.leases import API_KEY_PREFIX, digest
from swarm.server.state.rows import EpisodeRow, RunRow, TeamRow, VersionRow
from swarm.server.state.state import Restoration
from swarm.server.state.teams import late_commit, late_decision, late_prepare, late_resolve
from swarm.server.state.versions import VersionKey, shifts
from swarm.server.storage.reader import PoolReader
from swarm.server.storage.store import PoolStore

__all__ = ["GrantedLease", "OpenCall", "ServerEvent", "Service"]

_log = logging.getLogger(__name__)

T = TypeVar("T")
PAUSE_AFTER_FAILED_WRITE_S = 1.0
PAGE_DIGITS = 18
"""No `next` of a page has more."""


class Service:
    """One per server. All methods are called from one event loop.

    Raises: Refusal with its code. After STORAGE_FULL nothing has changed, in memory or on disk.
    """

    def __init__(self, clerk: Clerk) -> None:
        self.clerk = clerk

    @classmethod
    def open(cls, state_dir: Path, info: EngineInfo, *, clock: Clock, ids: Ids) -> Service:
        """The service over the pool in `state_dir` (made when missing). Episodes that were open are closed as server_restarted.

        Raises: PoolUnreadable, Refusal(STORAGE_FULL).
        """
        return cls(Clerk(PoolStore(state_dir / "pool.sqlite"), info, clock=clock, ids=ids))

    async def start(self) -> None:
        """Begin to watch limits. Needs the running event loop."""
        self.clerk.start()

    async def close(self) -> None:
        """Stop the timers, finish the writes under way, close the pool. Waiting claims get not_rolling."""
        await self.clerk.close()

    @property
    def _book(self) -> Book:
        return self.clerk.book

    @property
    def _read(self) -> PoolReader:
        return self.clerk.store.read

    # -- runs -----------------------------------------------------------------------------------------------------

    async def create_run(self, request: RunRequest, by: str) -> RunCreated:
        """Start a run. Codes: server_busy{run_id, holder}, invalid_spec{errors}, idempotency_conflict, engine_failed."""
        asked = digest(request.spec.model_dump_json())
        key = request.idempotency_key
        known = self._run_by_key(key) if key is not None else None
        if known is not None:
            if known.request_digest != asked and not self._began_with(known.run_id, request.spec):
                detail = f"key {key!r} started {known.run_id} with another spec; use a fresh key for each run"
                raise Refusal(ErrorCode.IDEMPOTENCY_CONFLICT, detail)
            await self.clerk.settled()
            return RunCreated(run_id=known.run_id)
        run = await self.clerk.carry_out(
            lambda book: book.steps.create(request.spec, by=by, key=key, request_digest=asked)
        )
        self._warn(run.run_id, run.spec.sampling.untrained)
        return RunCreated(run_id=run.run_id)

    def _warn(self, run_id: str, notes: Sequence[str]) -> None:
        """Tell those who watch the server, and its log."""
        for note in notes:
            _log.warning("run %s: %s", run_id, note)
            self.log(f"run {run_id}: {note}")

    def _began_with(self, run_id: str, spec: RunSpec) -> bool:
        """Whether the run was started with this spec. (Its digest is another where a version with fewer fields took it.)"""
        run = self._book.state.run
        configs = run.configs if run is not None and run.run_id == run_id else self._read.configs(run_id)
        try:
            first = RunSpec.model_validate(configs[0].spec, context=AS_STORED)
        except ValidationError:  # of another version: nobody can ask for it now
            return False
        return first == (spec if first.dtype == "auto" else spec.computed_in(first.dtype))

    def _run_by_key(self, key: str) -> RunRow | None:
        run = self._book.state.run
        if run is not None and run.row.idempotency_key == key:
            return run.row
        return self._read.run_by_key(key)

    async def report(self, run_id: str, since_step: int = 0) -> RunReport:
        """The run, with metrics of the steps after `since_step`. Codes: not_found."""
        await self.clerk.settled()  # who heard of a step from `status` finds it here
        steps = await self.clerk.read(lambda reader: reader.steps(run_id, since_step))
        evaluated = await self.clerk.read(lambda reader: reader.held_out(run_id))
        run = self._book.state.run
        if run is not None and run.run_id == run_id:
            phase = Phase.IDLE if run.row.released else self.clerk.situation.shown_phase
            seen = self._book.state.versions.rows
            return books.report(run.row, run.configs, steps, seen, evaluated, phase=phase, step=run.step)
        row = self._read.run(run_id)
        if row is None:
            raise _no_run(run_id)
        newest = self._read.newest_step(run_id)
        configs, seen = self._read.configs(run_id), self._read.versions(run_id)
        return books.report(row, configs, steps, seen, evaluated, phase=Phase.IDLE, step=newest)

    async def patch_run(self, run_id: str, patch: Mapping[str, Any], if_match: int | None, by: str) -> RunReport:
        """Change tunable fields. Codes: not_found, config_conflict{config_version}, invalid_spec{errors}, over_limit."""
        await self._require_run(run_id)
        if self._is_newest(run_id):
            known = self.spec(run_id).sampling.untrained
            await self.clerk.carry_out(lambda book: book.steps.patch(patch, if_match=if_match, by=by))
            report = await self.report(run_id)
            self._warn(run_id, [note for note in report.notes if note not in known])
            return report
        raise Refusal(ErrorCode.OVER_LIMIT, f"run {run_id} is over; only a running one can be changed")

    async def stop_run(self, run_id: str) -> RunReport:
        """Ask for a stop: drain, checkpoint, idle. Answers once the wish is durable; follow `status` to see it done.

        Again, or for a run that is over: nothing. Codes: not_found.
        """
        await self._require_run(run_id)
        if self._is_newest(run_id):
            await self.clerk.carry_out(lambda book: book.steps.request_stop())
        return await self.report(run_id)

    async def request_checkpoint(self, run_id: str) -> CheckpointRef:
        """A whole checkpoint of the newest step; waits until it is written. Codes: not_found, over_limit, engine_failed."""
        await self._require_run(run_id)
        run = self._book.state.run
        if run is None or run.run_id != run_id or run.row.released:
            raise Refusal(ErrorCode.OVER_LIMIT, f"run {run_id} is over and not served; what was kept of it is on disk")
        if self.clerk.situation.engine_failed is not None:
            raise Refusal(ErrorCode.ENGINE_FAILED, f"the engine failed: {self.clerk.situation.engine_failed.reason}")
        return await self.clerk.want_checkpoint(run_id)

    async def restore_run(self, run_id: str, wish: RestoreRequest, by: str) -> RunReport:
        """Go back to a checkpoint, on a new branch of the run; waits until the training loop has done it.

        Codes: not_found{checkpoints}, over_limit, server_busy, idempotency_conflict, engine_failed.
        """
        await self._require_run(run_id)
        run, key = self._book.state.run, wish.idempotency_key
        done = run.row.restored_to(key) if run is not None and run.run_id == run_id and key is not None else None
        if done is not None:
            if done != wish.step:
                detail = f"key {key!r} restored {run_id} to step {done}; use a fresh key for each"
                raise Refusal(ErrorCode.IDEMPOTENCY_CONFLICT, detail)
            return await self.report(run_id)
        asked = Restoration(run_id=run_id, step=wish.step, by=by, key=key)
        self._book.interventions.judge(asked)
        if self.clerk.situation.engine_failed is not None:
            raise Refusal(ErrorCode.ENGINE_FAILED, f"the engine failed: {self.clerk.situation.engine_failed.reason}")
        await asyncio.shield(self.clerk.want_restoration(asked))
        return await self.report(run_id)

    async def quarantine(self, run_id: str, wish: QuarantineRequest, by: str) -> RunReport:
        """Keep a client version out of training, or let it in again. Codes: not_found, over_limit."""
        await self._require_run(run_id)
        if not self._is_newest(run_id):
            raise Refusal(ErrorCode.OVER_LIMIT, f"run {run_id} is over; only a running one trains anything")
        await self.clerk.carry_out(
            lambda book: book.interventions.quarantine(
                wish.client_version, wanted=wish.quarantined, reason=wish.reason, by=by
            )
        )
        return await self.report(run_id)

    async def _require_run(self, run_id: str) -> None:
        if not self._is_newest(run_id) and self._read.run(run_id) is None:
            raise _no_run(run_id)

    def _is_newest(self, run_id: str) -> bool:
        run = self._book.state.run
        return run is not None and run.run_id == run_id

    # -- episodes -------------------------------------------------------------------------------------------------

    async def claim(self, claim: EpisodeClaim) -> GrantedLease:
        """A slot to try the task. Waits up to `wait_s`.

        Codes: not_found (another run), over_limit (complete or stopped), engine_failed, and after the wait not_rolling or
        draining, both with retry_after_s; idempotency_conflict.
        """
        try:
            answer = self._book.episodes.claim(claim)
        finally:
            written = self.clerk.turn()
        if isinstance(answer, NotYet):
            return await self._claim_later(claim, answer)
        try:
            await asyncio.shield(written)
        except asyncio.CancelledError:
            self._abandon(claim, answer)
            raise
        return answer

    async def _claim_later(self, claim: EpisodeClaim, reason: NotYet) -> GrantedLease:
        if claim.wait_s <= 0:
            raise reason.refusal()
        waiter = self.clerk.waiting.join(claim, reason)
        try:
            await within(self.clerk.clock, claim.wait_s, asyncio.shield(waiter.answer))
            if waiter.granted is None and not waiter.answer.done():
                raise waiter.reason.refusal()
            return await asyncio.shield(waiter.answer)
        except asyncio.CancelledError:
            if waiter.granted is not None:
                self._abandon(claim, waiter.granted)
            raise
        finally:
            self.clerk.waiting.give_up(waiter)

    def _abandon(self, claim: EpisodeClaim, granted: GrantedLease) -> None:
        """The claimant went away just as it was granted: give the slot back, unless a repetition can still ask for it."""
        if claim.idempotency_key is None and self._book.episodes.is_open(granted.episode_id):
            words = "the claimant went away before the answer"
            self._book.episodes.abort(granted.episode_id, granted.lease, words, Cause.CLIENT)
            self.clerk.turn()

    async def end(self, episode_id: str, result: EpisodeResult) -> EpisodeReceipt:
        """Store reward and calls durably. Codes: not_found, lease_lost, idempotency_conflict, storage_full.

        Calls that are open are broken off and recorded as such: the client may have hung up on them just now.
        """
        await self.clerk.break_off_calls(episode_id, result.lease)
        if not self._book.episodes.is_open(episode_id):
            return late_end(await self._closed(episode_id), episode_id, result)
        return await self.clerk.carry_out(lambda book: book.episodes.end(episode_id, result))

    async def abort(self, episode_id: str, abort: EpisodeAbort) -> LedgerEntry:
        """Drop the episode and offer its slot again. Codes: not_found, lease_lost."""
        if self._book.teams.is_prepared(episode_id):
            return await self.clerk.carry_out(
                lambda book: book.teams.abort(episode_id, abort.lease, abort.reason, abort.cause)
            )
        if not self._book.episodes.is_open(episode_id):
            return late_abort(await self._closed(episode_id), episode_id, abort.lease)
        return await self.clerk.carry_out(
            lambda book: book.episodes.abort(episode_id, abort.lease, abort.reason, abort.cause)
        )

    async def renew(self, episode_id: str, renewal: EpisodeRenewal) -> float:
        """Extend the lease; returns expires_at (Unix time). Codes: not_found, lease_lost."""
        teams, episodes = self._book.teams, self._book.episodes
        if not teams.knows(episode_id):
            raise lost(await self._closed(episode_id), episode_id)
        try:
            return (teams if teams.is_prepared(episode_id) else episodes).renew(episode_id, renewal.lease)
        finally:
            self.clerk.turn()

    async def access(self, api_key: str) -> EpisodeKey:
        """The open episode that an api key is for, and its lease. Raises: KeyRefused. Codes: lease_lost once it is over."""
        if not api_key.startswith(API_KEY_PREFIX):
            raise KeyRefused("not an episode's api key; use the api_key of a claimed episode")
        episode_id = api_key.removeprefix(API_KEY_PREFIX).partition(".")[0]
        live = self._book.state.live.get(episode_id)
        if live is not None and hmac.compare_digest(live.api_key.encode(), api_key.encode()):
            return EpisodeKey(episode_id, live.lease)
        row = await self._closed(episode_id)
        if row is None or not hmac.compare_digest(row.api_key_digest or "", digest(api_key)):
            raise KeyRefused("this api key was not made by this server; use the api_key of an episode claimed here")
        raise lost(row, episode_id)

    async def why_lost(self, episode_id: str) -> Refusal:
        """What is told of an episode that is over."""
        return lost(await self._closed(episode_id), episode_id)

    async def _closed(self, episode_id: str) -> EpisodeRow | None:
        """The row of an episode that is not open, as it is on disk once everything before this request is."""
        await self.clerk.settled()
        return self._read.episode(episode_id)

    # -- teams ------------------------------------------------------------------------------------------------------

    async def prepare(self, episode_id: str, wish: EpisodePreparation, sealed_key: str) -> TeamReceipt:
        """Open calls are broken off, as by an end. Codes: not_found, lease_lost, idempotency_conflict, invalid_spec, storage_full."""
        await self.clerk.break_off_calls(episode_id, wish.lease)
        if not self.clerk.book.teams.knows(episode_id):
            return late_prepare(*await self._closed_team(episode_id), episode_id, wish)
        return await self.clerk.carry_out(lambda book: book.teams.prepare(episode_id, wish, sealed_key))

    async def commit(self, episode_id: str, commit: EpisodeCommit) -> TeamReceipt:
        """Codes: not_found, lease_lost, invalid_spec (not prepared), storage_full."""
        if not self.clerk.book.teams.knows(episode_id):
            return late_commit(*await self._closed_team(episode_id), episode_id, commit.lease)
        return await self.clerk.carry_out(lambda book: book.teams.commit(episode_id, commit.lease))

    async def resolve(self, episode_id: str, resolution: EpisodeResolution) -> TeamReceipt:
        """Codes: not_found, lease_lost (decided otherwise), invalid_spec (not prepared), storage_full."""
        if self.clerk.book.teams.is_prepared(episode_id):
            return await self.clerk.carry_out(lambda book: book.teams.resolve(episode_id, resolution))
        if self.clerk.book.episodes.is_open(episode_id):
            detail = f"episode {episode_id!r} is still running, not prepared; its client or its lease ends it"
            raise Refusal(ErrorCode.INVALID_SPEC, detail, errors=[])
        return late_resolve(*await self._closed_team(episode_id), episode_id, resolution)

    async def decision(self, episode_id: str) -> TeamDecision:
        """What was decided, once it is on disk. Only for who holds the episode's team key. Codes: storage_full.

        The key is made for an episode that is on disk, and no row is ever deleted: where there is none any more, an older
        copy of the state directory was put back, and nothing can be committed under an id that is not given a second time.
        """
        if self.clerk.book.teams.knows(episode_id):
            return self.clerk.book.teams.decision(episode_id)
        row, team = await self._closed_team(episode_id)
        return late_decision(team, episode_id, row.cause if row is not None else None)

    async def _closed_team(self, episode_id: str) -> tuple[EpisodeRow | None, TeamRow | None]:
        """The rows of an episode that is neither open nor prepared, as they are on disk."""
        await self.clerk.settled()
        read = self.clerk.store.read
        row = read.episode(episode_id)
        return row, read.team(row.seq) if row is not None else None

    # -- calls (the gateway's) --------------------------------------------------------------------------------------

    def is_open(self, episode_id: str) -> bool:
        """Whether calls may come under it; also while its end is not on disk yet, which takes it back when it fails."""
        return self._book.episodes.is_open(episode_id) or episode_id in self._book.state.closing

    def open_call(self, episode_id: str, lease: str) -> OpenCall:
        """Begin a call. Refreshes the lease, whose idle limit stands still until `close_call`. Codes: not_found, lease_lost."""
        if not self._book.episodes.is_open(episode_id) and self._book.episodes.row(episode_id) is None:
            raise lost(self._read.episode(episode_id), episode_id)
        try:
            return self._book.episodes.open_call(episode_id, lease)
        finally:
            self.clerk.turn()

    def close_call(
        self,
        call: OpenCall,
        recorded: RecordedCall | Sequence[RecordedCall] | None,
        attempt: CallAttempt | None = None,
    ) -> bool:
        """End a call with what was sampled (several records for n > 1, None for nothing). Call exactly once per `open_call`.

        attempt: how it went; None for a request that was refused for its own faults. Returns False when the lease was lost or
        the episode ended meanwhile: the record was discarded.
        """
        records = [recorded] if isinstance(recorded, RecordedCall) else list(recorded or ())
        self.clerk.throughput.add(sum(len(record.sampled_ids) for record in records))
        self.clerk.failed_calls.update(record.failure.reason for record in records if record.failure is not None)
        try:
            return self._book.episodes.close_call(call, records, attempt)
        finally:
            self.clerk.call_closed.set()
            self.clerk.turn()

    def attempted(self, episode_id: str, attempt: CallAttempt) -> None:
        """A request that needs no record was answered."""
        live = self._book.state.live.get(episode_id)
        if live is not None:
            live.attempted(attempt)

    def suspect(self, at: float) -> None:
        """A client gave up on a recorded call at that Unix time, and the engine may be found to have hung by then."""
        self.clerk.situation.suspected_at = at

    def engine_lived(self, at: float) -> None:
        """It lived at that Unix time: whoever gave up before met no hang."""
        self.clerk.engine_lived(at)

    def fail_open(self, found: FailedCall) -> bool:
        """A recorded call failed on the server's side after all. False: its episode has ended; then `fail_closed`."""
        self.clerk.failed_calls.update([found.failure.reason])
        return self._book.episodes.fail_open(found)

    async def fail_closed(self, found: FailedCall) -> None:
        """The same, after `fail_open`, for an episode that has ended: dropped, unless a step has taken it. Codes: storage_full."""
        await self.clerk.settled()
        while found.episode_id in self._book.state.closing:
            await self.clerk.settled()
        if self._book.episodes.fail_open(found):  # its end could not be written: it is open again
            return
        row = self._read.episode(found.episode_id)
        calls = (self._read.calls(row.seq) if row is not None else None) or []
        await self.clerk.carry_out(lambda book: book.episodes.fail_closed(found, row, calls))

    # -- what happened ----------------------------------------------------------------------------------------------

    async def entry(self, episode_id: str) -> LedgerEntry:
        """Codes: not_found."""
        live = self._book.state.live.get(episode_id)
        if live is not None:
            return live.entry()
        row = await self._closed(episode_id)
        if row is None:
            raise lost(None, episode_id)
        return _told(row, shifts(self._versions(row.run_id)))

    async def trace(self, episode_id: str) -> EpisodeTrace:
        """Every recorded call, token by token; none where old calls were freed. Codes: not_found."""
        live = self._book.state.live.get(episode_id)
        if live is not None:
            return EpisodeTrace(entry=live.entry(), calls=list(live.calls))
        row = await self._closed(episode_id)
        if row is None:
            raise lost(None, episode_id)
        return EpisodeTrace(entry=row.entry(), calls=self._read.calls(row.seq) or [])

    async def ledger(self, *, after: str | None = None, limit: int = 100, **fields: Unpack[LedgerFields]) -> LedgerPage:
        """Episodes in the order of their claims. `after`: the `next` of the page before. Codes: not_found (run, `after`)."""
        wanted = LedgerFilter(**fields)
        if wanted.run_id is not None:
            await self._require_run(wanted.run_id)
        if after is not None and (not after.isdecimal() or len(after) > PAGE_DIGITS):
            raise Refusal(ErrorCode.NOT_FOUND, f"no page after {after[:80]!r}; pass the `next` of the page before")
        start = int(after) if after is not None else 0
        await self.clerk.settled()
        rows = await self.clerk.search(lambda reader: reader.ledger(wanted, start, limit + 1))
        more = str(rows[limit - 1].seq) if len(rows) > limit else None
        moved = {run_id: shifts(self._versions(run_id)) for run_id in {row.run_id for row in rows}}
        return LedgerPage(entries=[_told(row, moved[row.run_id]) for row in rows[:limit]], next=more)

    def _versions(self, run_id: str) -> list[VersionRow]:
        return self._book.state.versions.rows if self._is_newest(run_id) else self._read.versions(run_id)

    async def summary(self, wanted: LedgerFilter) -> LedgerSummary:
        """The ledger's rows that match, added up. Codes: not_found (run)."""
        if wanted.run_id is not None:
            await self._require_run(wanted.run_id)
        await self.clerk.settled()
        return await self.clerk.search(lambda reader: reader.summary(wanted))

    async def lost(self, run_id: str) -> dict[Cause, int]:
        """Attempts of the run that each cause lost; all causes. For a run that is there."""
        await self.clerk.settled()
        found = await self.clerk.search(lambda reader: reader.lost(run_id))
        return {cause: found.get(cause, 0) for cause in Cause}

    async def tasks(
        self, *, run_id: str | None = None, client_id: str | None = None, mix: str | None = None
    ) -> list[TaskProgress]:
        """Ended episodes by task (and, for eval, by step of the weights). run_id None: the current run. Codes: not_found (run)."""
        if run_id is not None:
            await self._require_run(run_id)
        run = self._book.state.run
        asked = run_id or (run.run_id if run else "")
        await self.clerk.settled()
        return await self.clerk.search(lambda reader: reader.tasks(asked, client_id, mix))

    # -- status -----------------------------------------------------------------------------------------------------

    async def status(self, since: int | None = None, wait_s: float = 0.0) -> ServerStatus:
        """How the server is doing. With `since`, waits up to `wait_s` for a revision that differs from it."""
        if since is not None:
            await self.clerk.feed.wait(since, wait_s)
        return self.clerk.status()

    def events(self) -> AsyncIterator[ServerEvent]:
        """Statuses and log lines from now on. A slow reader loses the oldest. Close the iterator to unsubscribe."""
        return self.clerk.feed.subscribe()

    def log(self, line: str) -> None:
        """Show a line to subscribers of `events`."""
        self.clerk.feed.log(line)

    def spec(self, run_id: str) -> RunSpec:
        """The current run's spec at its newest config version. Codes: not_found for any other run."""
        run = self._book.state.run
        if run is None or run.run_id != run_id:
            raise _no_run(run_id)
        return run.spec


def _told(row: EpisodeRow, moved: Mapping[VersionKey, float | None]) -> LedgerEntry:
    entry = row.entry()
    entry.version_shift = moved.get((row.mix, row.client_version))
    return entry


def _no_run(run_id: str) -> Refusal:
    return Refusal(ErrorCode.NOT_FOUND, f"no run {run_id!r} on this server")
