"""Kept transcripts answer what they were asked, and refuse anything else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.replay import ReplayEndpoint, read_transcript
from researcher.refusals import PlanningRefused
from tests.researcher.planner.llm.test_transcripts import CASES, TRANSCRIPTS, replayed

pytestmark = pytest.mark.anyio


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
