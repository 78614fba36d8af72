"""The benchmark of learning: its trials, how its lines are summed up, and the setting that each was measured in."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from bench.learning import ARMS, MAIN, RESULTS, ROOT, WHAT, Setting, kept, main, summary, trials
from researcher.instruments.catalogue import read_instrument

HERE = Setting(engine="local", model="smollm2-135m", device="cpu", dtype="float32")


@pytest.mark.parametrize("change", [{"engine": "echo"}, {"model": "other"}, {"device": "cuda"}, {"dtype": "bfloat16"}])
def test_a_line_counts_in_the_setting_that_it_was_measured_in_and_in_no_other(
    change: dict[str, str], tmp_path: Path
) -> None:
    file = tmp_path / "lines.jsonl"
    file.write_text(json.dumps({"key": "k", "seconds": 1.0} | asdict(HERE)) + "\n")
    assert list(kept(file, HERE)) == ["k"]
    assert kept(file, replace(HERE, **change)) == {}
    assert kept(tmp_path / "none.jsonl", HERE) == {}


@pytest.mark.parametrize("file", sorted(RESULTS.glob("learning-*.jsonl")), ids=lambda file: file.stem)
def test_every_committed_line_says_where_it_was_measured(file: Path) -> None:
    for line in map(json.loads, file.read_text().splitlines()):
        assert replace(HERE, dtype=line["dtype"]).made(line)


def test_a_run_s_own_number_type_is_the_setting_s() -> None:
    folder = read_instrument(ROOT / "studies" / "arithmetic")
    [trial, _] = trials(folder, 1, {"dtype": "bfloat16"})
    assert Setting.here(trial, "echo") == Setting(engine="echo", model="echo", device="cpu", dtype="bfloat16")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--engine", "echo"], "do not belong among the measured ones"),
        (["--set", '{"nonsense": 1}'], "--set: nonsense: unknown field"),
        (["--set", "[1]"], "must be a JSON object"),
        (["--set", "x"], "must be a JSON object"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(
    options: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["learning", "--what", "grpo", *options])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert said in capsys.readouterr().err


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
