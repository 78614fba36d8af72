"""Turns a chat stream into a sequence of items: thoughts, text and calls. Used by the Responses and Messages dialects."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Literal

from swarm.server.gateway.dialect import Dialect
from swarm.server.gateway.errors import ErrorAnswer
from swarm.server.gateway.forms import ChatForm, JsonObject


@dataclass(slots=True)
class Item:
    """An unfinished item. `shown` is the form in which the client saw it begin; `call_index` is the engine's index of a tool call."""

    kind: Literal["reasoning", "text", "call"]
    shown: JsonObject
    call_index: int | None = None
    parts: list[str] = field(default_factory=list)

    @property
    def said(self) -> str:
        return "".join(self.parts)


class ItemStream:
    """Splits the deltas of a chat stream into items. Text that arrives during a tool call waits for the call's end.

    A subclass writes the events. `items` holds the finished items, in the form that a whole answer shows.
    """

    def __init__(self) -> None:
        self.items: list[JsonObject] = []
        self._open: Item | None = None
        self._waiting: list[str] = []

    def end(self, answer: JsonObject) -> list[bytes]:
        """Return the last events, to be sent once the whole answer is recorded."""
        frames = self._close()
        return frames + self._last(answer)

    def whole(self, answer: JsonObject) -> JsonObject:
        """Return the whole answer in the dialect. Call this once `frames` has seen every chunk."""
        self._close()
        return self._whole(answer)

    @abstractmethod
    def frames(self, chunk: JsonObject, prompt_tokens: int) -> list[bytes]:
        """Return the events for one chunk of the engine's stream."""

    @abstractmethod
    def broken(self, error: ErrorAnswer) -> list[bytes]:
        """Return the events for an answer that is cut off by an error."""

    @abstractmethod
    def _begin_text(self, kind: Literal["reasoning", "text"]) -> tuple[JsonObject, list[bytes]]:
        """Begin an item of thoughts or text. Return its shown form and its first events."""

    @abstractmethod
    def _begin_call(self, part: JsonObject, name: str) -> tuple[JsonObject, list[bytes]]:
        """Begin a tool call. Return its shown form and its first events."""

    @abstractmethod
    def _said(self, item: Item, text: str) -> list[bytes]:
        """Return the events for new text of the open item."""

    @abstractmethod
    def _done(self, item: Item) -> tuple[JsonObject, list[bytes]]:
        """End an item. Return it as a whole answer shows it, and its last events."""

    @abstractmethod
    def _last(self, answer: JsonObject) -> list[bytes]: ...

    @abstractmethod
    def _whole(self, answer: JsonObject) -> JsonObject: ...

    def _delta(self, delta: JsonObject) -> list[bytes]:
        frames: list[bytes] = []
        if delta.get("reasoning"):
            frames += self._write("reasoning", delta["reasoning"])
        if delta.get("content"):
            frames += self._text(delta["content"])
        for part in delta.get("tool_calls") or ():
            frames += self._call(part, part.get("function") or {}, part.get("index", 0))
        return frames

    def _text(self, text: str) -> list[bytes]:
        if self._open is not None and self._open.kind == "call":
            self._waiting.append(text)
            return []
        return self._write("text", text)

    def _write(self, kind: Literal["reasoning", "text"], text: str) -> list[bytes]:
        """Continue the open item if it has this kind; otherwise begin a new one."""
        frames: list[bytes] = []
        if self._open is None or self._open.kind != kind:
            frames += self._close()
            shown, begun = self._begin_text(kind)
            self._open = Item(kind, shown)
            frames += begun
        return frames + self._grow(text)

    def _call(self, part: JsonObject, function: JsonObject, index: int) -> list[bytes]:
        frames: list[bytes] = []
        if function.get("name") and (self._open is None or self._open.call_index != index):
            frames += self._close()
            shown, begun = self._begin_call(part, function["name"])
            self._open = Item("call", shown, index)
            frames += begun
        if function.get("arguments") and self._open is not None and self._open.kind == "call":
            frames += self._grow(function["arguments"])
        return frames

    def _grow(self, text: str) -> list[bytes]:
        assert self._open is not None
        self._open.parts.append(text)
        return self._said(self._open, text)

    def _close(self) -> list[bytes]:
        frames: list[bytes] = []
        if self._open is not None:
            item, frames = self._done(self._open)
            self.items.append(item)
            self._open = None
        if self._waiting:
            text, self._waiting = "".join(self._waiting), []
            frames = [*frames, *self._text(text), *self._close()]
        return frames


class ItemDialect(Dialect):
    """A dialect over chat completions whose answers are items."""

    form = ChatForm()

    def answer(self, body: JsonObject, asked: JsonObject, answer: JsonObject) -> JsonObject:
        stream = self.stream(body, asked)
        for chunk in self.form.replay(answer, asked):
            stream.frames(chunk, 0)
        return stream.whole(answer)

    @abstractmethod
    def stream(self, body: JsonObject, asked: JsonObject) -> ItemStream:
        """Begin a stream of the dialect's events. `asked` is the engine's request, with defaults filled in."""
