"""What the planner says when it will not plan: one clear line, and what could be asked instead."""

from __future__ import annotations

from collections.abc import Sequence


class PlanningRefused(Exception):
    """The topic cannot be planned as it stands. The message is one line that says what to do next.

    nearest: what could be asked instead, nearest first (names of factors, metrics, instruments).
    """

    def __init__(self, message: str, nearest: Sequence[str] = ()) -> None:
        super().__init__(" ".join(message.split()))
        self.nearest = list(nearest)


class BudgetTooSmall(PlanningRefused):
    """Not even the least that would answer the question fits the budget."""
