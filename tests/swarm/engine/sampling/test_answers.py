"""What the client sees of vLLM's answers, beside what is booked of them."""

from __future__ import annotations

from typing import Any

import pytest

from swarm.engine.sampling.answers import Asked, StreamBook, TokenLimits, book_answer
from swarm.engine.sampling.mask_files import no_rows
from swarm.engine.seam import SampleRequest

TOLD: dict[str, Any] = {"text_offset": [0], "tokens": ["a"], "token_logprobs": [-0.5], "top_logprobs": [{"a": -0.5}]}


def choice() -> dict[str, Any]:
    own = {"index": 0, "text": "a", "finish_reason": "stop", "token_ids": [5], "prompt_token_ids": [1, 2]}
    return own | {"logprobs": dict(TOLD)}


@pytest.mark.parametrize(("wanted", "told"), [(None, None), (0, TOLD), (2, TOLD)])
def test_a_text_tells_logprobs_where_they_are_asked_for_even_of_the_sampled_tokens_alone(
    wanted: int | None, told: Any
) -> None:
    asked = Asked.by(SampleRequest(dialect="completions", body={"prompt": "x", "logprobs": wanted}))
    whole = book_answer({"choices": [choice()]}, asked, lambda *_: [], no_rows, TokenLimits(None, 100, ()))
    streamed = StreamBook(asked, lambda *_: [], no_rows).event({"choices": [choice()]})
    assert whole.answer["choices"][0]["logprobs"] == told
    assert streamed.data is not None
    assert streamed.data["choices"][0]["logprobs"] == told
    assert whole.choices[0].logprobs == streamed.choices[0].logprobs == [-0.5]


@pytest.mark.parametrize("wanted", [None, False, 0])
def test_a_chat_that_did_not_ask_for_logprobs_is_told_none(wanted: Any) -> None:
    body = {"messages": [], "prompt": "x", "logprobs": wanted}
    assert not Asked.by(SampleRequest(dialect="chat.completions", body=body)).logprobs


END = 9


@pytest.mark.parametrize(
    ("ids", "fields", "finish"),
    [
        ([5, 6, 7], {"max_tokens": 3}, "length"),
        ([5, 6, 7], {"max_tokens": 8, "max_completion_tokens": 3}, "length"),
        ([5, 6, 7, 8], {}, "length"),  # the context is full
        ([5, 6, 7], {"max_tokens": 4}, "tool_calls"),
        ([5, 6, END], {"max_tokens": 3}, "tool_calls"),
        ([5, 6, END], {"max_tokens": 3, "ignore_eos": True}, "length"),
        ([5, 6, 7], {"max_tokens": 3, "stop_reason": "###"}, "tool_calls"),
        ([5, 6, 7], {"max_tokens": 3, "stop_reason": 7}, "tool_calls"),
    ],
)
def test_an_answer_with_a_tool_call_that_a_limit_cut_is_recorded_and_shown_as_cut(
    ids: list[int], fields: dict[str, Any], finish: str
) -> None:
    body = {"messages": []} | fields
    request = SampleRequest(dialect="chat.completions", body=body)
    own = {"index": 0, "message": {"role": "assistant", "tool_calls": []}, "finish_reason": "tool_calls"}
    own |= {"stop_reason": body.pop("stop_reason", None), "token_ids": ids}
    own["logprobs"] = {"content": [{"logprob": -0.5} for _ in ids]}
    answer = {"prompt_token_ids": [1, 2], "choices": [own]}
    limits = TokenLimits.of(request, 6, {END})
    whole = book_answer(answer, Asked.by(request), lambda *_: [], no_rows, limits)
    assert whole.choices[0].finish_reason == whole.answer["choices"][0]["finish_reason"] == finish
