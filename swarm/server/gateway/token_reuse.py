"""Token reuse in chats: if a request sends an earlier answer back, keep the sampled ids and tokenise only the new text.

Pure functions, given the template (`render`, `decode`).

We remember which messages a call's prompt represents. If the call continues another call, these are that call's messages, its
answer as recorded rather than as sent back, and the new messages. The template renders them all once (`full`). If it renders
the recorded answer differently from the sampled tokens, or rewrites earlier text, the timeline forks, and we record a cause.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import Any

from swarm.server.gateway.message_form import (
    Message,
    has_only_text,
    normal_message,
    normal_text,
    spelling,
)

Render = Callable[[list[Message], bool], Awaitable[list[int]]]
"""Renders (messages, add_generation_prompt) to token ids, with the request's own tools and template settings."""
Decode = Callable[[list[int]], str]


class ForkCause(StrEnum):
    """Why a request that belongs to an earlier call does not continue it token by token."""

    ANSWER_EDITED = "answer_edited"
    HISTORY_CHANGED = "history_changed"
    TOOLS_CHANGED = "tools_changed"
    TEMPLATE_REWRITES_HISTORY = "template_rewrites_history"
    TEMPLATE_CHANGES_MESSAGE = "template_changes_message"
    NOT_ONLY_TEXT = "not_only_text"
    STOP_STRING_CUT = "stop_string_cut"


