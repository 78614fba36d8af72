"""What a report or a record says and what it has to be: one difference, and when two values are none."""

from __future__ import annotations

import json

from pydantic import BaseModel

from researcher.analysis.rounding import same_number
from researcher.report.vocabulary import Value


class Difference(BaseModel):
    """One thing that the report says and the records do not."""

    claim: str
    """The claim's name; `plan`, `verdict H1`, `decision compare` or `file report.md` for what is not a claim."""
    expression: str = ""
    reported: Value = None
    recomputed: Value = None
    problem: str

    def __str__(self) -> str:
        asked = f" = {self.expression}" if self.expression else ""
        if self.reported is None and self.recomputed is None:
            return f"{self.claim}{asked}: {self.problem}"
        return f"{self.claim}{asked}: reported {self.reported!r}, recomputed {self.recomputed!r}; {self.problem}"


def shown(column: object) -> Value:
    """A column's value as a difference tells it: a list as its JSON."""
    return column if column is None or isinstance(column, str | int | float) else json.dumps(column, ensure_ascii=False)


def same(one: object, other: object) -> bool:
    """Equal; numbers but for rounding."""
    if isinstance(one, int | float) and isinstance(other, int | float):
        return same_number(one, other)
    return one == other


def alike(one: object, other: object) -> bool:
    """`same`, of all that they hold."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(alike, one, other))
    return same(one, other)
