"""Client for vLLM's own server, on a Unix socket or over the network: render, sample, stream, change weights in place.

Knows vLLM's paths and fields, and nothing of processes, versions or episodes. Uses aiohttp because it spends 20 µs per stream
event where httpx spends 90 µs, on the CPU that also samples.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import orjson
from aiohttp import (
    ClientError,
    ClientSession,
    ClientTimeout,
    DummyCookieJar,
    TCPConnector,
    UnixConnector,
)

from swarm.engine.memory.model import weight_bytes
from swarm.engine.seam import Dialect, EngineDown, EngineError, EngineHung, RequestFailed, RequestRefused
from swarm.engine.training.limits import LEAST_LIMIT_S

PATHS: dict[Dialect, str] = {"chat.completions": "/v1/chat/completions", "completions": "/v1/completions"}
RENDERED: dict[Dialect, tuple[str, ...]] = {
    "chat.completions": ("messages", "tools", "tool_choice", "chat_template_kwargs", "documents", "reasoning_effort"),
    "completions": ("prompt", "add_special_tokens"),
}
"""The fields of a request that its prompt depends on."""
_DATA = b"data: "
_JSON = {"content-type": "application/json"}
_CONNECT_S = 10.0
_PATIENT = ClientTimeout(total=None, sock_connect=_CONNECT_S)
"""Time limits for sampling: only for connecting, none for the answer."""
_LOADED_BYTES_PER_S = 100_000_000
"""Rate at which a slow machine loads or hashes weights; two cores with fast memory are five times as fast."""
_MOVE_S = 60.0
"""Time limit for moving all weights from the device to host memory or back, in seconds."""
_PROBE = ClientTimeout(total=5.0)
_KEEP_S = 4.0
"""Keep-alive of idle connections, in seconds: shorter than vLLM's five seconds, so that no request uses a connection that vLLM is
closing."""


def loading_s(weights_dir: Path) -> float:
    """Return how many seconds loading these weights into a running model may take."""
    return weight_bytes(weights_dir) / _LOADED_BYTES_PER_S


class NotShared(EngineError):
    """The trainer and inference cannot share the device's memory. Nothing was sent."""


