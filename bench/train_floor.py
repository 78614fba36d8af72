"""How close does a training step come to the time of its matrix products?

    python -m bench.train_floor                 # on the recorded batch of *groups*

The floor is what a step cannot do without: every product of the model's own matrices with the tokens that are computed, once
forwards and twice backwards, at the rate that this machine reaches on just these shapes in the compute type, and the
attention's products at the same rate. The step is the trainer's own, in a process like the trainer's, with the time inside
the optimiser taken off. Floor and step are measured in turns. share is floor / step: 1 would be nothing but products.

    python -m bench.train_floor --whole         # of sampling and training together, and no step beside it

The floor of a whole step has sampling in it too: each token of the batch's tree once forwards, all of them at once, which no sampler
can do: it draws one token of each episode at a time. Nothing that computes each token in its context once can be faster.

    python -m bench.train_floor --device cuda
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from bench.command import run
from bench.machine import name_of, path_of_model, seconds, wait_for
from bench.workloads import NAMES, Workload, path_of
from foundation.arguments import count
from foundation.clock import SystemClock
from swarm.engine.local.forward import Policy
from swarm.engine.local.learner import Learner
from swarm.engine.local.minibatch import Piece, pieces
from swarm.engine.local.optimizer import Optimizer
from swarm.engine.machine import compute_type
from swarm.engine.sampling.server import REUSE_MEMORY
from swarm.engine.seam import TrainBatch
from swarm.engine.training.selection import branches, select
from swarm.engine.tree import Branch

_WARM_UP = 2
"""Number of uncounted steps. They allocate the memory that later steps reuse."""
_IN_A_ROW = 10
"""Products queued at once on a GPU per trial, so that launch time does not count."""
_SPEC = {"optimizer": {"learning_rate": 4e-5}}


class TimedOptimizer(Optimizer):
    """An optimiser that counts the seconds of its steps."""

    seconds = 0.0

    def step(self, *arguments: Any, **named: Any) -> Any:
        device = next(iter(self._weights.values())).device
        wait_for(device)
        began = time.perf_counter()
        done = super().step(*arguments, **named)
        wait_for(device)
        self.seconds += time.perf_counter() - began
        return done


@dataclass(slots=True)
class Product:
    """[tokens, inner] times [inner, outer], with both products of its backward pass."""

    tokens: int
    inner: int
    outer: int
    times: int

    @property
    def flops(self) -> float:
        return 6.0 * self.tokens * self.inner * self.outer * self.times

    def seconds(self, policy: Policy, *, trained: bool = True) -> float:
        """Seconds of all products in the policy's dtype on its device. Best of three trials, because a floor is the best that can be reached."""
        x, weight, slope = (
            torch.randn(shape, device=policy.device).to(policy.compute_dtype)
            for shape in ((self.tokens, self.inner), (self.outer, self.inner), (self.tokens, self.outer))
        )
        in_a_row = 1 if policy.device.type == "cpu" else _IN_A_ROW

        def multiply() -> None:
            for _ in range(in_a_row):
                _products_of_one(x, weight, slope if trained else None)

        return self.times * min(seconds(multiply, policy.device) for _ in range(3)) / in_a_row


def _products_of_one(x: Tensor, weight: Tensor, slope: Tensor | None) -> None:
    x @ weight.T
    if slope is not None:
        slope @ weight
        slope.T @ x


def products(policy: Policy, piece: Piece) -> list[Product]:
    """Products of one piece: the linear layers on its tokens, and the output layer on its heads."""
    shapes: dict[tuple[int, int], int] = {}
    output = policy.output_weight
    for module in policy.model.base_model.modules():
        if isinstance(module, torch.nn.Linear):
            shape = (module.in_features, module.out_features)
            shapes[shape] = shapes.get(shape, 0) + 1
    found = [Product(piece.tokens, inner, outer, times) for (inner, outer), times in shapes.items()]
    return [*found, Product(len(piece.heads.at_H), output.shape[1], output.shape[0], 1)]


