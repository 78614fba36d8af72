"""What does the gateway cost? Tokens per second through it ÷ straight to vLLM, and how much later the first token comes.

One server, one vLLM, one raw HTTP client for both ways. 1, 16 and 64 agents at once make a call each, all of them different;
streaming, and not. The ways take turns in rounds, each first in every other one, for --seconds in each setting:

    gateway   each agent in an episode of its own, through /v1/chat/completions; recorded, token for token
    direct    vLLM's Unix socket: word for word what the gateway asks vLLM for, the log-probabilities and ids that a record
              needs included
    plain     vLLM's Unix socket again, asked as a bare client would: no ids, no log-probabilities (--plain)

Every answer has the same number of tokens (ignore_eos). The first round of each setting is not counted: prompts are cached
after it. A machine's own pace drifts by more than the gateway costs, so a setting's ratio is the median over rounds of
gateway's tokens per second ÷ direct's *in the same round*, with the 95 % interval that the order of the rounds' ratios gives
(no assumption on how they are distributed; it takes six rounds at least, which --seconds does not cut short). ratio is the worst over all settings, with that setting's interval;
ttft_added_ms is the median over calls of what the gateway adds to the time to the first event of a stream, at the worst
number of agents. control_ms is processor time of the server's own process for one call: on a machine whose cores all sample,
that is what the gateway takes from vLLM, and it is the same however busy the machine is.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

import httpx
from scipy import stats

from bench.command import run
from bench.connection import Connection
from bench.serving import ServerProcess
from foundation import arguments
from swarm.engine.sampling.answers import chat_body

AGENTS = (1, 16, 64)
LEAST_ROUNDS = 6
"""Minimum number of rounds for a 95 % interval. With five, the range covers the median in only 94 % of cases."""
PATH = "/v1/chat/completions"
CLIENT = "bench"
_BOOT_LIMIT_S = 600.0
_SPEC = {"batch": {"tasks": 1, "group_size": 2}, "sampling": {"max_tokens": 8}}


@dataclass(frozen=True, slots=True)
class Setting:
    agents: int
    streaming: bool


@dataclass(frozen=True, slots=True)
class Call:
    """One call of one agent. number: its index among the agent's calls in a turn."""

    agent: int
    number: int


@dataclass(slots=True)
class Round:
    """One turn of one way: seconds from the first request to the last answer, tokens, and each call's time to the first event."""

    seconds: float = 0.0
    tokens: int = 0
    first_s: dict[Call, float] = field(default_factory=dict)
    control_s: float = 0.0
    """Processor time of the server's process during the round."""


@dataclass(slots=True)
class Tally:
    """All counted rounds of one way."""

    rounds: list[Round] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> list[float]:
        return [turn.tokens / turn.seconds for turn in self.rounds]


class Gateway:
    """Calls through the gateway, in episodes on the server."""

    def __init__(self, server: ServerProcess, http: httpx.Client, run_id: str, calls: int) -> None:
        host, port = server.url.removeprefix("http://").split(":")
        self._address = host, int(port)
        self._http = http
        self._run_id = run_id
        self._calls = calls
        self._pid = server.pid

    async def turn(self, setting: Setting, max_tokens: int) -> Round:
        grants = [self._claim(agent) for agent in range(setting.agents)]
        connections = [await Connection.open(*self._address) for _ in grants]

        async def agent(number: int, taken: Round) -> None:
            for at in range(self._calls):
                call = Call(number, at)
                body = asked(call, max_tokens)
                await make_call(connections[number], call, body, setting, taken, grants[number]["api_key"])

        spent_s = processor_s(self._pid)
        taken = await together(setting, agent)
        taken.control_s = processor_s(self._pid) - spent_s
        for grant in grants:
            abort = {"lease": grant["lease"], "reason": "only its calls were timed"}
            self._http.post(f"/swarm/v1/episodes/{grant['episode_id']}:abort", json=abort).raise_for_status()
        await asyncio.gather(*(connection.close() for connection in connections))
        return taken

    def _claim(self, agent: int) -> dict[str, Any]:
        body = {"run_id": self._run_id, "client_id": CLIENT, "task_id": f"t-{agent}", "kind": "eval", "wait_s": 120}
        return dict(
            self._http.post("/swarm/v1/episodes:claim", json=body | {"idle_limit_s": 3600}).raise_for_status().json()
        )


