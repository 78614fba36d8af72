"""How long does a warm server take from starting a second run to granting its first claim?

The first run trains one step, so that the weights have to be reset, and is stopped. The time is from just before
`POST /swarm/v1/runs` of the second run to the 200 of a claim sent right after it. seconds is the slowest of all switches,
median_s the median. ratio is boot_s ÷ median_s; boot_s is the time from the server's start until it serves.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from bench.command import run
from bench.serving import ServerProcess
from foundation.arguments import count

_BOOT_LIMIT_S = 300
_SPEC = {
    "batch": {"tasks": 1, "group_size": 2},
    "sampling": {"max_tokens": 8},
    "optimizer": {"learning_rate": 1e-4},
}


def claim(http: httpx.Client, run_id: str) -> dict[str, Any]:
    body = {"run_id": run_id, "client_id": "bench", "task_id": "t-1", "wait_s": 60}
    return dict(http.post("/swarm/v1/episodes:claim", json=body).raise_for_status().json())


def wait_for(http: httpx.Client, reached: Any, what: str) -> None:
    """Follow the status by long poll until `reached(status)`. Raises: RuntimeError when that takes too long."""
    until = time.monotonic() + _BOOT_LIMIT_S
    status = http.get("/swarm/v1/status").raise_for_status().json()
    while not reached(status):
        if status["phase"] == "failed" or time.monotonic() > until:
            raise RuntimeError(f"waiting for {what}: {status}")
        query = {"since": status["revision"], "wait_s": 20}
        status = http.get("/swarm/v1/status", params=query).raise_for_status().json()


def train_one_step(http: httpx.Client, run_id: str) -> None:
    model = http.get("/swarm/v1/status").raise_for_status().json()["model"]
    for reward in (0.0, 1.0):
        grant = claim(http, run_id)
        body = {"model": model, "messages": [{"role": "user", "content": "Say one word"}]}
        key = {"Authorization": f"Bearer {grant['api_key']}"}
        http.post("/v1/chat/completions", json=body, headers=key).raise_for_status()
        end = {"lease": grant["lease"], "reward": reward}
        http.post(f"/swarm/v1/episodes/{grant['episode_id']}:end", json=end).raise_for_status()
    wait_for(http, lambda status: status["step"] >= 1 and status["phase"] == "rolling", "the first step")


def switch(http: httpx.Client, previous: str) -> tuple[str, float]:
    """Stop the previous run and post the next; returns its id, and the seconds until its first claim was granted."""
    http.post(f"/swarm/v1/runs/{previous}:stop").raise_for_status()
    wait_for(http, lambda status: status["phase"] == "idle", "the stop")
    began = time.monotonic()
    created = http.post("/swarm/v1/runs", json={"spec": _SPEC}).raise_for_status().json()
    grant = claim(http, created["run_id"])
    seconds = time.monotonic() - began
    abort = {"lease": grant["lease"], "reason": "only its grant was timed"}
    http.post(f"/swarm/v1/episodes/{grant['episode_id']}:abort", json=abort).raise_for_status()
    return created["run_id"], seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("local", "echo"), default="local")
    parser.add_argument("--model", default=None, help="default: smollm2-135m, or echo")
    parser.add_argument("--switches", type=count, default=3)
    args = parser.parse_args()
    model = args.model or ("smollm2-135m" if args.engine == "local" else "echo")
    seconds = []
    began = time.monotonic()
    with (
        tempfile.TemporaryDirectory() as scratch,
        ServerProcess(Path(scratch) / "state", "--max-model-len", "1024", engine=args.engine, model=model) as server,
        server.client() as http,
    ):
        wait_for(http, lambda status: status["engine"]["warm"], "the engine")
        boot_s = time.monotonic() - began
        run_id = http.post("/swarm/v1/runs", json={"spec": _SPEC}).raise_for_status().json()["run_id"]
        for number in range(args.switches):
            train_one_step(http, run_id)
            run_id, taken = switch(http, run_id)
            seconds.append(taken)
            print(json.dumps({"switch": number, "seconds": round(taken, 3)}), flush=True)
    summary = {"bench": "run_switch", "engine": args.engine, "model": model, "n": len(seconds)}
    summary |= {"seconds": round(max(seconds), 3), "median_s": round(median(seconds), 3)}
    print(json.dumps(summary | {"boot_s": round(boot_s, 2), "ratio": round(boot_s / median(seconds), 2)}))


if __name__ == "__main__":
    sys.exit(run(main))
