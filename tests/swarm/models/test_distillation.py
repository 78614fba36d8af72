"""A smaller model made from a larger one: which layers it has, that it learns from its teacher, and that it is made once."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import pytest

from swarm.models import ModelUnavailable, cached_models, catalogue, resolve, sources
from swarm.models.catalogue import DistilledSource, KnownModel, hosted_name
from swarm.models.distillation import Recipe, distil
from swarm.models.distillation_prompts import prompts
from swarm.models.folder import ModelFolder, sha256_of, weight_files
from swarm.models.sources import SourceFailed

BRIEF = Recipe(sums=4, short=2, long=2, sampled=4, epochs=1, batch=4)


def weights_of(folder: Path) -> list[str]:
    return [sha256_of(file) for file in weight_files(folder)]


def test_a_smaller_model_has_the_layers_that_were_asked_for_and_is_the_same_each_time(
    tiny_llama: ModelFolder, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    told: list[str] = []
    for name in ("one", "two"):
        (tmp_path / name / "workshop").mkdir(parents=True)
        distil(tiny_llama.path, tmp_path / name / "made", tmp_path / name / "workshop", [1], BRIEF, told.append)
    assert weights_of(tmp_path / "one" / "made") == weights_of(tmp_path / "two" / "made")
    small = AutoModelForCausalLM.from_pretrained(tmp_path / "one" / "made")
    assert small.config.num_hidden_layers == len(small.model.layers) == 1
    words = [
        AutoTokenizer.from_pretrained(each)("1+2?").input_ids for each in (tiny_llama.path, tmp_path / "one" / "made")
    ]
    assert words[0] == words[1]
    assert any("the teacher answers: 100 %, 0 s left" in line for line in told)
    assert any("learning, 2 steps: 100 %" in line for line in told)


def test_what_the_teacher_said_is_not_asked_again(tiny_llama: ModelFolder, tmp_path: Path) -> None:
    told: list[str] = []
    for name in ("one", "two"):
        distil(tiny_llama.path, tmp_path / name, tmp_path, [0], BRIEF, told.append)
    assert len([line for line in told if line.startswith("the teacher answers: 100 %")]) == 1
    assert weights_of(tmp_path / "one") == weights_of(tmp_path / "two")


@pytest.mark.campaign
def test_it_comes_nearer_to_its_teacher(tiny_llama: ModelFolder, tmp_path: Path) -> None:
    said: list[str] = []
    long = dataclasses.replace(BRIEF, epochs=20, learning_rate=5e-3, warmup_steps=1)
    for name, recipe in (("brief", BRIEF), ("long", long)):
        distil(tiny_llama.path, tmp_path / name, tmp_path, [0], recipe, said.append)
    brief, trained = (float(line.rpartition("loss ")[2]) for line in said if "learning" in line and "100 %" in line)
    assert trained < 0.7 * brief


@pytest.mark.parametrize("layers", [[], [0, 2], [1, 0], [0, 0], [-1]])
def test_layers_that_the_teacher_does_not_have_are_refused(
    layers: list[int], tiny_llama: ModelFolder, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="from 0 to 1, in ascending order without repeats"):
        distil(tiny_llama.path, tmp_path / "made", tmp_path, layers, BRIEF)


def test_prompts_go_through_all_one_digit_sums_and_are_the_same_for_a_seed() -> None:
    asked = prompts(100, 5, 5, seed=1)
    assert asked == prompts(100, 5, 5, seed=1) != prompts(100, 5, 5, seed=2)
    assert len({tuple(char for char in prompt.text if char.isdigit()) for prompt in asked[:100]}) == 100


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> KnownModel:
    """A known model that is distilled from another known one, which lies in the cache."""
    teacher = KnownModel(name="big-2m", hub=catalogue.HubSource(repo="o/big-2m", folder="big-2m"))
    distilled = DistilledSource(teacher="big-2m", layers=(0,), folder="small-1m-distilled")
    small = KnownModel(name="small-1m", distilled=distilled)
    monkeypatch.setattr(catalogue, "CATALOGUE", (teacher, small))
    monkeypatch.setattr(sources, "fetch_from_hub", lambda _repo, into: _checkpoint(into, b"big"))
    return small


def _checkpoint(folder: Path, weights: bytes) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(weights)


@pytest.mark.usefixtures("small")
def test_a_distilled_model_is_made_once_from_its_teacher_and_named_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    teachers: list[Path] = []

    def distil(_source: DistilledSource, teacher: Path, into: Path, _workshop: Path) -> None:
        teachers.append(teacher)
        _checkpoint(into, b"small")

    monkeypatch.setattr(sources, "distil", distil)
    made = resolve("small-1m", cache=tmp_path)
    assert resolve("small-1m", cache=tmp_path) == made
    assert teachers == [tmp_path / "big-2m"]
    assert made.name == "small-1m-distilled"
    assert [model.name for model in cached_models(tmp_path)] == ["big-2m", "small-1m-distilled"]
    assert made.fingerprint != resolve("big-2m", cache=tmp_path).fingerprint


def test_what_the_making_says_is_told_and_its_failure_named(
    small: KnownModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="swarm.models")
    with pytest.raises(ModelUnavailable, match=r"small-1m is not available .*distillation:"):
        resolve("small-1m", cache=tmp_path)
    assert "6 to 15 min" in caplog.text
    assert small.distilled is not None
    with pytest.raises(SourceFailed, match="distillation:"):
        sources.distil(small.distilled, tmp_path / "nobody", tmp_path / "out", tmp_path / "workshop")


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("smollm2-135m", "smollm2-135m"),
        ("smollm2-135m-instruct-q4_1-dequantised@0123456789ab", "smollm2-135m"),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2-135m"),
        ("smollm2-81m-distilled@0123456789ab", "smollm2-81m"),
        ("Qwen/Qwen2.5-0.5B", "qwen--qwen2.5-0.5b"),
        ("qwen--qwen2.5-0.5b@0123456789ab", "qwen--qwen2.5-0.5b"),
        ("/srv/models/mine", "mine"),
        ("echo", "echo"),
    ],
)
def test_a_model_has_one_name_however_it_is_written(written: str, name: str) -> None:
    assert hosted_name(written) == name
