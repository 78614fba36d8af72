"""A trial's metrics come from recorded series, and what was not recorded is an error."""

from __future__ import annotations

from typing import Any

import pytest

from researcher.analysis.metrics import MetricMissing, finals, never_reached
from researcher.instruments.instrument import Metric


def metric(kind: Any, **fields: Any) -> Metric:
    return Metric(name="m", kind=kind, margin=0.1, **fields)


SERIES = {
    "reward_mean": [(1, 0.0), (2, 0.2), (3, 0.4), (4, 0.6), (5, 0.8)],
    "entropy": [(1, 3.0), (2, 2.0), (3, 1.0), (4, 0.6), (5, 0.4)],
    "step_s": [(1, 2.0), (2, 3.0), (3, 1.0), (4, 2.0), (5, 2.0)],
    "tokens_sampled": [(1, 30.0), (2, 0.0), (4, 12.0)],
    "eval_reward_before": [(0, 0.0), (1, 0.5)],
    "eval_reward_after": [(0, 1.0), (1, 0.5)],
    "eval_success_before": [(0, 0.0), (1, 0.0)],
    "eval_success_after": [(0, 1.0), (1, 0.0)],
    "eval_outcome_before.true_score": [(0, 0.0), (1, 0.5)],
    "eval_outcome_after.true_score": [(0, 1.0), (1, 0.5)],
    "outcome.true_score": [(1, 0.2), (2, 0.4)],
}


@pytest.mark.parametrize(
    ("wanted", "value"),
    [
        (metric("auc_reward"), 0.4),
        (metric("final_reward"), 0.7),
        (metric("steps_to_threshold", threshold=0.35), 3.0),
        (metric("steps_to_threshold", threshold=0.9), 6.0),
        (metric("seconds_to_threshold", threshold=0.35), 6.0),
        (metric("seconds_to_threshold", threshold=0.9), 12.0),
        (metric("wall_s"), 10.0),
        (metric("entropy_final"), 0.5),
        (metric("tokens_sampled"), 42.0),
        (metric("heldout_accuracy", when="after"), 0.5),
        (metric("heldout_accuracy", when="before"), 0.0),
        (metric("heldout_reward", when="gain"), 0.5),
        (metric("outcome", source="true_score"), 0.75),
        (metric("outcome", source="true_score", when="before"), 0.25),
        (metric("outcome", source="true_score", when="gain"), 0.5),
        (metric("outcome", source="true_score", when="training"), 0.3),
    ],
)
def test_every_kind_of_metric_is_computed_from_its_series(wanted: Metric, value: float) -> None:
    assert finals([wanted], SERIES)["m"] == pytest.approx(value)


def test_a_threshold_that_was_never_reached_is_said_to_be_so() -> None:
    assert never_reached(metric("steps_to_threshold", threshold=0.9), SERIES)
    assert not never_reached(metric("steps_to_threshold", threshold=0.5), SERIES)
    assert never_reached(metric("seconds_to_threshold", threshold=0.9), SERIES)
    assert not never_reached(metric("auc_reward"), SERIES)


def test_a_single_step_has_an_area() -> None:
    assert finals([metric("auc_reward")], {"reward_mean": [(1, 0.3)]}) == {"m": 0.3}


@pytest.mark.parametrize(
    ("wanted", "series", "says"),
    [
        (metric("auc_reward"), {}, "reward_mean"),
        (metric("wall_s"), {"step_s": []}, "step_s"),
        (metric("outcome", source="true_score"), {}, r"eval_outcome_after\.true_score"),
        (metric("auc_reward"), {"reward_mean": [(1, 0.0), (3, 0.1)]}, r"missing: \[2\]"),
        (metric("auc_reward"), {"reward_mean": [(1, 0.0), (1, 0.1)]}, "two values"),
        (metric("final_reward"), {"reward_mean": [(1, float("nan"))]}, "not finite"),
        (metric("steps_to_threshold"), SERIES, "no threshold"),
        (metric("tokens_sampled"), {}, "tokens_sampled"),
        (
            metric("heldout_accuracy"),
            {**SERIES, "eval_success_after": [(0, 1.0)]},
            "1 episodes, but eval_reward_after has 2",
        ),
    ],
)
def test_what_is_missing_is_named(wanted: Metric, series: dict[str, list[tuple[int, float]]], says: str) -> None:
    with pytest.raises(MetricMissing, match=says):
        finals([wanted], series)
