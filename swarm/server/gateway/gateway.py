"""An agent's request from its arrival to its record: open the call, keep sampled tokens, sample, record, answer.

One course for every dialect. Knows neither HTTP frameworks nor a concrete engine; what is recorded is the Desk's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from foundation.clock import Clock
from foundation.ids import Ids
from swarm.engine.seam import Engine, EngineDown, EngineHealth, RequestRefused, SampledEvent, SampleRequest
from swarm.protocol.episodes import POLICY_MODEL, EpisodeRenewal
from swarm.protocol.errors import ErrorCode, Refusal, SwarmError
from swarm.server.coordinator.calls import Ending, OpenCall
from swarm.server.coordinator.desk import Desk
from swarm.server.gateway.anthropic_messages import AnthropicMessages
from swarm.server.gateway.chat import ChatCompletions
from swarm.server.gateway.completions import Completions
from swarm.server.gateway.dialect import Dialect, Telling, check_depth
from swarm.server.gateway.errors import answer_of, bad_request, unknown_model
from swarm.server.gateway.merged import Over, closing, merged, together, until_over
from swarm.server.gateway.prompts import Prompts
from swarm.server.gateway.records import Records, Taking
from swarm.server.gateway.repeats import Attempt, Repeats
from swarm.server.gateway.responses import Responses
from swarm.server.gateway.sampling import with_defaults

Answer = TypeVar("Answer")

ENGINE_WAIT_S = 180.0
"""A request that meets a crashed engine waits so long for it to come back, before it fails."""
_AGAIN_AFTER_S = 0.25
_AGENT_HEADER = "x-agent-name"


@dataclass(slots=True, kw_only=True)
class _Request:
    """One request under way. asked: the engine's requests, one for each prompt; takings: empty when it was answered before."""

    dialect: Dialect
    body: dict[str, Any]
    call: OpenCall
    attempt: Attempt
    asked: list[dict[str, Any]]
    takings: list[Taking]
    answered_before: dict[str, Any] | None
    closed: bool = False

    @property
    def finished(self) -> bool:
        return all(taking.finished for taking in self.takings)

    def engine_answer(self) -> dict[str, Any]:
        return self.dialect.form.joined([taking.answer() for taking in self.takings])

    def answer(self, engine_answer: dict[str, Any]) -> dict[str, Any]:
        return self.dialect.answer(self.body, self.asked[0], engine_answer)

    def telling(self) -> Telling:
        return self.dialect.telling(self.body, self.asked[0])


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

    def __init__(self, desk: Desk, engine: Engine, clock: Clock, ids: Ids) -> None:
        self._desk = desk
        self._engine = engine
        self._clock = clock
        spoken: list[Dialect] = [ChatCompletions(), Completions(), Responses(), AnthropicMessages()]
        self._dialects = {dialect.name: dialect for dialect in spoken}
        self._records = Records(clock, ids, desk.is_open)
        self._prompts = Prompts(engine, self._records)
        self._repeats = Repeats(desk.is_open)
        self._stopping = Ending()
        self._ready = asyncio.Event()
        self._failed = False
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

        Raises: Refusal (lost lease, conflict, not_rolling when the server stops), RequestRefused, EngineDown.
        """
        request = await self._begin(dialect, episode_id, lease, body, headers)
        if request.answered_before is not None:
            return request.answer(request.answered_before)
        try:
            await self._while_open(request.call, lambda: together([self._sample(taking) for taking in request.takings]))
            return request.answer(self._finish(request))
        except RequestRefused:
            self._drop(request)
            raise
        finally:
            self._give_up(request)

    async def stream(
        self, dialect: str, episode_id: str, lease: str, body: dict[str, Any], headers: Mapping[str, str]
    ) -> AsyncGenerator[bytes, None]:
        """The frames of an answer, token by token. Closing it early stops the sampling, as above.

        Raises, before the first frame: as `complete`. What fails later is told in the stream.
        """
        request = await self._begin(dialect, episode_id, lease, body, headers)
        telling, shown = request.telling(), False
        if request.answered_before is not None:
            for frame in _told_again(request, telling, request.answered_before):
                yield frame
            return
        # One prompt's events are not merged: they pass here by the thousand, beside the sampling.
        streams = [self._events(taking) for taking in request.takings]
        try:
            async with aclosing(streams[0] if len(streams) == 1 else merged(streams)) as events:
                while (found := await self._next(request, events)) is not None:
                    taking, event = found
                    if not request.closed and request.finished:
                        self._finish(request)
                    if event.data is not None:
                        for frame in telling.tell(_numbered(event.data, taking.first), len(taking.prompt_ids)):
                            shown = True
                            yield frame
            if not request.closed:
                raise EngineDown("the engine ended its answer before the last token")
            for frame in telling.end(request.engine_answer()):
                yield frame
        except SwarmError as error:
            if not shown:
                if isinstance(error, RequestRefused):
                    self._drop(request)
                raise
            self._give_up(request)  # before the client takes what it is told, for which nothing waits
            for frame in telling.broken(answer_of(error)):
                yield frame
        finally:
            self._give_up(request)

    async def count_tokens(self, dialect: str, episode_id: str, lease: str, body: dict[str, Any]) -> int:
        """How many tokens the prompt of a request would have. Samples and records nothing. Raises: as `complete`."""
        rules = self._dialects[dialect]
        check_depth(body)
        rules.check(body)
        self._agent(body, {})
        await self.renew(episode_id, lease)
        calls = (await self._desk.trace(episode_id)).calls
        (asked,) = rules.requests(body, calls)
        return await self._patiently(lambda: self._prompts.count(asked, calls))

    async def renew(self, episode_id: str, lease: str) -> None:
        """That the episode is still open, as any request of its agent tells. Raises: Refusal (lost lease)."""
        await self._desk.renew(episode_id, EpisodeRenewal(lease=lease))

    # -- before sampling ------------------------------------------------------------------------------------------

    async def _begin(
        self, dialect: str, episode_id: str, lease: str, body: dict[str, Any], headers: Mapping[str, str]
    ) -> _Request:
        rules = self._dialects[dialect]
        check_depth(body)
        rules.check(body)
        rules.check_end(body)
        agent = self._agent(body, headers)
        call = self._desk.open_call(episode_id, lease)
        attempt: Attempt | None = None
        opened = False
        try:
            wanted = rules.requests(body, call.earlier)
            asked = [  # an engine draws choice i of a prompt with the seed + i
                with_defaults(each, call.spec.sampling, call.seed + number * rules.form.choices(each))
                for number, each in enumerate(wanted)
            ]
            attempt, answered = await self._repeats.begin(episode_id, dialect, agent, body, headers)
            takings: list[Taking] = []
            if answered is None:
                takings = await self._while_open(call, partial(self._takings, rules, asked, call, agent))
            opened = answered is None
            return _Request(
                dialect=rules,
                body=body,
                call=call,
                attempt=attempt,
                asked=asked,
                takings=takings,
                answered_before=answered,
            )
        finally:
            if not opened:
                self._desk.close_call(call, None)
                if attempt is not None and attempt.answer is None:
                    attempt.over.set()

    async def _takings(
        self, rules: Dialect, asked: list[dict[str, Any]], call: OpenCall, agent: str | None
    ) -> list[Taking]:
        takings: list[Taking] = []
        dialect = rules.form.engine_dialect
        for body in asked:
            prompt = await self._patiently(partial(self._prompts.of, dialect, body, agent, call.earlier))
            first = len(takings) * rules.form.choices(body)
            takings.append(Taking(call=call, agent=agent, dialect=rules, body=body, prompt=prompt, first=first))
        return takings

    def _agent(self, body: dict[str, Any], headers: Mapping[str, str]) -> str | None:
        """Who asks: the header, or what follows the model's name. Raises: RequestRefused, another model."""
        wanted = body.get("model")
        if not isinstance(wanted, str | None):
            raise bad_request(f"model must be a text, got {wanted!r}", "model")
        agent = agent_behind(wanted, self._engine.info.model) if wanted else None
        return _text(headers.get(_AGENT_HEADER, "")) or agent or None

    # -- sampling -------------------------------------------------------------------------------------------------

    async def _sample(self, taking: Taking) -> None:
        taking.take_all(await self._patiently(lambda: self._engine.sample(_sample_request(taking))))

    async def _events(self, taking: Taking) -> AsyncGenerator[tuple[Taking, SampledEvent], None]:
        """What the engine says to one prompt, taken already. A crash before anything was shown is waited out."""
        give_up_at = self._clock.monotonic() + ENGINE_WAIT_S
        shown = False
        while True:
            try:
                async with closing(self._engine.stream(_sample_request(taking))) as events:
                    async for event in events:
                        taking.take(event)
                        shown = shown or event.data is not None
                        yield taking, event
                return
            except EngineDown:
                if shown or not await self._engine_back(give_up_at):
                    raise
                taking.start_over()

    async def _patiently(self, ask: Callable[[], Awaitable[Answer]]) -> Answer:
        """What the engine answers; where it crashed meanwhile, wait for it and ask again. Nothing was shown yet."""
        give_up_at = self._clock.monotonic() + ENGINE_WAIT_S
        while True:
            try:
                return await ask()
            except EngineDown:
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

    def _finish(self, request: _Request) -> dict[str, Any]:
        """Record the call, before anything tells the client that it is over. Returns the engine's answer. Raises: as `_close`."""
        answer = request.attempt.answer = request.engine_answer()
        self._close(request)
        return answer

    def _close(self, request: _Request, *, complete: bool = True) -> None:
        """Record the call. Raises: Refusal(lease_lost) when its episode is over: the record was discarded."""
        request.closed = True
        records = [record for taking in request.takings for record in self._records.make(taking, complete=complete)]
        kept = self._desk.close_call(request.call, records or None)
        if complete and not kept:
            request.attempt.answer = None
            raise _lost(request.call)

    def _drop(self, request: _Request) -> None:
        """The engine took nothing on: there is nothing to record."""
        if not request.closed:
            request.closed = True
            self._desk.close_call(request.call, None)

    def _give_up(self, request: _Request) -> None:
        """Whatever happened, the call is closed once; what was sampled of a broken-off call is recorded as such."""
        try:
            if not request.closed:
                self._close(request, complete=False)
        finally:
            request.attempt.over.set()


def _sample_request(taking: Taking) -> SampleRequest:
    return SampleRequest(
        dialect=taking.dialect.form.engine_dialect, body=taking.body, prompt_ids=taking.prompt.prompt_ids
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


def _told_again(request: _Request, telling: Telling, answer: dict[str, Any]) -> Iterator[bytes]:
    prompt_tokens = int((answer.get("usage") or {}).get("prompt_tokens") or 0)
    for chunk in request.dialect.form.replay(answer, request.asked[0]):
        yield from telling.tell(chunk, prompt_tokens)
    yield from telling.end(answer)
