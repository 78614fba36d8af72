"""An episode that is bound to its team's decision, as memory holds it. Times are lease time."""

from __future__ import annotations

import math
from dataclasses import dataclass

from swarm.server.state.rows import EpisodeRow, TeamRow


@dataclass(slots=True, kw_only=True)
class Prepared:
    """Its rows are on disk; its lease is known by its digest alone, so that it outlives the process."""

    row: EpisodeRow
    team: TeamRow
    in_doubt: bool = False
    """Its client was silent for too long, or the server was restarted: nobody may come to tell what was decided."""
    silent_at: float = math.inf
    """When the client has been silent for too long."""

    @property
    def asks(self) -> bool:
        """Whether it should ask its decider now. The decider itself has nobody to ask."""
        return self.in_doubt and not self.team.decides

    def touch(self, now: float) -> None:
        self.silent_at = now + self.team.patience_s
