"""What routes ask of the book of teams. Like the desk, it answers after the change is on disk."""

from __future__ import annotations

from swarm.protocol.errors import ErrorCode, Refusal
from swarm.protocol.teams import EpisodeCommit, EpisodePreparation, EpisodeResolution, TeamDecision, TeamReceipt
from swarm.server.coordinator.clerk import Clerk
from swarm.server.coordinator.teams import late_commit, late_decision, late_prepare, late_resolve
from swarm.server.pool.rows import EpisodeRow, TeamRow


class TeamDesk:
    """One per server, over the desk's clerk. Raises: Refusal with its code."""

    def __init__(self, clerk: Clerk) -> None:
        self._clerk = clerk

    async def prepare(self, episode_id: str, wish: EpisodePreparation, sealed_key: str) -> TeamReceipt:
        """Open calls are broken off, as by an end. Codes: not_found, lease_lost, idempotency_conflict, invalid_spec, storage_full."""
        await self._clerk.break_off_calls(episode_id, wish.lease)
        if not self._clerk.book.teams.knows(episode_id):
            return late_prepare(*await self._closed(episode_id), episode_id, wish)
        return await self._clerk.carry_out(lambda book: book.teams.prepare(episode_id, wish, sealed_key))

    async def commit(self, episode_id: str, commit: EpisodeCommit) -> TeamReceipt:
        """Codes: not_found, lease_lost, invalid_spec (not prepared), storage_full."""
        if not self._clerk.book.teams.knows(episode_id):
            return late_commit(*await self._closed(episode_id), episode_id, commit.lease)
        return await self._clerk.carry_out(lambda book: book.teams.commit(episode_id, commit.lease))

    async def resolve(self, episode_id: str, resolution: EpisodeResolution) -> TeamReceipt:
        """Codes: not_found, lease_lost (decided otherwise), invalid_spec (not prepared), storage_full."""
        if self._clerk.book.teams.is_prepared(episode_id):
            return await self._clerk.carry_out(lambda book: book.teams.resolve(episode_id, resolution))
        if self._clerk.book.episodes.is_open(episode_id):
            detail = f"episode {episode_id!r} is still running, not prepared; its client or its lease ends it"
            raise Refusal(ErrorCode.INVALID_SPEC, detail, errors=[])
        return late_resolve(*await self._closed(episode_id), episode_id, resolution)

    async def decision(self, episode_id: str) -> TeamDecision:
        """What was decided, once it is on disk. Only for who holds the episode's team key. Codes: storage_full.

        The key is made for an episode that is on disk, and no row is ever deleted: where there is none any more, an older
        copy of the state directory was put back, and nothing can be committed under an id that is not given a second time.
        """
        if self._clerk.book.teams.knows(episode_id):
            return self._clerk.book.teams.decision(episode_id)
        row, team = await self._closed(episode_id)
        return late_decision(team, episode_id, row.cause if row is not None else None)

    async def _closed(self, episode_id: str) -> tuple[EpisodeRow | None, TeamRow | None]:
        """The rows of an episode that is neither open nor prepared, as they are on disk."""
        await self._clerk.settled()
        read = self._clerk.store.read
        row = read.episode(episode_id)
        return row, read.team(row.seq) if row is not None else None
