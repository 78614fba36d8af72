"""Models that a study file names: known names, hub names, folders; what of them decides the plan."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from researcher.design.models import model_of, models_named
from researcher.refusals import PlanningRefused
from researcher.study.plan import Plan, PlanModel
from swarm.models import resolve
from tests.fakes import specs
from tests.fakes.repeat_study import FOLDER


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SWARM_MODELS", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return checkpoint(tmp_path / "mine" / "tiny", b"weights")


def checkpoint(path: Path, weights: bytes) -> Path:
    path.mkdir(parents=True)
    for name, content in (("config.json", b"{}"), ("tokenizer.json", b"{}"), ("model.safetensors", weights)):
        (path / name).write_bytes(content)
    return path


def planned(*models: str, **fields: Any) -> Plan:
    return specs.planned(FOLDER, model=models[0] if len(models) == 1 else list(models), **fields)


def test_a_model_that_may_think_answers_at_once_unless_the_study_says_otherwise() -> None:
    def told(**fields: Any) -> tuple[Any, bool]:
        plan = specs.planned(**fields)
        said = any("do not: answers are short" in each for each in plan.assumptions)
        return plan.run["sampling"].get("thinking"), said

    assert told(model="Qwen/Qwen3-0.6B") == (False, True)
    assert told(model="Qwen/Qwen3-0.6B", set={"thinking": True, "max_tokens": 512}) == (True, False)
    varied = {"compare": {"thinking": {"levels": [False, True]}}, "set": {"max_tokens": 512}}
    assert told(model="Qwen/Qwen3-0.6B", **varied) == (None, False)
    assert told() == told(model="smollm2-81m") == (None, False)


@pytest.mark.parametrize(
    "text", ["smollm2-135m", "SmolLM2-135M", "smollm2-135m-instruct", "HuggingFaceTB/SmolLM2-135M-Instruct"]
)
def test_all_names_of_a_known_model_give_the_same_plan(text: str) -> None:
    assert planned(text).digest() == planned("smollm2-135m").digest()
    assert planned(text).model == PlanModel(name="smollm2-135m")


def test_a_hub_name_is_planned_without_being_fetched_and_without_a_trace_of_a_folder(cache: Path) -> None:
    found = planned("Qwen/Qwen3-0.6B").model_dump(mode="json")["model"]
    assert found == {"name": "Qwen/Qwen3-0.6B", "fingerprint": None}
    assert not cache.exists()


def test_a_folder_is_planned_with_its_weights_and_its_absolute_path(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tiny.parent)
    whole = planned(str(tiny))
    assert whole.model == PlanModel(name="tiny", fingerprint=resolve(str(tiny)).fingerprint, path=str(tiny))
    assert planned("./tiny").digest() == planned("tiny").digest() == whole.digest()
    (tiny / "model.safetensors").write_bytes(b"others!")
    assert planned("tiny").digest() != whole.digest(), "other weights make another study"


def test_a_known_name_is_no_folder_that_happens_to_be_here(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tiny.rename(tiny.parent / "smollm2-81m")
    monkeypatch.chdir(here.parent)
    assert model_of("smollm2-81m") == PlanModel(name="smollm2-81m")
    found = models_named(["./smollm2-81m"])["./smollm2-81m"]
    assert (found.path, found.name) == (str(here), f"smollm2-81m-{str(found.fingerprint)[:8]}")


@pytest.mark.parametrize(
    ("spoilt", "said"),
    [
        ("config.json", "contains no config.json with safetensors weights"),
        ("model.safetensors", "has no safetensors weights"),
        ("tokenizer.json", "has no tokenizer"),
    ],
)
def test_a_folder_that_is_no_checkpoint_is_refused_with_what_it_lacks(tiny: Path, spoilt: str, said: str) -> None:
    (tiny / spoilt).unlink()
    with pytest.raises(PlanningRefused, match=f"model: {tiny} {said}"):
        planned(str(tiny))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("smolm2-81m", "did you mean smollm2-81m"),
        ("nothing-like-it", "known names: smollm2-135m, smollm2-81m"),
        ("./missing", "there is no folder ./missing"),
        ("/no/such/place", "there is no folder /no/such/place"),
    ],
)
def test_what_is_no_model_is_refused_before_there_is_a_study(text: str, said: str) -> None:
    with pytest.raises(PlanningRefused, match=said):
        planned(text)


def test_several_models_are_a_factor_of_the_plan(tiny: Path) -> None:
    plan = planned("smollm2-81m", "Qwen/Qwen3-0.6B", str(tiny), design="compare")
    assert [model.name for model in plan.models] == ["smollm2-81m", "Qwen/Qwen3-0.6B", "tiny"]
    assert [arm.name for arm in plan.arms] == ["model=smollm2-81m", "model=Qwen-Qwen3-0.6B", "model=tiny"]
    assert plan.model_of("model=tiny").path == str(tiny)
    assert plan.model.name == "smollm2-81m"


def test_arms_may_bundle_a_model_with_other_settings(tiny: Path) -> None:
    arms: dict[str, Any] = {"small": {}, "mine": {"model": str(tiny), "learning_rate": 1e-3}}
    plan = specs.planned(FOLDER, arms=arms)
    assert (plan.model_of("small"), plan.model_of("mine")) == (plan.model, model_of(str(tiny)))


def test_folders_of_one_name_are_told_apart_by_their_weights(tiny: Path, tmp_path: Path) -> None:
    other = checkpoint(tmp_path / "yours" / "tiny", b"others!")
    plan = planned(str(tiny), str(other))
    assert [model.name for model in plan.models] == [f"tiny-{str(model.fingerprint)[:8]}" for model in plan.models]
    assert len({arm.name for arm in plan.arms}) == 2


def test_one_model_under_two_names_is_no_comparison(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(PlanningRefused, match=r"smollm2-135m and smollm2-135m-instruct are the same model"):
        planned("smollm2-135m", "smollm2-135m-instruct")
    shutil.copytree(tiny, tmp_path / "copy")
    with pytest.raises(PlanningRefused, match="are the same model"):
        planned(str(tiny), str(tmp_path / "copy"))


def test_models_are_no_factor_where_trials_train_further_ones() -> None:
    with pytest.raises(PlanningRefused, match="trials of team train further models"):
        specs.planned("team", model=["smollm2-81m", "smollm2-135m"])
