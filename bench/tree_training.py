"""How much faster is a gradient on the prefix tree than call by call, or on merged timelines?

Three batches recorded from real runs (bench/workloads): *groups*, eight answers to each of eight long questions; *turns*, an
agent that calls functions for eight turns; *fork*, two agents that ask twice and forget. The same batch three ways in the
same process, one after the other, twice where that is cheap; ten minutes in all:

calls   every call is a row of its own; its sampled tokens are trained.
merged  calls of an episode whose prompt begins with an earlier call's prompt and answer become one row with it (AgentJet's
        rule); episodes of a group share nothing.
tree    the trainer's own: every token in its context once.

Rows are computed by transformers as it stands (sdpa with a causal mask, no padding, logits only where tokens are trained,
autograd for everything), which knows nothing of trees: the relative error of the gradient is measured against call by call.
All three keep freed memory, as the trainer does. On the CPU rows are computed one by one; a GPU (`--device cuda`) takes as many of
about equal length at a time as are 16,384 tokens, filled up at their ends, since one by one they would leave it idle.

Then the tree once more with sampling masks, as calls with a JSON schema have them (*grammar*: one of 30 rows of bits at each token, two
thirds of them of a few tokens, the rest of nearly all) and calls with top-p (*nucleus*: a row of its own for each token in its context).
mask_overhead is its seconds ÷ those of the tree without masks, taken by turns.

A ratio is another way's seconds ÷ the tree's. Every workload's line has both. The last line takes ratio_vs_calls from *turns*,
where calls repeat the most, and ratio_vs_merged from *groups*, where merging shares nothing: each is higher there than on
the other workloads. efficiency is (time ratio) / (token ratio), of the tree against either way; the last line has the worst
of all workloads.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, PreTrainedModel

from bench.command import run
from bench.machine import name_of, path_of_model, seconds
from bench.workloads import NAMES, Workload, path_of
from foundation.arguments import count
from swarm.engine.local.forward import Policy
from swarm.engine.local.head import Price, gradients
from swarm.engine.local.mask_rows import encode
from swarm.engine.local.minibatch import Piece, pieces
from swarm.engine.local.optimizer import Optimizer
from swarm.engine.sampling.server import REUSE_MEMORY
from swarm.engine.training.selection import branches, select
from swarm.engine.tree import Branch, grow
from swarm.protocol.runspec import ComputeType
from swarm.protocol.sampling_mask import SamplingMask, only

_HEADS = 8
"""Distributions of a row are padded to a multiple of this number. For one or two rows beyond it, MKL adds up all 49,152 products
naively, which makes the row's gradient, and any comparison with it, wrong by 1e-4."""
_TURNS = 3
_TOGETHER = 16_384
"""Tokens per batch of rows on a GPU."""


@dataclass(slots=True)
class Row:
    """Token ids, and the trained ones among them as (position, weight)."""

    ids: list[int]
    trained: list[tuple[int, float]] = field(default_factory=list)

    def extend(self, branch: Branch) -> None:
        call = branch.call
        assert call.prompt_ids[: len(self.ids)] == self.ids
        first = len(call.prompt_ids)
        self.ids = call.prompt_ids + call.sampled_ids
        self.trained += [(at, branch.advantage * branch.weight) for at in range(first, len(self.ids))]


def rows_of_calls(made: Sequence[Branch]) -> list[Row]:
    rows = [Row([]) for _ in made]
    for row, branch in zip(rows, made, strict=True):
        row.extend(branch)
    return rows


def rows_of_timelines(made: Sequence[Branch]) -> list[Row]:
    """Merge the calls of each episode into rows. A call joins the longest row that it continues."""
    by_episode: dict[str, list[Row]] = {}
    for branch in made:
        rows = by_episode.setdefault(branch.call.call_id.rpartition("-")[0], [])
        begun = [row for row in rows if branch.call.prompt_ids[: len(row.ids)] == row.ids]
        row = max(begun, key=lambda row: len(row.ids), default=None)
        if row is None:
            rows.append(row := Row([]))
        row.extend(branch)
    return [row for rows in by_episode.values() for row in rows]


