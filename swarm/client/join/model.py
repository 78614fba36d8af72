"""Calls the episode's model with chat.completions, and formats chat messages for a terminal."""

from __future__ import annotations

import json
from types import TracebackType
from typing import Any, Self

import httpx

from foundation.addresses import is_loopback
from swarm.client.episode import Episode
from swarm.client.tasks import Outcome, Task
from swarm.protocol.episodes import POLICY_MODEL
from swarm.protocol.errors import SwarmError

CALL_LIMIT_S = 600.0


class ModelRefused(SwarmError):
    """The model did not answer. `status` and `body` come from the inference API, in its own error format."""

    def __init__(self, status: int, body: dict[str, Any]) -> None:
        super().__init__(f"the model refused (HTTP {status}): {body.get('error', {}).get('message', body)}")
        self.status = status
        self.body = body


class Model:
    """A connection to one episode's model. Use as an async context manager."""

    def __init__(self, episode: Episode) -> None:
        self._sampling = dict(episode.sampling)
        self._http = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {episode.api_key}"},
            timeout=httpx.Timeout(CALL_LIMIT_S, connect=10.0),
            trust_env=not is_loopback(httpx.URL(episode.base_url).host),
        )
        self._url = f"{episode.base_url}/chat/completions"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def chat(self, body: dict[str, Any], *, agent: str | None = None) -> dict[str, Any]:
        """Send a chat.completions body and return the complete response. `agent` is sent as the agent's name. Raises: ModelRefused."""
        headers = {"X-Agent-Name": agent} if agent else {}
        sent = {"model": POLICY_MODEL, **self._sampling, **body}
        try:
            answer = await self._http.post(self._url, json=sent, headers=headers)
            document: dict[str, Any] = answer.json()
        except (httpx.TransportError, json.JSONDecodeError) as error:
            raise ModelRefused(502, {"error": {"message": f"no answer from the server: {error}"}}) from error
        try:
            answer.raise_for_status()
        except httpx.HTTPStatusError as error:
            raise ModelRefused(answer.status_code, document) from error
        return document


async def ask_once(episode: Episode, task: Task) -> Outcome:
    """Play a plain query with a single call. The returned reward is a placeholder, because a person sets the reward."""
    async with Model(episode) as model:
        await model.chat({"messages": [{"role": "user", "content": task.query}]})
    return Outcome(reward=0.0)


def message_of(answer: dict[str, Any]) -> dict[str, Any]:
    """Return a completion's assistant message in the form used in later requests, with role, content and tool calls.

    The text of a plain completion becomes the content.
    """
    choice = answer["choices"][0]
    message = choice.get("message") or {"content": choice.get("text")}
    kept = {name: message[name] for name in ("role", "content", "tool_calls") if message.get(name) is not None}
    return {"role": "assistant", "content": None, **kept}


def text_of(message: dict[str, Any]) -> str:
    """Format a message's text for people, including its tool calls."""
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(str(part.get("text", f"[{part.get('type')}]")) for part in content)
    lines = [str(content)] if content else []
    for call in message.get("tool_calls") or ():
        function = call.get("function", {})
        lines.append(f"/call {function.get('name')} {function.get('arguments')}")
    return "\n".join(lines)


def shown(message: dict[str, Any]) -> str:
    """Format a message for display, indented under its role."""
    role = str(message.get("role", "?"))
    return "\n".join([f"{role}:", *(f"    {line}" for line in (text_of(message) or "(nothing)").split("\n"))])
