"""The chunks of one stream put together to the whole answer that it stands for."""

from __future__ import annotations

from abc import ABC, abstractmethod

from swarm.engine.seam import SampledEvent
from swarm.server.gateway.dialect import JsonObject

_HEAD = ("id", "created", "model")


class ChunkAssembly(ABC):
    """See `Assembly`. wanted: how many choices were asked for. A form says what one is made of."""

    kind: str
    """The answer's `object`."""

    def __init__(self, wanted: int) -> None:
        self._wanted = wanted
        self._head: JsonObject = {}
        self._choices: dict[int, JsonObject] = {}
        self._prompt_tokens = 0
        self._sampled_tokens = 0
        self._done: set[int] = set()

    def add(self, event: SampledEvent) -> None:
        if event.prompt_ids is not None:
            self._prompt_tokens = len(event.prompt_ids)
        for sampled in event.choices:
            self._sampled_tokens += len(sampled.sampled_ids)
        data = event.data
        if data is None:
            return
        if len(self._head) < len(_HEAD):
            self._head = {name: data[name] for name in _HEAD if name in data} | self._head
        for chunk in data.get("choices") or ():
            index = chunk["index"]
            choice = self._choices.get(index)
            if choice is None:
                choice = self._choices[index] = {"index": index} | self._begun()
            self._grow(choice, chunk)
            if chunk.get("finish_reason") is not None:
                choice["finish_reason"] = chunk["finish_reason"]
                self._done.add(index)
            if chunk.get("stop_reason") is not None:
                choice["stop_reason"] = chunk["stop_reason"]

    @property
    def finished(self) -> bool:
        return len(self._done) == self._wanted

    def answer(self) -> JsonObject:
        usage = {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._sampled_tokens,
            "total_tokens": self._prompt_tokens + self._sampled_tokens,
        }
        choices = [self._choices[index] for index in sorted(self._choices)]
        return self._head | {"object": self.kind, "choices": choices, "usage": usage}

    @abstractmethod
    def _begun(self) -> JsonObject:
        """A choice of which nothing has come, `finish_reason` None."""

    @abstractmethod
    def _grow(self, choice: JsonObject, chunk: JsonObject) -> None:
        """Add what a chunk says of it, but for the reasons of its end."""