class Plain:
    """Computes rows with transformers' own model."""

    def __init__(self, model: PreTrainedModel, dtype: ComputeType) -> None:
        self._model = model
        self._dtype = dtype

    @property
    def device(self) -> torch.device:
        return self._model.device

    def gradient(self, rows: Sequence[Row]) -> float:
        """Fill `grad` of the weights; returns the loss."""
        for weight in self._model.parameters():
            if weight.grad is not None:
                weight.grad.zero_()
        loss = 0.0
        with self._autocast():
            for some in self._batches(rows):
                cost = self._cost(some)
                cost.backward()  # type: ignore[no-untyped-call]
                loss += float(cost.detach())
        return loss

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, torch.bfloat16) if self._dtype == "bfloat16" else nullcontext()

    def _batches(self, rows: Sequence[Row]) -> Iterator[list[Row]]:
        if self.device.type == "cpu":
            yield from ([row] for row in rows)
            return
        some: list[Row] = []
        for row in sorted(rows, key=lambda row: len(row.ids)):
            if some and (len(some) + 1) * len(row.ids) > _TOGETHER:
                yield some
                some = []
            some.append(row)
        if some:
            yield some

    def _cost(self, rows: Sequence[Row]) -> Tensor:
        """Loss of a batch of rows. Padding is at the end, where no token of the row attends to it."""
        width = max(len(row.ids) for row in rows)
        ids = torch.tensor([row.ids + [0] * (width - len(row.ids)) for row in rows], device=self.device)
        trained = [(at, position, weight) for at, row in enumerate(rows) for position, weight in row.trained]
        trained += [(*trained[-1][:2], 0.0)] * (-len(trained) % _HEADS)
        row_U, position_U = torch.tensor([place[:2] for place in trained], device=self.device).T
        weights = torch.tensor([weight for _, _, weight in trained], device=self.device)
        seen = self._model.base_model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
        logits = self._model.get_output_embeddings()(seen[row_U, position_U - 1]).float()  # type: ignore[no-untyped-call]
        surprise: Tensor = cross_entropy(logits, ids[row_U, position_U], reduction="none")
        return (surprise * weights).sum()

    def gradients(self) -> dict[str, Tensor]:
        return {name: weight.grad for name, weight in self._model.named_parameters() if weight.grad is not None}


class Ours:
    """Computes the prefix tree with the trainer's forward pass and head."""

    def __init__(self, policy: Policy, dtype: ComputeType) -> None:
        self._policy = policy
        self._weights = dict(policy.model.named_parameters())
        self._optimizer = Optimizer(self._weights)
        policy.use_dtype(dtype)

    def gradient(self, made: Sequence[Branch]) -> float:
        """Fill `grad` of the weights as the trainer does, without its optimiser; returns the loss."""
        policy, loss = self._policy, 0.0
        self._optimizer.begin("adamw")
        for piece in pieces(made, policy):
            with policy.autocast():
                hidden_HD = policy.hidden(piece.micro)[piece.heads.at_H]
            slope_HD, _, _, cost = gradients(
                piece.heads,
                hidden_HD.detach().to(policy.compute_dtype),
                policy.cast_output_weight,
                policy.output_grad,
                price_of(piece),
            )
            torch.autograd.backward(hidden_HD, slope_HD.to(hidden_HD.dtype))
            loss += cost
        return loss

    def gradients(self) -> dict[str, Tensor]:
        return {name: weight.grad for name, weight in self._weights.items() if weight.grad is not None}

    @property
    def device(self) -> torch.device:
        return self._policy.device

    def tokens(self, made: Sequence[Branch]) -> int:
        """Number of computed tokens, including those repeated by cuts."""
        return sum(piece.tokens for piece in pieces(made, self._policy))


def price_of(piece: Piece) -> Price:
    """The policy gradient's loss at ratio 1."""
    facts = piece.facts

    def price(logp_U: Tensor, entropy_U: Tensor, uses: slice) -> Tensor:
        return -(logp_U * facts.advantage_U[uses] * facts.weight_U[uses]).sum()

    return price


