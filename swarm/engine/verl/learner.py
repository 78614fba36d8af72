"""One optimizer step on the ranks: from a batch to new weights and the outcome. Runs in the driver."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as verl_tensors
from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions

from foundation.clock import Clock
from foundation.ids import derived_seed
from swarm.engine.algorithms import algorithm_of
from swarm.engine.algorithms.base import Algorithm
from swarm.engine.algorithms.facts import TokenFacts, kl_to_start
from swarm.engine.algorithms.functions import Update
from swarm.engine.algorithms.own import told_of
from swarm.engine.algorithms.rewards import Credit, Episodes
from swarm.engine.seam import StepOutcome, TrainBatch, TrainingRefused
from swarm.engine.training.metrics import StepMetrics, WeightsChange, kl_sample
from swarm.engine.training.selection import (
    CallNotes,
    TrainedEpisode,
    branches,
    credit,
    episodes_of,
    learning_rate_at,
    minibatches,
    select,
    trainable_calls,
)
from swarm.engine.tree import Branch
from swarm.engine.verl.config import packed
from swarm.engine.verl.timelines import Row, by_temperature, filled_up, merged, side_by_side
from swarm.engine.verl.token_loss import TokenLoss
from swarm.protocol.runspec import RunSpec

if TYPE_CHECKING:
    from swarm.engine.verl.cluster import Cluster


class Learner:
    """Makes optimizer steps on the ranks.

    `half_way` is True if a refused step has already moved the weights: these belong to no step and must be restored.
    """

    def __init__(self, cluster: Cluster, clock: Clock, *, pad_token: int) -> None:
        self.half_way = False
        self._cluster = cluster
        self._clock = clock
        self._pad_token = pad_token
        self._packed = packed(cluster.settings)

    def learn(self, batch: TrainBatch) -> StepOutcome:
        """Make the step and return its outcome. Raises: TrainingRefused, ClusterLost."""
        began, spec = self._clock.monotonic(), batch.spec
        self._cluster.all_ranks("seed", derived_seed(spec.seed, "step", batch.step))
        selection = select(batch)
        rate = learning_rate_at(spec.optimizer, batch.step, spec.limits.steps)
        if branches(selection.trained, spec.algorithm):
            seen = self._optimise(selection.trained, batch, rate)
        else:
            seen = self._look(batch)
        metrics = seen.of_step(batch, rate)
        self.half_way = False
        metrics["train_s"] = self._clock.monotonic() - began
        return StepOutcome(step=batch.step, metrics=metrics, untrained=selection.untrained)

    def _optimise(self, episodes: Sequence[TrainedEpisode], batch: TrainBatch, rate: float) -> StepMetrics:
        """Run all epochs and minibatches; return the step's metrics."""
        spec, seen = batch.spec, StepMetrics()
        algorithm = algorithm_of(spec.algorithm)
        whole = episodes_of(batch) if algorithm.of_updates else None
        parts = [branches_and_rows(part, spec) for part in minibatches(episodes, spec, batch.step)]
        ready = [self._made_ready(made, rows, spec, seen) for made, rows in parts if rows]
        if algorithm.reads_tokens:
            _give_credit(batch, ready)
        if not spec.algorithm.kl:
            self._sample_kl([row for _, rows in parts for row in rows], spec, batch.step, seen)
        self._cluster.all_ranks("set_loss_fn", TokenLoss(spec.algorithm))
        for epoch in range(spec.optimizer.epochs):
            for part in ready:
                if whole is not None:
                    part.take_prices(algorithm, whole, self._now(part))
                loss = sum(self._accumulate(one, seen) for one in part.passes)
                seen.loss += loss / len(parts) if epoch == 0 else 0.0
                self._move(spec, rate, batch.step, seen)
        return seen

    def _made_ready(self, made: Sequence[Branch], rows: Sequence[Row], spec: RunSpec, seen: StepMetrics) -> Minibatch:
        """Build a minibatch from its passes, with the log-probabilities that its loss compares with."""
        seen.computed += sum(len(row.ids) for row in rows)
        part = Minibatch(calls=[(branch.call.call_id, len(branch.call.sampled_ids)) for branch in made])
        algorithm = algorithm_of(spec.algorithm)
        several = spec.optimizer.epochs * spec.optimizer.minibatches > 1
        for bare in self._passes(rows):
            one = bare
            if spec.algorithm.kl:
                one = with_column(one, "start", self._read("compute_start_log_prob", bare))
            if several or algorithm.of_updates or algorithm.reads_tokens:
                old = self._read("compute_log_prob", bare)
                _add_trained(seen, one, old)
                one = with_column(one, "old", old)
                part.entropies.append(trained(bare, old, "entropy"))
            part.passes.append(one)
        return part

    def _now(self, part: Minibatch) -> list[Tensor]:
        """Return the log-probabilities of each pass's trained tokens under the current weights; until these move, reuse those from
        before the step."""
        if not self.half_way:
            return [trained(one, one, "old") for one in part.passes]
        return [trained(one, self._read("compute_log_prob", one), "log_probs") for one in part.passes]

    def _accumulate(self, batch: TensorDict, seen: StepMetrics) -> float:
        """Accumulate the gradient of one pass; return the pass's part of the minibatch's loss. Raises: TrainingRefused."""
        answer = self._cluster.over_rows("forward_backward", batch.copy())
        reported = measured(answer)
        loss = float(reported["loss"])
        if not math.isfinite(loss):
            raise TrainingRefused(f"the loss is {loss}")
        seen.add_pass(_uses(batch), _total(reported["clipped"]))
        if "old" not in batch.keys():  # noqa: SIM118  not a mapping
            _add_trained(seen, batch, answer)
        return loss

    def _move(self, spec: RunSpec, rate: float, step: int, seen: StepMetrics) -> None:
        optimizer = spec.optimizer
        reported = self._cluster.all_ranks("take_optimizer_step", rate, optimizer.weight_decay, optimizer.max_grad_norm)
        norm = max(rank["grad_norm"] for rank in reported)
        if not math.isfinite(norm):
            raise TrainingRefused(
                f"step {step}: the gradient norm is {norm}; lower optimizer.learning_rate or look at the rewards"
            )
        self.half_way = True
        seen.grad_norm = max(seen.grad_norm, norm)
        moved, before = (sum(rank[name] for rank in reported) for name in ("moved", "before"))
        seen.change.add(WeightsChange(moved=moved, before=before))

    def _look(self, batch: TrainBatch) -> StepMetrics:
        """Measure a step that trains nothing, on the calls that could have been trained."""
        seen = StepMetrics()
        made, names = [], []
        for episode in (episode for group in batch.groups for episode in group.episodes):
            for call in trainable_calls(episode, batch.spec):
                made.append(Branch(call=call, advantage=0.0, weight=0.0))
                names.append(episode.episode_id)
        rows = merged(made, names)
        if rows:
            for one in self._passes(rows):
                seen.add_tokens(*_facts(one, self._read("compute_log_prob", one)))
            self._sample_kl(rows, batch.spec, batch.step, seen)
        return seen

    def _sample_kl(self, rows: Sequence[Row], spec: RunSpec, step: int, seen: StepMetrics) -> None:
        """Measure the KL to the initial weights on neighbouring rows, from a start that is random at each step."""
        chosen = kl_sample(rows, lambda row: int(sum(row.mask)), spec, step)
        for one in self._passes(chosen):
            now, start = (self._read(method, one) for method in ("compute_log_prob", "compute_start_log_prob"))
            seen.kls.append(kl_to_start(trained(one, now, "log_probs"), trained(one, start, "log_probs")))

    def _passes(self, rows: Sequence[Row]) -> list[TensorDict]:
        """Split rows into passes over the ranks, with equally many rows per rank.

        verl itself splits packed rows; for padded rows, it counts tokens without the padding, so we split them. Its fused kernels
        support only one temperature at a time.
        """
        settings = self._cluster.settings
        fused = settings.fused_kernels is not None
        made: list[TensorDict] = []
        for alike in by_temperature(rows) if fused else [rows] if rows else []:
            parts = (
                [alike] if self._packed else side_by_side(alike, ranks=settings.ranks, tokens=settings.tokens_per_rank)
            )
            for part in parts:
                shared = filled_up(part, settings.ranks)
                shared = balanced(shared, settings.ranks) if self._packed else shared
                made.append(tensors_of(shared, pad_token=self._pad_token, one_temperature=fused))
        return made

    def _read(self, method: str, batch: TensorDict) -> TensorDict:
        """Return the rows' log-probabilities (under the current weights, entropies too), without gradients. `method` chooses the
        weights."""
        asked = batch.copy()
        verl_tensors.assign_non_tensor(asked, compute_loss=False)
        return self._cluster.over_rows(method, asked)


