"""Results of a study: effects, verdicts, the report's claims, and findings for later studies."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from researcher.instruments.instrument import Direction, Scalar
from researcher.study.plan import Verdict


class Effect(BaseModel):
    """Treatment minus baseline on one metric, over trials.

    Special methods: `slope`, for a trend, compares the fitted line at the highest and the lowest level. `main_effects`, for a
    factor of a screen, takes all other factors at their mean. `arm_means`, for an arm of a screen, pools the spread over all arms.
    """

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
    method: Literal["welch", "paired", "bootstrap_iqm", "slope", "main_effects", "arm_means"]
    """For `bootstrap_iqm`, `mean_*` and `diff` are interquartile means."""
    p_value: float
    p_adjusted: float
    p_equivalence: float = 1.0
    """p-value of the two one-sided tests against a difference outside ± margin."""
    n_between: Annotated[int, Field(exclude_if=lambda count: not count)] = 0
    """For `slope`: number of finished trials at the levels in between."""
    failed_between: Annotated[int, Field(exclude_if=lambda count: not count)] = 0
    p_lack_of_fit: Annotated[float | None, Field(exclude_if=lambda found: found is None)] = None
    """For `slope`: p-value of the hypothesis that the levels' means lie on a line. None: not known."""
    trial_s: Annotated[float | None, Field(exclude_if=lambda seconds: seconds is None)] = None
    """Mean wall time of both sides' trials, used to price a repetition. Only in our own findings; neither verified nor exported."""


class VerdictRecord(BaseModel):
    hypothesis: str
    verdict: Verdict
    reason: str
    effect: Effect | None
    sentinels: Annotated[tuple[str, ...], Field(exclude_if=lambda names: not names)] = ()
    """Names of the sentinels that made the verdict invalid, in the plan's order."""


class Claim(BaseModel):
    """A named value of the report: an expression over recorded trials, and its value when the report was built."""

    name: str
    expression: str
    value: float | str | None
    text: str = ""
    """The value as printed in the report."""


class Finding(BaseModel):
    """A result that later studies can use, null results included."""

    id: str
    study_id: str
    """The study that found it; for an imported finding, a study elsewhere."""
    plan_hash: str
    question: str = ""
    """The study's question. Asking it again is a replication."""
    instrument: str
    instrument_version: str = ""
    model: str
    """Name of the model; several names, separated by commas, if the two sides differ in the model."""
    factor: str
    metric: str
    statement: str
    direction: Direction = "increase"
    margin: float | None = None
    """Smallest effect of interest, in the metric's unit; None if it was not recorded."""
    baseline: tuple[dict[str, Scalar], ...] = ()
    """Factor levels of each baseline arm; empty if not recorded."""
    treatment: tuple[dict[str, Scalar], ...] = ()
    verdict: Verdict
    effect: Effect | None = None
    scope: dict[str, Any] = {}
    """All other settings of the finding's trials: steps, run, task, further models, how held-out tasks were asked."""
    seeds: tuple[int, ...] | None = None
    """Seeds of all trials of the plan, in order, so that a replication can use others. None if not recorded."""
    at: float
    origin: str | None = None
    """Who shared the finding; None for our own. Imported findings cannot be recomputed, because their trials are elsewhere."""
    imported_at: float | None = None

    @property
    def models(self) -> list[str]:
        return self.model.split(", ")

    @property
    def recomputable(self) -> bool:
        return self.origin is None