class Direct:
    """Calls straight to vLLM, with the extra fields that a record needs, or `plain`."""

    def __init__(self, socket: Path, model: str, calls: int, *, plain: bool) -> None:
        self._socket = socket
        self._model = model
        self._calls = calls
        self._plain = plain
        self._requests = 0

    async def turn(self, setting: Setting, max_tokens: int) -> Round:
        connections = [await Connection.open_socket(self._socket) for _ in range(setting.agents)]

        async def agent(number: int, taken: Round) -> None:
            for at in range(self._calls):
                call = Call(number, at)
                await make_call(connections[number], call, self._body(call, max_tokens), setting, taken)

        taken = await together(setting, agent)
        await asyncio.gather(*(connection.close() for connection in connections))
        return taken

    def _body(self, call: Call, max_tokens: int) -> dict[str, Any]:
        body = asked(call, max_tokens) | {"model": self._model}
        if self._plain:
            return body
        self._requests += 1
        return chat_body(body, model=self._model, request_id=f"bench{self._requests:08x}", prompt_ids=None)


def asked(call: Call, max_tokens: int) -> dict[str, Any]:
    """Body of a call's request, the same for every way."""
    question = f"Tell a story about number {100 * call.number + call.agent}, and why somebody kept it in a drawer."
    return {
        "messages": [{"role": "user", "content": question}],
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "seed": 1 + 1000 * call.number + call.agent,
        "max_tokens": max_tokens,
        "ignore_eos": True,
    }


async def together(setting: Setting, agent: Any) -> Round:
    """Run all agents at once."""
    taken = Round()
    began = time.monotonic()
    await asyncio.gather(*(agent(number, taken) for number in range(setting.agents)))
    taken.seconds = time.monotonic() - began
    return taken


async def make_call(
    connection: Connection, call: Call, body: dict[str, Any], setting: Setting, taken: Round, bearer: str = ""
) -> None:
    """Make one call; adds its tokens and the time of its first event. Raises: RuntimeError for an answer of the wrong length."""
    began = time.monotonic()
    usage: dict[str, Any] = {}
    if setting.streaming:
        body = body | {"stream": True, "stream_options": {"include_usage": True}}
        last = b""
        async for data in connection.stream(PATH, body, bearer):
            taken.first_s.setdefault(call, time.monotonic() - began)
            if data != b"[DONE]":
                last = data
        usage = json.loads(last).get("usage") or {}
    else:
        usage = (await connection.post(PATH, body, bearer))["usage"]
    if usage.get("completion_tokens") != body["max_tokens"]:
        raise RuntimeError(f"{body['max_tokens']} tokens were asked for, the answer's usage is {usage}")
    taken.tokens += usage["completion_tokens"]


async def compare(setting: Setting, ways: dict[str, Any], seconds: float, max_tokens: int) -> dict[str, Tally]:
    """Run all ways in turns, in alternating order; the first round warms up. Runs whole pairs of rounds for `seconds`, but at
    least as many as an interval needs."""
    tallies = {name: Tally() for name in ways}
    number, until = 0, math.inf
    while number % 2 == 0 or number <= LEAST_ROUNDS or time.monotonic() < until:
        order = list(ways)
        for name in order if number % 2 == 0 else reversed(order):
            taken = await ways[name].turn(setting, max_tokens)
            if number:
                tallies[name].rounds.append(taken)
        if number == 0:
            until = time.monotonic() + seconds
        number += 1
    return tallies


def middle(values: Sequence[float]) -> tuple[float, float, float]:
    """The median, and its 95 % interval from order statistics (binomial, as in a sign test).

    Raises: ValueError when there are too few values for such an interval.
    """
    if len(values) < LEAST_ROUNDS:
        raise ValueError(f"a 95 % interval takes {LEAST_ROUNDS} values, got {len(values)}")
    inner = sorted(values)
    cut = int(stats.binom.ppf(0.025, len(inner), 0.5))
    return median(inner), inner[cut - 1], inner[-cut]


def paired(rates: dict[str, list[float]], other: str) -> list[float]:
    """The gateway's rate ÷ the other way's rate, by round."""
    return [ours / theirs for ours, theirs in zip(rates["gateway"], rates[other], strict=True)]


