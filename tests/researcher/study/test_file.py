"""Study files: how values are read, where keys stand, and what is no study file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from researcher.refusals import PlanningRefused, Refusals, SpecRefused
from researcher.study.file import checked_spec, read_study_file, read_study_text, scalar

YAML = """\
# A comment.
question: Is it better?
instrument: arithmetic
compare:
  learning_rate: {baseline: 1e-5, levels: [4e-5, 1E-4]}
set:
  hints: on
  name: no
schedule: {windows: [22:00-07:00]}
"""
TOML = """\
question = "Is it better?"
instrument = "arithmetic"
set.hints = "on"

[compare.learning_rate]  # of the optimiser
baseline = 1e-5
levels = [
  4e-5,
]

[seeds]
min = 3
"""


def written(folder: Path, text: str, name: str = "study.yaml") -> Path:
    (folder / name).write_text(text)
    return folder / name


def test_yaml_is_read_as_people_write_it(tmp_path: Path) -> None:
    data, lines = read_study_file(written(tmp_path, YAML))
    assert data["compare"]["learning_rate"] == {"baseline": 1e-5, "levels": [4e-5, 1e-4]}
    assert data["set"] == {"hints": "on", "name": "no"}
    assert data["schedule"] == {"windows": ["22:00-07:00"]}
    places = ("instrument", "compare.learning_rate.levels", "set.name", "schedule.windows.0", "set.other.part", "seeds")
    file = tmp_path / "study.yaml"
    assert [lines.at(path) for path in places] == [f"{file}:{line}" for line in (3, 5, 8, 9, 6)] + [str(file)]


def test_toml_is_read_with_its_lines(tmp_path: Path) -> None:
    file = written(tmp_path, TOML, "study.toml")
    data, lines = read_study_file(file)
    found, wrong = checked_spec(data)
    assert found is not None
    assert not wrong
    assert found.compare["learning_rate"].levels == (4e-5,)
    assert (found.set, found.seeds.min) == ({"hints": "on"}, 3)
    places = ("set.hints", "compare.learning_rate", "compare.learning_rate.levels", "seeds.min", "seeds.max")
    assert [lines.at(path) for path in places] == [f"{file}:{line}" for line in (3, 5, 7, 12, 11)]


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-5", 1e-5), ("1E-5", 1e-5), ("-3", -3), (".5", 0.5), ("1_000", 1000), ("4e-5", 4e-5), ("true", True), ("on", "on"),
     ("no", "no"), ("grpo", "grpo"), ("0x10", "0x10"), ("22:00", "22:00"), ("2026-01-01", "2026-01-01"), ("null", "null"),
     ("[1, 2]", "[1, 2]"), ("a: b: c", "a: b: c"), ("nan", "nan"), ("012", 12)],
)  # fmt: skip
def test_a_value_is_a_number_a_truth_or_a_text(text: str, value: object) -> None:
    found = scalar(text)
    assert (found, type(found)) == (value, type(value))


def test_paths_start_from_the_folder_of_the_file_and_names_stay_names(tmp_path: Path) -> None:
    for folder in ("mine", "smollm2-135m", "own", "grpo"):
        (tmp_path / folder).mkdir()
    (tmp_path / "own" / "instrument.toml").write_text("")
    (tmp_path / "train.jsonl").write_text("")
    text = "question: q\ninstrument: own\nmodel: [./mine, smollm2-135m, Qwen/Qwen3-0.6B, elsewhere/mine]\nset: {data: train.jsonl, a: grpo}\n"
    data, _ = read_study_file(written(tmp_path, text))
    assert data["instrument"] == str(tmp_path / "own")
    assert data["model"] == [str(tmp_path / "mine"), "smollm2-135m", "Qwen/Qwen3-0.6B", "elsewhere/mine"]
    assert data["set"] == {"data": str(tmp_path / "train.jsonl"), "a": "grpo"}
    data, _ = read_study_file(written(tmp_path, "instrument: arithmetic\narms: {a: {model: mine}, b: {}}\n"))
    assert (data["instrument"], data["arms"]["a"]["model"]) == ("arithmetic", str(tmp_path / "mine"))


def problems(tmp_path: Path, text: str, name: str = "study.yaml") -> tuple[str, list[str]]:
    """The refusal's message, and the names that it suggests."""
    try:
        data, lines = read_study_file(written(tmp_path, text, name))
    except PlanningRefused as refused:
        return str(refused), refused.nearest
    refusals = Refusals(checked_spec(data)[1])
    with pytest.raises(SpecRefused) as wrong:
        refusals.raise_any()
    return lines.located(wrong.value), wrong.value.nearest


