"""Family `larger`: which number is larger? Its runtime: a program of its own for each episode, told by two environment variables."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from pathlib import Path

from swarm.client import Episode, SwarmError, Task

PROGRAM = Path(__file__).with_name("black_box.py")
"""Knows nothing of swarms: any program that speaks OpenAI's chat completions could stand here."""


class ProgramFailed(SwarmError):
    """The agent's program ended with an error; the text is what it said."""


def draw(rng: random.Random) -> tuple[str, str, str]:
    """Id, question, and the expected answer."""
    a, b = rng.sample(range(1, 100), 2)
    return (
        f"{min(a, b)}<{max(a, b)}",
        f"Which number is larger, {a} or {b}? Answer with the number only.",
        str(max(a, b)),
    )


async def answer(episode: Episode, task: Task) -> str:
    """Raises: ProgramFailed."""
    environ = {**os.environ, "OPENAI_BASE_URL": episode.base_url, "OPENAI_API_KEY": episode.api_key}
    program = await asyncio.create_subprocess_exec(
        sys.executable,
        str(PROGRAM),
        env=environ,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    asked = json.dumps({"question": task.query, "sampling": dict(episode.sampling)})
    try:
        said, complaints = await program.communicate(asked.encode())
    except asyncio.CancelledError:
        program.kill()
        await program.wait()
        raise
    if program.returncode:
        raise ProgramFailed(f"{PROGRAM.name} ended with {program.returncode}: {complaints.decode()[-2000:]}")
    return said.decode()


async def close() -> None:
    """Nothing is kept between episodes."""