def told(setting: Setting, tallies: dict[str, Tally], calls: int) -> dict[str, Any]:
    """One output line of the bench."""
    rates = {name: tally.tokens_per_s for name, tally in tallies.items()}
    turns = tallies["gateway"].rounds
    line: dict[str, Any] = {"agents": setting.agents, "streaming": setting.streaming, "rounds": len(turns)}
    line |= {f"{name}_tokens_per_s": round(median(rate), 1) for name, rate in rates.items()}
    ratio, low, high = middle(paired(rates, "direct"))
    line |= {"ratio": round(ratio, 3), "ratio_95": [round(low, 3), round(high, 3)]}
    line["control_ms"] = round(1e3 * mean(turn.control_s for turn in turns) / (setting.agents * calls), 2)
    if "plain" in rates:
        line["ratio_plain"] = round(median(paired(rates, "plain")), 3)
    if setting.streaming:
        pairs = zip(tallies["gateway"].rounds, tallies["direct"].rounds, strict=True)
        added = [ours.first_s[call] - theirs.first_s[call] for ours, theirs in pairs for call in ours.first_s]
        firsts = [first for turn in tallies["direct"].rounds for first in turn.first_s.values()]
        line |= {"ttft_direct_ms": round(1e3 * median(firsts), 1), "ttft_added_ms": round(1e3 * median(added), 1)}
    return line


def start_run(http: httpx.Client) -> tuple[str, str]:
    """Start a run and wait until its weights are served; returns its id and the model's name.

    Raises: RuntimeError if the server fails or takes too long.
    """
    run_id = http.post("/swarm/v1/runs", json={"spec": _SPEC}).raise_for_status().json()["run_id"]
    until = time.monotonic() + _BOOT_LIMIT_S
    status = http.get("/swarm/v1/status").raise_for_status().json()
    while status["phase"] != "rolling":
        if status["phase"] == "failed" or time.monotonic() > until:
            raise RuntimeError(f"the server does not roll: {status}")
        query = {"since": status["revision"], "wait_s": 20}
        status = http.get("/swarm/v1/status", params=query).raise_for_status().json()
    return run_id, status["model"]


def processor_s(pid: int) -> float:
    """Processor time of all threads of a process since its start, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def socket_of(state_dir: Path) -> Path:
    """vLLM's Unix socket, from the server's state directory."""
    (note,) = state_dir.rglob("*.socket-dir")
    return Path(note.read_text()) / "vllm.sock"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--agents", type=arguments.count, nargs="+", default=AGENTS)
    parser.add_argument("--calls", type=arguments.count, default=1, help="of each agent in a turn, one after the other")
    parser.add_argument("--max-tokens", type=arguments.count, default=48)
    parser.add_argument("--seconds", type=arguments.number, default=120.0, help="that each setting is measured for")
    parser.add_argument("--plain", action="store_true", help="also as a bare client that wants no log-probabilities")
    args = parser.parse_args()
    lines = []
    with (
        tempfile.TemporaryDirectory() as scratch,
        ServerProcess(
            Path(scratch) / "state",
            "--max-model-len",
            "1024",
            "--log-level",
            "warning",
            engine="local",
            model=args.model,
        ) as server,
        server.client() as http,
    ):
        run_id, model = start_run(http)
        socket = socket_of(server.state_dir)
        gateway = Gateway(server, http, run_id, args.calls)
        ways: dict[str, Any] = {"gateway": gateway}
        ways["direct"] = Direct(socket, model, args.calls, plain=False)
        if args.plain:
            ways["plain"] = Direct(socket, model, args.calls, plain=True)
        for agents in args.agents:
            for streaming in (False, True):
                setting = Setting(agents, streaming)
                lines.append(
                    told(setting, asyncio.run(compare(setting, ways, args.seconds, args.max_tokens)), args.calls)
                )
                print(json.dumps(lines[-1]), flush=True)
    worst = min(lines, key=lambda line: line["ratio"])
    summary = {
        "bench": "gateway_overhead",
        "model": model,
        "n": len(lines),
        "ratio": worst["ratio"],
        "ratio_95": worst["ratio_95"],
    }
    print(json.dumps(summary | {"ttft_added_ms": max(line.get("ttft_added_ms", -1e9) for line in lines)}))


if __name__ == "__main__":
    sys.exit(run(main))
