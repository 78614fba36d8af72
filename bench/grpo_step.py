"""How long does one GRPO step take, compared with TRL on the same model, tasks and lengths?

A step is 64 completions of at most 32 tokens (8 sums, 8 completions of each), one optimiser step, and whatever it takes
until the next completions come from the new weights. Ours: the local engine, driven as the server drives it (64 calls at
once, batch, train, serve). TRL's: `GRPOTrainer` in an environment of its own, which makes a first step in float32, under
autocast and with bfloat16 weights; the fastest goes on: which one that is depends on the CPU. Both sides make a step that is
not counted; then they take turns, so that whatever else this machine does meets both. The learning rate is too small for either
side to learn to answer in fewer tokens, so that all steps are of the same model and of the same lengths (sampled_tokens,
trl_sampled_tokens): at a rate that it learns at, ours answers in half the tokens after five steps, and TRL's in bfloat16 does
not learn. All of these are medians.

TRL samples with transformers' own `generate`, not with vLLM, and runs in its environment as it was installed: without the memory
allocator and the OpenMP settings that our server and our trainer run with. Ours stay in memory, idle, while TRL makes a step, and
TRL while ours do. dtype is what ours compute in, which TRL's precision may not be; cpu is what both ran on.

ratio is of that step; ratio_turns of the *turns* step (`bench.turns_step`: 4 episodes of 8 turns over a prompt of 780 tokens),
where TRL computes in the precision that was its fastest on sums. ratio_at_floor and ratio_turns_at_floor are what they would be if
our steps were nothing but the matrix products that they cannot do without (`bench.train_floor --whole`): no more can be had
on this machine.

`--device cuda --trl-python PATH` compares both on one GPU that holds both: sums alone, answers of up to 128 tokens, each side with its own
vLLM on the card (TRL's in its own process, `vllm_mode="colocate"`). PATH is the Python of an environment with TRL, vLLM and a torch for CUDA
(`pip install "trl[vllm]"`). Rewards do not depend on what the model knows, so that one of random weights will do.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, get_args

from bench import train_floor, turns_step
from bench.command import run
from bench.sums import GPU_MAX_TOKENS, GROUP_SIZE, MAX_TOKENS, PRECISIONS, STILL, TASKS, Sum, even, score, sums
from bench.workloads import episode_of, of_groups
from foundation.arguments import count
from foundation.clock import SystemClock
from foundation.gpus import cards
from foundation.ids import derived_seed
from swarm.engine.devices import Layout
from swarm.engine.local.engine import LocalEngine
from swarm.engine.machine import Device
from swarm.engine.seam import RunContext, SampleRequest, TrainBatch, TrainEpisode, TrainGroup
from swarm.models import resolve
from swarm.protocol.episodes import WeightsVersion
from swarm.protocol.runspec import RunSpec

_ROOT = Path(__file__).resolve().parents[1]
_LOCK = _ROOT / "requirements" / "trl.txt"
_ENVIRONMENT = _ROOT / ".venv-trl"
_SPEC = RunSpec.model_validate(
    {
        "optimizer": {"learning_rate": STILL},
        "batch": {"tasks": TASKS, "group_size": GROUP_SIZE},
        "sampling": {"max_tokens": MAX_TOKENS},
    }
)

FIRST = 2
"""Number of the first counted step."""

Step = Callable[[int], Awaitable[dict[str, float]]]
"""Makes the step with a given number; returns its seconds, those of its parts, and its token counts."""


class Ours:
    """The local engine under one run."""

    def __init__(self, engine: LocalEngine, run_dir: Path) -> None:
        self._engine = engine
        self._on_gpu = engine.inference.settings.device == "cuda"
        self._spec = _SPEC.computed_in(engine.info.dtype)
        self._run = RunContext(run_id="bench", branch=0, spec=self._spec, directory=run_dir)
        self._clock = SystemClock()
        self.groups: dict[int, list[TrainGroup]] = {}
        """Groups by step."""

    async def open(self) -> None:
        await self._engine.open_run(self._run)

    async def step(self, number: int) -> dict[str, float]:
        """Make a step; returns the seconds of each part and the number of tokens."""
        began = self._clock.monotonic()
        groups = list(await asyncio.gather(*(self._group(number, at, task) for at, task in enumerate(sums(number)))))
        self.groups[number] = groups
        sampled = self._clock.monotonic()
        outcome = await self._engine.train(TrainBatch(step=number, spec=self._spec, groups=groups))
        trained = self._clock.monotonic()
        await self._engine.serve(WeightsVersion(run_id="bench", branch=0, step=number))
        served = self._clock.monotonic()
        tokens = sum(len(call.sampled_ids) for group in groups for episode in group.episodes for call in episode.calls)
        return {
            "seconds": served - began,
            "generate_s": sampled - began,
            "train_s": trained - sampled,
            "sync_s": served - trained,
            "sampled_tokens": tokens,
            "reward_mean": outcome.metrics["reward_mean"],
            "tokens_trained": outcome.metrics["tokens_trained"],
        }

    async def _group(self, step: int, at: int, task: Sum) -> TrainGroup:
        episodes = await asyncio.gather(*(self._episode(step, at, slot, task) for slot in range(GROUP_SIZE)))
        return TrainGroup(group_id=f"{step}-{at}", task_id=task.question, episodes=list(episodes))

    async def _episode(self, step: int, at: int, slot: int, task: Sum) -> TrainEpisode:
        body = {
            "messages": [{"role": "user", "content": task.question}],
            "temperature": 1.0,
            "max_tokens": GPU_MAX_TOKENS if self._on_gpu else MAX_TOKENS,
        }
        if self._engine.info.default_seeds:
            body["seed"] = derived_seed("bench", step, at, slot)
        sampled = await self._engine.sample(SampleRequest(dialect="chat.completions", body=body))
        if self._on_gpu:
            reward = even(sampled.choices[0].sampled_ids)
        else:
            reward = score(sampled.answer["choices"][0]["message"]["content"] or "", task.total)
        return episode_of(f"{step}-{at}-{slot}", sampled, reward)


class Trl:
    """TRL in a separate process, which makes one step per request."""

    def __init__(self, task: str, model: Path, precision: str, logs: Path, python: Path | None) -> None:
        """python: that of an environment for a GPU; None: our own environment, on the CPU."""
        self.precision = precision
        self._log = logs / f"trl-{task}-{precision}.log"
        with self._log.open("w") as errors:
            self._process = subprocess.Popen(
                [
                    *(str(python or _ENVIRONMENT / "bin" / "python"), "-m", "bench.trl_grpo"),
                    *("--model", str(model), "--precision", precision, "--task", task, "--scratch", str(logs)),
                    *(["--gpu"] if python else []),
                ],
                cwd=_ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def close(self) -> None:
        """End the process. May be called at any time and repeatedly; discards a step in progress."""
        self._process.kill()
        self._process.communicate()

    def step(self) -> dict[str, float]:
        """Make the next step; returns its seconds and its number of sampled tokens."""
        assert self._process.stdin is not None
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        while True:
            said = self._said()
            if "seconds" in said:
                return said

    def _said(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"TRL ended with status {self._process.wait()}: {self._log.read_text()[-2000:]}")
        return dict(json.loads(line)) if line.startswith("{") else {}


def ensure_trl() -> None:
    """Create TRL's environment from its lock file, unless one from the same lock exists."""
    marker = _ENVIRONMENT / "lock.txt"
    if marker.exists() and marker.read_bytes() == _LOCK.read_bytes():
        return
    print(f"Setting up {_ENVIRONMENT.name} from requirements/{_LOCK.name} ...", file=sys.stderr)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(_ENVIRONMENT)], check=True)
    pip = [str(_ENVIRONMENT / "bin" / "python"), "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-deps", "-r", str(_LOCK)], check=True, stdout=sys.stderr)
    marker.write_bytes(_LOCK.read_bytes())


