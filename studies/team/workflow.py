"""Two small models, one task: a planner reads a story and writes down the sum in it, a solver who sees only that works it out.

The claimed episode is the solver's; the planner's is claimed on its own server, and the team counts on both or on none.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import random
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Literal
from weakref import WeakKeyDictionary

from swarm.client import Episode, Partner, SwarmError, Task, team

from .reward import score_planner, score_solver

if TYPE_CHECKING:
    from openai import AsyncOpenAI

Split = Literal["train", "heldout"]

HELD_OUT_SHARE = 4
"""One sum in this many is never trained on, whatever story it is in."""
NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn")
THINGS = ("apples", "books", "coins", "stamps", "shells", "pens")
MOST_OPERANDS = 4
MOST = 20
CALL_LIMIT_S = 180.0

_clients: WeakKeyDictionary[asyncio.AbstractEventLoop, AsyncOpenAI] = WeakKeyDictionary()
_partners: dict[str, Partner] = {}


class NoPlanner(SwarmError):
    """Nobody said where the second model is."""


def meet(partners: Mapping[str, Partner]) -> None:
    """The other model, `planner`: a trial says so before its first episode."""
    _partners.clear()
    _partners.update(partners)


def tasks(
    split: Split,
    seed: int,
    count: int | None,
    *,
    operands: int = 2,
) -> Iterator[Task]:
    """Stories with `operands` numbers to add.

    train: an endless stream in an order that depends on `seed`. heldout: `count` different sums, the same for every seed.
    """
    if split not in ("train", "heldout"):
        raise ValueError(f"split must be train or heldout, got {split!r}")
    if not 2 <= operands <= MOST_OPERANDS:
        raise ValueError(f"operands must lie between 2 and {MOST_OPERANDS}, got {operands}")
    rng = random.Random(f"{split}/{seed if split == 'train' else operands}")
    return itertools.islice((_task(sums, rng) for sums in _sums(rng, split, operands)), count)


def is_held_out(operands: tuple[int, ...]) -> bool:
    """Whether these numbers, in any order, are kept for evaluation. Depends on nothing else."""
    text = "+".join(map(str, sorted(operands)))
    return hashlib.sha256(f"heldout:{text}".encode()).digest()[0] % HELD_OUT_SHARE == 0


async def rollout(episode: Episode, task: Task) -> None:
    """The planner writes, the solver answers, both are rewarded; on leaving the team both episodes are committed."""
    if "planner" not in _partners:
        raise NoPlanner("a team needs a second server for its planner: `researcher start --instrument team` brings it")
    planner = _partners["planner"].episode_with(episode)
    numbers = tuple(task.metadata["operands"])
    async with team(solver=episode, planner=planner) as ep:
        plan = await _ask(ep["planner"], f"{task.query} Write the numbers to add, with plus signs, and nothing else.")
        answer = await _ask(
            ep["solver"], f"What is the total of {plan.strip() or 'nothing'}? Answer with the number only."
        )
        solved = score_solver(answer, sum(numbers))
        rewards = {"solver": solved, "planner": score_planner(plan, numbers, solved)}
        ep.end(rewards=rewards, success=solved == 1.0, metrics={"planner_reward": rewards["planner"]})


async def close() -> None:
    """Give back the connections of this event loop."""
    client = _clients.pop(asyncio.get_running_loop(), None)
    if client is not None:
        await client.close()


async def _ask(episode: Episode, question: str) -> str:
    client = _client().with_options(base_url=episode.base_url, api_key=episode.api_key)
    completion = await client.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": question}], **episode.sampling
    )
    return completion.choices[0].message.content or ""


def _client() -> AsyncOpenAI:
    """One per event loop, whose connections all episodes share; importing the SDK waits for the first episode."""
    loop = asyncio.get_running_loop()
    if loop not in _clients:
        from openai import AsyncOpenAI

        _clients[loop] = AsyncOpenAI(
            base_url="http://per-episode", api_key="per-episode", max_retries=4, timeout=CALL_LIMIT_S
        )
    return _clients[loop]


def _task(operands: tuple[int, ...], rng: random.Random) -> Task:
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    more = ", then ".join(f"{number} more" for number in operands[1:])
    return Task(
        id=f"{'+'.join(map(str, operands))}/{name}/{thing}",
        query=f"{name} has {operands[0]} {thing} and gets {more}.",
        metadata={"operands": list(operands)},
    )


def _sums(rng: random.Random, split: Split, operands: int) -> Iterator[tuple[int, ...]]:
    """Train sums for ever, all of them in a new order each time round; every held-out sum once."""
    every = itertools.combinations_with_replacement(range(1, MOST + 1), operands)
    mine = [numbers for numbers in every if is_held_out(numbers) == (split == "heldout")]
    while split == "train":
        yield from (tuple(rng.sample(numbers, operands)) for numbers in rng.sample(mine, len(mine)))
    yield from (tuple(rng.sample(numbers, operands)) for numbers in rng.sample(mine, len(mine)))
