"""What the gateway needs of a dialect: its messages, its agent, its answers as objects and as frames of a stream.

One implementation per dialect; the gateway's own course is the same for all.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from swarm.engine.seam import RequestRefused, SampledEvent
from swarm.server.gateway.messages import Message


class Assembly(Protocol):
    """Puts a stream's events together to the answer that they amount to."""

    def add(self, event: SampledEvent) -> None: ...

    @property
    def finished(self) -> bool:
        """Whether every choice has its finish reason: no token will follow."""

    def answer(self) -> dict[str, Any]: ...


class Dialect(Protocol):
    """The rules of one dialect. Methods that read a body raise RequestRefused in the dialect's own format."""

    def check(self, body: dict[str, Any]) -> None:
        """Refuse what is no request at all, before anything is counted."""

    def refusal(self, status: int, message: str, kind: str, parameter: str | None = None) -> RequestRefused:
        """An error in the dialect's own format."""

    def choices(self, body: dict[str, Any]) -> int:
        """How many answers are asked for."""

    def messages(self, body: dict[str, Any]) -> list[Message]:
        """The conversation as chat messages."""

    def prompt_settings(self, body: dict[str, Any]) -> dict[str, Any]:
        """All that the prompt depends on besides the messages: tools, template settings."""

    def prompt_body(self, body: dict[str, Any], messages: list[Message]) -> dict[str, Any]:
        """A body to render `messages` with the settings of `body`."""

    def choice_of(self, answer: dict[str, Any], index: int) -> dict[str, Any]:
        """The answer with one of its choices alone, as it is recorded."""

    def message_of(self, answer: dict[str, Any]) -> Message | None:
        """The message that a client would send back for a recorded answer; None where there is none."""

    def assembly(self, body: dict[str, Any]) -> Assembly:
        """Begin to put a stream together."""

    def frame(self, data: dict[str, Any]) -> bytes:
        """One event of the stream, encoded."""

    def last_frame(self) -> bytes:
        """What ends a stream; empty where nothing does."""

    def replay(self, answer: dict[str, Any], body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """A recorded answer as the events of a stream."""
