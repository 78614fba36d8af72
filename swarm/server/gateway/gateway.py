"""An agent's request from its arrival to its record: open the call, keep sampled tokens, sample, record, answer.

The same course for every dialect. Knows neither HTTP frameworks nor a concrete engine; what is recorded is the Service's.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from foundation.clock import Clock
from foundation.ids import Ids
from swarm.engine.seam import Engine, EngineDown, EngineHealth, SampledEvent, SampleRequest
from swarm.protocol.episodes import POLICY_MODEL, CallFailure, EpisodeRenewal, RecordedCall
from swarm.protocol.errors import ErrorCode, Refusal, SwarmError
from swarm.server.gateway.anthropic import AnthropicMessages
from swarm.server.gateway.chat import ChatCompletions
from swarm.server.gateway.completions import Completions
from swarm.server.gateway.dialect import AnswerStream, Dialect
from swarm.server.gateway.errors import answer_of, bad_request, unknown_model
from swarm.server.gateway.failures import Failures, KeptCall, Progress, is_refusal
from swarm.server.gateway.prompts import Prompts
from swarm.server.gateway.records import Generation, Records
from swarm.server.gateway.responses import Responses
from swarm.server.gateway.retries import Attempt, Retries, body_hash, is_retry
from swarm.server.gateway.sampling import with_defaults
from swarm.server.gateway.streams import Over, closing, merged, together, until_over
from swarm.server.gateway.token_reuse import Prompt
from swarm.server.service import Service
from swarm.server.state.calls import CallAttempt, Ending, OpenCall, Outcome

Answer = TypeVar("Answer")

ENGINE_WAIT_S = 180.0
"""A request that meets a crashed engine waits so long for it to come back, before it fails."""
_AGAIN_AFTER_S = 0.25
_AGENT_HEADER = "x-agent-name"


@dataclass(slots=True, kw_only=True)
class _Request:
    """One request under way. asked: the engine's requests, one for each prompt; generations: empty when it was answered before."""

    dialect: Dialect
    body: dict[str, Any]
    agent: str | None
    call: OpenCall
    is_retry: bool
    began: int
    progress: Progress = field(default_factory=Progress)
    attempt: Attempt | None = None
    asked: list[dict[str, Any]] = field(default_factory=list)
    generations: list[Generation] = field(default_factory=list)
    answered_before: dict[str, Any] | None = None
    sampling: bool = False
    """The engine was asked to sample."""
    closed: bool = False
    kept: KeptCall | None = None

    @property
    def finished(self) -> bool:
        return all(generation.finished for generation in self.generations)

    def engine_answer(self) -> dict[str, Any]:
        return self.dialect.form.joined([generation.answer() for generation in self.generations])

    def answer(self, engine_answer: dict[str, Any]) -> dict[str, Any]:
        return self.dialect.answer(self.body, self.asked[0], engine_answer)

    def stream(self) -> AnswerStream:
        return self.dialect.stream(self.body, self.asked[0])

    def ended(self, outcome: Outcome, at: int) -> CallAttempt:
        """How it went, for whoever judges whether a failure was made good."""
        attempt = self.attempt or Attempt(body_hash(self.dialect.name, self.agent, self.body), None)
        return CallAttempt(
            asked=attempt.body_hash,
            key=attempt.key,
            is_retry=self.is_retry,
            began=self.began,
            ended=at,
            outcome=outcome,
        )


def agent_behind(wanted: str, hosted: str) -> str | None:
    """The agent in `model@agent`, where a model's name has one behind it. Raises: RequestRefused for another model."""
    if wanted in (POLICY_MODEL, hosted):
        return None
    name, mark, agent = wanted.rpartition("@")
    if not mark or name not in (POLICY_MODEL, hosted):
        raise unknown_model(wanted, hosted)
    return agent