@dataclass(slots=True, kw_only=True)
class Minibatch:
    """The passes of one update.

    calls: id and size of each call, in the order of the numbers in the column `call`, which begin at 1.
    entropies: of each pass's trained tokens before the step; empty if they were not read.
    """

    calls: list[tuple[str, int]]
    passes: list[TensorDict] = field(default_factory=list)
    entropies: list[Tensor] = field(default_factory=list)

    def take_prices(self, algorithm: Algorithm, episodes: Episodes, logps: Sequence[Tensor]) -> None:
        """Set the facts that the algorithm computes over the whole update. `logps` has each pass's log-probabilities under the current
        weights.

        Raises: TrainingRefused.
        """
        place_N = self._places()
        known = [facts_of(one) for one in self.passes]
        names = [each.name for each in fields(TokenFacts) if getattr(known[0], each.name) is not None]
        columns = {name: torch.cat([getattr(facts, name) for facts in known])[place_N] for name in names}
        facts = TokenFacts(**columns | {"entropy_U": torch.cat(self.entropies)[place_N]})
        logp_N = torch.cat(list(logps))[place_N]
        update = Update(logp_N=logp_N, facts=facts, calls=self.calls, episodes=episodes)
        for name, value_N in told_of(algorithm.over_update(update)).items():
            self._take(name.removesuffix("_U"), value_N, place_N)

    def notes(self) -> dict[str, CallNotes]:
        """Return the input of `selection.credit`, by call: log-probability and entropy of each token before the step."""
        place_N = self._places()
        logps, entropies = (
            torch.cat(values)[place_N].split_with_sizes([size for _, size in self.calls])
            for values in ([trained(one, one, "old") for one in self.passes], self.entropies)
        )
        return {
            name: CallNotes(logps=logp_S.tolist(), entropies=entropy_S.tolist())
            for (name, _), logp_S, entropy_S in zip(self.calls, logps, entropies, strict=True)
        }

    def take_credit(self, credits: Mapping[str, Credit]) -> None:
        """Set the advantage of each token."""
        earned = [value for name, _ in self.calls for value in credits[name].advantages]
        self._take("advantage", torch.tensor(earned), self._places())

    def _places(self) -> Tensor:
        """Return the index of each token (calls concatenated) among the trained tokens of the passes."""
        return torch.argsort(torch.cat([trained(one, one, "call") for one in self.passes]), stable=True)

    def _take(self, name: str, value_N: Tensor, place_N: Tensor) -> None:
        """Add the column `name` to all passes. `value_N` has its values, calls concatenated; `place_N` is what `_places` returns."""
        value_U = torch.empty_like(value_N)
        value_U[place_N] = value_N
        parts = value_U.split_with_sizes([_uses(one) for one in self.passes])
        self.passes = [with_values(one, name, own) for one, own in zip(self.passes, parts, strict=True)]


