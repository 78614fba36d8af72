"""What a trial becomes: levels land where their factor's target says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from researcher.executor.blueprint import Work, run_spec, trial_blueprint
from researcher.executor.errors import InstrumentChanged
from researcher.models import TrialRecord, TrialStatus
from researcher.study.plan import Arm, Plan
from tests.fakes.repeat_study import FOLDER, repeat_plan, repeat_setup


def work_of(plan: Plan, tmp_path: Path) -> Work:
    return Work(study_id="st-1", plan=plan, setup=repeat_setup(tmp_path))


def trial_of(arm: str, seed: int = 3) -> TrialRecord:
    return TrialRecord(
        key=f"hash/{arm}/{seed}", study_id="st-1", stage="compare", arm=arm, seed=seed, status=TrialStatus.PLANNED
    )


def plan_with(levels: dict[str, bool | int | float | str], **changes: object) -> Plan:
    plan = repeat_plan(**changes)
    return plan.model_copy(update={"arms": (Arm(name="a", levels=levels), *plan.arms)})


def test_defaults_plan_and_levels_are_laid_over_each_other(tmp_path: Path) -> None:
    plan = plan_with(
        {"learning_rate": 1e-3, "steps": 9, "syllables": 3},
        run={"batch": {"tasks": 2}, "optimizer": {"learning_rate": 7.0}},
    )
    work, trial = work_of(plan, tmp_path), trial_of("a")
    spec = run_spec(work, trial)
    assert (spec.optimizer.learning_rate, spec.batch.tasks, spec.batch.group_size) == (1e-3, 2, 8)
    assert (spec.seed, spec.limits.steps) == (3, 9)
    assert spec.labels["study"] == "st-1"
    assert spec.labels["trial"] == trial.key
    blueprint = trial_blueprint(work, trial, spec, "http://a", "run-1")
    assert blueprint.parameters == {"syllables": 3}
    assert (blueprint.seed, blueprint.group_size, blueprint.heldout.tasks) == (3, 8, 8)
    assert Path(blueprint.instrument_dir, blueprint.workflow).is_file()
    assert blueprint.instrument_dir == str(FOLDER)


def test_arms_of_one_seed_share_everything_but_their_levels(tmp_path: Path) -> None:
    work = work_of(repeat_plan(), tmp_path)
    one, other = (run_spec(work, trial_of(arm.name)).model_dump() for arm in work.plan.arms)
    assert one["optimizer"].pop("learning_rate") != other["optimizer"].pop("learning_rate")
    one.pop("labels")
    other.pop("labels")
    assert one == other


def test_a_level_that_no_server_would_take_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValidationError):
        run_spec(work_of(plan_with({"group_size": 1}), tmp_path), trial_of("a"))


def test_an_unknown_factor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not a factor of repeat"):
        run_spec(work_of(plan_with({"weather": 1}), tmp_path), trial_of("a"))


def test_an_instrument_that_changed_since_the_plan_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InstrumentChanged):
        work_of(repeat_plan(instrument_code="1" * 64), tmp_path)


def test_folders_of_trials_hold_no_strange_characters(tmp_path: Path) -> None:
    work = work_of(plan_with({}), tmp_path)
    folder = work.folder(trial_of("../lr 1e-5"), 2)
    assert folder.parent.parent.parent == tmp_path / "st-1" / "trials"
    assert re.fullmatch(r"\.\.-lr-1e-5-[0-9a-f]{8}-seed3/attempt2", "/".join(folder.parts[-2:]))


def test_every_arm_has_a_folder_of_its_own_that_a_file_system_can_name(tmp_path: Path) -> None:
    work = work_of(repeat_plan(), tmp_path)
    assert work.folder(trial_of("learning_rate=1e-05"), 1) == Path(
        tmp_path, "st-1/trials/hash/learning_rate=1e-05-seed3/attempt1"
    )
    arms = [
        "prompt=Think!",
        "prompt=Think?",
        "prompt=" + "word " * 100,
        "prompt=" + "word " * 101,
        "prompt=" + "想" * 200,
    ]
    folders = {work.folder(trial_of(arm), 1) for arm in arms}
    assert len(folders) == len(arms)
    for folder in folders:
        folder.mkdir(parents=True)


def test_a_trial_that_an_earlier_version_began_keeps_its_folder(tmp_path: Path) -> None:
    work = work_of(repeat_plan(), tmp_path)
    begun = tmp_path / "st-1" / "trials" / "hash" / "lr=1e-5-group_size=8-seed3"
    begun.mkdir(parents=True)
    assert work.folder(trial_of("lr=1e-5,group_size=8"), 1) == begun / "attempt1"


def test_a_trial_scores_the_held_out_tasks_after_those_that_its_plan_skips(tmp_path: Path) -> None:
    work, trial = work_of(plan_with({}, heldout_from=20), tmp_path), trial_of("a")
    blueprint = trial_blueprint(work, trial, run_spec(work, trial), "http://a", "run-1")
    assert (blueprint.heldout.first, blueprint.heldout.tasks, blueprint.heldout.upto) == (20, 8, 28)
    plain = work_of(plan_with({}), tmp_path)
    usual = trial_blueprint(plain, trial, run_spec(plain, trial), "http://a", "run-1")
    assert "first" not in usual.model_dump(mode="json")["heldout"]
