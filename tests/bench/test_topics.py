"""The benches of planning: topics are scored by what is stated, and kept transcripts answer what they were asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.replay import ReplayEndpoint, read_transcript
from bench.topics import main, scored
from researcher.planner.outcome import Declined
from researcher.refusals import PlanningRefused
from tests.researcher.planner.llm.test_transcripts import CASES, TRANSCRIPTS, replayed
from tests.researcher.planner.test_matcher import FOLDERS, of

pytestmark = pytest.mark.anyio


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


async def test_all_of_a_folder_are_replayed_by_what_is_asked(tmp_path: Path) -> None:
    endpoint = ReplayEndpoint([TRANSCRIPTS])
    for case in (CASES[-1], CASES[0]):
        (tmp_path / case["file"]).mkdir()
        await replayed(endpoint, case, tmp_path / case["file"])
        assert not endpoint.left


@pytest.mark.parametrize("change", [{"topic": "Is a group size of 8 better on sums?"}, {"given": {"steps": 7}}])
async def test_another_request_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    case = next(case for case in CASES if case["file"] == "factorial.jsonl") | change
    with pytest.raises(PlanningRefused, match="no transcript answers this request"):
        await replayed(ReplayEndpoint([TRANSCRIPTS / "factorial.jsonl"]), case, tmp_path)


async def test_a_planning_that_goes_another_way_is_refused_with_the_place(tmp_path: Path) -> None:
    """The error that the recorded second answer mends is gone."""
    turns = read_transcript(TRANSCRIPTS / "lost_bound.jsonl")
    file = tmp_path / "other.jsonl"
    looked = turns[1].model_copy(update={"new": [*turns[1].new, {"role": "user", "content": "?"}]})
    file.write_text("".join(f"{turn.model_dump_json()}\n" for turn in (turns[0], looked)))
    case = next(case for case in CASES if case["file"] == "lost_bound.jsonl")
    with pytest.raises(PlanningRefused, match="the transcript differs from here on"):
        await replayed(ReplayEndpoint([file]), case, tmp_path)
