"""Handles an agent's request from start to finish: open the call, reuse sampled tokens, sample, record, answer.

The steps are the same for every dialect. Knows no HTTP framework and no concrete engine; the Service stores the records.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager, suppress
from functools import partial
from typing import TypeVar

from foundation.clock import Clock
from foundation.ids import Ids
from swarm.engine.seam import Engine, EngineDown, EngineHealth, SampledEvent, SampleRequest
from swarm.protocol.episodes import CallFailure, EpisodeRenewal, RecordedCall
from swarm.protocol.errors import ErrorCode, Refusal, SwarmError
from swarm.server.gateway.anthropic import AnthropicMessages
from swarm.server.gateway.chat import ChatCompletions
from swarm.server.gateway.completions import Completions
from swarm.server.gateway.dialect import AnswerStream, Dialect
from swarm.server.gateway.errors import answer_of, bad_request
from swarm.server.gateway.failures import (
    EngineWait,
    Failures,
    KeepsFailing,
    KeptCall,
    Progress,
    is_refusal,
    why_refused,
)
from swarm.server.gateway.forms import JsonObject
from swarm.server.gateway.records import Generation, Prompts, Records
from swarm.server.gateway.request import AgentRequest, agent_of
from swarm.server.gateway.responses import Responses
from swarm.server.gateway.retries import Attempt, Retries, body_hash, is_retry
from swarm.server.gateway.sampling import forbidding, wants_masks, with_defaults
from swarm.server.gateway.streams import Over, closing, merged, together, until_over
from swarm.server.gateway.token_reuse import Prompt
from swarm.server.keys import EpisodeKey
from swarm.server.service import Service
from swarm.server.state.calls import CallAttempt, Ending, OpenCall, Outcome

Answer = TypeVar("Answer")
Headers = Mapping[str, str]


class Gateway:
    """Answers requests to the inference API. Call all its coroutines from one event loop."""

    def __init__(self, service: Service, engine: Engine, clock: Clock, ids: Ids) -> None:
        self._service = service
        self._engine = engine
        self._clock = clock
        dialects: list[Dialect] = [ChatCompletions(), Completions(), Responses(), AnthropicMessages()]
        self._dialects = {dialect.name: dialect for dialect in dialects}
        self._records = Records(clock, ids, service.is_open)
        self._prompts = Prompts(engine, self._records)
        self._retries = Retries(service.is_open)
        self._stopping = Ending()
        self._failures = Failures(service, clock)
        self._wait = EngineWait(clock)
        self._order = itertools.count()
        engine.subscribe(self._on_health)

    def stop(self) -> None:
        """Cut off every open call and refuse later ones, because the server is stopping. See `complete` and `stream`."""
        self._stopping.come()

    def decode(self, ids: list[int]) -> str:
        """Return the text of the token ids, including special tokens."""
        return self._engine.decode(ids)

    @contextmanager
    def noting_refusals(self, key: EpisodeKey) -> Iterator[None]:
        """Record the reason if a request of this episode is refused within the block."""
        try:
            yield
        except SwarmError as error:
            if is_refusal(error):
                self._service.refused(key.episode_id, why_refused(error))
            raise

    async def complete(
        self, dialect: str, key: EpisodeKey, body: JsonObject, headers: Headers
    ) -> tuple[JsonObject, Callable[[], None]]:
        """Sample a whole answer. Cancelling this coroutine stops sampling and records the call as incomplete.

        A failure of ours is recorded as such. Also returns a function to call once the answer has been sent to its client.

        Raises: Refusal (lost lease, conflict, not_rolling when the server stops), RequestRefused, EngineDown.
        """
        request = self._open(dialect, key, body, headers)
        with self._recorded(request):
            await self._begin(request, headers)
            if request.answered_before is not None:
                return request.answer(request.answered_before), request.delivered
            await self._while_open(
                request.call, lambda: together([self._sample(request, each) for each in request.generations])
            )
            answer = request.answer(request.engine_answer())
            self._finish(request)
            return answer, request.delivered

    async def stream(
        self, dialect: str, key: EpisodeKey, body: JsonObject, headers: Headers
    ) -> AsyncGenerator[bytes, None]:
        """Stream the frames of an answer, token by token. Closing the stream early stops sampling and records the call as incomplete.

        Raises: the errors of `complete`, but only before the first frame. A later failure is reported in the stream.
        """
        request = self._open(dialect, key, body, headers)
        stream: AnswerStream | None = None
        with self._recorded(request):
            try:
                await self._begin(request, headers)
                stream = request.stream()
                async with aclosing(self._frames(request, stream)) as frames:
                    async for frame in frames:
                        yield frame
                request.delivered()
            except SwarmError as error:
                if stream is None or not request.progress.shown:
                    raise
                self._broken(request, error)
                request.release()  # now: nothing has to wait until the client has read the last frames
                for frame in stream.broken(answer_of(error)):
                    yield frame

    async def count_tokens(self, dialect: str, key: EpisodeKey, body: JsonObject, headers: Headers) -> int:
        """Count the tokens in the prompt that this request would get as a call. Samples nothing; only failures of ours are recorded.

        Raises: the errors of `complete`.
        """
        rules, progress, began = self._dialects[dialect], Progress(), next(self._order)
        await self._service.renew(key.episode_id, EpisodeRenewal(lease=key.lease))
        agent: str | None = None
        asked: list[JsonObject] = []
        try:
            rules.check(body)
            agent = agent_of(body, headers, self._engine.info.model, any_model=key.any_model)
            calls = (await self._service.trace(key.episode_id)).calls
            asked = rules.requests(body, calls)
            wanted = with_defaults(asked[0], self._service.spec_of(key.episode_id).sampling, None)
            count = await self._wait.ask(progress, partial(self._prompts.count, wanted, calls))
        except BaseException as error:  # record any failure, then raise it again
            failure = self._failures.why(progress, error)
            if failure is not None or not is_refusal(error):
                with suppress(Refusal):  # its episode is over, so the record is not needed
                    request = self._opened(rules, agent, key, body, headers)
                    request.progress, request.began = progress, began
                    request.attempt = Attempt(_counted(rules, agent, body), None)
                    if failure is not None:
                        request.ask(asked, seeded=self._engine.info.default_seeds)
                    self._broken(request, error)
            raise
        attempt = CallAttempt(
            asked=_counted(rules, agent, body),
            is_retry=is_retry(headers),
            began=began,
            ended=next(self._order),
            outcome="answered",
        )
        self._service.attempted(key.episode_id, attempt)
        return count

    # -- before sampling ------------------------------------------------------------------------------------------

    def _open(self, dialect: str, key: EpisodeKey, body: JsonObject, headers: Headers) -> AgentRequest:
        """Check a request, and open its call. Raises: RequestRefused, Refusal (lost lease)."""
        rules, agent = self._dialects[dialect], None
        try:
            rules.check(body)
            rules.check_end(body)
            agent = agent_of(body, headers, self._engine.info.model, any_model=key.any_model)
        except SwarmError:
            raise
        except Exception as error:  # an internal error, which the agent will see
            self._broken(self._opened(rules, agent, key, body, headers), error)
            raise
        return self._opened(rules, agent, key, body, headers)

    def _opened(
        self, rules: Dialect, agent: str | None, key: EpisodeKey, body: JsonObject, headers: Headers
    ) -> AgentRequest:
        call = self._service.open_call(key.episode_id, key.lease)
        again, began = is_retry(headers), next(self._order)
        return AgentRequest(dialect=rules, body=body, agent=agent, call=call, is_retry=again, began=began)

    async def _begin(self, request: AgentRequest, headers: Headers) -> None:
        """Find the recorded answer if this is a retry; otherwise prepare the engine's requests."""
        rules, call = request.dialect, request.call
        request.ask(rules.requests(request.body, call.earlier), seeded=self._engine.info.default_seeds)
        request.attempt, request.answered_before = await self._retries.begin(
            call.episode_id, rules.name, request.agent, request.body, headers
        )
        request.began = next(self._order)  # a retry may have waited for the request that it repeats
        if request.answered_before is None:
            request.generations = await self._while_open(call, partial(self._generations, request))
            request.sampling = True
        else:
            self._close(request, [])

    async def _generations(self, request: AgentRequest) -> list[Generation]:
        generations: list[Generation] = []
        dialect = request.dialect.form.engine_dialect
        for number, body in enumerate(request.asked):
            prompt = partial(self._prompts.of, dialect, body, request.agent, request.call.earlier)
            generations.append(request.generation(number, await self._wait.ask(request.progress, prompt)))
        return generations

    # -- sampling -------------------------------------------------------------------------------------------------

    async def _sample(self, request: AgentRequest, generation: Generation) -> None:
        with _blamed(generation):
            sampled = await self._wait.ask(request.progress, lambda: self._engine.sample(_sample_request(generation)))
        self._failures.engine_lives()
        generation.take_all(sampled)

    async def _frames(self, request: AgentRequest, stream: AnswerStream) -> AsyncGenerator[bytes, None]:
        """Yield the answer's frames as it is sampled. The call is recorded before the client gets the last frames."""
        if request.answered_before is not None:
            for frame in request.replayed(stream, request.answered_before):
                yield frame
            return
        # A single prompt needs no merging, and skipping it matters: the engine sends thousands of events.
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
            raise EngineDown("the engine's stream ended before the answer was complete")
        for frame in stream.end(request.engine_answer()):
            yield frame

    async def _events(
        self, request: AgentRequest, generation: Generation
    ) -> AsyncGenerator[tuple[Generation, SampledEvent], None]:
        """Yield the engine's events for one prompt, after adding them to the generation. If the engine crashes before the client
        has seen anything, wait for it and start over."""
        patience, shown = self._wait.patience(), False
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
                with _blamed(generation):
                    if shown or not await self._wait.is_back(patience, error):
                        raise
                generation.start_over()

    def _on_health(self, health: EngineHealth) -> None:
        self._failures.on_health(health)
        self._wait.on_health(health)

    async def _while_open(self, call: OpenCall, work: Callable[[], Awaitable[Answer]]) -> Answer:
        """Return the result of `work`, or cancel it when the episode ends or the server stops.

        Raises: Refusal(lease_lost) when the episode ends, Refusal(not_rolling) when the server stops.
        """
        try:
            return await until_over((call.ending, self._stopping), work)
        except Over as error:
            raise (_lost(call) if call.ending.over else _stopped()) from error

    async def _next(self, request: AgentRequest, events: AsyncIterator[Answer]) -> Answer | None:
        """Return the next event of a stream; None at its end. Once the call is recorded, nothing cuts the stream off.

        Raises: the errors of `_while_open`.
        """
        try:
            return await (anext(events) if request.closed else self._while_open(request.call, events.__anext__))
        except StopAsyncIteration:
            return None

    # -- after sampling -------------------------------------------------------------------------------------------

    @contextmanager
    def _recorded(self, request: AgentRequest) -> Iterator[None]:
        """If an error keeps the client from getting a whole answer, close the call and record what was sampled."""
        try:
            yield
        except BaseException as error:  # raised again
            self._broken(request, error)
            raise
        finally:
            request.release()

    def _finish(self, request: AgentRequest) -> None:
        """Record the call before the client sees its end. Raises: Refusal(lease_lost) if it is too late to record it."""
        assert request.attempt is not None
        request.attempt.answer = request.engine_answer()
        self._close(request, [record for each in request.generations for record in self._records.make(each)])
        if request.kept is None:
            request.attempt.answer = None
            raise _lost(request.call)

    def _close(self, request: AgentRequest, records: list[RecordedCall], outcome: Outcome = "answered") -> None:
        """Close the call, exactly once. Records that arrive after the episode's end are discarded."""
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

    def _broken(self, request: AgentRequest, error: BaseException) -> None:
        """Record a call whose client gets no whole answer: the sampled tokens, and the failure if we caused it."""
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

    def _broken_off(self, request: AgentRequest, failure: CallFailure | None) -> list[RecordedCall]:
        """Return the records of a call without a whole answer: at least one for each unanswered prompt."""
        if not request.asked:
            return [] if failure is None else [self._unread(request, failure)]
        nothing = Prompt(messages=())
        generations = request.generations or [request.generation(n, nothing) for n in range(len(request.asked))]
        unfinished = [generation for generation in generations if not generation.finished] or generations
        return [
            record
            for each in generations
            for record in self._records.make(each, complete=False, failure=failure if each in unfinished else None)
        ]

    def _unread(self, request: AgentRequest, failure: CallFailure) -> RecordedCall:
        """Return the record of a request that failed because of us before we knew what to ask the engine."""
        request.asked = [with_defaults({}, request.call.spec.sampling, None)]
        generation = request.generation(0, Prompt(messages=()))
        (record,) = self._records.make(generation, complete=False, failure=failure)
        return record.model_copy(update={"request": request.body})


