"""How long until inference on the CPU answers its first call, with vLLM's engine core forked from its server or spawned?

The two ways take turns. Run it on an idle machine. If this machine's server does not fork its core, only vLLM's way is timed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median

from bench.command import run
from foundation.arguments import count
from foundation.clock import SystemClock
from swarm.engine.local.inference import VllmInference
from swarm.engine.sampling.server import FORKING_SERVER, VLLM_SERVER, ServedAdapter, VllmSettings
from swarm.engine.seam import SampleRequest
from swarm.engine.training.supervisor import ChildCommand
from swarm.models import resolve

_CALL = SampleRequest(
    dialect="chat.completions",
    body={"messages": [{"role": "user", "content": "Tell a story."}], "max_tokens": 64, "ignore_eos": True, "seed": 1},
    prompt_ids=None,
)


class SpawnedCore(VllmSettings):
    """Settings that start the engine core with vLLM's own entry point."""

    def command(self, socket: Path, adapter: ServedAdapter | None = None) -> ChildCommand:
        child = super().command(socket, adapter)
        return replace(child, argv=[VLLM_SERVER if part == FORKING_SERVER else part for part in child.argv])


@contextmanager
def settings_of(kind: str, model: str) -> Iterator[VllmSettings]:
    """kind: forked or spawned."""
    with tempfile.TemporaryDirectory() as scratch:
        of_kind = VllmSettings if kind == "forked" else SpawnedCore
        path = resolve(model).path
        yield of_kind(model_dir=path, model_name=model, log_path=Path(scratch) / "log", max_model_len=1024)


async def boot(kind: str, model: str) -> dict[str, float]:
    """Seconds until the server answers, and seconds of a first and a second call of 64 tokens."""
    with settings_of(kind, model) as settings:
        inference = VllmInference(settings, clock=SystemClock())
        marks = [time.monotonic()]
        try:
            await inference.boot()
            marks.append(time.monotonic())
            for _ in range(2):
                await inference.sample(_CALL)
                marks.append(time.monotonic())
        finally:
            await inference.shutdown()
    taken = [after - before for before, after in pairwise(marks)]
    return dict(zip(("boot_s", "first_call_s", "second_call_s"), taken, strict=True))


def forks(model: str) -> bool:
    """Whether this machine's server forks its core."""
    with settings_of("forked", model) as settings:
        return FORKING_SERVER in settings.command(Path("s")).argv


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=count, default=3)
    args = parser.parse_args()
    kinds = ["spawned", "forked"] if forks(args.model) else ["spawned"]
    boots: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(args.rounds):
        for kind in kinds:
            taken = asyncio.run(boot(kind, args.model))
            boots[kind].append(taken["boot_s"])
            seconds = {name: round(value, 2) for name, value in taken.items()}
            print(json.dumps({"round": number, "core": kind} | seconds), flush=True)
    medians = {f"{kind}_boot_s": round(median(times), 2) for kind, times in boots.items()}
    ratio = {"ratio": round(median(boots["spawned"]) / median(boots["forked"]), 2)} if len(kinds) > 1 else {}
    print(json.dumps({"bench": "boot", "model": args.model, "n": args.rounds} | medians | ratio))


if __name__ == "__main__":
    sys.exit(run(main))
