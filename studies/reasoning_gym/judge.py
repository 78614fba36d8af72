"""The client's side of scorer.py: one such process, started when it is first needed, replaced when an answer was too much for it."""

from __future__ import annotations

import asyncio
import base64
import os
import pickle
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from swarm.client import SwarmError

START_LIMIT_S = 120.0
SCORE_LIMIT_S = 20.0
LONGEST = 4000
"""Characters of an answer that are looked at."""


class ScorerFailed(SwarmError):
    """The process that scores does not start."""


class Judge:
    """Scores answers, one after the other. `close` ends the process."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def score(self, family: str, options: Mapping[str, Any], answer: str, entry: dict[str, Any]) -> float | None:
        """0.0 to 1.0; None for an answer that took the scorer too long, or its life.

        Raises: ScorerFailed.
        """
        request = base64.b64encode(pickle.dumps((family, dict(options), answer[:LONGEST], entry))) + b"\n"
        async with self._turn:
            process = self._process or await self._started()
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                async with asyncio.timeout(SCORE_LIMIT_S):
                    process.stdin.write(request)
                    await process.stdin.drain()
                    return float(await process.stdout.readline())
            except (TimeoutError, ValueError, ConnectionError):  # ValueError: it died, and its line is empty
                await self._end()
                return None
            except asyncio.CancelledError:  # its line would be read as the next answer's
                await self._end()
                raise

    async def close(self) -> None:
        async with self._turn:
            await self._end()

    async def _started(self) -> asyncio.subprocess.Process:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(Path(__file__).with_name("scorer.py"))),
            # Of the environment only what the interpreter needs to find its packages: no key, no token.
            env={name: os.environ[name] for name in ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH") if name in os.environ},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        assert self._process.stdout is not None
        with suppress(TimeoutError):
            async with asyncio.timeout(START_LIMIT_S):
                if await self._process.stdout.readline() == b"ready\n":
                    return self._process
        await self._end()
        raise ScorerFailed(
            f"scorer.py does not start; run `{sys.executable} {Path(__file__).with_name('scorer.py')}` to see why"
        )

    async def _end(self) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
            self._process = None
