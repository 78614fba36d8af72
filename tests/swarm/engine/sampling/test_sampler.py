"""Which weights sampled which token, over changes that fall into a call."""

from __future__ import annotations

from swarm.engine.sampling.mask_files import FLAG
from swarm.engine.sampling.request_ids import CHOICES
from swarm.engine.sampling.sampler import WeightSpans, with_arguments
from swarm.protocol.episodes import VersionSpan, WeightsVersion


def version(step: int) -> WeightsVersion:
    return WeightsVersion(run_id="r", step=step)


def span(start: int, end: int, step: int) -> VersionSpan:
    return VersionSpan(start=start, end=end, version=version(step))


def test_a_call_without_a_change_has_one_span() -> None:
    call = WeightSpans(version(1)).begin("a")
    assert call.spans(0, 0, 5) == [span(0, 5, 1)]
    assert call.spans(0, 0, 0) == []


def test_each_choice_of_each_call_is_split_where_it_stood() -> None:
    spans = WeightSpans(version(1))
    one, two, waiting = spans.begin("one"), spans.begin("two"), spans.begin("waiting")
    spans.change(version(2), {"chatcmpl-one-0123abcd": 3, "0_chatcmpl-two-0123abcd": 4, "1_chatcmpl-two-0123abcd": 1})
    assert one.spans(0, 0, 5) == [span(0, 3, 1), span(3, 5, 2)]
    assert two.spans(0, 0, 5) == [span(0, 4, 1), span(4, 5, 2)]
    assert two.spans(1, 0, 5) == [span(0, 1, 1), span(1, 5, 2)]
    assert waiting.spans(0, 0, 5) == [span(0, 5, 2)]
    assert spans.begin("later").spans(0, 0, 1) == [span(0, 1, 2)]


def test_parts_of_a_stream_count_from_their_own_start_over_two_changes() -> None:
    spans = WeightSpans(version(1))
    call = spans.begin("a")
    spans.change(version(2), {"chatcmpl-a-00000000": 2})
    spans.change(version(3), {"chatcmpl-a-00000000": 4})
    assert call.spans(0, 1, 6) == [span(0, 1, 1), span(1, 3, 2), span(3, 5, 3)]
    assert call.spans(0, 5, 6) == [span(0, 1, 3)]


def test_a_call_that_is_over_is_forgotten() -> None:
    spans = WeightSpans(version(1))
    call = spans.begin("a")
    spans.end(call)
    spans.change(version(2), {"chatcmpl-a-00000000": 1})
    assert call.spans(0, 0, 3) == [span(0, 3, 1)]


def test_text_completions_are_known_by_their_own_ids() -> None:
    spans = WeightSpans(version(1))
    one, several = spans.begin("one"), spans.begin("several")
    spans.change(version(2), {"cmpl-one-0-0123abcd": 3, "1_cmpl-several-0-0123abcd": 2})
    assert [span.end for span in one.spans(0, 0, 5)] == [3, 5]
    assert [span.end for span in several.spans(1, 0, 5)] == [2, 5]


def test_a_client_keeps_its_own_arguments_of_an_extension_and_cannot_set_ours() -> None:
    theirs = {"vllm_xargs": {"mine": 1, CHOICES: "x", FLAG: []}}
    assert with_arguments(theirs, {})["vllm_xargs"] == {"mine": 1}
    assert with_arguments(theirs, {CHOICES: 2})["vllm_xargs"] == {"mine": 1, CHOICES: 2}
    for body in ({}, {"vllm_xargs": None}, {"vllm_xargs": "x"}):
        assert with_arguments(body, {}) == body
