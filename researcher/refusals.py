"""Errors raised when a request cannot be planned: one clear line, and what could be asked instead."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from pydantic import BaseModel, ValidationError

from foundation.strict import explain


class PlanningRefused(Exception):
    """The request cannot be planned as it stands. The message is one line that says what to do next.

    `nearest` lists what could be asked instead, nearest first (names of factors, metrics, instruments).
    """

    def __init__(self, message: str, nearest: Sequence[str] = ()) -> None:
        super().__init__(" ".join(message.split()))
        self.nearest = list(nearest)


class SpecRefused(PlanningRefused):
    """A setting of the study spec is wrong. `problems` pairs dotted paths (`compare.learning_rate`) with what is wrong there."""

    def __init__(self, field: str, problem: str, nearest: Sequence[str] = ()) -> None:
        super().__init__(f"{field}: {problem}", nearest)
        self.problems = [(field, problem)]


def refused_in(error: ValidationError, model: type[BaseModel]) -> list[SpecRefused]:
    """Return one refused setting per bad field of the document."""
    return [
        SpecRefused(each.field, str(each).removeprefix(f"{each.field}: "), [each.nearest] if each.nearest else [])
        for each in explain(error, model)
    ]


class SeveralRefused(SpecRefused):
    """Several settings are wrong."""

    def __init__(self, found: Sequence[SpecRefused]) -> None:
        PlanningRefused.__init__(self, "; ".join(map(str, found)), [name for each in found for name in each.nearest])
        self.problems = [problem for each in found for problem in each.problems]


class Refusals:
    """Collects refused settings, to report all of them together."""

    def __init__(self, found: Sequence[SpecRefused] = ()) -> None:
        self.found = list(found)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Record a refusal raised by the body, and continue after it."""
        try:
            yield
        except SpecRefused as refused:
            self.found.append(refused)

    def raise_any(self) -> None:
        """Raise what was recorded, if anything. Raises: SpecRefused, which names all recorded refusals."""
        if self.found:
            raise self.found[0] if len(self.found) == 1 else SeveralRefused(self.found)


class BudgetTooSmall(SpecRefused):
    """The budget is too small for even the smallest study that could answer the question."""


class RecordsDisagree(ValueError):
    """A stored number differs from its value recomputed from the records. The text names trial and metric."""


class UnknownName(ValueError):
    """An expression uses a name that this study does not have."""