def distance(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Norm of the difference over all weights, relative to theirs."""
    off = sum(float((ours[name] - theirs[name]).double().norm() ** 2) for name in theirs)
    return math.sqrt(off / sum(float(grad.double().norm() ** 2) for grad in theirs.values()))


@dataclass(slots=True)
class Contest:
    """One workload, three ways."""

    plain: Plain
    ours: Ours
    made: list[Branch]
    calls: list[Row]
    merged: list[Row]
    calls_s: list[float] = field(default_factory=list)
    merged_s: list[float] = field(default_factory=list)
    tree_s: list[float] = field(default_factory=list)
    error: float = 0.0
    """Largest error of the tree's gradient, against the rows that were computed last."""

    @property
    def merges(self) -> bool:
        """Whether any episode has calls to merge. If not, merged timelines equal the calls and are not timed separately."""
        return self.merged != self.calls

    def warm_up(self) -> None:
        self.ours.gradient(self.made)
        self.plain.gradient(self.merged[:1] if self.plain.device.type == "cpu" else self.calls)

    def cheap_ways(self) -> None:
        self.tree_s.append(self._timed(partial(self.ours.gradient, self.made)))
        if self.merges:
            self.merged_s.append(self._timed(partial(self.plain.gradient, self.merged)))
            self.error = max(self.error, distance(self.ours.gradients(), self.plain.gradients()))

    def round(self) -> None:
        """Run call by call in two halves, with the cheap ways in between and after, so that a slow phase of the machine affects all."""
        taken, sums = 0.0, dict[str, Tensor]()
        for half in (self.calls[::2], self.calls[1::2]):
            taken += self._timed(partial(self.plain.gradient, half))
            for name, grad in self.plain.gradients().items():
                sums[name] = sums[name] + grad if name in sums else grad.clone()
            self.cheap_ways()
        self.calls_s.append(taken)
        self.error = max(self.error, distance(self.ours.gradients(), sums))

    def _timed(self, work: Callable[[], object]) -> float:
        return seconds(work, self.plain.device)


def measure(workload: Workload, plain: Plain, ours: Ours, repeats: int) -> dict[str, Any]:
    """One row of the result."""
    batch = workload.batch(
        algorithm={"entropy": 1e-9}
    )  # nonzero, so that all three ways compute calls without advantage too
    made = branches(select(batch).trained, batch.spec.algorithm)
    contest = Contest(plain, ours, made, rows_of_calls(made), rows_of_timelines(made))
    contest.warm_up()
    for _ in range(repeats):
        contest.round()
    masked = {f"mask_overhead_{kind}": overhead(ours, made, masked_as(made, kind)) for kind in ("grammar", "nucleus")}
    row = {
        "workload": workload.name,
        **workload.lengths,
        "tokens_called": sum(len(row.ids) for row in contest.calls),
        "tokens_merged": sum(len(row.ids) for row in contest.merged),
        "tokens_tree": len(grow(made).token),
        "tokens_computed": ours.tokens(made),
        "tokens_trained": sum(len(row.trained) for row in contest.calls),
        "calls_s": fmean(contest.calls_s),
        "merged_s": fmean(contest.merged_s if contest.merges else contest.calls_s),
        "tree_s": fmean(contest.tree_s),
        "grad_rel_err": contest.error,
    }
    return row | ratios(row) | masked


def overhead(ours: Ours, made: Sequence[Branch], masked: Sequence[Branch]) -> float:
    """Seconds with masks ÷ seconds without, median over turns."""
    ours.gradient(masked)
    turns = []
    for _ in range(_TURNS):
        plain_s = seconds(partial(ours.gradient, made), ours.device)
        turns.append(seconds(partial(ours.gradient, masked), ours.device) / plain_s)
    return median(turns)


def masked_as(made: Sequence[Branch], kind: str) -> list[Branch]:
    """The same calls with sampling masks. Equal tokens in equal contexts get equal masks, as they would from equal weights."""
    vocabulary = 8 + max(token for branch in made for token in branch.call.prompt_ids + branch.call.sampled_ids)
    draw = random.Random(0)
    shapes = [draw.sample(range(vocabulary), draw.choice([1, 3, 10, 200])) for _ in range(20)]
    nearly_all = [draw.sample(range(vocabulary), draw.choice([500, vocabulary // 3])) for _ in range(10)]
    found = []
    for branch in made:
        call, rows = branch.call, []
        context = hash(tuple(call.prompt_ids))  # hashes of integers are the same in every process
        for token in call.sampled_ids:
            number = context % (len(shapes) + len(nearly_all))
            if kind == "nucleus":
                rows.append(only([token, *random.Random(context).sample(range(vocabulary), 30)]))
            elif number < len(shapes):
                rows.append(only([token, *shapes[number]]))
            else:
                allowed_RV = torch.ones(1, vocabulary, dtype=torch.bool)
                allowed_RV[0, nearly_all[number - len(shapes)]] = False
                allowed_RV[0, token] = True
                rows += encode(allowed_RV)
            context = hash((context, token))
        masked = replace(call, reproducible=False, mask=SamplingMask.of(rows))
        found.append(replace(branch, call=masked))
    return found


def ratios(row: dict[str, Any]) -> dict[str, float]:
    by_calls, by_merged = row["calls_s"] / row["tree_s"], row["merged_s"] / row["tree_s"]
    fewer_calls, fewer_merged = row["tokens_called"] / row["tokens_tree"], row["tokens_merged"] / row["tokens_tree"]
    return {
        "ratio_vs_calls": by_calls,
        "ratio_vs_merged": by_merged,
        "token_ratio_calls": fewer_calls,
        "token_ratio_merged": fewer_merged,
        "efficiency_calls": by_calls / fewer_calls,
        "efficiency_merged": by_merged / fewer_merged,
    }


def say(**fields: Any) -> None:
    rounded = {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in fields.items()}
    print(json.dumps(rounded), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="bench.tree_training", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    recorded = [name for name in NAMES if path_of(name).exists()]
    parser.add_argument(
        "--workloads", nargs="+", choices=NAMES, default=recorded, help="default: all that are recorded"
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="what matrices are multiplied in"
    )
    parser.add_argument("--repeats", type=count, default=1, help="times that each workload is computed call by call")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", default="smollm2-135m", help="name, or path of a folder")
    args = parser.parse_args()
    if REUSE_MEMORY.items() - os.environ.items():
        os.execve(
            sys.executable, [sys.executable, "-m", "bench.tree_training", *sys.argv[1:]], os.environ | REUSE_MEMORY
        )
    path, device = path_of_model(args.model), torch.device(args.device)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")
    nn.Module.to(model, device)
    plain, ours = Plain(model.train(False), args.dtype), Ours(Policy.load(path, device), args.dtype)
    rows = {}
    for name in args.workloads:
        rows[name] = measure(Workload.load(path_of(name)), plain, ours, args.repeats)
        say(**rows[name])
    say(**summary(rows, args.dtype, name_of(device)))
    return 0


def summary(rows: dict[str, dict[str, Any]], dtype: ComputeType, device: str) -> dict[str, Any]:
    worst = min(min(row["efficiency_calls"], row["efficiency_merged"]) for row in rows.values())
    found: dict[str, Any] = {"bench": "tree_training", "device": device, "dtype": dtype}
    if "turns" in rows:
        found |= {"ratio_vs_calls": rows["turns"]["ratio_vs_calls"], "ratio_vs_calls_on": "turns"}
    if "groups" in rows:
        found |= {"ratio_vs_merged": rows["groups"]["ratio_vs_merged"], "ratio_vs_merged_on": "groups"}
    if missing := [name for name in NAMES if name not in rows]:
        found["not_measured"] = missing
    overheads = [value for row in rows.values() for name, value in row.items() if name.startswith("mask_overhead")]
    worst_error = max(row["grad_rel_err"] for row in rows.values())
    return found | {"efficiency": worst, "mask_overhead": max(overheads), "grad_rel_err": worst_error}


if __name__ == "__main__":
    sys.exit(run(main))
