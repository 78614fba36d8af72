"""The chunks of one stream put together to the whole answer that it stands for."""

from __future__ import annotations

from abc import ABC, abstractmethod

from swarm.engine.seam import SampledEvent
from swarm.server.gateway.dialect import JsonObject


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

    def add(self, event: SampledEvent) -> None:
        if event.prompt_ids is not None:
            self._prompt_tokens = len(event.prompt_ids)
        self._sampled_tokens += sum(len(choice.sampled_ids) for choice in event.choices)
        data = event.data or {}
        for name in ("id", "created", "model"):
            if name in data:
                self._head.setdefault(name, data[name])
        for chunk in data.get("choices") or ():
            index = int(chunk["index"])
            choice = self._choices.setdefault(index, {"index": index} | self._begun())
            self._grow(choice, chunk)
            for name in ("finish_reason", "stop_reason"):
                if chunk.get(name) is not None:
                    choice[name] = chunk[name]

    @property
    def finished(self) -> bool:
        done = [choice for choice in self._choices.values() if choice["finish_reason"] is not None]
        return len(done) == self._wanted

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