def _give_credit(batch: TrainBatch, ready: Sequence[Minibatch]) -> None:
    """Set token-level advantages, computed over all minibatches."""
    notes: dict[str, CallNotes] = {}
    for part in ready:
        notes |= part.notes()
    earned = credit(batch, notes)
    for part in ready:
        part.take_credit(earned)


def branches_and_rows(episodes: Sequence[TrainedEpisode], spec: RunSpec) -> tuple[list[Branch], list[Row]]:
    of_call = {call.call_id: episode.episode_id for episode in episodes for call in episode.calls}
    made = branches(episodes, spec.algorithm)
    return made, merged(made, [of_call[branch.call.call_id] for branch in made])


def _uses(batch: TensorDict) -> int:
    """Return the batch's number of trained tokens."""
    return int(sum(float(row.sum()) for row in batch["loss_mask"].unbind()))


def _facts(batch: TensorDict, answer: TensorDict) -> tuple[Tensor, Tensor, TokenFacts]:
    """Return logp_U, entropy_U and the facts of the trained tokens."""
    return trained(batch, answer, "log_probs"), trained(batch, answer, "entropy"), facts_of(batch)


def facts_of(batch: TensorDict) -> TokenFacts:
    """Return the facts of a batch's trained tokens from its columns, in row order."""
    known = {f"{name}_U": trained(batch, batch, name) for name in (*COLUMNS, "old", "start") if name in batch.keys()}  # noqa: SIM118  not a mapping
    return TokenFacts(**known)