@dataclass(frozen=True, kw_only=True)
class EarlierCall:
    """A recorded choice, with the fields that later calls need.

    Args:
        sent: the messages as the client sent them.
        messages: the messages that its prompt represents.
        answer: the message that a client sends back for it.
        settings: tools and template settings.
        rendered: the template's rendering of `messages`; equal to `prompt_ids` if the call did not continue another call.
    """

    call_id: str
    agent: str | None
    sent: tuple[Message, ...]
    messages: tuple[Message, ...]
    answer: Message
    settings: Any
    prompt_ids: list[int]
    rendered: list[int]
    sampled_ids: list[int]
    stopped: bool = False
    """Whether the choice ended at a stop string or stop token of the client's, which the answer does not show."""

    @cached_property
    def normal_sent(self) -> list[dict[str, Any]]:
        return [normal_message(message) for message in self.sent]

    @cached_property
    def normal_answer(self) -> dict[str, Any]:
        return normal_message(self.answer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """The prompt that a request is sampled from. If `prompt_ids` is None, the prompt is the template's rendering of `messages`."""

    prompt_ids: list[int] | None = None
    rendered: list[int] | None = None
    messages: tuple[Message, ...]
    parent_call_id: str | None = None
    fork_cause: ForkCause | None = None


class TokenReuse:
    """Token reuse with one template. `_closing` holds the tokens that the template writes after an assistant's message."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._closing: list[int] | None = None

    async def prompt_for(
        self,
        messages: Sequence[Message],
        settings: Any,
        agent: str | None,
        earlier: Sequence[EarlierCall],
        render: Render,
    ) -> Prompt:
        """Build the prompt of a new request, given the earlier calls of its episode."""
        sent = tuple(messages)
        fresh = Prompt(messages=sent)
        if not earlier:
            return fresh
        normal = [normal_message(message) for message in sent]
        parent, cause = _parent(sent, normal, settings, agent, earlier)
        if cause is ForkCause.ANSWER_EDITED:
            longer = [call for call in earlier if parent is None or len(call.sent) > len(parent.sent)]
            same = await self._parent_by_template(normal, sent, settings, longer, render)
            parent, cause = (parent, cause) if same is None else (same, None)
        if parent is None:
            return Prompt(messages=sent, fork_cause=cause or _changed_history(normal, agent, earlier))
        if not has_only_text(list(sent)):
            return Prompt(messages=sent, fork_cause=ForkCause.NOT_ONLY_TEXT)
        prompt = await self._continued(parent, sent, render)
        return replace(prompt, fork_cause=prompt.fork_cause or cause or _changed_between(normal, parent, earlier))

    async def _parent_by_template(
        self,
        normal: list[dict[str, Any]],
        sent: tuple[Message, ...],
        settings: Any,
        earlier: Sequence[EarlierCall],
        render: Render,
    ) -> EarlierCall | None:
        """Find the call whose answer came back with changes that the template does not render, so the model sees no change."""
        for call in sorted(earlier, key=lambda call: len(call.sent), reverse=True):
            size = len(call.sent)
            if len(normal) <= size or normal[:size] != call.normal_sent or call.settings != settings:
                continue
            if normal[size]["role"] != "assistant" or not has_only_text([sent[size]]):
                continue
            if normal[size].get("content") != call.normal_answer.get("content"):
                continue
            recorded, returned = [await render([*call.messages, each], False) for each in (call.answer, sent[size])]
            if recorded == returned:
                return call
        return None

    # -- continuing a call -----------------------------------------------------------------------------------------

    async def _continued(self, parent: EarlierCall, sent: tuple[Message, ...], render: Render) -> Prompt:
        """Splice the prompt from the parent's prompt, its sampled tokens, and what the template writes after them."""
        messages = (*parent.messages, parent.answer, *sent[len(parent.sent) + 1 :])
        full = await render(list(messages), True)
        closing = await self._closing_of(render)
        end = self._end_of_answer(parent, full, closing)
        if end is None:
            cause = await self._why_not(parent, full, closing, render)
            return Prompt(messages=sent, fork_cause=cause)
        ended = bool(closing) and parent.sampled_ids[-1:] == closing[:1]
        suffix = full[end + 1 :] if ended else full[end:]
        return Prompt(
            prompt_ids=[*parent.prompt_ids, *parent.sampled_ids, *suffix],
            rendered=full,
            messages=messages,
            parent_call_id=parent.call_id,
        )

    def _end_of_answer(self, parent: EarlierCall, full: list[int], closing: list[int]) -> int | None:
        """Return the index in `full` at which the parent's answer ends and the closing tokens begin; None if the template changed
        the answer."""
        start = len(parent.rendered)
        if full[:start] != parent.rendered or not closing:
            return None
        end = _find(full, closing, start)
        while end is not None:
            if self._says_what_was_sampled(parent, full[start:end], closing):
                return end
            # The answer itself may contain the closing tokens: try later matches until the answer gets too long.
            if end - start > len(parent.sampled_ids) * 2 + 64:
                return None
            end = _find(full, closing, end + 1)
        return None

    def _says_what_was_sampled(self, parent: EarlierCall, body: list[int], closing: list[int]) -> bool:
        """True if `body` equals the sampled answer, as ids or as text, with or without the token with which the model ended it."""
        sampled = [parent.sampled_ids]
        if not parent.stopped or parent.sampled_ids[-1:] == closing[:1]:
            sampled.append(parent.sampled_ids[:-1])
        if body in sampled:
            return True
        text = normal_text(self._decode(body))
        return any(text == normal_text(self._decode(ids)) for ids in sampled)

    async def _why_not(self, parent: EarlierCall, full: list[int], closing: list[int], render: Render) -> ForkCause:
        alone = await render([*parent.messages, parent.answer], False)
        if full[: len(alone)] != alone:
            return ForkCause.TEMPLATE_REWRITES_HISTORY
        written = normal_text(self._decode(alone[len(parent.rendered) : len(alone) - len(closing)]))
        if alone[: len(parent.rendered)] == parent.rendered and parent.stopped:
            sampled = normal_text(self._decode(parent.sampled_ids))
            if sampled.startswith(written):
                return ForkCause.STOP_STRING_CUT
        return ForkCause.TEMPLATE_CHANGES_MESSAGE

    async def _closing_of(self, render: Render) -> list[int]:
        """Return the closing tokens: the common end of two different rendered answers. Computed once."""
        if self._closing is None:
            one, other = [
                await render([{"role": "user", "content": "a"}, {"role": "assistant", "content": text}], False)
                for text in ("x", "y")
            ]
            size = 0
            while size < min(len(one), len(other)) and one[-1 - size] == other[-1 - size]:
                size += 1
            self._closing = one[len(one) - size :]
        return self._closing


def _parent(
    sent: Sequence[Message],
    normal: list[dict[str, Any]],
    settings: Any,
    agent: str | None,
    earlier: Sequence[EarlierCall],
) -> tuple[EarlierCall | None, ForkCause | None]:
    """Return the longest call whose messages and answer begin the request (of equals, the most similar), and why no longer one does."""
    best: list[EarlierCall] = []
    cause: ForkCause | None = None
    # Message counts: of the calls that may be continued, and of the longest call that may not.
    resumed = reached = -1
    for call in earlier:
        size = len(call.sent)
        if size < resumed or len(normal) <= size or normal[:size] != call.normal_sent:
            continue
        if (found := _why_other(normal[size], settings, call)) is None:
            best, resumed = [*(best if size == resumed else ()), call], size
        elif size > reached or (size == reached and found is ForkCause.TOOLS_CHANGED):
            cause, reached = found, size
    return _most_similar(best, sent, agent), cause if reached > resumed else None


def _most_similar(calls: Sequence[EarlierCall], sent: Sequence[Message], agent: str | None) -> EarlierCall | None:
    """Return the best of several equivalent calls: the one spelt most like the request, then the agent's own, then the latest."""
    if len(calls) < 2:
        return calls[0] if calls else None
    spelt = [spelling(message) for message in sent]

    def rank(call: EarlierCall) -> tuple[int, bool]:
        pairs = zip(spelt, map(spelling, (*call.sent, call.answer)), strict=False)
        alike = sum(one == other for message, known in pairs for one, other in zip(message, known, strict=True))
        return alike, call.agent == agent

    return max(reversed(calls), key=rank)


def _why_other(message: dict[str, Any], settings: Any, call: EarlierCall) -> ForkCause | None:
    """Return why a request forks at `message`, which follows the call's messages.

    Returns: None if `message` is the call's answer and the settings are equal.
    """
    if message != call.normal_answer:
        return ForkCause.ANSWER_EDITED if message["role"] == "assistant" else ForkCause.HISTORY_CHANGED
    return ForkCause.TOOLS_CHANGED if call.settings != settings else None


def _changed_history(
    normal: list[dict[str, Any]], agent: str | None, earlier: Sequence[EarlierCall]
) -> ForkCause | None:
    """Detect a changed history: the request contains answers that do not come from any call of its agent.

    Messages with which an earlier call of the agent also began (a system prompt, worked examples) do not count.
    """
    own = [call for call in earlier if call.agent == agent]
    shared = max((_shared_head(normal, call.normal_sent) for call in own), default=0)
    carries = any(message["role"] in ("assistant", "tool", "function") for message in normal[shared:])
    return ForkCause.HISTORY_CHANGED if own and carries else None


def _changed_between(
    normal: list[dict[str, Any]], parent: EarlierCall, earlier: Sequence[EarlierCall]
) -> ForkCause | None:
    """Detect a changed history: the request sends a later answer back, but not after the messages that it answered."""
    begun = len(parent.sent) + 1
    later = [message for message in normal[begun:] if message["role"] == "assistant"]
    if not later:
        return None
    descends = (call for call in earlier if len(call.sent) > begun and call.normal_sent[:begun] == normal[:begun])
    return ForkCause.HISTORY_CHANGED if any(call.normal_answer in later for call in descends) else None


def _shared_head(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> int:
    size = 0
    while size < min(len(one), len(other)) and one[size] == other[size]:
        size += 1
    return size


def _find(ids: list[int], wanted: list[int], start: int) -> int | None:
    for at in range(start, len(ids) - len(wanted) + 1):
        if ids[at] == wanted[0] and ids[at : at + len(wanted)] == wanted:
            return at
    return None
