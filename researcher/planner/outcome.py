"""The planners' input and outcomes. `tests/contracts/planner_contract.py` tests every planner."""

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
    """A topic to plan, and what the planner may use.

    `topic` is prose, treated as data. `given` holds spec fields fixed by options, which overrule the topic. `instruments` are the
    ones to choose from. `known` are findings of earlier studies, and `paces` the speeds of their trials on these servers. `servers`
    is the number of servers to plan for. `kept` looks up models that earlier trials trained and kept. `answers` are a person's
    answers to the planner's questions.
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
    """A draft for a person to finish; nothing runs. `problems` holds one sentence per problem."""

    draft: Draft
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The planner needs an answer from a person before it can continue."""

    question: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Declined:
    """No instrument here can answer the topic. `nearest` lists what could be asked instead."""

    reason: str
    nearest: tuple[str, ...] = ()


Outcome = Proposed | NeedsEdit | Asked | Declined


class Planner(Protocol):
    """Turns a topic into a draft. A planner runs nothing, measures nothing and gives no verdict."""

    @property
    def name(self) -> str:
        """The author recorded in drafts: `builtin`, or the LLM's name."""

    async def propose(self, request: TopicRequest) -> Outcome: ...
