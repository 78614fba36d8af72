"""Input and outcomes of planners. `tests/contracts/planner_contract.py` tests every planner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from researcher.design.planning import KeptModels
from researcher.design.pricing import Pace
from researcher.instruments.catalogue import InstrumentFolder
from researcher.models import Finding
from researcher.study.draft import Draft


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicRequest:
    """topic: prose, as data. given: spec fields fixed by options; they overrule the topic. instruments: the choice.
    known: findings of earlier studies. paces: durations of their trials on these servers. servers: trials at once. kept: finds
    trained models of earlier trials. answers: a person's answers to the planner's questions.
    """

    topic: str
    instruments: Sequence[InstrumentFolder]
    given: dict[str, Any] = field(default_factory=dict)
    known: Sequence[Finding] = ()
    paces: Sequence[Pace] = ()
    servers: int = 1
    kept: KeptModels | None = None
    answers: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposed:
    """A complete spec that `design` has accepted."""

    draft: Draft


@dataclass(frozen=True, slots=True, kw_only=True)
class NeedsEdit:
    """A draft for a person to finish; nothing runs. problems: one sentence each."""

    draft: Draft
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The planner needs a person's answer before it can continue."""

    question: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Declined:
    """No instrument here can answer the topic. nearest: what could be asked instead."""

    reason: str
    nearest: tuple[str, ...] = ()


Outcome = Proposed | NeedsEdit | Asked | Declined


class Planner(Protocol):
    """Turns a topic into a draft. Runs nothing, measures nothing, decides no verdict."""

    @property
    def name(self) -> str:
        """Author of the drafts: `builtin`, or the LLM's name."""

    async def propose(self, request: TopicRequest) -> Outcome: ...
