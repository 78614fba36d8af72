"""Turns a request's sampled tokens into recorded calls, and recorded calls into the prompt of the next request.

Requests and answers are recorded in the engine's form, whatever their dialect.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from foundation.clock import Clock
from foundation.ids import Ids
from swarm.engine.seam import Dialect as EngineDialect
from swarm.engine.seam import Engine, Sampled, SampledChoice, SampledEvent
from swarm.protocol.episodes import CallFailure, RecordedCall, VersionSpan, WeightsVersion
from swarm.protocol.sampling_mask import SamplingMask, allows
from swarm.server.gateway.dialect import Dialect
from swarm.server.gateway.forms import Assembly, message_of, prompt_body, prompt_settings
from swarm.server.gateway.message_form import Message
from swarm.server.gateway.open_episodes import OpenEpisodes
from swarm.server.gateway.sampling import recorded_sampling
from swarm.server.gateway.text_token_reuse import continued_text
from swarm.server.gateway.token_reuse import EarlierCall, Prompt, TokenReuse
from swarm.server.state.calls import OpenCall


@dataclass(slots=True)
class PartialChoice:
    """The part of a streamed choice that has arrived. `begun` holds (index of first token, weights version) for each span of tokens."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    masks: list[bytes] = field(default_factory=list)
    finish_reason: str | None = None
    begun: list[tuple[int, WeightsVersion]] = field(default_factory=list)

    def take(self, new: SampledChoice) -> None:
        """Append new tokens. The version spans of `new` are relative to its first token."""
        for span in new.versions:
            last = self.begun[-1][1] if self.begun else None
            if last is not span.version and last != span.version:  # nearly always the same object
                self.begun.append((len(self.ids) + span.start, span.version))
        self.ids += new.sampled_ids
        self.logprobs += new.logprobs
        self.masks += new.masks
        self.finish_reason = new.finish_reason or self.finish_reason

    def choice(self, index: int) -> SampledChoice:
        """Return the choice as sampled so far."""
        ends = [start for start, _ in self.begun[1:]] + [len(self.ids)]
        return SampledChoice(
            index=index,
            sampled_ids=self.ids,
            logprobs=self.logprobs,
            masks=self.masks,
            finish_reason=self.finish_reason,
            versions=[
                VersionSpan(start=start, end=end, version=version)
                for (start, version), end in zip(self.begun, ends, strict=False)
            ],
        )


@dataclass(slots=True, kw_only=True)
class Generation:
    """The choices of one prompt while they are being sampled.

    `body` is the engine's request, with defaults filled in. `first` is the index of its first choice in the whole answer.
    """

    call: OpenCall
    agent: str | None
    dialect: Dialect
    body: dict[str, Any]
    prompt: Prompt
    first: int = 0
    prompt_ids: list[int] = field(default_factory=list)
    _choices: dict[int, PartialChoice] = field(default_factory=dict)
    _sampled: Sampled | None = None
    _assembly: Assembly | None = None

    def take_all(self, sampled: Sampled) -> None:
        """Add a whole answer."""
        self.prompt_ids = sampled.prompt_ids
        self._sampled = sampled

    def take(self, event: SampledEvent) -> None:
        """Add the next event of a stream."""
        if self._assembly is None:
            self._assembly = self.dialect.form.assembly(self.body)
        self._assembly.add(event)
        if event.prompt_ids is not None:
            self.prompt_ids = event.prompt_ids
        for new in event.choices:
            partial = self._choices.get(new.index)
            if partial is None:
                partial = self._choices[new.index] = PartialChoice()
            partial.take(new)

    def start_over(self) -> None:
        """Discard a stream that was cut off before the client saw anything."""
        self._choices, self._assembly, self.prompt_ids = {}, None, []

    @property
    def streamed(self) -> bool:
        """Whether the client got each choice as it was sampled, rather than all at the end."""
        return self._assembly is not None

    @property
    def finished(self) -> bool:
        return self._assembly is not None and self._assembly.finished

    @property
    def choices(self) -> dict[int, SampledChoice]:
        """The choices sampled so far, by index."""
        if self._sampled is not None:
            return {choice.index: choice for choice in self._sampled.choices}
        return {index: partial.choice(index) for index, partial in self._choices.items()}

    def answer(self) -> dict[str, Any]:
        """Return the answer so far; empty before its beginning."""
        if self._sampled is not None:
            return self._sampled.answer
        return {} if self._assembly is None else self._assembly.answer()