@pytest.mark.parametrize(
    ("old", "new", "says", "nearest"),
    [
        ("instrument:", "instrumnt:", ["study.yaml:3: instrumnt: unknown field", "study.yaml: instrument: "], "instrument"),
        ("baseline:", "base_line:", ["study.yaml:5: compare.learning_rate.base_line: unknown field"], "compare.learning_rate.baseline"),
        ("schedule:", "shedule:", ["study.yaml:9: shedule: unknown field (did you mean 'schedule'?)"], "schedule"),
        ("[22:00-07:00]", "22", ["study.yaml:9: schedule.windows: "], None),
        ("  name: no\n", "  hints: off\n", ["study.yaml:8: set.hints is given twice; first in line 7"], None),
        ("schedule: {", "schedule: {{", ["study.yaml:", "this is not YAML"], None),
        ("[22:00-07:00]}", "&always [22:00-07:00]}\nnotify: *always", ["study.yaml:10: *always repeats an earlier value"], None),
        (YAML, "", ["is not a study file: it has no keys"], None),
        (YAML, "- a\n- b\n", ["is not a study file"], None),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_its_line(
    tmp_path: Path, old: str, new: str, says: list[str], nearest: str | None
) -> None:
    said, near = problems(tmp_path, YAML.replace(old, new))
    assert all(text in said for text in says)
    assert nearest is None or nearest in near


def test_aliases_are_refused_before_they_are_written_out() -> None:
    nested = "".join(f"  - &a{level} [{', '.join([f'*a{level - 1}'] * 300)}]\n" for level in range(1, 6))
    with pytest.raises(PlanningRefused, match=r"the text:3: \*a0 repeats an earlier value.*write the value out"):
        read_study_text(f"set:\n  - &a0 {['x'] * 300}\n{nested}", Path())


def test_wrong_toml_is_named_too(tmp_path: Path) -> None:
    for old, new, says in (
        ("min = 3", "mni = 3", "study.toml:12: seeds.mni: unknown field (did you mean 'seeds.min'?)"),
        ("min = 3", "min = 3\nmin = 4", "this is not TOML"),
        ("min = 3", "min = ", "this is not TOML"),
        ("min = 3", f"min = {'9' * 400}", "study.toml:12: seeds.min: a number with more than 100 digits"),
        ("min = 3", f"min = {'9' * 5000}", "this is not TOML"),
        ("min = 3", f"min = {'[' * 3000}{']' * 3000}", "nested too deeply"),
        (
            "  4e-5,",
            f"  {'9' * 400},",
            "study.toml:7: compare.learning_rate.levels.0: a number with more than 100 digits",
        ),
        ("min = 3", f"min = 0x{'f' * 4000}", "study.toml:12: seeds.min: a number with more than 100 digits"),
    ):
        assert says in problems(tmp_path, TOML.replace(old, new), "study.toml")[0]


def test_the_file_of_an_instrument_is_no_study_file(tmp_path: Path) -> None:
    said, _ = problems(tmp_path, 'name = "mine"\nworkflow = "workflow.py"\n[defaults]\nsteps = 3\n', "study.toml")
    assert "describes an instrument, not a study" in said
    assert f"--instrument {tmp_path}" in said


def test_a_file_that_cannot_be_read_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    for name, says in (
        ("nope.yaml", "No such file"),
        ("binary.yaml", "is not a UTF-8 text file"),
        (".", "Is a directory"),
    ):
        with pytest.raises(PlanningRefused, match=says):
            read_study_file(tmp_path / name)


def test_a_wrong_value_is_shown_without_its_file_where_it_came_from_options() -> None:
    fields: dict[str, Any] = {"question": "q", "instrument": "i", "compare": {"kl": {"levels": [0.1]}}, "claim": "up"}
    spec, (wrong,) = checked_spec(fields)
    assert str(wrong).startswith("claim: ")
    assert spec is not None
    assert (spec.claim, list(spec.compare)) == ("none", ["kl"])


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({"claim": "up", "steps": "ten", "seeds": {"mni": 3}}, ["seeds.mni", "claim", "steps"]),
        ({"claim": "up", "set": {"kl": 1}}, ["claim", "set.kl"]),
        ({"claim": "up", "compare": {"kl": {"levels": []}}}, ["claim", "compare.kl.levels"]),
        ({"compare": {"kl": [0, 1]}, "claim": "up"}, ["compare", "claim"]),
        ({"model": [1, 2], "compare": {}, "claim": "up"}, ["model.0", "model.1", "claim"]),
    ],
    ids=["several fields", "one that clashes", "one that is empty", "nothing else differs", "nothing left to compare"],
)
def test_all_fields_that_are_wrong_are_named_at_once(changes: dict[str, Any], fields: list[str]) -> None:
    given = {"question": "q", "instrument": "i", "compare": {"kl": {"levels": [0.1]}}} | changes
    _, wrong = checked_spec(given)
    found = [field for each in wrong for field, _ in each.problems]
    assert sorted(set(found)) == sorted(fields)


def test_every_key_that_stands_twice_is_named(tmp_path: Path) -> None:
    said, _ = problems(tmp_path, "question: a\nquestion: b\nset: {kl: 0, kl: 1, 3: 4}\n")
    assert said.count("is given twice") == 2
    assert "study.yaml:3: 3 is not a string" in said
