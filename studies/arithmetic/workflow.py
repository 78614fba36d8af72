"""Sums as tasks, and an agent that is asked for them: one call of the plain OpenAI SDK."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

from swarm.client import Episode, Outcome, Task

from .reward import RIGHT, score

if TYPE_CHECKING:
    from openai import AsyncOpenAI

Split = Literal["train", "heldout"]
Answer = Literal["text", "json", "tool"]

HELD_OUT_SHARE = 4
"""One pair of operands in this many is never trained on."""
LISTABLE_PAIRS = 10_000
MOST_DIGITS = 9
CALL_LIMIT_S = 180.0


def _one(answer: dict[str, Any]) -> dict[str, Any]:
    """The schema of an object whose only field is the answer."""
    return {
        "type": "object",
        "properties": {"answer": answer},
        "required": ["answer"],
        "additionalProperties": False,
    }


_NUMBER = _one({"type": "integer"})
_WRITTEN_OUT = _one({"type": "string", "pattern": "^[0-9 +=]{1,12}$"})
"""A small model that is asked for a number at once repeats the first operand."""
_ASKED: dict[str, dict[str, Any]] = {
    "text": {},
    "json": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "sum", "schema": _NUMBER, "strict": True}}
    },
    "tool": {
        "tools": [{"type": "function", "function": {"name": "submit", "parameters": _WRITTEN_OUT, "strict": True}}],
        "tool_choice": {"type": "function", "function": {"name": "submit"}},
    },
}
"""What a call asks for, by the form of the answer."""

_clients: WeakKeyDictionary[asyncio.AbstractEventLoop, AsyncOpenAI] = WeakKeyDictionary()


def tasks(split: Split, seed: int, count: int | None, *, digits: int = 1, answer: Answer = "text") -> Iterator[Task]:
    """Sums of two numbers with `digits` digits each. answer: in words, as JSON of a schema, or by a forced call of a tool.

    train: an endless stream (or `count` of them) in an order that depends on `seed`. heldout: `count` different sums,
    or all where there are fewer; the same for every seed. No sum is in both, nor its mirror image.
    """
    if split not in ("train", "heldout"):
        raise ValueError(f"split must be train or heldout, got {split!r}")
    if not 1 <= digits <= MOST_DIGITS:
        raise ValueError(f"digits must lie between 1 and {MOST_DIGITS}, got {digits}")
    if answer not in _ASKED:
        raise ValueError(f"answer must be one of {', '.join(_ASKED)}, got {answer!r}")
    pairs = _endless(random.Random(seed), digits) if split == "train" else _held_out(digits)
    return itertools.islice((_task(pair, answer) for pair in pairs), count)


def is_held_out(a: int, b: int) -> bool:
    """Whether a + b and b + a are kept for evaluation. Depends on the operands and on nothing else."""
    low, high = sorted((a, b))
    return hashlib.sha256(f"heldout:{low}+{high}".encode()).digest()[0] % HELD_OUT_SHARE == 0


async def rollout(episode: Episode, task: Task) -> Outcome:
    """Ask once, score the answer."""
    client = _client(episode.base_url).with_options(base_url=episode.base_url, api_key=episode.api_key)
    asked = _ASKED[task.metadata.get("answer", "text")]
    completion = await client.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": task.query}], **asked, **episode.sampling
    )
    message = completion.choices[0].message
    said = "".join(call.function.arguments for call in message.tool_calls or ()) or message.content or ""
    reward = score(said, int(task.metadata["total"]))
    return Outcome(reward=reward, success=reward == RIGHT)


async def close() -> None:
    """Give back the connections of this event loop."""
    client = _clients.pop(asyncio.get_running_loop(), None)
    if client is not None:
        await client.close()


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


def _task(pair: tuple[int, int], answer: Answer) -> Task:
    a, b = pair
    metadata = {"total": a + b} if answer == "text" else {"total": a + b, "answer": answer}
    return Task(id=f"{a}+{b}", query=f"What is {a}+{b}? Answer with the number only.", metadata=metadata)


def _operands(digits: int) -> range:
    return range(10 ** (digits - 1), 10**digits)


def _endless(rng: random.Random, digits: int) -> Iterator[tuple[int, int]]:
    """Train pairs for ever: where they can be listed, all of them in a new order each time round."""
    operands = _operands(digits)
    if len(operands) ** 2 <= LISTABLE_PAIRS:
        pairs = [(a, b) for a in operands for b in operands if not is_held_out(a, b)]
        while True:
            yield from rng.sample(pairs, len(pairs))
    while True:
        pair = rng.choice(operands), rng.choice(operands)
        if not is_held_out(*pair):
            yield pair


def _held_out(digits: int) -> Iterator[tuple[int, int]]:
    """Different held-out pairs in a fixed order."""
    operands = _operands(digits)
    rng = random.Random(f"heldout/{digits}")
    if len(operands) ** 2 <= LISTABLE_PAIRS:
        pairs = [(a, b) for a in operands for b in operands if is_held_out(a, b)]
        yield from rng.sample(pairs, len(pairs))
        return
    seen: set[tuple[int, int]] = set()
    while True:
        pair = rng.choice(operands), rng.choice(operands)
        if pair not in seen and is_held_out(*pair):
            seen.add(pair)
            yield pair
