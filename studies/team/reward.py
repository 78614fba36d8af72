"""What each of the two models earns, for one problem that they solve together."""

from __future__ import annotations

import re

_NUMBER = re.compile(r"-?\d+")
SHARED = 0.5
"""Of the planner's reward, what depends on the solver's answer."""


def score_solver(answer: str, total: int) -> float:
    """1.0 when the last number in the answer is the total; 0.1 for a wrong number; 0.0 without any."""
    numbers = _NUMBER.findall(answer)
    if not numbers:
        return 0.0
    return 1.0 if int(numbers[-1]) == total else 0.1


def score_planner(plan: str, operands: tuple[int, ...], solver: float) -> float:
    """Half for the share of the operands that the plan passes on, half for what the solver made of it.

    A plan that says the total itself passes nothing on: then the solver would have nothing to do. Empty: 0.0.
    """
    if not plan.strip():
        return 0.0
    said = [int(number) for number in _NUMBER.findall(plan)]
    passed = 0.0 if sum(operands) in said and sum(operands) not in operands else _share(operands, said)
    return (1 - SHARED) * passed + SHARED * solver


def _share(operands: tuple[int, ...], said: list[int]) -> float:
    """How many of the operands are said, each counted once."""
    left = list(said)
    found = 0
    for operand in operands:
        if operand in left:
            left.remove(operand)
            found += 1
    return found / len(operands)
