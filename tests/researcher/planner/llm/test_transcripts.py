"""Answers as a strong model gives them, written by hand: each covers its topic, says what it leaves out, or declines.

`cases.jsonl` says what each transcript has to come to: `expect` is a partial spec (null: not set; names of arms are free),
`decline`, or `draft`; `uncovered` are words that have to be named there.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from bench.replay import ReplayEndpoint, read_transcript
from foundation.clock import ManualClock, SystemClock
from researcher.design.planning import plan_of
from researcher.instruments.catalogue import available
from researcher.llm.asking import Asker
from researcher.llm.endpoint import Endpoint, LlmOutage, LlmSettings, LlmUnusable
from researcher.models import LlmCall
from researcher.planner.agent import LlmPlanner
from researcher.planner.outcome import Asked, Declined, NeedsEdit, Outcome, Proposed, TopicRequest
from researcher.planner.transcripts import save_transcript
from researcher.study.spec import StudySpec
from tests.fakes.scripted_llm import ScriptedLlm, called, completion, proposed

pytestmark = pytest.mark.anyio
HERE = Path(__file__).parent
TRANSCRIPTS = HERE / "transcripts"
CASES = [json.loads(line) for line in (HERE / "cases.jsonl").read_text(encoding="utf-8").splitlines()]
FOLDERS = {folder.instrument.name: folder for folder in available({})}


async def replayed(endpoint: Endpoint, case: dict[str, Any], place: Path) -> Outcome:
    """Asked as often as there are answers."""
    answers: list[str] = []
    while True:
        asker = Asker(endpoint, LlmSettings(model="a-strong-model"), SystemClock())
        planner = LlmPlanner(asker, checkpoints=f"sqlite:///{place}/researcher.db")
        request = TopicRequest(
            topic=case["topic"], instruments=[*FOLDERS.values()], given=case.get("given", {}), answers=answers
        )
        found = await planner.propose(request)
        if not isinstance(found, Asked):
            return found
        answers.append(case["answers"][len(answers)])


@pytest.mark.parametrize("case", CASES, ids=[case["file"].removesuffix(".jsonl") for case in CASES])
async def test_the_topic_is_covered_or_it_says_what_is_not_or_declines(case: dict[str, Any], tmp_path: Path) -> None:
    endpoint = ReplayEndpoint([TRANSCRIPTS / case["file"]])
    found = await replayed(endpoint, case, tmp_path)
    assert not endpoint.left
    if case["expect"] == "decline":
        assert isinstance(found, Declined)
        assert found.nearest
        return
    if case["expect"] == "draft":
        assert isinstance(found, NeedsEdit)
        return
    assert isinstance(found, Proposed), found
    spec = StudySpec.model_validate(found.draft.fields)
    assert spec.question == case["topic"]
    assert plan_of(spec, FOLDERS[spec.instrument]).question == case["topic"]
    assert _differences(case["expect"], found.draft.fields) == []
    named = " ".join(found.draft.uncovered)
    assert [word for word in case.get("uncovered", ()) if word not in named] == []
    assert bool(found.draft.uncovered) == bool(case.get("uncovered") or case.get("given"))


def _differences(expected: dict[str, Any], fields: dict[str, Any]) -> list[str]:
    """What is stated and differs."""
    found = []
    for name, value in expected.items():
        given = fields.get(name)
        if name == "arms":
            value, given = list(value.values()), list((given or {}).values())
        if isinstance(value, dict):
            found += [f"{name}.{each}" for each in _differences(value, given or {})]
        elif value != given:
            found.append(f"{name}: {given!r} is not {value!r}")
    return found


def test_there_are_enough_of_them_and_each_is_expected_to_come_to_something() -> None:
    assert len(CASES) >= 25
    assert {case["file"] for case in CASES} == {file.name for file in TRANSCRIPTS.glob("*.jsonl")}


async def test_kept_calls_become_a_transcript_with_every_request_whole_that_comes_to_the_same(tmp_path: Path) -> None:
    calls: list[LlmCall] = []
    look = called(("instrument", {"name": "arithmetic"}))
    llm, clock = ScriptedLlm(LlmOutage("no route"), look, completion("?"), proposed()), ManualClock()
    topic = TopicRequest(topic="Is 1e-4 better than 1e-5?", instruments=[*FOLDERS.values()])
    planner = LlmPlanner(Asker(llm, LlmSettings(model="some-llm"), clock, keep=calls.append))
    planning = asyncio.create_task(planner.propose(topic))
    while not planning.done():
        await asyncio.sleep(0)
        clock.advance(1.0)
    found = await planning
    calls.insert(
        0, calls[0].model_copy(update={"purpose": "write", "request": {"messages": [{"role": "user", "content": "?"}]}})
    )
    file = tmp_path / "kept.jsonl"
    save_transcript(file, calls)
    turns, messages, fields = read_transcript(file), list[dict[str, Any]](), dict[str, Any]()
    for turn, call in zip(turns, calls, strict=True):
        messages, fields = (turn.prompt or messages) + turn.new, turn.fields or fields
        assert call.request == {**fields, "messages": messages} or call.purpose == "write"
        assert (turn.answer, turn.error) == (call.answer, call.error)
    again = LlmPlanner(Asker(ReplayEndpoint([file]), LlmSettings(model="some-llm"), SystemClock()))
    assert await again.propose(topic) == found
    with pytest.raises(LlmUnusable):
        await ReplayEndpoint([file]).answer({"messages": []})


def test_a_call_without_messages_is_kept_as_it_is(tmp_path: Path) -> None:
    request: dict[str, Any] = {"model": "some-llm", "input": "Compare 1e-5 and 4e-5."}
    call = LlmCall(purpose="other", model="some-llm", request=request, answer={"output": "?"}, at=0.0)
    save_transcript(tmp_path / "kept.jsonl", [call, call.model_copy(update={"answer": None, "error": "no route"})])
    turns = read_transcript(tmp_path / "kept.jsonl")
    assert [turn.fields for turn in turns] == [request, request]
    assert [(turn.answer, turn.error) for turn in turns] == [({"output": "?"}, None), (None, "no route")]