def _add_trained(seen: StepMetrics, batch: TensorDict, answer: TensorDict) -> None:
    seen.add_trained(*_facts(batch, answer))


def _total(reported: object) -> float:
    """Return the sum over ranks and micro-batches, however deeply verl nests their lists."""
    if isinstance(reported, list | tuple):
        return sum(_total(part) for part in reported)
    return float(reported)  # type: ignore[arg-type]


COLUMNS = ("advantage", "weight", "recorded", "off_policy")


def jagged(columns: Sequence[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(list(columns), layout=torch.jagged)


def balanced(rows: Sequence[Row], ranks: int) -> list[Row]:
    """Reorder rows so that each rank's equal share takes about the same time, by verl's own cost estimate."""
    work = calculate_workload(torch.tensor([len(row.ids) for row in rows])).tolist()
    parts = get_seqlen_balanced_partitions(work, ranks, equal_size=True)
    return [rows[index] for part in parts for index in part]


def tensors_of(rows: Sequence[Row], *, pad_token: int, one_temperature: bool = False) -> TensorDict:
    """Build a batch for verl's workers. Later columns (old, start) are added with `with_column`.

    `one_temperature` passes the temperature as one number instead of one per row.
    """
    columns = {
        "input_ids": jagged([torch.tensor(row.ids) for row in rows]),
        "position_ids": jagged([torch.arange(len(row.ids)) for row in rows]),
        "loss_mask": jagged([_before(row.mask) for row in rows]),
    }
    common: dict[str, Any] = {"calculate_entropy": True, "pad_token_id": pad_token, "global_batch_size": len(rows)}
    if one_temperature:
        common["temperature"] = rows[0].temperature
    else:
        columns["temperature"] = torch.tensor([row.temperature for row in rows])
    for name in COLUMNS:
        columns[name] = jagged([_before(getattr(row, name)) for row in rows])
    columns["call"] = jagged([torch.tensor([*row.call[1:], 0]) for row in rows])
    batch: TensorDict = verl_tensors.get_tensordict(columns, non_tensor_dict=common)
    return batch


def with_column(batch: TensorDict, name: str, answer: TensorDict) -> TensorDict:
    """Return the batch with the log-probabilities from the ranks' answer as a further column."""
    made = batch.copy()
    made[name] = jagged([row.detach().float() for row in answer["log_probs"].unbind()])
    return made


def with_values(batch: TensorDict, name: str, value_U: Tensor) -> TensorDict:
    """Return the batch with a further column, 0 where a token is not trained. `value_U` is in row order."""
    rest, columns = value_U.float(), []
    for row in batch["loss_mask"].unbind():
        column, uses = torch.zeros(len(row)), row > 0
        count = int(uses.sum())
        column[uses] = rest[:count]
        rest = rest[count:]
        columns.append(column)
    made = batch.copy()
    made[name] = jagged(columns)
    return made


def trained(batch: TensorDict, answer: TensorDict, name: str) -> Tensor:
    """Return a column of an answer at the trained tokens, in row order."""
    mask = torch.cat([row > 0 for row in batch["loss_mask"].unbind()])
    return torch.cat([row.detach().float() for row in answer[name].unbind()])[mask]


def measured(answer: TensorDict) -> dict[str, Any]:
    """Return the ranks' joint metrics. All ranks report the same; if verl returns a list of their reports, take the first."""
    reported = verl_tensors.get(answer, "metrics")
    first: dict[str, Any] = reported[0] if isinstance(reported, list) else reported
    return first


def _before(column: Sequence[float]) -> Tensor:
    return torch.tensor([*column[1:], 0.0])
