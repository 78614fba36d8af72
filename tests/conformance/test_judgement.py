"""What the conformance suite calls a fault, and what not. No model, no framework."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from swarm.protocol.episodes import RecordedCall, RecordedSampling, VersionSpan, WeightsVersion
from tests.conformance.environments import version_of
from tests.conformance.frameworks import Framework, UnknownFramework, declared
from tests.conformance.judgement import Judgement, Outcome, judge
from tests.conformance.table import row, write_judgement, write_trained
from tests.conformance.training import Trained, share_of
from tests.conformance.witness import Seen, Witness

GOOD = Outcome(0, '{"answers": ["42"]}')
BAD = Outcome(1, error="ValueError: no tool was called")
FRAMEWORK = Framework(name="it", exercised="two turns", forced="required", timelines=1)


def call(number: int, prompt: Sequence[int], sampled: Sequence[int], **fields: object) -> RecordedCall:
    version = WeightsVersion(run_id="run")
    made = RecordedCall(
        call_id=f"call-{number}",
        episode_id="episode",
        index=number,
        agent=None,
        dialect="chat.completions",
        prompt_ids=list(prompt),
        sampled_ids=list(sampled),
        logprobs=[-1.0] * len(sampled),
        sampling=RecordedSampling(temperature=1.0),
        versions=[VersionSpan(start=0, end=len(sampled), version=version)],
        finish_reason="stop",
        started_at=0.0,
        latency_s=1.0,
    )
    return made.model_copy(update=fields)


FIRST = call(1, [1, 2], [3, 4])
SECOND = call(2, [1, 2, 3, 4, 5], [6], parent_call_id="call-1")
SEEN = [Seen((1, 2), (3, 4)), Seen((1, 2, 3, 4, 5), (6,))]


def judged(
    calls: Sequence[RecordedCall] = (FIRST, SECOND),
    seen: Sequence[Seen] | None = SEEN,
    framework: Framework = FRAMEWORK,
    swarm: Outcome = GOOD,
    bare: Outcome | None = GOOD,
) -> Judgement:
    return judge(framework, "1.0", calls, seen, swarm, bare)


def test_two_turns_on_one_timeline_conform() -> None:
    judgement = judged()
    assert judgement.conforms, judgement.faults
    assert (judgement.timelines, judgement.forks, judgement.same_answers) == (1, {}, True)


def test_ids_that_vllm_did_not_sample_are_a_fault() -> None:
    judgement = judged(seen=[SEEN[0], replace(SEEN[1], sampled_ids=(7,))])
    assert judgement.faults == [
        "call 2 (chat.completions): vLLM did not sample what is recorded",
        "vLLM sampled 1 answers that are not recorded",
    ]


def test_a_broken_off_call_may_hold_less_than_was_sampled() -> None:
    calls = [FIRST, call(2, SECOND.prompt_ids, [6], parent_call_id="call-1", complete=False)]
    assert judged(calls, seen=[SEEN[0], replace(SEEN[1], sampled_ids=(6, 7, 8))]).conforms


def test_a_call_must_begin_with_the_tokens_that_it_continues() -> None:
    calls = [FIRST, call(2, [1, 2, 3, 9, 5], [6], parent_call_id="call-1")]
    assert "does not begin with the tokens" in judged(calls, seen=None).faults[0]


def test_a_fork_needs_the_tables_leave() -> None:
    calls = [FIRST, call(2, [1, 2, 9], [6], fork_cause="answer_edited")]
    judgement = judged(calls, seen=None)
    assert judgement.faults == ["1 forks by answer_edited, 0 allowed"]
    assert judgement.timelines == 1
    allowed = FRAMEWORK.model_copy(update={"forks": {"answer_edited": 1}})
    assert judged(calls, seen=None, framework=allowed).conforms


def test_a_prompt_that_belongs_to_no_call_is_another_timeline() -> None:
    calls = [FIRST, call(2, [8, 9], [6])]
    assert judged(calls, seen=None).faults == ["2 timelines, 1 expected"]


@pytest.mark.parametrize(("swarm", "bare"), [(GOOD, BAD), (BAD, GOOD), (BAD, BAD), (BAD, None)])
def test_the_script_must_succeed_here_and_there(swarm: Outcome, bare: Outcome | None) -> None:
    assert not judged(swarm=swarm, bare=bare).conforms


def test_the_witness_reads_whole_answers_and_streams() -> None:
    witness = Witness()
    whole = {"prompt_token_ids": [1, 2], "choices": [{"index": 0, "token_ids": [3]}, {"index": 1, "token_ids": [4]}]}
    witness.note(json.dumps(whole).encode(), events=False)
    chunks = [
        {"prompt_token_ids": [1, 2], "choices": [{"index": 0, "token_ids": None}]},
        {"choices": [{"index": 0, "token_ids": [3, 4]}]},
        {"choices": [{"index": 0, "token_ids": [5]}]},
        {"choices": [], "usage": {}},
    ]
    told = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    witness.note(told.encode(), events=True)
    assert witness.seen == [Seen((1, 2), (3,)), Seen((1, 2), (4,)), Seen((1, 2), (3, 4, 5))]


def test_a_row_is_replaced_and_the_others_stay(tmp_path: Path) -> None:
    page, other = tmp_path / "page.md", FRAMEWORK.model_copy(update={"name": "other"})
    page.write_text("before\n<!-- table -->\n<!-- /table -->\nafter\n")
    for framework, judgement in ((other, judged()), (FRAMEWORK, judged(swarm=BAD)), (FRAMEWORK, judged())):
        write_judgement(page, framework, judgement, [FRAMEWORK, other])
    lines = page.read_text().splitlines()
    assert lines[4] == row(FRAMEWORK, judged())
    assert lines[5].startswith("| other |")
    assert (lines[0], lines[-1], len(lines)) == ("before", "after", 8)


TRAINED = Trained(
    framework="it",
    version="1.0",
    calls=4,
    drawn=200,
    trained=190,
    forced=20,
    mismatch=0.012,
    untrained={},
    outcomes=[GOOD, BAD],
)


def test_a_script_may_fail_where_its_calls_are_trained(tmp_path: Path) -> None:
    assert TRAINED.faults == []
    page = tmp_path / "page.md"
    page.write_text("<!-- table -->\n<!-- /table -->\n<!-- training -->\n<!-- /training -->\n")
    write_trained(page, FRAMEWORK, TRAINED, [FRAMEWORK])
    assert "| it | 1.0 | 4 | 200 | 95.0% | 20 | made | 0.012 |" in page.read_text()


def test_a_step_that_was_not_made_and_a_wrong_distribution_are_faults() -> None:
    assert "no step was made" in replace(TRAINED, mismatch=None).faults[0]
    assert "differ by 0.300" in replace(TRAINED, mismatch=0.3).faults[0]
    assert share_of([TRAINED, replace(TRAINED, trained=110)]) == 0.75


def test_every_framework_has_its_script_and_its_pins() -> None:
    for framework in declared():
        assert framework.script_path.is_file(), framework.name
        if framework.requirements is not None:
            assert version_of(framework), framework.name
    with pytest.raises(UnknownFramework, match="did you mean openai"):
        declared(["opnai"])
