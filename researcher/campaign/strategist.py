"""The seam between a campaign and the source of its proposals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NoReturn, Protocol

from researcher.campaign.goal import Aim
from researcher.campaign.proposals import Proposal
from researcher.campaign.seen import Left, Seen
from researcher.models import LlmCall


class NoProposal(Exception):
    """The strategist proposes nothing; the text gives the reason and the remedy."""


class IdeasSpent(NoProposal):
    """The campaign's LLM budget is spent: the campaign concludes with the results it has."""


class StrategistAway(NoProposal):
    """The strategist cannot be reached now: the campaign waits, and asks again when it resumes."""


class StrategistFailed(NoProposal):
    """The strategist's answer cannot be read: a person has to look."""


class Strategist(Protocol):
    """Proposes next steps. It only sees `Seen`, and code judges every proposal before it is carried out."""

    @property
    def name(self) -> str:
        """`builtin`, or the LLM's name."""

    async def propose(self, seen: Seen) -> Sequence[Proposal]:
        """Propose one to five alternatives. On a later attempt, `seen.problems` has the problems of the previous proposals.

        Raises: NoProposal.
        """

    def calls(self) -> list[LlmCall]:
        """Return the LLM calls since this method was last called, with raw answers."""


@dataclass(frozen=True, slots=True)
class LlmAway:
    """Stands for a campaign's LLM where it cannot be asked: whatever needs the LLM waits, for the given reason."""

    reason: str
    name: ClassVar[str] = "llm"

    async def propose(self, seen: Seen) -> NoReturn:
        raise StrategistAway(self.reason)

    def calls(self) -> list[LlmCall]:
        return []

    async def write(
        self, words: str, aims: Sequence[Aim], left: Left, kept: Sequence[LlmCall], keep: Callable[[LlmCall], None]
    ) -> NoReturn:
        """Stand for its writing of instruments (`InstrumentWriter`)."""
        raise StrategistAway(self.reason)
