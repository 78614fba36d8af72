"""The *sums* task of the step benches, the same for both sides: one-digit sums with a fixed prompt. Needs only the standard library."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

TASKS = 8
GROUP_SIZE = 8
MAX_TOKENS = 32
GPU_MAX_TOKENS = 128
LEARNING_RATE = 4e-5
STILL = 1e-7
"""A learning rate for timing: every weight changes, but samples keep their lengths."""
PRECISIONS = ("float32", "autocast", "bfloat16")
"""TRL's precisions: all in float32; float32 weights under bfloat16 autocast; all in bfloat16."""
_NUMBER = re.compile(r"-?\d+")


@dataclass(frozen=True, slots=True)
class Sum:
    question: str
    total: int


def sums(step: int) -> list[Sum]:
    """The tasks of one step, the same in every process."""
    draw = random.Random(step)
    pairs = [(draw.randint(1, 9), draw.randint(1, 9)) for _ in range(TASKS)]
    return [Sum(f"What is {a}+{b}? Answer with the number only.", a + b) for a, b in pairs]


def even(ids: Sequence[int]) -> float:
    """1 for an answer whose token ids have an even sum. Any model, also one of random weights, gets both rewards in a group."""
    return float(sum(ids) % 2 == 0)


def score(answer: str, total: int) -> float:
    """1 for the bare number, 0.5 when it is the last number of a longer answer, else 0."""
    numbers = _NUMBER.findall(answer)
    if not numbers or int(numbers[-1]) != total:
        return 0.0
    return 1.0 if answer.strip() == str(total) else 0.5