class Gateway:
    """Answers the inference surface. All coroutines are called from one event loop."""

    def __init__(self, service: Service, engine: Engine, clock: Clock, ids: Ids) -> None:
        self._service = service
        self._engine = engine
        self._clock = clock
        spoken: list[Dialect] = [ChatCompletions(), Completions(), Responses(), AnthropicMessages()]
        self._dialects = {dialect.name: dialect for dialect in spoken}
        self._records = Records(clock, ids, service.is_open)
        self._prompts = Prompts(engine, self._records)
        self._retries = Retries(service.is_open)
        self._stopping = Ending()
        self._ready = asyncio.Event()
        self._failed = False
        self._failures = Failures(service, clock)
        self._order = itertools.count()
        engine.subscribe(self._on_health)

    def stop(self) -> None:
        """The server ends: break off every call, as `complete` and `stream` say. Those that come later are refused, too."""
        self._stopping.come()

    def decode(self, ids: list[int]) -> str:
        """Text of the ids, special tokens included."""
        return self._engine.decode(ids)

    async def complete(
        self, dialect: str, episode_id: str, lease: str, body: dict[str, Any], headers: Mapping[str, str]
    ) -> dict[str, Any]:
        """A whole answer. Cancelling it stops the sampling, and the call is recorded as broken off.

        Raises: Refusal (lost lease, conflict, not_rolling when the server stops), RequestRefused, EngineDown. What failed on
        our side is recorded as such.
        """
        request = self._open(dialect, episode_id, lease, body, headers)
        try:
            await self._begin(request, headers)
            if request.answered_before is not None:
                return request.answer(request.answered_before)
            await self._while_open(
                request.call, lambda: together([self._sample(request, t) for t in request.generations])
            )
            answer = request.answer(request.engine_answer())
            self._finish(request)
            return answer
        except BaseException as error:  # whatever it is, the call is recorded, and the error goes on
            self._broken(request, error)
            raise
        finally:
            _over(request)

    async def stream(
        self, dialect: str, episode_id: str, lease: str, body: dict[str, Any], headers: Mapping[str, str]
    ) -> AsyncGenerator[bytes, None]:
        """The frames of an answer, token by token. Closing it early stops the sampling, as above.

        Raises, before the first frame: as `complete`. What fails later is told in the stream.
        """
        request = self._open(dialect, episode_id, lease, body, headers)
        stream: AnswerStream | None = None
        try:
            await self._begin(request, headers)
            stream = request.stream()
            if request.answered_before is not None:
                for frame in _replayed(request, stream, request.answered_before):
                    yield frame
                return
            async with aclosing(self._frames(request, stream)) as frames:
                async for frame in frames:
                    yield frame
        except SwarmError as error:
            self._broken(request, error)
            if stream is None or not request.progress.shown:
                raise
            _over(request)  # before the client takes what it is told, for which nothing waits
            for frame in stream.broken(answer_of(error)):
                yield frame
        except BaseException as error:  # whatever it is, the call is recorded, and the error goes on
            self._broken(request, error)
            raise
        finally:
            _over(request)

    async def _frames(self, request: _Request, stream: AnswerStream) -> AsyncGenerator[bytes, None]:
        """The answer as it is sampled. It is recorded before the client hears of its end."""
        # One prompt's events are not merged: they pass here by the thousand, beside the sampling.
        streams = [self._events(request, generation) for generation in request.generations]
        async with aclosing(streams[0] if len(streams) == 1 else merged(streams)) as events:
            while (found := await self._next(request, events)) is not None:
                generation, event = found
                if not request.closed and request.finished:
                    self._finish(request)
                if event.data is not None:
                    for frame in stream.frames(_numbered(event.data, generation.first), len(generation.prompt_ids)):
                        request.progress.shown, request.progress.outage = True, None
                        yield frame
        if not request.closed:
            raise EngineDown("the engine ended its answer before the last token")
        for frame in stream.end(request.engine_answer()):
            yield frame

    async def count_tokens(
        self, dialect: str, episode_id: str, lease: str, body: dict[str, Any], headers: Mapping[str, str]
    ) -> int:
        """How many tokens the prompt of a request would have. Samples nothing, and records nothing but what was broken off.

        Raises: as `complete`.
        """
        rules, progress, began = self._dialects[dialect], Progress(), next(self._order)
        await self.renew(episode_id, lease)
        agent: str | None = None
        asked: dict[str, Any] | None = None
        try:
            rules.check(body)
            agent = self._agent(body, headers)
            calls = (await self._service.trace(episode_id)).calls
            (asked,) = rules.requests(body, calls)
            count = await self._patiently(progress, partial(self._prompts.count, asked, calls))
        except BaseException as error:  # whatever it is, a failure is recorded, and the error goes on
            if self._failures.why(progress, error) is not None or not is_refusal(error):
                with suppress(Refusal):  # its episode is over: nobody keeps the record
                    request = self._opened(rules, agent, episode_id, lease, body, headers)
                    request.progress, request.began, request.attempt = progress, began, _count(rules, agent, body)
                    if asked is not None:
                        request.asked = [with_defaults(asked, request.call.spec.sampling, request.call.seed)]
                    self._broken(request, error)
            raise
        attempt = _count(rules, agent, body)
        self._service.attempted(
            episode_id,
            CallAttempt(
                asked=attempt.body_hash,
                is_retry=is_retry(headers),
                began=began,
                ended=next(self._order),
                outcome="answered",
            ),
        )
        return count

    async def renew(self, episode_id: str, lease: str) -> None:
        """That the episode is still open, as any request of its agent tells. Raises: Refusal (lost lease)."""
        await self._service.renew(episode_id, EpisodeRenewal(lease=lease))

    # -- before sampling ------------------------------------------------------------------------------------------

    def _open(
        self, dialect: str, episode_id: str, lease: str, body: dict[str, Any], headers: Mapping[str, str]
    ) -> _Request:
        """Check what can be checked of a request by itself, and open its call. Raises: RequestRefused, Refusal (lost lease)."""
        rules, agent = self._dialects[dialect], None
        try:
            rules.check(body)
            rules.check_end(body)
            agent = self._agent(body, headers)
        except SwarmError:
            raise
        except Exception as error:  # a fault of ours, and the agent will be told so
            self._broken(self._opened(rules, agent, episode_id, lease, body, headers), error)
            raise
        return self._opened(rules, agent, episode_id, lease, body, headers)

    def _opened(
        self,
        rules: Dialect,
        agent: str | None,
        episode_id: str,
        lease: str,
        body: dict[str, Any],
        headers: Mapping[str, str],
    ) -> _Request:
        call = self._service.open_call(episode_id, lease)
        again, began = is_retry(headers), next(self._order)
        return _Request(dialect=rules, body=body, agent=agent, call=call, is_retry=again, began=began)

    async def _begin(self, request: _Request, headers: Mapping[str, str]) -> None:
        """Find out what to ask the engine for, or what was answered before."""
        rules, call = request.dialect, request.call
        wanted = rules.requests(request.body, call.earlier)
        request.asked = [  # an engine draws choice i of a prompt with the seed + i
            with_defaults(each, call.spec.sampling, call.seed + number * rules.form.choices(each))
            for number, each in enumerate(wanted)
        ]
        request.attempt, request.answered_before = await self._retries.begin(
            call.episode_id, rules.name, request.agent, request.body, headers
        )
        request.began = next(self._order)  # it may have waited for the one that it retries
        if request.answered_before is None:
            request.generations = await self._while_open(call, partial(self._generations, request))
            request.sampling = True
        else:
            self._close(request, [])

    async def _generations(self, request: _Request) -> list[Generation]:
        generations: list[Generation] = []
        rules, call = request.dialect, request.call
        for body in request.asked:
            asked = partial(self._prompts.of, rules.form.engine_dialect, body, request.agent, call.earlier)
            generations.append(_generation(request, len(generations), await self._patiently(request.progress, asked)))
        return generations

    def _agent(self, body: dict[str, Any], headers: Mapping[str, str]) -> str | None:
        """Who asks: the header, or what follows the model's name. Raises: RequestRefused, another model."""
        wanted = body.get("model")
        if not isinstance(wanted, str | None):
            raise bad_request(f"model must be a text, got {wanted!r}", "model")
        agent = agent_behind(wanted, self._engine.info.model) if wanted else None
        return _text(headers.get(_AGENT_HEADER, "")) or agent or None

    # -- sampling -------------------------------------------------------------------------------------------------

    async def _sample(self, request: _Request, generation: Generation) -> None:
        sampled = await self._patiently(request.progress, lambda: self._engine.sample(_sample_request(generation)))
        self._failures.engine_lives()
        generation.take_all(sampled)

    async def _events(
        self, request: _Request, generation: Generation
    ) -> AsyncGenerator[tuple[Generation, SampledEvent], None]:
        """What the engine says to one prompt, taken already. A crash before anything was shown is waited out."""
        give_up_at = self._clock.monotonic() + ENGINE_WAIT_S
        shown = False
        while True:
            try:
                async with closing(self._engine.stream(_sample_request(generation))) as events:
                    async for event in events:
                        self._failures.engine_lives()
                        generation.take(event)
                        shown = shown or event.data is not None
                        yield generation, event
                return
            except EngineDown as error:
                request.progress.outage = error
                if shown or not await self._engine_back(give_up_at):
                    raise
                generation.start_over()

    async def _patiently(self, progress: Progress, ask: Callable[[], Awaitable[Answer]]) -> Answer:
        """What the engine answers; where it crashed meanwhile, wait for it and ask again. Nothing was shown yet."""
        give_up_at = self._clock.monotonic() + ENGINE_WAIT_S
        while True:
            try:
                return await ask()
            except EngineDown as error:
                progress.outage = error
                if not await self._engine_back(give_up_at):
                    raise

    async def _engine_back(self, give_up_at: float) -> bool:
        """Wait until it may be worth trying again; False when it is not any more."""
        left = give_up_at - self._clock.monotonic()
        if self._failed or left <= 0:
            return False
        if self._ready.is_set():  # the crash is not noticed yet, or is over already
            await self._clock.sleep(_AGAIN_AFTER_S)
            return True
        waits = [asyncio.ensure_future(self._ready.wait()), asyncio.ensure_future(self._clock.sleep(left))]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return not self._failed

    def _on_health(self, health: EngineHealth) -> None:
        self._failures.on_health(health)
        self._failed = health.failed_for_good
        if health.ready or health.failed_for_good:
            self._ready.set()
        else:
            self._ready.clear()

    async def _while_open(self, call: OpenCall, work: Callable[[], Awaitable[Answer]]) -> Answer:
        """What `work` gives, which is cancelled when the episode ends or the server stops. Raises: Refusal(lease_lost, not_rolling)."""
        try:
            return await until_over((call.ending, self._stopping), work)
        except Over as error:
            raise (_lost(call) if call.ending.over else _stopped()) from error

    async def _next(self, request: _Request, events: AsyncIterator[Answer]) -> Answer | None:
        """The next of a stream; None: that was all. What is recorded already is told to the end. Raises: as `_while_open`."""
        try:
            return await (anext(events) if request.closed else self._while_open(request.call, events.__anext__))
        except StopAsyncIteration:
            return None

    # -- after sampling -------------------------------------------------------------------------------------------

    def _finish(self, request: _Request) -> None:
        """Record the call, before anything tells the client that it is over. Raises: Refusal(lease_lost): nobody keeps it."""
        assert request.attempt is not None
        request.attempt.answer = request.engine_answer()
        self._close(request, [record for t in request.generations for record in self._records.make(t, complete=True)])
        if request.kept is None:
            request.attempt.answer = None
            raise _lost(request.call)

    def _close(self, request: _Request, records: list[RecordedCall], outcome: Outcome = "answered") -> None:
        """The call is closed once. What its episode has no use for any more is discarded."""
        request.closed = True
        attempt = request.ended(outcome, next(self._order))
        if self._service.close_call(request.call, records or None, attempt):
            request.kept = KeptCall(
                at=self._clock.now(),
                episode_id=request.call.episode_id,
                call_ids=frozenset(record.call_id for record in records),
                attempt=attempt,
                attempts=request.call.attempts,
            )

    def _broken(self, request: _Request, error: BaseException) -> None:
        """The client gets no answer, or not all of it: record what was sampled, and whether that is a failure of ours."""
        failure = self._failures.why(request.progress, error, sampling=request.sampling)
        refused = failure is None and is_refusal(error)
        if request.closed:
            if failure is not None and request.kept is not None:
                self._failures.mark(request.kept.failed(failure))
        elif refused and not request.progress.shown:
            request.closed = True
            self._service.close_call(request.call, None)
        else:
            self._close(request, self._broken_off(request, failure), "left" if failure is None else "failed")
            if failure is None and request.kept is not None and not refused:
                self._failures.left(request.kept)

    def _broken_off(self, request: _Request, failure: CallFailure | None) -> list[RecordedCall]:
        """The records of a call that has no whole answer: at least one for each prompt that has none."""
        call, agent, name = request.call, request.agent, request.dialect.name
        if not request.asked:
            return [] if failure is None else [self._records.unread(call, name, agent, request.body, failure)]
        generations = request.generations or [
            _generation(request, number, Prompt(messages=())) for number in range(len(request.asked))
        ]
        unfinished = [generation for generation in generations if not generation.finished] or generations
        return [
            record
            for generation in generations
            for record in self._records.make(
                generation, complete=False, failure=failure if generation in unfinished else None
            )
        ]


