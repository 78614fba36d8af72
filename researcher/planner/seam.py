"""What every planner is given and gives: the built-in one, and one that asks an LLM.

`tests/contracts/planner_contract.py` holds every implementation to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from researcher.instruments.catalogue import InstrumentFolder
from researcher.models import Finding
from researcher.study.plan import Plan

PlannerChoice = Literal["auto", "llm", "builtin"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What a person asked for beside the topic.

    instrument: name or folder. models: names that are available beside the instruments' own. seeds: per arm, fixed.
    budget_s: wall time. servers: how many trials run at once. allow_underpowered: run although the noise may be too loud.
    looks: how often the effect is looked at, alpha being spent over the looks; 1 is only at the end.
    first_seed: from which seeds are counted; a replication takes others than the study before it.
    fine: how many levels between those that are compared Optuna may try, before the best is confirmed; 0 is none.
    """

    instrument: str | None = None
    planner: PlannerChoice = "auto"
    seeds: int | None = None
    budget_s: float | None = None
    servers: int = 1
    models: tuple[str, ...] = ()
    allow_underpowered: bool = False
    looks: int = 1
    first_seed: int = 0
    fine: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.looks <= 5:
            raise ValueError(f"looks must be 1 to 5, got {self.looks}")
        if self.first_seed < 0:
            raise ValueError(f"first_seed must not be negative, got {self.first_seed}")
        if not 0 <= self.fine <= 50:
            raise ValueError(f"fine must be 0 to 50, got {self.fine}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """A topic and everything that a plan may draw on."""

    topic: str
    options: PlanOptions
    instruments: Sequence[InstrumentFolder]
    known: Sequence[Finding] = ()


class Planner(Protocol):
    """Turns a request into a plan that can be frozen. Runs nothing, measures nothing, decides no verdict."""

    @property
    def name(self) -> str:
        """What the plan says who made it: `builtin`, or the LLM's name."""

    async def plan(self, request: PlanRequest) -> Plan:
        """Raises: PlanningRefused when no plan can be made; never returns half a plan."""
