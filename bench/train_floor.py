"""How near does a training step come to the time of its matrix products alone?

    python -m bench.train_floor                 # on the recorded batch of *groups*

The floor is what a step cannot do without: every product of the model's own matrices with the tokens that are computed, once
forwards and twice backwards, at the rate that this machine reaches on just these shapes in the compute type, and the
attention's products at the same rate. The step is the trainer's own, in a process like the trainer's, with the time inside
the optimiser taken off. Floor and step are measured in turns. share is floor / step: 1 would be nothing but products.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from bench.workloads import NAMES, Workload, path_of
from foundation.clock import SystemClock
from swarm.engine.lesson import branches, select
from swarm.engine.local.forward import Policy
from swarm.engine.local.learner import Learner
from swarm.engine.local.optimizer import Optimizer
from swarm.engine.local.reading import Piece, pieces
from swarm.engine.local.vllm_server import REUSE_MEMORY
from swarm.engine.seam import TrainBatch
from swarm.models import resolve

_WARM_UP = 2
"""Steps that are not counted: what they take of fresh memory is there for those after them."""
_SPEC = {"dtype": "bfloat16", "optimizer": {"learning_rate": 4e-5}}


class TimedOptimizer(Optimizer):
    """Counts the seconds in its steps."""

    seconds = 0.0

    def step(self, *arguments: Any, **named: Any) -> Any:
        began = time.perf_counter()
        done = super().step(*arguments, **named)
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

    def seconds(self, dtype: torch.dtype) -> float:
        """Of all of them: the better of two trials of one, since a floor is what can be reached."""
        x, weight, slope = (
            torch.randn(shape).to(dtype)
            for shape in ((self.tokens, self.inner), (self.outer, self.inner), (self.tokens, self.outer))
        )
        return self.times * min(_once(x, weight, slope) for _ in range(3))


def _once(x: Tensor, weight: Tensor, slope: Tensor) -> float:
    began = time.perf_counter()
    x @ weight.T
    slope @ weight
    slope.T @ x
    return time.perf_counter() - began


def products(policy: Policy, piece: Piece) -> list[Product]:
    """Of one piece: the linear layers on its tokens, the output layer on its heads."""
    shapes: dict[tuple[int, int], int] = {}
    output = policy.output_weight
    for module in policy.model.base_model.modules():
        if isinstance(module, torch.nn.Linear):
            shape = (module.in_features, module.out_features)
            shapes[shape] = shapes.get(shape, 0) + 1
    found = [Product(piece.tokens, inner, outer, times) for (inner, outer), times in shapes.items()]
    return [*found, Product(len(piece.heads.at_H), output.shape[1], output.shape[0], 1)]


def attention_flops(policy: Policy, piece: Piece) -> float:
    """Scores and their sums, forwards and backwards, of every token with itself and its ancestors."""
    config = policy.model.config.get_text_config()
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    pairs = float((piece.micro.depth_T + 1).sum())
    return 12.0 * pairs * float(width * config.num_attention_heads * config.num_hidden_layers)


def floor_seconds(policy: Policy, batch: TrainBatch) -> float:
    selection = select(batch)
    ready = pieces(branches(selection.lessons, batch.spec.algorithm), policy)
    seconds = flops = attention = 0.0
    for piece in ready:
        for product in products(policy, piece):
            seconds += product.seconds(policy.compute_dtype)
            flops += product.flops
        attention += attention_flops(policy, piece)
    return seconds * (1 + attention / flops)


def measure(model: Path, batch: TrainBatch, steps: int) -> dict[str, Any]:
    policy = Policy.load(model)
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
    """Run this bench where memory is kept as the trainer keeps it; its summary."""
    command = [sys.executable, "-m", "bench.train_floor", "--here", *arguments]
    env = os.environ | REUSE_MEMORY
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="bench.train_floor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", choices=NAMES, default="groups")
    parser.add_argument("--model", default="smollm2-135m", help="name, or path of a folder")
    parser.add_argument("--steps", type=int, default=4, help="measured steps")
    parser.add_argument("--here", action="store_true", help="in this process, whatever its memory settings")
    args = parser.parse_args()
    if not args.here:
        arguments = ["--workload", args.workload, "--model", args.model, "--steps", str(args.steps)]
        print(json.dumps(in_a_trainer_like_process(*arguments)))
        return 0
    model = Path(args.model) if Path(args.model).is_dir() else resolve(args.model).path
    batch = Workload.load(path_of(args.workload)).batch(**_SPEC)
    found = {name: round(value, 3) for name, value in measure(model, batch, args.steps).items()}
    print(json.dumps({"bench": "train_floor", "workload": args.workload, **found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
