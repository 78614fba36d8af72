"""An agent's request from its arrival to its record: open the call, keep sampled tokens, sample, record, answer.

One course for every dialect. Knows neither HTTP frameworks nor a concrete engine; what is recorded is the Desk's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from foundation.clock import Clock
from foundation.ids import Ids
from swarm.engine.seam import Dialect, Engine, EngineDown, EngineHealth, Sampled, SampledEvent, SampleRequest
from swarm.protocol.episodes import POLICY_MODEL
from swarm.protocol.errors import ErrorCode, Refusal
from swarm.server.coordinator.calls import OpenCall
from swarm.server.coordinator.desk import Desk
from swarm.server.gateway.chat import ChatCompletions
from swarm.server.gateway.dialect import Dialect as DialectRules
from swarm.server.gateway.echo import EchoRule, Prompt
from swarm.server.gateway.records import Records, Taking
from swarm.server.gateway.repeats import Attempt, Repeats
from swarm.server.gateway.sampling import with_defaults

ENGINE_WAIT_S = 180.0
"""A request that meets a crashed engine waits so long for it to come back, before it fails."""
_AGAIN_AFTER_S = 0.25
_AGENT_HEADER = "x-agent-name"


@dataclass(slots=True)
class _Request:
    """One request under way."""

    dialect: Dialect
    rules: DialectRules
    body: dict[str, Any]
    call: OpenCall
    attempt: Attempt
    prompt: Prompt
    taking: Taking
    answered_before: dict[str, Any] | None = None
    closed: bool = False

    def sample_request(self) -> SampleRequest:
        return SampleRequest(dialect=self.dialect, body=self.body, prompt_ids=self.prompt.prompt_ids)


class Gateway:
    """Answers the inference surface. All coroutines are called from one event loop."""

    def __init__(self, desk: Desk, engine: Engine, clock: Clock, ids: Ids) -> None:
        self._desk = desk
        self._engine = engine
        self._clock = clock
        self._dialects: dict[Dialect, DialectRules] = {"chat.completions": ChatCompletions()}
        self._echo = EchoRule(engine.decode)
        self._records = Records(clock, ids)
        self._repeats = Repeats()
        self._ready = asyncio.Event()
        self._failed = False
        engine.subscribe(self._on_health)

    def decode(self, ids: list[int]) -> str:
        """Text of the ids, special tokens included."""
        return self._engine.decode(ids)

    async def complete(
        self, dialect: Dialect, episode_id: str, lease: str, body: dict[str, Any], headers: Mapping[str, str]
    ) -> dict[str, Any]:
        """A whole answer. Cancelling it stops the sampling, and the call is recorded as broken off.

        Raises: Refusal (lost lease, conflict), RequestRefused (in the dialect's format), EngineDown.
        """
        request = await self._begin(dialect, episode_id, lease, body, headers)
        if request.answered_before is not None:
            return request.answered_before
        try:
            sampled = await self._sampled(request)
            request.taking.take_all(sampled)
            request.attempt.answer = sampled.answer
            self._close(request)
            return sampled.answer
        finally:
            self._give_up(request)

    async def stream(
        self, dialect: Dialect, episode_id: str, lease: str, body: dict[str, Any], headers: Mapping[str, str]
    ) -> AsyncGenerator[bytes, None]:
        """The frames of an answer, token by token. Closing it early stops the sampling, as above. Raises: as `complete`."""
        request = await self._begin(dialect, episode_id, lease, body, headers)
        rules = request.rules
        if request.answered_before is not None:
            for data in rules.replay(request.answered_before, body):
                yield rules.frame(data)
            yield rules.last_frame()
            return
        try:
            async with aclosing(self._events(request)) as frames:
                async for frame in frames:
                    yield frame
            if not request.closed:
                raise EngineDown("the engine ended its answer before the last token")
            yield rules.last_frame()
        finally:
            self._give_up(request)

    # -- before sampling ------------------------------------------------------------------------------------------

    async def _begin(
        self, dialect: Dialect, episode_id: str, lease: str, body: dict[str, Any], headers: Mapping[str, str]
    ) -> _Request:
        rules = self._rules(dialect)
        rules.check(body)
        agent = self._agent(rules, body, headers)
        call = self._desk.open_call(episode_id, lease)
        attempt: Attempt | None = None
        opened = False
        try:
            attempt, answered = await self._repeats.begin(episode_id, body, headers)
            filled = with_defaults(body, call.spec.sampling, call.seed)
            prompt = Prompt(messages=())
            if answered is None:
                prompt = await self._prompt(dialect, rules, filled, call, agent)
            taking = Taking(call=call, agent=agent, dialect=dialect, rules=rules, body=filled, prompt=prompt)
            opened = answered is None
            return _Request(dialect, rules, filled, call, attempt, prompt, taking, answered)
        finally:
            if not opened:
                self._desk.close_call(call, None)
                if attempt is not None and attempt.answer is None:
                    attempt.over.set()

    def _rules(self, dialect: Dialect) -> DialectRules:
        rules = self._dialects.get(dialect)
        if rules is None:
            raise Refusal(ErrorCode.NOT_FOUND, f"this server does not speak {dialect} yet")
        return rules

    def _agent(self, rules: DialectRules, body: dict[str, Any], headers: Mapping[str, str]) -> str | None:
        """Who asks: the header, or what follows the model's name (`model@agent`). Raises: RequestRefused, another model."""
        hosted, wanted = self._engine.info.model, body.get("model")
        agent = None
        if isinstance(wanted, str) and wanted not in ("", POLICY_MODEL, hosted):
            name, mark, agent = wanted.rpartition("@")
            if not mark or name not in (POLICY_MODEL, hosted):
                text = f"The model `{wanted}` does not exist; this server hosts `{hosted}`."
                raise rules.refusal(404, text, "NotFoundError", "model")
        return headers.get(_AGENT_HEADER) or agent or None

    async def _prompt(
        self, dialect: Dialect, rules: DialectRules, body: dict[str, Any], call: OpenCall, agent: str | None
    ) -> Prompt:
        """Continue an earlier call of the episode token by token, where the request echoes one."""

        async def render(messages: list[dict[str, Any]], add_generation_prompt: bool) -> list[int]:
            asked = rules.prompt_body(body, messages)
            return await self._engine.render(dialect, asked, add_generation_prompt=add_generation_prompt)

        earlier = await self._records.earlier(rules, call.earlier, render)
        messages, settings = rules.messages(body), rules.prompt_settings(body)
        return await self._echo.prompt_for(messages, settings, agent, earlier, render)

    # -- sampling -------------------------------------------------------------------------------------------------

    async def _sampled(self, request: _Request) -> Sampled:
        """Sample; where the engine crashed meanwhile, wait for it and sample again. Nothing was shown yet."""
        give_up_at = self._clock.monotonic() + ENGINE_WAIT_S
        while True:
            try:
                return await self._engine.sample(request.sample_request())
            except EngineDown:
                if not await self._engine_back(give_up_at):
                    raise

    async def _events(self, request: _Request) -> AsyncGenerator[bytes, None]:
        """Frames as the engine samples. The call is recorded before the frame that tells the client it is over."""
        give_up_at = self._clock.monotonic() + ENGINE_WAIT_S
        while True:
            shown = False
            try:
                async with _closing(self._engine.stream(request.sample_request())) as events:
                    async for event in events:
                        request.taking.take(event)
                        if request.taking.finished and not request.closed:
                            request.attempt.answer = request.taking.answer()
                            self._close(request)
                        if event.data is not None:
                            shown = True
                            yield request.rules.frame(event.data)
                return
            except EngineDown:
                if shown or not await self._engine_back(give_up_at):
                    raise
                request.taking.start_over()

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

    # -- after sampling -------------------------------------------------------------------------------------------

    def _close(self, request: _Request, *, complete: bool = True) -> None:
        """Record the call. Raises: Refusal(lease_lost) when its episode is over: the record was discarded."""
        request.closed = True
        records = self._records.make(request.taking, complete=complete)
        kept = self._desk.close_call(request.call, records or None)
        if complete and not kept:
            request.attempt.answer = None
            raise Refusal(
                ErrorCode.LEASE_LOST,
                f"episode {request.call.episode_id!r} ended while this call was sampled; nothing was kept",
            )

    def _give_up(self, request: _Request) -> None:
        """Whatever happened, the call is closed once; what was sampled of a broken-off call is recorded as such."""
        try:
            if not request.closed:
                self._close(request, complete=False)
        finally:
            request.attempt.over.set()


@asynccontextmanager
async def _closing(events: AsyncIterator[SampledEvent]) -> AsyncGenerator[AsyncIterator[SampledEvent], None]:
    """Close the stream at once when it is left, so that the sampling stops."""
    try:
        yield events
    finally:
        if isinstance(events, AsyncGenerator):
            await events.aclose()
