"""The seam between a campaign and whoever has its ideas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from researcher.campaign.proposals import Proposal
from researcher.campaign.seen import Seen
from researcher.models import LlmCall


class Strategist(Protocol):
    """Proposes next steps. It only ever sees `Seen`, and nothing that it says is carried out before code has judged it."""

    @property
    def name(self) -> str:
        """`builtin`, or the LLM's name."""

    async def propose(self, seen: Seen) -> Sequence[Proposal]:
        """One to five alternatives. `seen.problems`: what was wrong with those before, where this is another attempt."""

    def calls(self) -> list[LlmCall]:
        """LLM calls since this was last asked, with raw answers."""
