"""The seam between a campaign and whoever has its ideas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from researcher.campaign.proposals import Proposal
from researcher.campaign.seen import Seen
from researcher.models import LlmCall


class NoProposal(Exception):
    """The strategist proposes nothing; the text says why, and what to do."""


class IdeasSpent(NoProposal):
    """The campaign's budget for ideas is spent: it concludes with what it has."""


class StrategistAway(NoProposal):
    """It cannot be asked now: the campaign waits, and asks again when it goes on."""


class StrategistFailed(NoProposal):
    """It was asked, and what it says cannot be read: a person has to look."""


class Strategist(Protocol):
    """Proposes next steps. It only ever sees `Seen`, and nothing that it says is carried out before code has judged it."""

    @property
    def name(self) -> str:
        """`builtin`, or the LLM's name."""

    async def propose(self, seen: Seen) -> Sequence[Proposal]:
        """One to five alternatives. `seen.problems`: what was wrong with those before, where this is another attempt.

        Raises: NoProposal.
        """

    def calls(self) -> list[LlmCall]:
        """LLM calls since this was last asked, with raw answers."""
