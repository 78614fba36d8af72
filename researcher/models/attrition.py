"""Attempts at a trial's episodes, and the causes of those that did not end with a reward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import BaseModel

from swarm.protocol.episodes import COUNTED, Cause

Kind = Literal["train", "eval"]
KINDS: tuple[Kind, ...] = ("train", "eval")
ENDED = "none"
"""Cause stored in SQL for attempts that ended with a reward."""
LONGEST_TRACEBACK = 2000
"""Maximum length of a stored message, in characters."""


EXCUSED = "losses_excused"
"""Kind of the event that records attempts lost to code that has since been repaired."""


class EpisodeAttempts(BaseModel):
    """Attempts at episodes of one kind: one per episode that was claimed and closed."""

    attempts: int = 0
    lost: dict[Cause, int] = {}
    """Lost attempts by cause. Causes without losses are left out."""
    set_aside: int = 0
    """Number of tasks given up after repeatedly lost attempts."""

    @property
    def eligible(self) -> int:
        """Number of attempts, minus those lost to the server, the network or a person, which say nothing about the arm."""
        return self.attempts - sum(count for cause, count in self.lost.items() if cause not in COUNTED)

    @property
    def counted(self) -> int:
        """Number of attempts lost to the rollout, the grader, the client or a limit."""
        return sum(count for cause, count in self.lost.items() if cause in COUNTED)

    @property
    def ended(self) -> int:
        return self.attempts - sum(self.lost.values())


class Attrition(BaseModel):
    """The attempts of a trial's own client, and the lost ones, summed over the servers of all its models."""

    train: EpisodeAttempts = EpisodeAttempts()
    eval: EpisodeAttempts = EpisodeAttempts()
    first: dict[Cause, str] = {}
    """Message or traceback of the first attempt lost to each cause, without secrets."""

    def of(self, kind: Kind) -> EpisodeAttempts:
        return self.train if kind == "train" else self.eval

    def rows(self) -> Iterator[tuple[str, str, int]]:
        """Yield rows for SQL: kind, cause or `ENDED`, number of attempts."""
        for kind in KINDS:
            own = self.of(kind)
            yield kind, ENDED, own.ended
            yield from ((kind, cause.value, own.lost[cause]) for cause in Cause if own.lost.get(cause))


def without(found: Attrition, earlier: Attrition) -> Attrition:
    """Return `found` without the lost attempts and abandoned tasks in `earlier`. Attempts that ended with a reward stay."""
    return found.model_copy(
        update={kind: _without(found.of(kind), earlier.of(kind)) for kind in KINDS},
    )


def _without(found: EpisodeAttempts, earlier: EpisodeAttempts) -> EpisodeAttempts:
    lost = {cause: count - earlier.lost.get(cause, 0) for cause, count in found.lost.items()}
    return EpisodeAttempts(
        attempts=found.attempts - sum(earlier.lost.values()),
        lost={cause: count for cause, count in lost.items() if count > 0},
        set_aside=max(0, found.set_aside - earlier.set_aside),
    )


def together(parts: list[Attrition]) -> Attrition:
    """Return the sum of the parts. For each cause, the first message is that of the first part that has one."""
    return Attrition(
        train=_sum([part.train for part in parts]),
        eval=_sum([part.eval for part in parts]),
        first={cause: words for part in reversed(parts) for cause, words in part.first.items()},
    )


def _sum(parts: list[EpisodeAttempts]) -> EpisodeAttempts:
    lost = {cause: sum(part.lost.get(cause, 0) for part in parts) for cause in Cause}
    return EpisodeAttempts(
        attempts=sum(part.attempts for part in parts),
        lost={cause: count for cause, count in lost.items() if count},
        set_aside=sum(part.set_aside for part in parts),
    )