def _generation(request: _Request, number: int, prompt: Prompt) -> Generation:
    rules, body = request.dialect, request.asked[number]
    first = number * rules.form.choices(body)
    return Generation(call=request.call, agent=request.agent, dialect=rules, body=body, prompt=prompt, first=first)


def _count(rules: Dialect, agent: str | None, body: dict[str, Any]) -> Attempt:
    return Attempt(body_hash(f"{rules.name}/count_tokens", agent, body), None)


def _over(request: _Request) -> None:
    if request.attempt is not None:
        request.attempt.over.set()


def _sample_request(generation: Generation) -> SampleRequest:
    return SampleRequest(
        dialect=generation.dialect.form.engine_dialect, body=generation.body, prompt_ids=generation.prompt.prompt_ids
    )


def _lost(call: OpenCall) -> Refusal:
    text = f"episode {call.episode_id!r} ended while this call was sampled: it has no answer"
    return Refusal(ErrorCode.LEASE_LOST, text)


def _stopped() -> Refusal:
    text = "the server is shutting down; try again when it is back"
    return Refusal(ErrorCode.NOT_ROLLING, text, retry_after_s=5)


def _text(header: str) -> str:
    """A header that was sent as UTF-8, which arrives as Latin-1; what is none is Latin-1 indeed."""
    try:
        return header.encode("latin-1").decode()
    except UnicodeError:
        return header


def _numbered(data: dict[str, Any], first: int) -> dict[str, Any]:
    """A chunk whose choices are numbered through the whole answer."""
    if not first or not data.get("choices"):
        return data
    return data | {"choices": [choice | {"index": choice["index"] + first} for choice in data["choices"]]}


def _replayed(request: _Request, stream: AnswerStream, answer: dict[str, Any]) -> Iterator[bytes]:
    prompt_tokens = int((answer.get("usage") or {}).get("prompt_tokens") or 0)
    for chunk in request.dialect.form.replay(answer, request.asked[0]):
        yield from stream.frames(chunk, prompt_tokens)
    yield from stream.end(answer)
