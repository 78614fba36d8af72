"""Guessing a number with a tool: several turns of the plain OpenAI SDK, a hint after each.

The tool is offered, never forced: forcing it would sample under a grammar, which cannot be trained. A model that writes its
number as text instead is understood, and answered in text.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import random
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

from swarm.client import Episode, Outcome, Task

from .game import Game
from .reward import score

if TYPE_CHECKING:
    from openai import AsyncOpenAI

Split = Literal["train", "heldout"]

HELD_OUT_SHARE = 4
"""One secret of a range in this many is never trained on."""
LOWEST, HIGHEST = 0, 900
"""Where ranges begin."""
WIDTHS = range(4, 101)
MOST_TURNS = 20
CALL_LIMIT_S = 180.0
GUESS_TOOL: Any = {
    "type": "function",
    "function": {
        "name": "guess",
        "description": "Guess the number. Answers higher, lower or correct.",
        "parameters": {
            "type": "object",
            "properties": {"number": {"type": "integer", "description": "your guess"}},
            "required": ["number"],
        },
    },
}
_NUMBER = re.compile(r"-?\d+")
_LONGEST = 18
"""Characters of a number that are read: all that lie beyond are far outside any range, and Python reads only so many."""

_clients: WeakKeyDictionary[asyncio.AbstractEventLoop, AsyncOpenAI] = WeakKeyDictionary()


def tasks(split: Split, seed: int, count: int | None, *, width: int = 8, turns: int = 4) -> Iterator[Task]:
    """Secrets in ranges of `width` numbers, to be found in `turns` turns.

    train: an endless stream (or `count` of them) in an order that depends on `seed`. heldout: `count` different ones, the
    same for every seed. No pair of range and secret is in both.
    """
    if split not in ("train", "heldout"):
        raise ValueError(f"split must be train or heldout, got {split!r}")
    if width not in WIDTHS:
        raise ValueError(f"width must lie between {WIDTHS.start} and {WIDTHS.stop - 1}, got {width}")
    if not 1 <= turns <= MOST_TURNS:
        raise ValueError(f"turns must lie between 1 and {MOST_TURNS}, got {turns}")
    secrets = _secrets(random.Random(f"{split}/{seed if split == 'train' else width}"), split, width)
    return itertools.islice((_task(low, secret, width, turns) for low, secret in secrets), count)


def is_held_out(low: int, secret: int) -> bool:
    """Whether this secret of the range that begins at `low` is kept for evaluation. Depends on nothing else."""
    return hashlib.sha256(f"heldout:{low}:{secret}".encode()).digest()[0] % HELD_OUT_SHARE == 0


async def rollout(episode: Episode, task: Task) -> Outcome:
    """Play until the number is found or the turns are used up."""
    client = _client(episode.base_url).with_options(base_url=episode.base_url, api_key=episode.api_key)
    low, high, secret, turns = (int(task.metadata[name]) for name in ("low", "high", "secret", "turns"))
    game = Game(low=low, high=high, secret=secret, turns=turns)
    messages: list[Any] = [{"role": "user", "content": task.query}]
    with_tool = 0
    while not game.over:
        completion = await client.chat.completions.create(
            model="policy", messages=messages, tools=[GUESS_TOOL], **episode.sampling
        )
        message = completion.choices[0].message
        messages.append(message.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True))
        with_tool += bool(message.tool_calls)
        messages += answers(message, game)
    metrics = {"turns": float(game.used), "guesses": float(len(game.guesses)), "tool_turns": float(with_tool)}
    return Outcome(reward=score(game), success=game.solved, metrics=metrics)


def answers(message: Any, game: Game) -> list[dict[str, Any]]:
    """Play the guess of a message; what is said to it. Only the first of several tool calls is a turn."""
    if not message.tool_calls:
        numbers = _NUMBER.findall(message.content or "")
        return [{"role": "user", "content": game.guess(int(numbers[-1][:_LONGEST]) if numbers else None)}]
    said: list[dict[str, Any]] = []
    for call in message.tool_calls:
        hint = "One guess at a time." if said else game.guess(_called_number(call))
        said.append({"role": "tool", "tool_call_id": call.id, "content": hint})
    return said


async def close() -> None:
    """Give back the connections of this event loop."""
    client = _clients.pop(asyncio.get_running_loop(), None)
    if client is not None:
        await client.close()


def _called_number(call: Any) -> int | None:
    """The number in a call of the tool; None where it holds none."""
    try:
        arguments = json.loads(call.function.arguments)
    except ValueError:  # no JSON, or a number of more digits than Python reads
        return None
    number = arguments.get("number") if isinstance(arguments, dict) else None
    if isinstance(number, str) and _NUMBER.fullmatch(number.strip()):
        return int(number.strip()[:_LONGEST])
    return number if isinstance(number, int) and not isinstance(number, bool) else None


def _client(base_url: str) -> AsyncOpenAI:
    """One per event loop, whose connections all episodes share; importing the SDK waits for the first episode."""
    loop = asyncio.get_running_loop()
    if loop not in _clients:
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient

        local = "//127.0.0.1" in base_url or "//localhost" in base_url
        http = DefaultAsyncHttpxClient(trust_env=not local)
        _clients[loop] = AsyncOpenAI(
            base_url=base_url, api_key="per-episode", http_client=http, max_retries=4, timeout=CALL_LIMIT_S
        )
    return _clients[loop]


def _task(low: int, secret: int, width: int, turns: int) -> Task:
    high = low + width - 1
    return Task(
        id=f"{low}-{high}:{secret}/{turns}",
        query=(
            f"I think of a whole number from {low} to {high}. Find it in at most {turns} guesses: call the tool guess, "
            f"and I say higher or lower. Your first guess is a number from {low} to {high}"
        ),
        metadata={"low": low, "high": high, "secret": secret, "turns": turns},
    )


def _secrets(rng: random.Random, split: Split, width: int) -> Iterator[tuple[int, int]]:
    """Ranges and secrets of one split, without end; held-out ones all different, until there are no more."""
    every = [(low, secret) for low in range(LOWEST, HIGHEST, 10) for secret in range(low, low + width)]
    mine = [pair for pair in every if is_held_out(*pair) == (split == "heldout")]
    while split == "train":
        yield from rng.sample(mine, len(mine))
    yield from rng.sample(mine, len(mine))
