"""Findings of sentinels, and access to the series that sentinels read."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from pydantic import BaseModel

from researcher.models import TrialRecord
from researcher.study.plan import Hypothesis

Severity = Literal["invalid", "warning", "unchecked"]


class SentinelFinding(BaseModel):
    """A sentinel's finding. `text` has no numbers; `value` is the number that triggered the finding."""

    name: str
    severity: Severity
    text: str
    arms: tuple[str, ...] = ()
    trials: tuple[str, ...] = ()
    hypotheses: tuple[str, ...] = ()
    """Hypotheses that become invalid; if empty, all that involve one of the `arms`."""
    value: float | None = None

    def takes(self, hypothesis: Hypothesis) -> bool:
        """True if this finding makes the verdict on the hypothesis invalid."""
        named = hypothesis.id in self.hypotheses if self.hypotheses else bool(hypothesis.sides & set(self.arms))
        return self.severity == "invalid" and named


class Unchecked(Exception):
    """Raised when a series that a sentinel needs was not recorded."""


def finding(name: str, severity: Severity, text: str, hits: Sequence[tuple[TrialRecord, float]]) -> SentinelFinding:
    return SentinelFinding(
        name=name,
        severity=severity,
        text=text,
        arms=tuple(dict.fromkeys(trial.arm for trial, _ in hits)),
        trials=tuple(trial.key for trial, _ in hits),
        value=max(value for _, value in hits),
    )


def unchecked(name: str, blind: Sequence[TrialRecord] = ()) -> SentinelFinding:
    return SentinelFinding(
        name=name,
        severity="unchecked",
        text="the data that this check needs was not recorded",
        arms=tuple(dict.fromkeys(trial.arm for trial in blind)),
        trials=tuple(trial.key for trial in blind),
    )


@dataclass(frozen=True, slots=True)
class Estimate:
    """One trial's estimate, with its standard error over episodes."""

    value: float
    error: float

    @classmethod
    def over(cls, values: Sequence[float]) -> Estimate:
        """Estimate the mean from one value per task; 0 if there are none."""
        if not values:
            return cls(0.0, 0.0)
        count = len(values)
        return cls(math.fsum(values) / count, float(np.std(values, ddof=1)) / math.sqrt(count) if count > 1 else 0.0)


def mean_of(found: Sequence[Estimate]) -> float:
    return math.fsum(one.value for one in found) / len(found)


def task_means(values: Iterable[tuple[int, float]], each: int) -> dict[int, float]:
    """Return the mean value of each task, from pairs of episode index and value.

    `each` is the number of episodes per task; a task's indices are consecutive.
    """
    by_task: dict[int, list[float]] = defaultdict(list)
    for index, value in values:
        by_task[index // each].append(value)
    return {task: math.fsum(found) / len(found) for task, found in by_task.items()}


def points(trial: TrialRecord, name: str) -> list[tuple[int, float]]:
    """Return a series as (step, value) pairs in order of steps. Raises: Unchecked."""
    points = trial.series.get(name)
    if not points:
        raise Unchecked
    return sorted(points)


def series(trial: TrialRecord, name: str) -> np.ndarray:
    return np.array([value for _, value in points(trial, name)])


def ends(values: np.ndarray) -> tuple[float, float]:
    """Return the means of the first and of the last quarter."""
    quarter = max(1, math.ceil(len(values) / 4))
    return float(np.mean(values[:quarter])), float(np.mean(values[-quarter:]))
