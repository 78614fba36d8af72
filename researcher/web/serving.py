"""The page as a process: its socket, uvicorn, its end."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from foundation.commandline import UsageError
from foundation.signals import told_to_end

_STOP_LIMIT_S = 5


@contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """A socket that listens there; port 0 takes a free one. Raises: UsageError when it cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol by its number: where it is left out, asyncio leaves TCP's delay on, and an answer takes 40 ms.
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen()
        except OSError as error:
            raise UsageError(
                f"cannot listen on {host}:{port}: {error.strerror}; choose another --port, or 0 for any"
            ) from error
        yield listener


def serve(app: ASGIApp, listener: socket.socket, ready: Callable[[], None]) -> None:
    """Until SIGINT or SIGTERM. ready: called once answers are given."""
    asyncio.run(_Server(app, ready).serve(sockets=[listener]))


class _Server(uvicorn.Server):
    """uvicorn that ends without dying of the signal it handled."""

    def __init__(self, app: ASGIApp, ready: Callable[[], None]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=_STOP_LIMIT_S,
            )
        )
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        with told_to_end(self._stop):
            yield

    def _stop(self) -> None:
        self.force_exit = self.should_exit  # asked twice: do not wait for answers under way
        self.should_exit = True
