"""Talks to vLLM's own server over its Unix socket: renders, samples, streams, and changes weights in place.

Knows vLLM's paths and fields, and nothing of processes, versions or episodes.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import orjson

from swarm.engine.seam import Dialect, EngineDown, EngineError, RequestRefused

PATHS: dict[Dialect, str] = {"chat.completions": "/v1/chat/completions", "completions": "/v1/completions"}
RENDERED: dict[Dialect, tuple[str, ...]] = {
    "chat.completions": ("messages", "tools", "tool_choice", "chat_template_kwargs", "documents", "reasoning_effort"),
    "completions": ("prompt", "add_special_tokens"),
}
"""The fields of a request that its prompt depends on."""
_CONTROL_LIMIT_S = 30.0
_UNLIMITED = httpx.Limits(max_connections=None, max_keepalive_connections=128)


class VllmClient:
    """One connection pool to one server. Raises EngineDown whenever the server does not answer."""

    def __init__(self, socket: Path | None, *, url: str = "http://inference", key: str | None = None) -> None:
        self._http = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=None if socket is None else str(socket), limits=_UNLIMITED),
            base_url=url,
            headers={} if key is None else {"authorization": f"Bearer {key}"},
            timeout=httpx.Timeout(None, connect=10.0),  # an answer may take as long as it takes
            trust_env=False,
        )

    @classmethod
    def at(cls, address: str, key: str) -> VllmClient:
        """A server that listens at HOST:PORT and asks for a key."""
        return cls(None, url=f"http://{address}", key=key)

    async def close(self) -> None:
        await self._http.aclose()

    async def healthy(self) -> bool:
        try:
            return (await self._http.get("/health", timeout=5.0)).status_code == 200
        except httpx.TransportError:
            return False  # not listening yet

    async def render(self, dialect: Dialect, body: dict[str, Any]) -> list[int]:
        """Token ids that the template makes of a request; of a text completion, those of its one prompt."""
        answer = await self._post(PATHS[dialect] + "/render", body)
        (rendered,) = answer if isinstance(answer, list) else [answer]
        return list(rendered["token_ids"])

    async def sample(self, dialect: Dialect, body: dict[str, Any]) -> dict[str, Any]:
        """A whole answer. Cancelling the call stops the sampling."""
        return dict(await self._post(PATHS[dialect], body))

    async def stream(self, dialect: Dialect, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """The chunks of an answer, as they are sampled. Closing the iterator stops the sampling."""
        try:
            async with self._http.stream("POST", PATHS[dialect], content=orjson.dumps(body), headers=_JSON) as response:
                if response.status_code != 200:
                    _raise_for(response.status_code, await response.aread())
                async for data in _events(response.aiter_raw()):
                    if data == b"[DONE]":
                        return
                    chunk = orjson.loads(data)
                    if "error" in chunk:
                        _raise_for(int(chunk["error"].get("code") or 500), data)
                    yield chunk
        except httpx.TransportError as error:
            raise _down(error) from error
        raise EngineDown("the inference engine broke off its answer")

    # -- weights --------------------------------------------------------------------------------------------------

    async def pause(self) -> None:
        """Freeze every request where it is; new ones wait."""
        await self._control("/pause?mode=keep")

    async def resume(self) -> None:
        await self._control("/resume")

    async def sampled_counts(self) -> dict[str, int]:
        """Sampled tokens so far of every request that the engine holds, by the engine's own request id."""
        answer = await self._control("/collective_rpc", {"method": "sampled_counts"})
        (counts,) = answer["results"]
        return {str(name): int(count) for name, count in counts.items()}

    async def reload_weights(self, weights_dir: Path) -> None:
        """Read safetensors from `weights_dir` into the running model."""
        await self._control(
            "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(weights_dir)}}
        )

    async def forget_prefixes(self) -> None:
        """Drop every cached key and value, so that nothing computed with other weights is used again.

        Requests that are frozen compute theirs anew when they go on.
        """
        answer = await self._control("/reset_prefix_cache?reset_running_requests=true")
        if not answer.get("success"):
            raise EngineError("the inference engine kept keys and values of the old weights")

    async def _control(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        try:
            response = await self._http.post(path, json=body or {}, timeout=_CONTROL_LIMIT_S)
        except httpx.TransportError as error:
            raise _down(error) from error
        if response.status_code != 200:
            raise EngineError(f"{path} answered {response.status_code}: {response.text[:300]}")
        return dict(orjson.loads(response.content)) if response.content else {}

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        try:
            response = await self._http.post(path, content=orjson.dumps(body), headers=_JSON)
        except httpx.TransportError as error:
            raise _down(error) from error
        if response.status_code != 200:
            _raise_for(response.status_code, response.content)
        return orjson.loads(response.content)


_JSON = {"content-type": "application/json"}


async def _events(parts: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """The data of each server-sent event."""
    rest = b""
    async for part in parts:
        *events, rest = (rest + part).split(b"\n\n")
        for event in events:
            if event.startswith(b"data: "):
                yield event[6:]


def _raise_for(status: int, content: bytes) -> None:
    """An error answer: the request's fault keeps its body, the server's own means that it is failing."""
    try:
        body = orjson.loads(content)
    except orjson.JSONDecodeError:
        body = {"error": {"message": content.decode(errors="replace")[:300], "type": "InternalServerError"}}
    if status >= 500:
        raise EngineDown(f"the inference engine failed: {_message(body)}")
    if "error" not in body:
        body = {"error": {"message": _message(body), "type": "BadRequestError", "param": None, "code": status}}
    raise RequestRefused(status, body)


def _message(body: dict[str, Any]) -> str:
    error = body.get("error")
    return str(error.get("message") if isinstance(error, dict) else body.get("detail") or body)


def _down(error: httpx.TransportError) -> EngineDown:
    return EngineDown(f"the inference engine does not answer ({type(error).__name__})")
