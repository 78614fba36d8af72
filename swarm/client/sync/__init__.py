"""The synchronous twin of `swarm.client`, for plain scripts and threads. Same names, same errors.

An event loop in a thread of its own does the work, so that leases are renewed while a script computes.
"""

from swarm.client.sync.client import SwarmClient, SyncRollout
from swarm.client.sync.episode import Episode
from swarm.client.sync.team import Team, team

__all__ = ["Episode", "SwarmClient", "SyncRollout", "Team", "team"]
