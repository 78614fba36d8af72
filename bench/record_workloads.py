"""Record the workloads of `bench.tree_training`: real runs of three agents on a real server, kept as token ids.

    python -m bench.record_workloads            # all three, about two minutes; writes bench/workloads/*.json.gz

groups: 8 questions about a text, 8 answers each. turns: a clerk with two tools, 8 turns, 4 episodes. fork: a writer that asks
twice and goes on with one answer, a critic with a system prompt of its own, and a writer whose history is summarised.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from bench.clerk import EPISODES, MAX_TOKENS, TOWNS, TURNS, Clerk, goods, ledger
from bench.command import run
from bench.run_switch import wait_for
from bench.serving import ServerProcess
from bench.workloads import Workload, of_traces, path_of
from swarm.client import Episode, SwarmClient

_NUMBER = re.compile(r"-?\d+")
_SPEC = {"batch": {"tasks": 100, "group_size": 8}, "sampling": {"temperature": 1.0, "max_tokens": 64}}

Chat = Callable[[str, list[dict[str, Any]], int], Awaitable[dict[str, Any]]]
"""(agent, messages, max_tokens) → the assistant's message."""


@dataclass(frozen=True, slots=True)
class Recorded:
    tasks: int
    episodes: int
    play: Callable[[Chat, int], Awaitable[float]]
    """(chat, number of the task) → the reward."""


async def answer_a_question(chat: Chat, task: int) -> float:
    town = TOWNS[task % len(TOWNS)]
    text = ledger(task)
    held = sum(
        int(found) for found in _NUMBER.findall(next(line for line in text.split(". ") if line.startswith(town)))
    )
    rules = (
        "You keep the books of a trading company. Read the list, find the town that you are asked about, add the two "
        "numbers that stand in its sentence, and say how you found them in one short sentence. End with the sum alone."
    )
    question = f"Here is the list. {text} How many things does {town} hold altogether?"
    said = await chat("", [{"role": "system", "content": rules}, {"role": "user", "content": question}], 64)
    return closeness(said["content"] or "", held)


async def serve_as_a_clerk(chat: Chat, task: int) -> float:
    clerk = Clerk(task)
    messages: list[dict[str, Any]] = [*clerk.opening]
    for _ in range(TURNS):
        said = await chat("", messages, MAX_TOKENS)
        messages += [said, {"role": "user", "content": clerk.obey(said["content"] or "")}]
    return clerk.coins


async def write_with_a_critic(chat: Chat, task: int) -> float:
    """The writer asks twice and keeps the longer draft; a critic with its own prompt comments; then the history is summarised."""
    town = TOWNS[task % len(TOWNS)]
    brief = f"{ledger(task)} Write two sentences that sell the {goods(task)} of {town}. Name a price."
    writer = [
        {"role": "system", "content": "You write advertisements for a trading company, short and to the point."},
        {"role": "user", "content": brief},
    ]
    drafts = await asyncio.gather(*(chat("writer", writer, 48) for _ in range(2)))
    draft = max(drafts, key=lambda said: len(said["content"] or ""))
    critic = [
        {"role": "system", "content": "You judge advertisements. Say in one sentence what is missing."},
        {"role": "user", "content": f"{brief} This was written: {draft['content']}"},
    ]
    remark = await chat("critic", critic, 32)
    writer += [draft, {"role": "user", "content": f"The critic says: {remark['content']} Write it again."}]
    second = await chat("writer", writer, 48)
    critic += [remark, {"role": "user", "content": f"This was written then: {second['content']} Is it good now?"}]
    await chat("critic", critic, 24)
    summed_up = [
        *writer[:2],
        {"role": "user", "content": f"So far: {second['content']} Give it a title of three words."},
    ]
    title = await chat("writer", summed_up, 16)
    return (
        len(set((second["content"] or "").lower().split())) / 40 - abs(len((title["content"] or "").split()) - 3) / 10
    )


def closeness(answer: str, right: int) -> float:
    numbers = _NUMBER.findall(answer)
    return 1.0 / (1.0 + abs(int(numbers[-1][:6]) - right)) if numbers else 0.0


WORKLOADS = {
    "groups": Recorded(tasks=8, episodes=8, play=answer_a_question),
    "turns": Recorded(tasks=1, episodes=EPISODES, play=serve_as_a_clerk),
    "fork": Recorded(tasks=2, episodes=4, play=write_with_a_critic),
}


async def record(url: str, model: str, name: str) -> Workload:
    what = WORKLOADS[name]
    async with SwarmClient(url) as client, httpx.AsyncClient(timeout=300, trust_env=False) as http:

        async def played(task: int, slot: int) -> str:
            async with client.episode(task_id=f"{name}-{task}", wait_s=120) as episode:
                reward = await what.play(talker(http, episode, model, f"{name}/{task}/{slot}"), task)
                await episode.end(reward=reward)
                return episode.id

        groups = []
        for task in range(what.tasks):
            ids = await asyncio.gather(*(played(task, slot) for slot in range(what.episodes)))
            groups.append([await client.trace(episode_id) for episode_id in ids])
    return of_traces(name, model, groups)


def talker(http: httpx.AsyncClient, episode: Episode, model: str, seed: str) -> Chat:
    draw = random.Random(seed)

    async def chat(agent: str, messages: list[dict[str, Any]], max_tokens: int) -> dict[str, Any]:
        body = {
            "model": f"{model}@{agent}" if agent else model,
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": 1.0,
            "seed": draw.getrandbits(31),
        }
        key = {"Authorization": f"Bearer {episode.api_key}"}
        answer = await http.post(f"{episode.base_url}/chat/completions", json=body, headers=key)
        answer.raise_for_status()
        message = answer.json()["choices"][0]["message"]
        return {"role": "assistant", "content": message["content"]}

    return chat


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.record_workloads", description=__doc__, allow_abbrev=False)
    parser.add_argument("names", nargs="*", default=list(WORKLOADS), metavar="NAME", help=", ".join(WORKLOADS))
    parser.add_argument("--model", default="smollm2-135m")
    args = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="swarm-bench-") as scratch,
        ServerProcess(Path(scratch) / "state", "--max-model-len", "2048", engine="local", model=args.model) as server,
        server.client() as http,
    ):
        wait_for(http, lambda status: status["engine"]["warm"], "the engine")
        model = http.get("/swarm/v1/status").raise_for_status().json()["model"]
        http.post("/swarm/v1/runs", json={"spec": _SPEC}).raise_for_status()
        for name in args.names:
            workload = asyncio.run(record(server.url, model, name))
            workload.save(path_of(name))
            print(json.dumps({"workload": name} | workload.lengths), flush=True)


if __name__ == "__main__":
    sys.exit(run(main))
