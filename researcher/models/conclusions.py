"""What a study comes to: effects, verdicts, claims of its report, findings for the next one."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Literal

from pydantic import BaseModel


class Verdict(StrEnum):
    INVALID = "invalid"
    SUPPORTED = "supported"
    REFUTED = "refuted"
    EQUIVALENT = "equivalent"
    INCONCLUSIVE = "inconclusive"


class Effect(BaseModel):
    """Treatment minus baseline on one metric, over trials."""

    hypothesis: str
    metric: str
    n_baseline: int
    n_treatment: int
    failed_baseline: int = 0
    failed_treatment: int = 0
    mean_baseline: float
    mean_treatment: float
    diff: float
    low: float
    high: float
    level: float
    method: Literal["welch", "paired", "bootstrap_iqm"]
    """bootstrap_iqm: `mean_*` and `diff` are interquartile means, not means."""
    p_value: float
    p_adjusted: float
    p_equivalence: float = 1.0
    """Two one-sided tests: that the true difference lies outside ± margin."""


class VerdictRecord(BaseModel):
    hypothesis: str
    verdict: Verdict
    reason: str
    effect: Effect | None


class Claim(BaseModel):
    """A named value of the report: an expression over recorded trials, and what it was when the report was built."""

    name: str
    expression: str
    value: float | str | None
    text: str = ""
    """How the report prints it."""


class Finding(BaseModel):
    """What a study leaves to the next one: nulls too."""

    id: str
    study_id: str
    plan_hash: str
    instrument: str
    model: str
    factor: str
    metric: str
    statement: str
    verdict: Verdict
    effect: Effect | None = None
    scope: dict[str, Any] = {}
    at: float
