"""How many more episodes per hour result from sampling the next batch while slow tools hold up the current one?

One real server (vLLM and the trainer) and one agent. The agent is asked for a one-digit sum, passes its answer to a tool, is asked
again with the tool's output, and passes that answer to the tool. A tool takes log-normal time, median 2 s and sigma 1, the same for
each episode in both arms. Each arm is a run of its own: with `max_staleness` 0 the next episode waits for each step's weights, with
1 it starts with the current ones. An arm is timed from its start to the end of its last step; then its final weights answer
held-out sums. 0 runs first, after a run of one step that is not counted. not_worse: the held-out reward of 1 is not below that
of 0 by more than the noise of their difference, two standard errors.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, variance
from typing import Any

import httpx

from bench.command import run
from bench.run_switch import wait_for
from bench.serving import ServerProcess
from bench.sums import LEARNING_RATE
from foundation.arguments import count
from foundation.ids import derived_seed
from studies.arithmetic.reward import score
from studies.arithmetic.workflow import tasks
from swarm.client import Episode, Outcome, SwarmClient, Task
from swarm.protocol.runspec import RunSpec

MEDIAN_S = 2.0
SIGMA = 1.0
TASKS = 4
GROUP_SIZE = 8
MAX_TOKENS = 16
CONCURRENCY = 2 * TASKS * GROUP_SIZE
_EVAL_SAMPLES = 4


@dataclass(slots=True)
class Arm:
    """One run with one max_staleness."""

    staleness: int
    episodes: int
    seconds: float
    rewards: list[float]
    """Rewards of the held-out sums, each a mean over its samples."""

    @property
    def per_hour(self) -> float:
        return 3600 * self.episodes / self.seconds


class Agent:
    """Makes two LLM calls and two tool calls per episode. Tools take no time in held-out episodes, which are not timed."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http
        self._begun: dict[str, int] = {}

    async def train(self, episode: Episode, task: Task) -> Outcome:
        slot = self._begun[task.id] = self._begun.get(task.id, -1) + 1
        draw = random.Random(derived_seed("tool", task.id, slot))
        return await self._play(episode, task, [draw.lognormvariate(math.log(MEDIAN_S), SIGMA) for _ in range(2)])

    async def answer(self, episode: Episode, task: Task) -> Outcome:
        return await self._play(episode, task, [0.0, 0.0])

    async def _play(self, episode: Episode, task: Task, latencies_s: list[float]) -> Outcome:
        messages: list[dict[str, Any]] = [{"role": "user", "content": task.query}]
        said = ""
        for latency_s in latencies_s:
            said = await self._ask(episode, messages)
            await asyncio.sleep(latency_s)
            check = f"Read it again. {task.query}"
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": check}]
        return Outcome(reward=score(said, int(task.metadata["total"])))

    async def _ask(self, episode: Episode, messages: list[dict[str, Any]]) -> str:
        body = {"model": "policy", "messages": messages, **episode.sampling}
        key = {"Authorization": f"Bearer {episode.api_key}"}
        answer = await self._http.post(f"{episode.base_url}/chat/completions", json=body, headers=key)
        answer.raise_for_status()
        return str(answer.json()["choices"][0]["message"]["content"] or "")


def run_arm(url: str, http: httpx.Client, staleness: int, steps: int) -> Arm:
    """Carry out one run, and wait until the server is idle again."""
    arm = asyncio.run(train_and_answer(url, staleness, steps))
    wait_for(http, lambda status: status["phase"] == "idle", "the stop")
    return arm


async def train_and_answer(url: str, staleness: int, steps: int) -> Arm:
    """Train, then evaluate the final weights."""
    async with SwarmClient(url) as client, httpx.AsyncClient(timeout=300, trust_env=False, limits=_LIMITS) as http:
        agent = Agent(http)
        spec = {
            "max_staleness": staleness,
            "batch": {"tasks": TASKS, "group_size": GROUP_SIZE},
            "sampling": {"max_tokens": MAX_TOKENS},
            "optimizer": {"learning_rate": LEARNING_RATE},
            "checkpoint": {"every_steps": steps},
            "limits": {"steps": steps},
        }
        run_id = (await client.start_run(RunSpec.model_validate(spec))).run_id
        await client.run_tasks(_numbered(), agent.train, concurrency=CONCURRENCY, run_id=run_id, progress=False)
        report = await client.run(run_id)
        rewards: dict[str, list[float]] = {}

        async def answered(episode: Episode, task: Task) -> Outcome:
            outcome = await agent.answer(episode, task)
            rewards.setdefault(task.id, []).append(outcome.reward)
            return outcome

        await client.run_tasks(
            tasks("heldout", 0, None),
            answered,
            kind="eval",
            run_id=run_id,
            episodes_per_task=_EVAL_SAMPLES,
            concurrency=CONCURRENCY,
            progress=False,
        )
        await client.stop_run(run_id)
    episodes = sum(int(step.values["episodes"]) for step in report.steps)
    seconds = report.steps[-1].at - report.started_at
    return Arm(staleness, episodes, seconds, [fmean(rewards[name]) for name in sorted(rewards)])


_LIMITS = httpx.Limits(max_connections=None)


def _numbered() -> Iterator[Task]:
    """Give repeated sums new task ids, so that groups do not mix and each gets its own latency."""
    for number, task in enumerate(tasks("train", 0, None)):
        yield Task(id=f"{number}:{task.id}", query=task.query, metadata=task.metadata)


def noise(arms: tuple[Arm, Arm]) -> float:
    """Two standard errors of the difference of the mean rewards, paired because both arms have the same sums."""
    pairs = [one - other for one, other in zip(arms[0].rewards, arms[1].rewards, strict=True)]
    return 2 * math.sqrt(variance(pairs) / len(pairs))


def say(**fields: Any) -> None:
    rounded = {name: round(value, 3) if isinstance(value, float) else value for name, value in fields.items()}
    print(json.dumps(rounded), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="bench.async_overlap", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=count, default=8, help="of each arm")
    parser.add_argument("--engine", choices=("local", "echo"), default="local")
    args = parser.parse_args()
    model = "smollm2-135m" if args.engine == "local" else "echo"
    arms: dict[int, Arm] = {}
    with (
        tempfile.TemporaryDirectory(prefix="swarm-bench-") as scratch,
        ServerProcess(Path(scratch) / "state", "--max-model-len", "512", engine=args.engine, model=model) as server,
        server.client() as http,
    ):
        wait_for(http, lambda status: status["engine"]["warm"], "the engine")
        run_arm(server.url, http, staleness=0, steps=1)
        for staleness in (0, 1):
            arm = arms[staleness] = run_arm(server.url, http, staleness, args.steps)
            say(
                max_staleness=staleness,
                episodes=arm.episodes,
                seconds=arm.seconds,
                episodes_per_hour=arm.per_hour,
                heldout_reward=fmean(arm.rewards),
            )
    difference = fmean(arms[1].rewards) - fmean(arms[0].rewards)
    floor = noise((arms[0], arms[1]))
    say(
        bench="async_overlap",
        engine=args.engine,
        ratio=arms[1].per_hour / arms[0].per_hour,
        reward_difference=difference,
        noise_floor=floor,
        not_worse=difference >= -floor,
        heldout_sums=len(arms[0].rewards),
        steps=args.steps,
    )
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