class Records:
    """Creates recorded calls, and remembers how the template rendered their prompts while their episodes are open."""

    def __init__(self, clock: Clock, ids: Ids, is_open: Callable[[str], bool]) -> None:
        self._clock = clock
        self._ids = ids
        self._earlier: OpenEpisodes[dict[str, EarlierCall]] = OpenEpisodes(is_open, dict)

    def make(
        self, generation: Generation, *, complete: bool = True, failure: CallFailure | None = None
    ) -> list[RecordedCall]:
        """Create one record per choice. In a stream that was cut off, the choices that had ended are complete.

        `failure` is recorded with each choice that did not end or, if all ended, with an extra choice without tokens.
        """
        spliced = generation.prompt.prompt_ids
        prompt_ids = generation.prompt_ids or spliced or []
        kept_splice = spliced is not None and spliced == prompt_ids
        answer, choices, call = generation.answer(), generation.choices, generation.call
        records = []
        indices = sorted(choices) or ([0] if not complete else [])
        if failure is not None and all(_ended(generation, choices.get(index)) for index in indices):
            indices.append(indices[-1] + 1)
        for index in indices:
            choice = choices.get(index) or SampledChoice(index=index)
            ended = complete or _ended(generation, choice)
            record = RecordedCall(
                call_id=self._ids.new("call"),
                episode_id=call.episode_id,
                index=call.index,
                agent=generation.agent,
                dialect=generation.dialect.name,
                prompt_ids=prompt_ids,
                sampled_ids=choice.sampled_ids,
                logprobs=choice.logprobs,
                mask=_mask(choice),
                sampling=recorded_sampling(generation.body),
                versions=choice.versions,
                finish_reason=choice.finish_reason,
                complete=ended,
                failure=None if ended else failure,
                parent_call_id=generation.prompt.parent_call_id if kept_splice else None,
                fork_cause=generation.prompt.fork_cause,
                started_at=call.opened_at,
                latency_s=max(0.0, self._clock.now() - call.opened_at),
                request=generation.body,
                answer=generation.dialect.form.choice_of(answer, index) if answer else {},
            )
            records.append(record)
            if record.complete and (message := message_of(record.answer)) is not None:
                rendered = generation.prompt.rendered if kept_splice else prompt_ids
                self._remember(record, message, generation.prompt.messages, rendered or prompt_ids)
        return records

    def earlier(self, calls: Sequence[RecordedCall]) -> list[EarlierCall]:
        """Return the complete chats among the calls of an open episode, in the form that token reuse needs."""
        known = self._earlier.of(calls[0].episode_id) if calls else {}
        return [known[call.call_id] for call in calls if call.call_id in known]

    def _remember(
        self, call: RecordedCall, message: Message, messages: tuple[Message, ...], rendered: list[int]
    ) -> None:
        self._earlier.of(call.episode_id)[call.call_id] = EarlierCall(
            call_id=call.call_id,
            agent=call.agent,
            sent=tuple(call.request["messages"]),
            messages=messages,
            answer=message,
            settings=prompt_settings(call.request),
            prompt_ids=call.prompt_ids,
            rendered=rendered,
            sampled_ids=call.sampled_ids,
            stopped=_stopped(call),
        )


def _mask(choice: SampledChoice) -> SamplingMask | None:
    """Return the choice's sampling mask; None if it has no tokens, or if a token has no row or is not allowed by its row."""
    rows, ids = choice.masks, choice.sampled_ids
    if not ids or len(rows) != len(ids) or not all(map(allows, rows, ids)):
        return None
    return SamplingMask.of(rows)


def _stopped(call: RecordedCall) -> bool:
    """True if the choice ended at a stop string or a stop token that the client named, rather than at the model's own end token."""
    reason, tokens = call.answer["choices"][0].get("stop_reason"), call.request.get("stop_token_ids")
    return isinstance(reason, str) or (isinstance(tokens, list) and reason in tokens)


def _ended(generation: Generation, choice: SampledChoice | None) -> bool:
    """True if the client got the whole choice, even if it did not get the whole answer."""
    return choice is not None and generation.streamed and choice.finish_reason is not None


class Prompts:
    """Builds prompts with token reuse, for chats and for text completions, with one engine's tokenizer."""

    def __init__(self, engine: Engine, records: Records) -> None:
        self._engine = engine
        self._records = records
        self._chats = TokenReuse(engine.decode)

    async def of(
        self, dialect: EngineDialect, body: dict[str, Any], agent: str | None, calls: Sequence[RecordedCall]
    ) -> Prompt:
        """Build the prompt for the engine's request `body`. If `body` sends an earlier call's answer back, the prompt reuses that
        call's exact tokens."""
        if dialect == "completions":
            return await continued_text(body["prompt"], calls, self._tokenise, self._engine.decode)

        async def render(messages: list[dict[str, Any]], add_generation_prompt: bool) -> list[int]:
            asked = prompt_body(body, messages)
            return await self._engine.render("chat.completions", asked, add_generation_prompt=add_generation_prompt)

        earlier = self._records.earlier(calls)
        return await self._chats.prompt_for(body["messages"], prompt_settings(body), agent, earlier, render)

    async def count(self, body: dict[str, Any], calls: Sequence[RecordedCall]) -> int:
        """Return the number of tokens in the prompt that the engine would get for the chat `body`."""
        prompt = await self.of("chat.completions", body, None, calls)
        if prompt.prompt_ids is not None:
            return len(prompt.prompt_ids)
        return len(await self._engine.render("chat.completions", prompt_body(body, body["messages"])))

    async def _tokenise(self, text: str) -> list[int]:
        return await self._engine.render("completions", {"prompt": text, "add_special_tokens": False})
