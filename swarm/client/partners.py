"""The other models of a trial that trains several at once: each has a server and a run of its own, beside the crew's."""

from __future__ import annotations

from dataclasses import dataclass

from swarm.client.client import SwarmClient
from swarm.client.episode import Episode

IDLE_LIMIT_S = 60.0
"""Of a partner's episode at the most. A crew that was killed finds its own open episodes again and gives them back; those
that it held elsewhere run out by this limit, and their slots are on offer again."""


@dataclass(frozen=True, slots=True)
class Partner:
    """One further model: its server, and the run that trains it. A workflow is handed them by role (`meet`)."""

    swarm: SwarmClient
    run_id: str

    def episode_with(self, episode: Episode) -> Episode:
        """This model's part in the task of a claimed `episode`, not yet claimed: for `team(solver=episode, planner=...)`."""
        claim = episode.claim
        return self.swarm.episode(
            task_id=claim.task_id,
            run_id=self.run_id,
            mix=claim.mix,
            kind=claim.kind,
            idle_limit_s=min(claim.idle_limit_s, IDLE_LIMIT_S),
            max_episode_s=claim.max_episode_s,
            max_call_s=claim.max_call_s,
            sampling=episode.sampling,
        )
