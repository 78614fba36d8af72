"""Inference on several devices of this machine: a vLLM server on each. They share the calls and serve the same weights.

Each replica crashes and restarts independently. Inference serves as long as any replica does. Knows nothing of episodes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swarm.engine.local.inference import DeviceTransfer, VllmInference
from swarm.engine.sampling.server import ServedAdapter, VllmSettings
from swarm.engine.seam import (
    Dialect,
    EngineDown,
    EngineHealth,
    ReplicaHealth,
    Sampled,
    SampledEvent,
    SampleRequest,
)
from swarm.protocol.episodes import WeightsVersion

_LOG = logging.getLogger(__name__)
_AHEAD = 4
"""A call goes to the replica that knows its prompt, if that one has at most this many more calls than the least busy replica."""
_KEPT = 20_000
"""Number of prompt prefixes to remember per replica."""
_TEXT_PART = 256
"""Length of the parts in which prompts of text completions are compared, in characters or token ids."""


@dataclass(slots=True)
class Replica:
    """A server, its number of open calls, and hashes of prompts that it may have cached, newest last."""

    inference: VllmInference
    calls: int = 0
    held: dict[int, None] = field(default_factory=dict)

    def known(self, beginnings: Sequence[int]) -> int:
        """Return how many of these growing prefixes of a prompt the replica has computed."""
        return next((at for at, each in enumerate(beginnings) if each not in self.held), len(beginnings))

    def takes(self, beginnings: Sequence[int]) -> None:
        for each in beginnings:
            self.held.pop(each, None)
            self.held[each] = None
        while len(self.held) > _KEPT:
            del self.held[next(iter(self.held))]


class Replicas:
    """All replicas of one model, as one inference. Call all coroutines from one event loop.

    `boot`, `shutdown`, `render`, `decode`, `sample` and `stream` follow the contract of `swarm.engine.seam.Engine`. A call goes to the
    replica that has computed most of its prompt, unless another one has far fewer calls. When a replica dies, its calls fail, and later
    calls go to the others.
    """

    def __init__(self, replicas: Sequence[VllmInference]) -> None:
        self.all = tuple(replicas)
        self._replicas = [Replica(each) for each in replicas]
        self._subscribers: list[Callable[[EngineHealth], None]] = []
        for each in replicas:
            each.subscribe(self._tell)

    @property
    def settings(self) -> VllmSettings:
        """Settings of the first replica. The others differ only in device and log."""
        return self.all[0].settings

    @property
    def health(self) -> EngineHealth:
        """Ready if any replica is ready; failed for good once all replicas have failed for good."""
        each = [(str(replica.settings.device_name), replica.health) for replica in self.all]
        reasons = [health.reason for _, health in each if health.reason is not None and not health.ready]
        return EngineHealth(
            ready=any(health.ready for _, health in each),
            booting=any(health.booting for _, health in each),
            failed_for_good=all(health.failed_for_good for _, health in each),
            reason="; ".join(reasons) or None,
            failures=sum(health.failures for _, health in each),
            hung_since=min((health.hung_since for _, health in each if health.hung_since is not None), default=None),
            replicas=tuple(
                ReplicaHealth(
                    device=device,
                    ready=health.ready,
                    failed_for_good=health.failed_for_good,
                    reason=health.reason,
                    failures=health.failures,
                    hung_since=health.hung_since,
                )
                for device, health in each
            ),
        )

    def subscribe(self, on_health: Callable[[EngineHealth], None]) -> None:
        """Call `on_health` on every change of any replica's health."""
        self._subscribers.append(on_health)

    def memory_needed(self) -> int:
        """Return the bytes of host memory that all replicas need; see `VllmSettings`."""
        return sum(replica.settings.memory_needed() for replica in self.all)

    def least_memory(self) -> int:
        """Return the minimum bytes of host memory: weights loaded, almost no requests."""
        return sum(replica.settings.least_memory() for replica in self.all)

    async def boot(self) -> None:
        """Start all replicas. Continues without replicas that fail; their health says so. Raises: EngineDown if none starts."""
        outcomes = await asyncio.gather(*(replica.boot() for replica in self.all), return_exceptions=True)
        failed = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        for error in failed:
            if not isinstance(error, EngineDown) or len(failed) == len(self.all):
                raise error
            _LOG.error("continuing without a replica: %s", error)

    async def settled(self) -> None:
        """Wait until a replica serves. Raises: EngineDown if none will."""
        waits = [asyncio.ensure_future(replica.settled()) for replica in self.all]
        try:
            for number, wait in enumerate(asyncio.as_completed(waits), start=1):
                try:
                    await wait
                    return
                except EngineDown:
                    if number == len(waits):
                        raise
        finally:
            for each in waits:
                each.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def shutdown(self) -> None:
        await asyncio.gather(*(replica.shutdown() for replica in self.all))

    # -- tokens and sampling --------------------------------------------------------------------------------------

    async def render(self, dialect: Dialect, body: dict[str, Any], *, add_generation_prompt: bool = True) -> list[int]:
        with self._taken(()) as replica:
            return await replica.render(dialect, body, add_generation_prompt=add_generation_prompt)

    def decode(self, ids: list[int]) -> str:
        return self.all[0].decode(ids)

    async def sample(self, request: SampleRequest) -> Sampled:
        with self._taken(self._beginnings(request)) as replica:
            return await replica.sample(request)

    async def stream(self, request: SampleRequest) -> AsyncGenerator[SampledEvent, None]:
        with self._taken(self._beginnings(request)) as replica:
            async with aclosing(replica.stream(request)) as events:
                async for event in events:
                    yield event

    @contextmanager
    def _taken(self, beginnings: Sequence[int]) -> Iterator[VllmInference]:
        """Choose the replica for a call with this prompt. Raises: EngineDown if none is available."""
        ready = [replica for replica in self._replicas if replica.inference.health.ready]
        if not ready:
            raise EngineDown(self.health.reason or "inference is not booted")
        fewest = min(replica.calls for replica in ready)
        near = [replica for replica in ready if replica.calls <= fewest + _AHEAD]
        taken = max(near, key=lambda replica: (replica.known(beginnings), -replica.calls))
        taken.takes(beginnings)
        taken.calls += 1
        try:
            yield taken.inference
        finally:
            taken.calls -= 1

    def _beginnings(self, request: SampleRequest) -> list[int]:
        return [] if len(self.all) == 1 else beginnings(request)

    # -- weights --------------------------------------------------------------------------------------------------

    async def publish(
        self,
        weights_dir: Path | None,
        version: WeightsVersion,
        *,
        approval: asyncio.Future[None] | None = None,
        adapter: ServedAdapter | None = None,
    ) -> None:
        """Serve other weights on all replicas, in place; see `VllmInference.publish`. Afterwards no replica serves the old ones.

        Returns once every replica has changed or is restarting, and at least one serves.
        Raises: WeightsRefused (then the previous weights are served again); EngineDown if no replica can serve any more.
        """
        changes = (replica.publish(weights_dir, version, approval=approval, adapter=adapter) for replica in self.all)
        outcomes = await asyncio.gather(*changes, return_exceptions=True)
        for replica in self._replicas:
            replica.held.clear()
        await self.settled()
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    async def publish_over_device(self, transfer: DeviceTransfer, version: WeightsVersion) -> bool:
        """Like `VllmInference.publish_over_device`; only for a single replica."""
        (only,) = self._replicas
        published = await only.inference.publish_over_device(transfer, version)
        only.held.clear()
        return published

    @asynccontextmanager
    async def asleep(self) -> AsyncIterator[None]:
        """Put all replicas to sleep within the block; see `VllmInference.asleep`."""
        async with AsyncExitStack() as sleeping:
            for replica in self.all:
                await sleeping.enter_async_context(replica.asleep())
            yield

    def _tell(self, _: EngineHealth) -> None:
        for replica in self._replicas:
            if not replica.inference.health.ready:
                replica.held.clear()
        health = self.health
        for subscriber in self._subscribers:
            subscriber(health)


def beginnings(request: SampleRequest) -> list[int]:
    """Return hashes of growing prefixes of the prompt's source: its tools and messages, or parts of its text.

    An agent's next turn, and other calls that start alike, have the same first hashes.
    """
    body = request.body
    parts: list[Any]
    if request.dialect == "completions":
        prompt = body.get("prompt")
        whole = prompt if isinstance(prompt, str | list) else ""
        parts = [whole[at : at + _TEXT_PART] for at in range(0, len(whole), _TEXT_PART)]
    else:
        messages = body.get("messages")
        parts = messages if isinstance(messages, list) else []
    made, last = list[int](), hash(repr(body.get("tools")))
    for part in parts:
        last = hash((last, repr(part)))
        made.append(last)
    return made
