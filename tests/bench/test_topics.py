"""The bench of topics counts only what is stated, and asks only a planner that is configured."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.topics import main, scored
from researcher.planner.outcome import Declined
from tests.researcher.planner.test_matcher import FOLDERS, of


def test_the_bench_counts_only_stated_fields_and_any_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = of("Compare GRPO with RLOO on countdown.")
    levels = {"compare": {"algorithm": {"any_order": ["rloo", "grpo"]}}}
    assert scored(outcome, levels, FOLDERS) == "right"
    assert scored(outcome, {"any_of": ["decline", levels]}, FOLDERS) == "right"
    assert scored(outcome, levels | {"claim": "increase"}, FOLDERS) == "wrong_silently"
    assert scored(outcome, "decline", FOLDERS) == "wrong_silently"
    assert scored(Declined(reason="no"), levels, FOLDERS) == "declined"
    file = tmp_path / "topics.jsonl"
    file.write_text('{"topic": "Is the moon made of cheese?", "expect": "decline"}\n', encoding="utf-8")
    assert main(["--file", str(file)]) == 0
    assert '"right": 1, "draft": 0' in capsys.readouterr().out


def test_a_planner_that_is_not_configured_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MODEL", "BASE_URL", "API_KEY"):
        monkeypatch.delenv(f"RESEARCHER_LLM_{name}", raising=False)
    with pytest.raises(SystemExit, match="RESEARCHER_LLM_MODEL"):
        main(["--planner", "llm"])
