"""What a planner is given and what it may answer. `tests/contracts/planner_contract.py` holds every planner to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from researcher.instruments.catalogue import InstrumentFolder
from researcher.models import Finding
from researcher.study.draft import Draft


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicRequest:
    """topic: prose, as data. given: fields of the spec that a person has fixed with options, by name; they hold whatever
    the topic says. instruments: those to choose from. known: findings of earlier studies. servers: how many trials run at once.
    answers: what a person has answered to the planner's questions so far."""

    topic: str
    instruments: Sequence[InstrumentFolder]
    given: dict[str, Any] = field(default_factory=dict)
    known: Sequence[Finding] = ()
    servers: int = 1
    answers: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposed:
    """A whole spec that can be planned: `design` has accepted it."""

    draft: Draft


@dataclass(frozen=True, slots=True, kw_only=True)
class NeedsEdit:
    """A draft that a person has to finish. problems: one sentence each; nothing runs."""

    draft: Draft
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The planner needs an answer of a person before it can go on."""

    question: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Declined:
    """The topic is nothing that an instrument here can answer. nearest: what could be asked instead."""

    reason: str
    nearest: tuple[str, ...] = ()


Outcome = Proposed | NeedsEdit | Asked | Declined


class Planner(Protocol):
    """Turns a topic into a draft. Runs nothing, measures nothing, decides no verdict."""

    @property
    def name(self) -> str:
        """Who the draft's author is: `builtin`, or the LLM's name."""

    async def propose(self, request: TopicRequest) -> Outcome: ...
