"""The benchmark of learning: what a trial of it is, and how its lines are summed up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.learning import ARMS, MAIN, WHAT, summary, trials
from researcher.instruments.catalogue import read_instrument

STUDIES = Path(__file__).parents[2] / "studies"


def line(arm: str, seed: int, before: float, after: float) -> dict[str, Any]:
    planner = {"heldout_before": 0.5, "heldout_after": 0.5}
    return {"arm": arm, "seed": seed, "heldout_before": before, "heldout_after": after, "planner": planner}


@pytest.mark.parametrize("name", sorted({study for study, _ in WHAT.values()}))
def test_a_control_differs_from_its_trial_in_the_learning_rate_alone(name: str) -> None:
    folder = read_instrument(STUDIES / name)
    learning, control, *_ = trials(folder, 3, {"limits": {"steps": 4}})
    for role in (MAIN, *folder.instrument.roles):
        one, other = learning.spec(role), control.spec(role)
        assert (one.limits.steps, one.seed, other.optimizer.learning_rate) == (4, 0, 0.0)
        assert one.optimizer.learning_rate > 0
        assert one.model_dump(exclude={"optimizer"}) == other.model_dump(exclude={"optimizer"})
    assert len({trial.key for trial in trials(folder, 3, {})}) == 3 * len(ARMS)


@pytest.mark.parametrize("what", WHAT)
def test_what_an_algorithm_changes_is_valid_and_leaves_the_control_alone(what: str) -> None:
    study, changes = WHAT[what]
    folder = read_instrument(STUDIES / study)
    learning, control, *_ = trials(folder, 1, {}, changes)
    assert learning.spec(MAIN).optimizer.learning_rate > 0
    assert control.key == list(trials(folder, 1, {}))[1].key


def test_gains_are_compared_with_the_controls_of_the_same_seeds() -> None:
    lines = [line("learning", 0, 0.2, 0.5), line("control", 0, 0.2, 0.25), line("learning", 1, 0.3, 0.5)]
    half = summary("mix", lines)
    assert (half["seeds"], half["against"], half["rose_in"]) == (1, 0.25, 1), (
        "a seed without its control does not count"
    )
    whole = summary("mix", [*lines, line("control", 1, 0.3, 0.35)])
    assert (whole["seeds"], whole["gain_learning"], whole["gain_control"]) == (2, 0.25, 0.05)
    assert whole["against"] == 0.2
    assert whole["against_low"] < 0.2 < whole["against_high"]
    assert summary("team", lines, "planner")["against"] == 0.0
    assert summary("mix", [])["seeds"] == 0