def attention_flops(policy: Policy, piece: Piece) -> float:
    """FLOPs of attention scores and weighted sums, forward and backward, of every token with itself and its ancestors."""
    config = policy.model.config.get_text_config()
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    pairs = float((piece.micro.depth_T + 1).sum())
    return 12.0 * pairs * float(width * config.num_attention_heads * config.num_hidden_layers)


def floor_seconds(policy: Policy, batch: TrainBatch) -> float:
    """Training floor: forward and backward for all tokens that lead to a trained token."""
    return _products_seconds(policy, branches(select(batch).trained, batch.spec.algorithm), trained=True)


def sampling_floor_seconds(policy: Policy, batch: TrainBatch) -> float:
    """Sampling floor: forward for all tokens except the last of each answer, and a distribution for each sampled token."""
    calls = [call for group in batch.groups for episode in group.episodes for call in episode.calls]
    return _products_seconds(policy, [Branch(call=call, advantage=0.0, weight=0.0) for call in calls], trained=False)


def _products_seconds(policy: Policy, made: Sequence[Branch], *, trained: bool) -> float:
    needed = flops = attention = 0.0
    for piece in pieces(made, policy):
        for product in products(policy, piece):
            needed += product.seconds(policy, trained=trained)
            flops += product.flops
        attention += attention_flops(policy, piece)
    return needed * (1 + attention / flops)


def measure_whole(policy: Policy, batch: TrainBatch, rounds: int) -> dict[str, float]:
    """The floor of a whole step, the minimum over `rounds` rounds."""
    policy.use_dtype(batch.spec.dtype)
    sampling, training = zip(
        *((sampling_floor_seconds(policy, batch), floor_seconds(policy, batch)) for _ in range(rounds)), strict=True
    )
    return {"sample_floor_s": min(sampling), "train_floor_s": min(training), "floor_s": min(sampling) + min(training)}


def measure(policy: Policy, batch: TrainBatch, steps: int) -> dict[str, Any]:
    learner = Learner(policy, SystemClock())
    learner.optimizer = timer = TimedOptimizer(dict(policy.model.named_parameters()))
    rows = []
    for number in range(_WARM_UP + steps):
        timer.seconds = 0.0
        step = TrainBatch(step=number + 1, spec=batch.spec, groups=batch.groups)
        metrics = learner.learn(step).metrics
        floor_s = floor_seconds(policy, batch)
        rows.append({"floor_s": floor_s, "step_s": metrics["train_s"] - timer.seconds, "optimizer_s": timer.seconds})
    rows = rows[_WARM_UP:]
    middle = {name: median(row[name] for row in rows) for name in rows[0]}
    return middle | {"train_share_of_floor": median(row["floor_s"] / row["step_s"] for row in rows)}


def in_a_trainer_like_process(*arguments: str) -> dict[str, Any]:
    """Run this bench in a process with the trainer's memory settings; returns its summary."""
    command = [sys.executable, "-m", "bench.train_floor", "--here", *arguments]
    env = os.environ | REUSE_MEMORY
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="bench.train_floor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", default="groups", help=f"{', '.join(NAMES)}, or a file that holds one")
    parser.add_argument("--model", default="smollm2-135m", help="name, or path of a folder")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=count, default=4, help="measured steps; with --whole, rounds")
    parser.add_argument("--whole", action="store_true", help="the floor of sampling and training together")
    parser.add_argument("--here", action="store_true", help="in this process, whatever its memory settings")
    args = parser.parse_args()
    if not args.here:
        arguments = [f"--{name}={getattr(args, name)}" for name in ("workload", "model", "device", "steps")]
        print(json.dumps(in_a_trainer_like_process(*arguments, *(["--whole"] if args.whole else []))))
        return 0
    device = torch.device(args.device)
    policy = Policy.load(path_of_model(args.model), device)
    workload = Workload.load(path_of(args.workload) if args.workload in NAMES else Path(args.workload))
    tried = measure_whole if args.whole else measure
    found = {
        name: float(f"{value:.4g}")
        for name, value in tried(policy, workload.batch(dtype=compute_type(args.device), **_SPEC), args.steps).items()
    }
    heading = {"bench": "train_floor", "device": name_of(device), "whole": args.whole, "workload": workload.name}
    print(json.dumps({**heading, **found}))
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