async def fastest_trl(
    task: str, model: Path, precisions: Sequence[str], logs: Path, opened: ExitStack, python: Path | None
) -> Trl:
    """TRL in its fastest precision, warmed up by one step. `opened` closes it; slower ones are closed at once."""
    best: tuple[float, Trl] | None = None
    for precision in precisions:
        trl = opened.enter_context(closing(Trl(task, model, precision, logs, python)))
        made = await asyncio.to_thread(trl.step)
        seconds = made["seconds"]
        say(task=task, side="trl", precision=precision, warm_up=True, **made)
        if best is not None:
            slower = trl if seconds > best[0] else best[1]
            slower.close()
        if best is None or seconds <= best[0]:
            best = (seconds, trl)
    if best is None:
        raise ValueError("name at least one precision")
    return best[1]


@dataclass(frozen=True, slots=True)
class Compared:
    """The measured steps of both sides, and TRL's precision."""

    ours: list[dict[str, float]]
    trl: list[dict[str, float]]
    precision: str

    @property
    def ratio(self) -> float:
        return self.ratio_at(_middle(self.ours, "seconds"))

    def ratio_at(self, seconds: float) -> float:
        """The ratio if our step took `seconds`."""
        return _middle(self.trl, "seconds") / seconds

    @property
    def middle(self) -> int:
        """Index of our step with the median time."""
        return sorted(range(len(self.ours)), key=lambda at: self.ours[at]["seconds"])[len(self.ours) // 2]

    def summary(self, infix: str = "") -> dict[str, float]:
        """Medians over the steps. infix: inserted before each of our names, and after `trl_`."""
        return {
            f"{infix}s_per_step": round(_middle(self.ours, "seconds"), 3),
            f"trl_{infix}s_per_step": round(_middle(self.trl, "seconds"), 3),
            f"{infix}sampled_tokens": round(_middle(self.ours, "sampled_tokens"), 1),
            f"trl_{infix}sampled_tokens": round(_middle(self.trl, "sampled_tokens"), 1),
        }


def _middle(steps: Sequence[dict[str, float]], name: str) -> float:
    return median(step[name] for step in steps)


async def side_by_side(
    task: str, step: Step, model: Path, precisions: Sequence[str], steps: int, logs: Path, python: Path | None = None
) -> Compared:
    """Make one uncounted step per side, then measure steps in turns. step: makes ours. python: TRL's for a GPU."""
    ours, theirs = [], []
    say(task=task, side="ours", warm_up=True, **await step(FIRST - 1))
    with ExitStack() as opened:
        trl = await fastest_trl(task, model, precisions, logs, opened, python)
        for number in range(FIRST, FIRST + steps):
            ours.append(await step(number))
            say(task=task, side="ours", step=number, **ours[-1])
            theirs.append(await asyncio.to_thread(trl.step))
            say(task=task, side="trl", step=number, precision=trl.precision, **theirs[-1])
    return Compared(ours, theirs, trl.precision)


async def measure(
    model_name: str, steps: int, turns_steps: int, precisions: Sequence[str], home: Path
) -> dict[str, Any]:
    model = resolve(model_name)
    engine = LocalEngine(model, logs=home, clock=SystemClock(), max_model_len=1024)
    try:
        await engine.boot()
        side = Ours(engine, home / "run")
        await side.open()
        by_sums = await side_by_side("sums", side.step, model.path, precisions, steps, home)
    finally:
        await engine.shutdown()
    middle = home / "sums.json.gz"
    of_groups("sums", model_name, side.groups[FIRST + by_sums.middle]).save(middle)
    async with turns_step.on_a_server(model_name, home) as step:
        by_turns = await side_by_side("turns", step, model.path, [by_sums.precision], turns_steps, home)
    return {
        **by_sums.summary(),
        "ratio": round(by_sums.ratio, 2),
        "ratio_at_floor": round(by_sums.ratio_at(step_floor(model_name, str(middle))), 2),
        "dtype": engine.info.dtype,
        "trl_precision": by_sums.precision,
        "cpu": cpu(),
        "steps": steps,
        **by_turns.summary("turns_"),
        "ratio_turns": round(by_turns.ratio, 2),
        "ratio_turns_at_floor": round(by_turns.ratio_at(step_floor(model_name, "turns")), 2),
    }


async def measure_on_gpu(
    model_name: str, steps: int, precisions: Sequence[str], home: Path, trl_python: Path
) -> dict[str, Any]:
    model, card = resolve(model_name), cards()[0]
    engine = LocalEngine(
        model, logs=home, clock=SystemClock(), max_model_len=1024, devices=Layout.one("cuda"), card=card.total // 2
    )
    try:
        await engine.boot()
        side = Ours(engine, home / "run")
        await side.open()
        by_sums = await side_by_side("sums", side.step, model.path, precisions, steps, home, trl_python)
    finally:
        await engine.shutdown()
    summary = by_sums.summary()
    return {
        **summary,
        "tokens_per_s": round(summary["sampled_tokens"] / summary["s_per_step"], 1),
        "trl_tokens_per_s": round(summary["trl_sampled_tokens"] / summary["trl_s_per_step"], 1),
        "ratio": round(by_sums.ratio, 2),
        "dtype": engine.info.dtype,
        "trl_precision": by_sums.precision,
        "card": card.name,
        "steps": steps,
    }


def step_floor(model_name: str, workload: str) -> float:
    """Seconds that the matrix products of a whole step take (see `bench.train_floor`), with nothing else running."""
    found = train_floor.in_a_trainer_like_process("--whole", "--model", model_name, "--workload", workload)
    say(**found)
    return float(found["floor_s"])


def floor_share(model_name: str) -> dict[str, float]:
    """The train phase against its floor (see `bench.train_floor`), with nothing else running."""
    found = train_floor.in_a_trainer_like_process("--model", model_name)
    say(**found)
    return {"train_share_of_floor": found["train_share_of_floor"]}


def cpu() -> str:
    """Linux's name of this machine's processor, and the number of cores that this process may use."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else 'unnamed'}, {len(os.sched_getaffinity(0))} cores"


def say(**fields: Any) -> None:
    rounded = {name: round(value, 3) if isinstance(value, float) else value for name, value in fields.items()}
    print(json.dumps(rounded), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.grpo_step", description=__doc__, allow_abbrev=False)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--steps", type=count, default=7, help="measured steps of each side")
    parser.add_argument("--turns-steps", type=count, default=3, help="measured steps of each side on *turns*")
    parser.add_argument("--trl-precision", nargs="+", default=PRECISIONS, choices=PRECISIONS, metavar="PRECISION")
    parser.add_argument("--device", choices=get_args(Device), default="cpu")
    parser.add_argument(
        "--trl-python", type=Path, help="with --device cuda: Python of an environment with TRL and vLLM"
    )
    args = parser.parse_args()
    if (args.device == "cuda") != (args.trl_python is not None):
        parser.error("--device cuda and --trl-python go together")
    if args.trl_python is not None:
        if not cards():
            parser.error("nvidia-smi names no card on this machine")
        with tempfile.TemporaryDirectory(prefix="swarm-bench-") as home:
            found = asyncio.run(measure_on_gpu(args.model, args.steps, args.trl_precision, Path(home), args.trl_python))
        say(bench="grpo_step", **found)
        return 0
    ensure_trl()
    with tempfile.TemporaryDirectory(prefix="swarm-bench-") as home:
        found = asyncio.run(measure(args.model, args.steps, args.turns_steps, args.trl_precision, Path(home)))
    say(bench="grpo_step", **found, **floor_share(args.model))
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
