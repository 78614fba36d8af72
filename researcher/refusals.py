"""What is said when no plan can be made: one clear line, and what could be asked instead."""

from __future__ import annotations

from collections.abc import Sequence


class PlanningRefused(Exception):
    """The request cannot be planned as it stands. The message is one line that says what to do next.

    nearest: what could be asked instead, nearest first (names of factors, metrics, instruments).
    """

    def __init__(self, message: str, nearest: Sequence[str] = ()) -> None:
        super().__init__(" ".join(message.split()))
        self.nearest = list(nearest)


class SpecRefused(PlanningRefused):
    """A setting of the study spec is wrong. field: its dotted path (`compare.learning_rate`), with which the message begins."""

    def __init__(self, field: str, problem: str, nearest: Sequence[str] = ()) -> None:
        super().__init__(f"{field}: {problem}", nearest)
        self.field = field


class BudgetTooSmall(SpecRefused):
    """Not even the least that would answer the question fits the budget."""


class RecordsDisagree(ValueError):
    """A stored number is not what the records behind it give; the text names trial and metric."""


class UnknownName(ValueError):
    """An expression names what this study does not have."""
