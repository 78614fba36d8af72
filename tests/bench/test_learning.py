"""What a trial's line holds: measured in one setting, it is never taken for another's."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from bench.learning import RESULTS, ROOT, Setting, kept, main, trials
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
    assert len(kept(file, HERE)) == len(file.read_text().splitlines())


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
