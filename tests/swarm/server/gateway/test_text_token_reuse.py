"""The echo rule for text completions over tokenizers whose text does not simply add up."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models

from swarm.protocol.episodes import RecordedCall, RecordedSampling
from swarm.server.gateway.text_token_reuse import continued_text
from swarm.server.gateway.token_reuse import ForkCause, Prompt

pytestmark = pytest.mark.anyio

START, END, QUESTION, FOO, BAR, NEW = 0, 1, 3, 4, 5, 99


def blank_dropping() -> Tokenizer:
    """It decodes as that of Llama 2 does: a blank at the beginning of all is left out."""
    words = {"<s>": START, "</s>": END, "<unk>": 2, "▁Q": QUESTION, "▁foo": FOO, "▁bar": BAR}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    pieces = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(pieces)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


TOKENIZER = blank_dropping()


async def following(shown: str, sampled: list[int], text: str, finish: str = "stop") -> tuple[Prompt, list[str]]:
    """The prompt for `text` after an answer to " Q", and what of it was tokenised."""
    tokenised: list[str] = []

    async def tokenise(rest: str) -> list[int]:
        tokenised.append(rest)
        return [NEW]

    def decode(ids: list[int]) -> str:
        return str(TOKENIZER.decode(ids, skip_special_tokens=False))

    call = RecordedCall(
        call_id="call-1",
        episode_id="ep-1",
        index=0,
        agent=None,
        dialect="completions",
        prompt_ids=[START, QUESTION],
        sampled_ids=sampled,
        logprobs=[0.0] * len(sampled),
        sampling=RecordedSampling(temperature=1.0),
        versions=[],
        finish_reason=finish,
        started_at=0.0,
        latency_s=0.0,
        request={"prompt": " Q"},
        answer={"choices": [{"text": shown}]},
    )
    return await continued_text(text, [call], tokenise, decode), tokenised


async def test_an_end_token_is_not_in_the_next_prompt_where_decoding_drops_the_first_blank() -> None:
    prompt, tokenised = await following(" foo bar", [FOO, BAR, END], " Q foo bar more")
    assert (prompt.prompt_ids, prompt.fork_cause) == ([START, QUESTION, FOO, BAR, NEW], None)
    assert tokenised == [" more"]


async def test_a_stop_string_is_not_in_the_next_prompt_where_decoding_drops_the_first_blank() -> None:
    prompt, tokenised = await following(" foo", [FOO, BAR], " Q foo more")
    assert (prompt.prompt_ids, prompt.fork_cause) == ([START, QUESTION, FOO, NEW], None)
    assert tokenised == [" more"]


async def test_a_stop_string_that_is_written_again_stands_where_decoding_drops_the_first_blank() -> None:
    prompt, tokenised = await following(" foo", [FOO, BAR], " Q foo bar more")
    assert (prompt.prompt_ids, prompt.fork_cause) == ([START, QUESTION, FOO, BAR, NEW], None)
    assert tokenised == [" more"]


async def test_an_answer_that_is_not_found_in_what_was_sampled_forks() -> None:
    """A special token in the middle is sampled, but not shown; where the answer was cut is not known."""
    prompt, _ = await following(" foo bar", [FOO, START, BAR, END], " Q foo bar more")
    assert (prompt.prompt_ids, prompt.fork_cause) == (None, ForkCause.STOP_STRING_CUT)


async def test_all_that_was_sampled_up_to_the_token_limit_stands() -> None:
    prompt, _ = await following(" foo bar", [FOO, START, BAR], " Q foo bar more", finish="length")
    assert (prompt.prompt_ids, prompt.fork_cause) == ([START, QUESTION, FOO, START, BAR, NEW], None)