def _counted(rules: Dialect, agent: str | None, body: JsonObject) -> str:
    return body_hash(f"{rules.name}/count_tokens", agent, body)


@contextmanager
def _blamed(generation: Generation) -> Iterator[None]:
    """Refuse a call that keeps failing although the engine runs, if its restrictions may forbid every token. Raises: RequestRefused."""
    try:
        yield
    except KeepsFailing as error:
        names = forbidding(generation.body)
        if not names:
            raise
        text = f"{error}. The engine runs, so the call may be at fault: {' and '.join(names)} may forbid every token; change the call"
        raise bad_request(text, names[0]) from error


def _sample_request(generation: Generation) -> SampleRequest:
    form = generation.dialect.form
    return SampleRequest(
        dialect=form.engine_dialect,
        body=generation.body,
        prompt_ids=generation.prompt.prompt_ids,
        masks=wants_masks(generation.body, generation.call.spec.sampling),
    )


def _lost(call: OpenCall) -> Refusal:
    text = f"episode {call.episode_id!r} ended while this call was being sampled, so the call has no answer"
    return Refusal(ErrorCode.LEASE_LOST, text)


def _stopped() -> Refusal:
    text = "the server is shutting down; try again when it is back"
    return Refusal(ErrorCode.NOT_ROLLING, text, retry_after_s=5)


def _numbered(data: JsonObject, first: int) -> JsonObject:
    """Return a chunk with its choices numbered as in the whole answer."""
    if not first or not data.get("choices"):
        return data
    return data | {"choices": [choice | {"index": choice["index"] + first} for choice in data["choices"]]}