class VllmClient:
    """A pool of connections to one server. Raises EngineDown whenever the server does not answer.

    Sampling has no time limit: the server's owner monitors whether it is alive.
    """

    def __init__(
        self,
        socket: Path | None,
        *,
        address: str = "inference",
        key: str | None = None,
        answer_s: float = LEAST_LIMIT_S,
    ) -> None:
        """Connect to a Unix socket of this machine, or without one to `address`, HOST:PORT.

        `answer_s` is the maximum time in seconds that the engine may compute before it reads another request.
        """
        self.url = f"http://{address}/"
        self._answer_s = answer_s
        pool: dict[str, Any] = {"limit": 0, "keepalive_timeout": _KEEP_S}
        self._http = ClientSession(
            self.url,
            connector=TCPConnector(**pool) if socket is None else UnixConnector(str(socket), **pool),
            headers={} if key is None else {"authorization": f"Bearer {key}"},
            timeout=_PATIENT,
            cookie_jar=DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent"),
        )

    @classmethod
    def at(cls, address: str, key: str) -> VllmClient:
        """Return a client for a server that listens at HOST:PORT and requires a key."""
        return cls(None, address=address, key=key)

    async def close(self) -> None:
        await self._http.close()
        # Transports close their sockets in the loop's next iteration, which may be its last.
        await asyncio.sleep(0)

    async def healthy(self) -> bool:
        try:
            async with self._http.get("/health", timeout=_PROBE) as response:
                return response.status == 200
        except (ClientError, TimeoutError):
            return False  # not listening yet

    async def render(self, dialect: Dialect, body: dict[str, Any]) -> list[int]:
        """Return the token ids of a request rendered with the chat template; for a text completion, those of its only prompt."""
        answer = await self._post(PATHS[dialect] + "/render", body)
        (rendered,) = answer if isinstance(answer, list) else [answer]
        return list(rendered["token_ids"])

    async def sample(self, dialect: Dialect, body: dict[str, Any]) -> dict[str, Any]:
        """Return a complete answer. Cancelling the call stops sampling."""
        return dict(await self._post(PATHS[dialect], body))

    async def stream(self, dialect: Dialect, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the chunks of an answer as they are sampled. Closing the iterator stops sampling."""
        done, rest = False, b""
        try:
            async with self._http.post(PATHS[dialect], data=orjson.dumps(body), headers=_JSON) as response:
                if response.status != 200:
                    _raise_for(response.status, await response.read())
                async for part in response.content.iter_any():
                    *events, rest = (rest + part).split(b"\n\n")
                    for data in [event[len(_DATA) :] for event in events if event.startswith(_DATA)]:
                        if data == b"[DONE]":
                            done = True
                            continue
                        chunk = orjson.loads(data)
                        if "error" in chunk:
                            _raise_for(int(chunk["error"].get("code") or 500), data)
                        yield chunk
        except ClientError as error:
            if not done:
                raise _down(error) from error
        if not done:
            raise EngineDown("the inference engine ended its answer early")

    # -- weights --------------------------------------------------------------------------------------------------

    async def pause(self) -> None:
        """Freeze every request where it is; new requests wait."""
        await self._control("/pause?mode=keep")

    async def resume(self) -> None:
        await self._control("/resume")

    async def sleep(self) -> None:
        """Freeze every request, drop the KV cache, and move the weights to host memory; on the CPU they stay."""
        await self._control("/sleep?level=1&mode=keep", limit_s=_MOVE_S)

    async def wake_up(self) -> None:
        """Undo `sleep`; requests recompute their keys and values. Does nothing if the server is awake."""
        await self._control("/wake_up", limit_s=_MOVE_S)

    async def sampled_counts(self) -> dict[str, int]:
        """Return how many tokens each request in the engine has sampled so far, by the engine's own request id."""
        answer = await self._control("/collective_rpc", {"method": "sampled_counts"})
        (counts,) = answer["results"]
        return {str(name): int(count) for name, count in counts.items()}

    async def replace_weights(self, weights_dir: Path) -> None:
        """Load safetensors from `weights_dir` into the running model. The time limit grows with their size."""
        await self._control(
            "/collective_rpc",
            {"method": "replace_weights", "kwargs": {"folder": str(weights_dir)}},
            limit_s=self._answer_s + loading_s(weights_dir),
        )

    async def take_weights(self, socket: Path, limit_s: float) -> str:
        """Receive the weights that the trainer sends to this socket; return their digest. Raises: NotShared.

        `limit_s` is the time limit for the transfer itself.
        """
        answer = await self._control(
            "/collective_rpc",
            {"method": "take_weights", "kwargs": {"socket": str(socket)}},
            limit_s=self._answer_s + limit_s,
        )
        (taken,) = answer["results"]
        if (refused := taken.get("refused")) is not None:
            raise NotShared(refused)
        return str(taken["digest"])

    async def replace_adapter(self, name: str, folder: Path) -> None:
        """Reload the adapter that is served under this name, from `folder`. Raises: EngineError."""
        answer = await self._control(
            "/collective_rpc", {"method": "replace_adapter", "kwargs": {"name": name, "folder": str(folder)}}
        )
        if answer["results"] != [{"loaded": True}]:
            raise EngineError(f"the inference engine did not load the adapter in {folder}")

    async def forget_prefixes(self) -> None:
        """Drop the KV cache, so that nothing computed with old weights is reused.

        Frozen requests recompute theirs when they continue.
        """
        answer = await self._control("/reset_prefix_cache?reset_running_requests=true")
        if not answer.get("success"):
            raise EngineError("the inference engine did not drop the keys and values of the old weights")

    async def _control(
        self, path: str, body: dict[str, Any] | None = None, *, limit_s: float | None = None
    ) -> dict[str, Any]:
        content, limit = orjson.dumps(body or {}), ClientTimeout(total=limit_s or self._answer_s)
        try:
            async with self._http.post(path, data=content, headers=_JSON, timeout=limit) as response:
                status, content = response.status, await response.read()
        except TimeoutError as error:
            raise EngineHung(f"the inference engine has not answered {path} for {limit.total:.0f} s") from error
        except ClientError as error:
            raise _down(error) from error
        if status != 200:
            raise EngineError(f"{path} answered {status}: {content.decode(errors='replace')[:300]}")
        return dict(orjson.loads(content)) if content else {}

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        try:
            async with self._http.post(path, data=orjson.dumps(body), headers=_JSON) as response:
                status, content = response.status, await response.read()
        except ClientError as error:
            raise _down(error) from error
        if status != 200:
            _raise_for(status, content)
        return orjson.loads(content)


def _raise_for(status: int, content: bytes) -> None:
    """Raise for an error response: RequestRefused with the body for client errors, RequestFailed for server errors."""
    try:
        body = orjson.loads(content)
    except orjson.JSONDecodeError:
        body = {"error": {"message": content.decode(errors="replace")[:300], "type": "InternalServerError"}}
    if status >= 500:
        raise RequestFailed(f"the inference engine failed: {_message(body)}")
    if "error" not in body:
        body = {"error": {"message": _message(body), "type": "BadRequestError", "param": None, "code": status}}
    raise RequestRefused(status, body)


def _message(body: dict[str, Any]) -> str:
    error = body.get("error")
    return str(error.get("message") if isinstance(error, dict) else body.get("detail") or body)


def _down(error: ClientError) -> EngineDown:
    return EngineDown(f"the inference engine does not answer ({type(error).__name__})")
