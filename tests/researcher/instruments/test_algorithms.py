"""What a run has: what the study states, then the algorithm's own defaults, then the instrument's."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from researcher.instruments.catalogue import InstrumentFolder, available
from researcher.study.plan import Plan
from swarm.protocol.algorithms import ALGORITHMS
from swarm.protocol.runspec import RunSpec
from tests.contracts.planner_contract import ROOT
from tests.fakes.specs import planned


def runs(plan: Plan) -> dict[str, RunSpec]:
    return {arm.name: RunSpec.model_validate(plan.run_fields(plan.levels_of(arm))) for arm in plan.arms}


@pytest.mark.parametrize("folder", available({}), ids=lambda folder: folder.instrument.name)
def test_every_algorithm_has_its_own_defaults_on_every_instrument(folder: InstrumentFolder) -> None:
    held = {"data": "hf:someone/some"} if folder.instrument.name == "dataset" else {}
    each = {name: {"algorithm": name} for name in ALGORITHMS}
    arms = runs(planned(folder, arms=each, set=held, budget={"wall": "100h"}))
    for name, spec in arms.items():
        alone = RunSpec.model_validate({"algorithm": {"name": name}})
        assert (spec.algorithm, spec.batch.rule) == (alone.algorithm, alone.batch.rule), name
    everywhere = runs(planned(folder, set={"algorithm": "dapo", **held}))
    assert {spec.batch.rule for spec in everywhere.values()} == {"informative_tasks"}


@pytest.fixture
def opinionated(tmp_path: Path) -> Path:
    """An instrument that states what DAPO has by default, too."""
    folder = Path(shutil.copytree(ROOT / "tests" / "instruments" / "kitchen", tmp_path / "kitchen"))
    with open(folder / "instrument.toml", "a") as file:
        file.write('[defaults.run.batch]\nrule = "tasks"\n[defaults.run.algorithm]\nclip_high = 0.3\n')
    return folder


def clips(plan: Plan) -> dict[str, tuple[Any, ...]]:
    return {name: (spec.algorithm.clip_high, spec.batch.rule) for name, spec in runs(plan).items()}


def test_an_algorithms_defaults_go_before_an_instruments_and_after_what_the_study_states(opinionated: Path) -> None:
    arms = {"plain": {}, "dapo": {"algorithm": "dapo"}, "wide": {"algorithm": "dapo", "clip_high": 0.4}}
    plan = planned(opinionated, arms=arms)
    assert clips(plan) == {
        "plain": (0.3, "tasks"),
        "dapo": (0.28, "informative_tasks"),
        "wide": (0.4, "informative_tasks"),
    }
    assert "batch.rule" not in dict(plan.held)
    assert Plan.model_validate_json(plan.canonical()).digest() == plan.digest()
    arms = {"grpo": {"algorithm": "grpo"}, "dapo": {"algorithm": "dapo"}}
    assert clips(planned(opinionated, arms=arms, set={"clip_high": 0.35}))["dapo"] == (0.35, "informative_tasks")
    everywhere = planned(opinionated, arms={"a": {"epochs": 1}, "b": {"epochs": 2}}, set={"algorithm": "dapo"})
    assert set(clips(everywhere).values()) == {(0.28, "informative_tasks")}


def test_plans_in_which_no_default_yields_leave_no_trace_of_the_order(opinionated: Path) -> None:
    assert "stated" not in planned(opinionated).model_dump()
    before = planned(opinionated, arms={"a": {"algorithm": "grpo"}, "b": {"algorithm": "dapo"}})
    stored = before.model_copy(update={"stated": None})
    assert clips(stored)["b"] == (0.3, "tasks")
