"""Findings of sentinels, and the series they read."""

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
    """A finding of a sentinel. `text` has no numbers; `value` is the number that triggered it."""

    name: str
    severity: Severity
    text: str
    arms: tuple[str, ...] = ()
    trials: tuple[str, ...] = ()
    hypotheses: tuple[str, ...] = ()
    """Hypotheses that become invalid; default: all that involve one of its arms."""
    value: float | None = None

    def takes(self, hypothesis: Hypothesis) -> bool:
        """Whether this finding makes the verdict on the hypothesis invalid."""
        named = hypothesis.id in self.hypotheses if self.hypotheses else bool(hypothesis.sides & set(self.arms))
        return self.severity == "invalid" and named


class Unchecked(Exception):
    """A needed series was not recorded."""


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
        text="what this check needs was not recorded",
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
        """The mean of one value per task; 0 without any."""
        if not values:
            return cls(0.0, 0.0)
        count = len(values)
        return cls(math.fsum(values) / count, float(np.std(values, ddof=1)) / math.sqrt(count) if count > 1 else 0.0)


def mean_of(found: Sequence[Estimate]) -> float:
    return math.fsum(one.value for one in found) / len(found)


def task_means(values: Iterable[tuple[int, float]], each: int) -> dict[int, float]:
    """Means by task of (episode index, value). each: episodes per task; the indices of one task are consecutive."""
    by_task: dict[int, list[float]] = defaultdict(list)
    for index, value in values:
        by_task[index // each].append(value)
    return {task: math.fsum(found) / len(found) for task, found in by_task.items()}


def points(trial: TrialRecord, name: str) -> list[tuple[int, float]]:
    """(step, value), in order of steps."""
    points = trial.series.get(name)
    if not points:
        raise Unchecked
    return sorted(points)


def series(trial: TrialRecord, name: str) -> np.ndarray:
    return np.array([value for _, value in points(trial, name)])


def ends(values: np.ndarray) -> tuple[float, float]:
    """Means of the first and of the last quarter."""
    quarter = max(1, math.ceil(len(values) / 4))
    return float(np.mean(values[:quarter])), float(np.mean(values[-quarter:]))
