"""Token reuse in text completions: if a prompt continues an earlier prompt and its answer, keep the sampled ids.

Pure functions, given the tokenizer (`tokenise`, `decode`). Only the text after the answer is tokenised. If the client repeats the
text that the engine cut off at a stop string, its ids are kept too; otherwise only the ids up to the cut are kept.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from swarm.protocol.episodes import RecordedCall
from swarm.server.gateway.token_reuse import Decode, ForkCause, Prompt

Tokenise = Callable[[str], Awaitable[list[int]]]
"""Tokenises a text, without adding the tokens that begin a prompt."""


@dataclass(frozen=True, slots=True)
class _Continuation:
    """An earlier call that the prompt continues: the ids to keep, and the text that follows them."""

    call: RecordedCall
    ids: list[int]
    rest: str


async def continued_text(
    prompt: str | list[int], earlier: Sequence[RecordedCall], tokenise: Tokenise, decode: Decode
) -> Prompt:
    """Build the prompt of a text completion, given the earlier calls of its episode."""
    calls = [call for call in earlier if call.complete and call.dialect == "completions"]
    if not isinstance(prompt, str):
        return _continued_ids(prompt, calls)
    best: _Continuation | None = None
    cause: ForkCause | None = None
    resumed = reached = (
        0  # prompt lengths: of the continued call, and of the longest call whose answer is not continued
    )
    for call in calls:
        before = _text_of(call.request["prompt"], decode)
        if not prompt.startswith(before) or len(prompt) == len(before):
            continue
        found = _after_answer(call, prompt[len(before) :], decode)
        if isinstance(found, ForkCause):
            cause = cause or found
            reached = max(reached, len(before))
        elif found is not None and (best is None or len(found.ids) >= len(best.ids)):
            best, resumed = found, len(before)
    if best is None:
        return Prompt(messages=(), fork_cause=cause)
    new = await tokenise(best.rest) if best.rest else []
    forked = cause if reached > resumed else None
    return Prompt(messages=(), prompt_ids=[*best.ids, *new], parent_call_id=best.call.call_id, fork_cause=forked)


def _continued_ids(prompt: list[int], calls: Sequence[RecordedCall]) -> Prompt:
    """Build the prompt from token ids, which stay as sent. Its parent is the longest call whose prompt and sampled ids begin it."""
    parent, size = None, 0
    for call in calls:
        held = [*call.prompt_ids, *call.sampled_ids]
        if len(held) >= size and prompt[: len(held)] == held:
            parent, size = call.call_id, len(held)
    return Prompt(messages=(), prompt_ids=prompt, parent_call_id=parent)


def _after_answer(call: RecordedCall, text: str, decode: Decode) -> _Continuation | ForkCause | None:
    """Split `text`, which follows the call's prompt, into the call's answer and new text.

    Returns: the ForkCause if `text` does not continue the answer token by token; None if the answer has no visible text.
    """
    shown = str(call.answer["choices"][0]["text"])
    if not shown.strip():
        return None
    said = next((same for same in (shown, shown.rstrip(), shown.strip()) if same and text.startswith(same)), None)
    if said is None:
        return ForkCause.ANSWER_EDITED
    rest, seen = text[len(said) :], shown.lstrip()
    sampled = decode(call.sampled_ids).lstrip()  # decoding may drop the leading blank that the client saw
    whole = _Continuation(call, [*call.prompt_ids, *call.sampled_ids], rest)
    if not sampled.startswith(seen):  # special tokens are not shown
        return whole if call.finish_reason == "length" else ForkCause.STOP_STRING_CUT
    cut = sampled[len(seen) :]
    if rest.startswith(cut):
        return replace(whole, rest=rest[len(cut) :])
    for end in range(len(call.sampled_ids) - 1, 0, -1):
        kept = decode(call.sampled_ids[:end]).lstrip()
        if kept == seen:
            return _Continuation(call, [*call.prompt_ids, *call.sampled_ids[:end]], rest)
        if len(kept) < len(seen):
            break
    return ForkCause.STOP_STRING_CUT


def _text_of(prompt: Any, decode: Decode) -> str:
    return prompt if isinstance(prompt, str) else decode(prompt)
