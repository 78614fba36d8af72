"""The second model: its server, and a run there that trains along with ours.

Where it is comes from the environment (SWARM_PARTNER_URL, SWARM_PARTNER_TOKEN), like any server's address and token. Its run
is started once per run of ours, with equal groups and no limit of steps: ours ends the study.
"""

from __future__ import annotations

import asyncio
import os

from swarm.client import Episode, RunSpec, ServerBusy, SwarmClient, SwarmError

URL, TOKEN = "SWARM_PARTNER_URL", "SWARM_PARTNER_TOKEN"
PARTNER_OF = "partner_of"


class NoPartner(SwarmError):
    """Nobody said where the second model is."""


class Partner:
    """One per event loop and process."""

    def __init__(self) -> None:
        self._swarm: SwarmClient | None = None
        self._run_ids: dict[str, str] = {}
        self._starting = asyncio.Lock()

    async def claim_of(
        self, episode: Episode, learning_rate: float, max_tokens: int, group_size: int, tasks: int
    ) -> Episode:
        """The partner's episode that belongs to ours: same task, same kind, not yet claimed."""
        swarm = self._client(episode)
        ours = episode.claim.run_id
        async with self._starting:
            if ours not in self._run_ids:
                self._run_ids[ours] = await _run_beside(swarm, ours, learning_rate, max_tokens, group_size, tasks)
        return swarm.episode(
            task_id=episode.claim.task_id,
            run_id=self._run_ids[ours],
            kind=episode.claim.kind,
            sampling=episode.sampling,
            idle_limit_s=episode.claim.idle_limit_s,
        )

    async def close(self) -> None:
        """Stop the runs that were started for ours, and give back the connections."""
        swarm, self._swarm = self._swarm, None
        if swarm is None:
            return
        try:
            for run_id in self._run_ids.values():
                await swarm.stop_run(run_id)
        finally:
            await swarm.close()

    def _client(self, episode: Episode) -> SwarmClient:
        if self._swarm is None:
            url = os.environ.get(URL)
            if not url:
                raise NoPartner(f"a team needs a second server: start one with `swarm serve` and set {URL} to its url")
            claim = episode.claim
            self._swarm = SwarmClient(
                url, os.environ.get(TOKEN) or None, client_id=claim.client_id, client_version=claim.client_version
            )
        return self._swarm


async def _run_beside(
    swarm: SwarmClient, ours: str, learning_rate: float, max_tokens: int, group_size: int, tasks: int
) -> str:
    """The partner's run for our run. A run that was left over by an earlier one of ours is stopped first."""
    spec = RunSpec.model_validate(
        {
            "optimizer": {"learning_rate": learning_rate},
            "batch": {"tasks": tasks, "group_size": group_size},
            "sampling": {"max_tokens": max_tokens},
            "labels": {PARTNER_OF: ours},
        }
    )
    try:
        return (await swarm.start_run(spec, idempotency_key=f"partner of {ours}")).run_id
    except ServerBusy as busy:
        held = await swarm.run(str(busy.fields["run_id"]))
        if PARTNER_OF not in held.spec.labels:
            raise
        await swarm.stop_run(held.run_id)
    async for _ in swarm.statuses():
        if (await swarm.run(held.run_id)).status != "running":
            break
    return (await swarm.start_run(spec, idempotency_key=f"partner of {ours}")).run_id
