"""The gate on kept ratios, and the page that is made of kept results."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from bench import gate
from bench.gate import GATES, OWN_BARS, RESULTS, ROOT, Line, judged, kept, summary
from bench.page import PAGE, SECTIONS, page


def test_the_page_is_what_the_kept_results_make() -> None:
    assert PAGE.read_text() == page(), "run `python -m bench.page`"


def test_every_kept_result_is_on_the_page_and_every_table_has_rows() -> None:
    tables = [table for section in SECTIONS.values() for table in section]
    assert {table.file for table in tables} == {file.stem for file in RESULTS.glob("*.jsonl")}
    assert [table for table in tables if len(re.findall(r"^\|", table.shown(), re.MULTILINE)) < 3] == []


def test_every_benchmark_of_make_bench_is_gated_and_has_a_kept_ratio() -> None:
    named = re.search(r"^BENCHES := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert named is not None
    assert set(named[1].split()) == {*GATES, *OWN_BARS}
    for name, gated in GATES.items():
        line = summary(kept(name), name)
        assert line is not None, name
        assert line[gated.ratio] > 0
        assert judged(name, line, line)["ok"]


@pytest.mark.parametrize(("better", "found", "worse"), [
    ("higher", 1.81, False),
    ("higher", 1.79, True),
    ("higher", 9.0, False),
    ("lower", 2.19, False),
    ("lower", 2.21, True),
    ("lower", 0.1, False),
])  # fmt: skip
def test_a_ratio_is_worse_beyond_its_tolerance_alone(better: str, found: float, worse: bool) -> None:
    gated = gate.Gate("ratio", "this ÷ that", 0.1, better)  # type: ignore[arg-type]
    assert gated.worse(found, 2.0) is worse


def made(name: str, monkeypatch: pytest.MonkeyPatch, lines: list[Line], *options: str, code: int = 0) -> int:
    """The gate's exit code for a benchmark that says these lines."""
    monkeypatch.setattr(gate, "measured", lambda _: (code, lines))
    monkeypatch.setattr(sys, "argv", ["gate", *options, name])
    return gate.main()


@pytest.mark.parametrize(
    ("lines", "code", "why"),
    [
        ([{"bench": "boot", "ratio": 2.0}], 0, "15% worse is allowed"),
        ([{"bench": "boot", "ratio": 1.5}], 0, "15% worse is allowed"),
        ([{"bench": "boot", "n": 3}], 0, "no 'ratio'"),
        ([], 1, "exit code 1"),
    ],
)
def test_a_worse_ratio_or_none_at_all_fails(
    lines: list[Line], code: int, why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = made("boot", monkeypatch, lines, code=code)
    verdict = json.loads(capsys.readouterr().out)
    assert why in verdict["why"]
    assert failed == (not verdict["ok"]) == (verdict.get("ratio") != 2.0)


def test_what_was_measured_in_another_precision_is_not_compared() -> None:
    before = summary(kept("grpo_step"), "grpo_step") or {}
    verdict = judged("grpo_step", {**before, "dtype": "bfloat16", "ratio": 0.1}, before)
    assert verdict["ok"]
    assert verdict["why"] == "not compared: the kept line has another dtype"


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs git's records")
def test_kept_lines_say_of_which_commit_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "RESULTS", tmp_path)
    lines: list[Line] = [{"round": 1}, {"bench": "boot", "ratio": 2.0}]
    assert made("boot", monkeypatch, lines, "--keep") == 0
    first, last = kept("boot")
    assert first == lines[0]
    assert re.fullmatch(r"[0-9a-f]{8,}\+?", last.pop("commit"))
    assert last == lines[1]
