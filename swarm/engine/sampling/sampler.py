"""Calls to vLLM's server, which return token ids, log-probabilities, and the version of the weights that sampled each token.

Weights may change while calls are in flight: we pause the server and note how many tokens each call has sampled.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator, Set
from contextlib import AbstractContextManager, aclosing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from swarm.engine.sampling.answers import Asked, Masks, StreamBook, TokenLimits, book_answer, chat_body, text_body
from swarm.engine.sampling.client import RENDERED, VllmClient
from swarm.engine.sampling.mask_files import FLAG, MaskFiles, no_rows
from swarm.engine.sampling.request_ids import CHOICES, own_id
from swarm.engine.seam import Dialect, Sampled, SampledEvent, SampleRequest
from swarm.protocol.episodes import VersionSpan, WeightsVersion


@dataclass(slots=True)
class CallInFlight:
    """One request to the engine. `changes` has each later weights version, with the index of its first token in each choice."""

    request_id: str
    first_version: WeightsVersion
    changes: list[tuple[dict[int, int], WeightsVersion]] = field(default_factory=list)
    _unchanged: dict[int, VersionSpan] = field(default_factory=dict)
    """By number of tokens: the span of an event sampled by the first weights. Cached, because a stream has thousands of events."""

    def spans(self, choice: int, start: int, end: int) -> list[VersionSpan]:
        """Return the versions of the sampled tokens [start, end) of a choice, with positions counted from `start`."""
        if not self.changes:
            return [self._first_span(end - start)] if end > start else []
        spans: list[VersionSpan] = []
        version, begin = self.first_version, start
        for sampled_before, changed_to in self.changes:
            at = min(max(sampled_before.get(choice, 0), begin), end)
            if at > begin:
                spans.append(VersionSpan(start=begin - start, end=at - start, version=version))
            version, begin = changed_to, at
        if end > begin:
            spans.append(VersionSpan(start=begin - start, end=end - start, version=version))
        return spans

    def _first_span(self, size: int) -> VersionSpan:
        known = self._unchanged.get(size)
        if known is None:
            known = self._unchanged[size] = VersionSpan(start=0, end=size, version=self.first_version)
        return known


class WeightSpans:
    """All calls in flight, and the weights that are served now."""

    def __init__(self, version: WeightsVersion) -> None:
        self.version = version
        self._calls: dict[str, CallInFlight] = {}

    @property
    def in_flight(self) -> Set[str]:
        """Our ids of unfinished requests."""
        return self._calls.keys()

    def begin(self, request_id: str) -> CallInFlight:
        call = CallInFlight(request_id, self.version)
        self._calls[request_id] = call
        return call

    def end(self, call: CallInFlight) -> None:
        self._calls.pop(call.request_id, None)

    def change(self, version: WeightsVersion, sampled_counts: dict[str, int]) -> None:
        """Record a change of weights.

        `sampled_counts` maps the engine's request ids to the number of tokens sampled before the change. A choice that is not in it
        has not begun: all its tokens will come from the new weights. (A finished call was answered during the pause, before this
        method ran. A choice that finished before others of its call is still in the counts.)
        """
        found: dict[str, dict[int, int]] = {}
        for engine_id, count in sampled_counts.items():
            choice, request_id = own_id(engine_id)
            found.setdefault(request_id, {})[choice] = count
        for call in self._calls.values():
            call.changes.append((found.get(call.request_id, {}), version))
        self.version = version


class Sampler(ABC):
    """The sampling half of an engine. A subclass chooses the server for each call."""

    def __init__(self, model_dir: Path, model_name: str, max_model_len: int) -> None:
        self._model_name = model_name
        self._max_model_len = max_model_len
        self._tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        added = self._tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(number for number, token in added.items() if token.special)
        self._spans = WeightSpans(WeightsVersion(run_id=""))
        self._next_request = 0

    @property
    def version(self) -> WeightsVersion:
        """The weights version for calls that begin now."""
        return self._spans.version

    @abstractmethod
    def _server(self) -> AbstractContextManager[VllmClient]:
        """Return a context manager that yields the server for a call. Raises: EngineDown."""

    def _mask_folder(self) -> Path | None:
        """Return the folder in which the server writes sampling masks, or None if it writes none."""
        return None

    def _lives(self) -> None:
        """Called whenever a token arrives."""
        return

    async def render(self, dialect: Dialect, body: dict[str, Any], *, add_generation_prompt: bool = True) -> list[int]:
        """See `Engine.render`. Sampling fields of the body are ignored."""
        wanted = {name: body[name] for name in RENDERED[dialect] if name in body}
        ours: dict[str, Any] = {"model": self._model_name, "max_tokens": 1}
        if dialect == "chat.completions":
            ours["add_generation_prompt"] = add_generation_prompt
        with self._server() as server:
            return await server.render(dialect, wanted | ours)

    def decode(self, ids: list[int]) -> str:
        """See `Engine.decode`."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    async def sample(self, request: SampleRequest) -> Sampled:
        """See `Engine.sample`. Raises: RequestRefused, EngineDown."""
        with self._server() as server, self._call() as call, self._masks(request, call) as masks:
            answer = await server.sample(request.dialect, self._body(request, call))
            self._lives()
            limits = TokenLimits.of(request, self._max_model_len, self._special_ids)
            return book_answer(answer, Asked.by(request), call.spans, masks, limits)

    async def stream(self, request: SampleRequest) -> AsyncGenerator[SampledEvent, None]:
        """See `Engine.stream`. Raises: RequestRefused and EngineDown, before the first event or in between."""
        with self._server() as server, self._call() as call, self._masks(request, call) as masks:
            body = self._body(request, call) | {"stream": True}
            book = StreamBook(Asked.by(request), call.spans, masks)
            async with aclosing(server.stream(request.dialect, body)) as chunks:
                async for chunk in chunks:
                    self._lives()
                    yield book.event(chunk)

    @contextmanager
    def _call(self) -> Iterator[CallInFlight]:
        self._next_request += 1
        call = self._spans.begin(f"{os.getpid():x}{id(self) & 0xFFFF:04x}{self._next_request:08x}")
        try:
            yield call
        finally:
            self._spans.end(call)

    @contextmanager
    def _masks(self, request: SampleRequest, call: CallInFlight) -> Iterator[Masks]:
        """Yield a reader of the call's sampling masks."""
        folder = self._mask_folder() if request.masks else None
        if folder is None:
            yield no_rows
            return
        files = MaskFiles(folder, call.request_id)
        try:
            yield files.rows
        finally:
            files.remove(self._spans.in_flight - {call.request_id})

    def _body(self, request: SampleRequest, call: CallInFlight) -> dict[str, Any]:
        made = chat_body if request.dialect == "chat.completions" else text_body
        body = made(request.body, model=self._model_name, request_id=call.request_id, prompt_ids=request.prompt_ids)
        arguments = ({FLAG: 1} if request.masks else {}) | _number_of_choices(body)
        return with_arguments(body, arguments)


def with_arguments(body: dict[str, Any], ours: dict[str, int]) -> dict[str, Any]:
    """Return the request with our extension arguments beside the client's. A client cannot set ours."""
    given = body.get("vllm_xargs") or {}
    if not isinstance(given, dict) or not (given or ours):
        return body  # vLLM refuses arguments that are no object
    return body | {"vllm_xargs": {name: value for name, value in given.items() if name not in (FLAG, CHOICES)} | ours}


def _number_of_choices(body: dict[str, Any]) -> dict[str, int]:
    """Return the argument that tells vLLM's worker how many choices the call has; empty for one choice."""
    choices = body.get("n")
    return {CHOICES: choices} if isinstance(choices, int) and choices > 1 else {}
