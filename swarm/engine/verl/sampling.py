"""Sampling from replicas over their HTTP servers: each call goes to the one that has least to do.

Token ids in, token ids and log-probabilities out, each token stamped with the weights that sampled it. Imports neither torch
nor vllm.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from swarm.engine.local.recorded_answer import Asked, StreamBook, book_answer, chat_body, text_body
from swarm.engine.local.vllm_client import RENDERED, VllmClient
from swarm.engine.local.weight_spans import CallInFlight, WeightSpans
from swarm.engine.seam import Dialect, EngineDown, Sampled, SampledEvent, SampleRequest
from swarm.engine.training.channel import Place
from swarm.protocol.episodes import WeightsVersion


@dataclass(slots=True)
class _Replica:
    client: VllmClient
    calls: int = 0


class ReplicaSampling:
    """The inference half. boot and weights are the driver's; this knows where the replicas are and what they serve.

    known: whether it is known which weights are served; after a restart it is not, until a run is opened again.
    """

    def __init__(self, model_dir: Path, model_name: str) -> None:
        self._model_name = model_name
        self._tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        self._replicas: list[_Replica] = []
        self._spans = WeightSpans(WeightsVersion(run_id=""))
        self._next_request = 0
        self.known = True

    async def found(self, places: list[Place]) -> None:
        """Replicas were started: these take every call from now on."""
        again = bool(self._replicas) or not self.known
        await self.lost()
        self._replicas = [_Replica(VllmClient.at(place.address, place.key)) for place in places]
        self.known = not again

    async def lost(self) -> None:
        """The replicas are gone."""
        gone, self._replicas = self._replicas, []
        if gone:
            self.known = False
        for replica in gone:
            await replica.client.close()

    def changed(self, version: WeightsVersion, sampled_counts: dict[str, int]) -> None:
        """The replicas have these weights now; what each request had sampled before, by vLLM's own id."""
        self._spans.change(version, sampled_counts)
        self.known = True

    # -- tokens ---------------------------------------------------------------------------------------------------

    async def render(self, dialect: Dialect, body: dict[str, Any], *, add_generation_prompt: bool = True) -> list[int]:
        """See `Engine.render`. Sampling fields of the body are ignored."""
        wanted = {name: body[name] for name in RENDERED[dialect] if name in body}
        ours: dict[str, Any] = {"model": self._model_name, "max_tokens": 1}
        if dialect == "chat.completions":
            ours["add_generation_prompt"] = add_generation_prompt
        with self._replica() as client:
            return await client.render(dialect, wanted | ours)

    def decode(self, ids: list[int]) -> str:
        """See `Engine.decode`."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    # -- sampling -------------------------------------------------------------------------------------------------

    async def sample(self, request: SampleRequest) -> Sampled:
        """See `Engine.sample`. Raises: RequestRefused, EngineDown."""
        with self._call() as call, self._replica() as client:
            answer = await client.sample(request.dialect, self._body(request, call))
        return book_answer(answer, Asked.by(request), call.spans)

    async def stream(self, request: SampleRequest) -> AsyncGenerator[SampledEvent, None]:
        """See `Engine.stream`. Raises: RequestRefused and EngineDown, before the first event or in between."""
        with self._call() as call, self._replica() as client:
            book = StreamBook(Asked.by(request), call.spans)
            body = self._body(request, call) | {"stream": True}
            async with aclosing(client.stream(request.dialect, body)) as chunks:
                async for chunk in chunks:
                    yield book.event(chunk)

    @contextmanager
    def _call(self) -> Iterator[CallInFlight]:
        if not self.known:
            raise EngineDown("the replicas were started anew and do not serve the run's weights yet")
        self._next_request += 1
        call = self._spans.begin(f"{os.getpid():x}{id(self) & 0xFFFF:04x}{self._next_request:08x}")
        try:
            yield call
        finally:
            self._spans.end(call)

    @contextmanager
    def _replica(self) -> Iterator[VllmClient]:
        if not self._replicas:
            raise EngineDown("no replica is there; the engine is booting or has crashed")
        replica = min(self._replicas, key=lambda replica: replica.calls)
        replica.calls += 1
        try:
            yield replica.client
        finally:
            replica.calls -= 1

    def _body(self, request: SampleRequest, call: CallInFlight) -> dict[str, Any]:
        made = chat_body if request.dialect == "chat.completions" else text_body
        return made(request.body, model=self._model_name, request_id=call.request_id, prompt_ids=request.prompt_ids)
