"""verl's FSDP2 worker trains what plain GRPO trains: one rank, in this process, without Ray."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from typing import Any

import pytest

from foundation.clock import SystemClock
from swarm.engine.seam import TrainBatch, TrainingRefused
from swarm.models.folder import ModelFolder
from tests.swarm.engine.batches import batch, branching_batch, call, episode, group
from tests.swarm.engine.plain_grpo import PlainGrpo

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="needs verl: `make verl`"),
    pytest.mark.filterwarnings("default"),  # verl's and hydra's own
]


@pytest.fixture(scope="module")
def learner(tiny_llama: ModelFolder, cpu_platform: None) -> Iterator[Any]:
    from swarm.engine.verl.learner import Learner
    from tests.swarm.engine.verl.one_rank import OneRank

    with OneRank(tiny_llama.path) as cluster:
        yield Learner(cluster, SystemClock(), pad_token=0)


@pytest.fixture
def fresh(learner: Any) -> Any:
    learner._cluster.all_ranks("to_start", 1)
    return learner


@pytest.mark.parametrize(
    "algorithm",
    [{}, {"loss_agg": "token", "kl": 0.1, "entropy": 0.01}, {"loss_agg": "call", "importance_correction": "truncated"}],
    ids=["episode", "token, kl, entropy", "call, truncated"],
)
def test_a_step_is_that_of_plain_grpo(fresh: Any, tiny_llama: ModelFolder, algorithm: dict[str, Any]) -> None:
    made = branching_batch(algorithm=algorithm)
    outcome = fresh.learn(made)
    plain = PlainGrpo(tiny_llama.path).step(made)
    norm = math.sqrt(sum(float(part.norm()) ** 2 for part in plain.gradient.values()))
    assert outcome.metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert outcome.metrics["loss"] == pytest.approx(plain.loss, abs=1e-5)
    assert outcome.metrics["weights_change"] > 0


def test_turns_are_computed_once_and_shared_prompts_are_not(fresh: Any) -> None:
    metrics = fresh.learn(branching_batch()).metrics
    assert metrics["tokens_merged"] < metrics["tokens_computed"] < metrics["tokens_called"]


def test_the_same_step_from_the_same_weights_is_the_same_bit_for_bit(fresh: Any) -> None:
    made = branching_batch(optimizer={"learning_rate": 1e-3, "minibatches": 2, "epochs": 2})
    once = fresh.learn(made).metrics
    fresh._cluster.all_ranks("to_start", 1)
    again = fresh.learn(made).metrics
    assert {**once, "train_s": 0} == {**again, "train_s": 0}


def test_kl_to_the_first_weights_is_seen_once_they_moved(fresh: Any) -> None:
    assert fresh.learn(branching_batch()).metrics["kl_to_start"] == pytest.approx(0, abs=1e-6)
    assert fresh.learn(_second_step()).metrics["kl_to_start"] > 1e-3


def test_equal_rewards_train_nothing_and_are_looked_at(fresh: Any) -> None:
    flat = batch(group("a", *(episode(f"e{n}", 1.0, call(f"c{n}", [1, 30], [40 + n, 2])) for n in range(2))))
    outcome = fresh.learn(flat)
    assert outcome.metrics["weights_change"] == outcome.metrics["grad_norm"] == 0
    assert outcome.metrics["entropy"] > 0
    assert set(outcome.untrained.values()) == {"zero_variance"}


def test_a_learning_rate_too_small_to_move_anything_is_refused(fresh: Any) -> None:
    with pytest.raises(TrainingRefused, match="did not change the weights"):
        fresh.learn(branching_batch(optimizer={"learning_rate": 1e-30}))


def _second_step() -> TrainBatch:
    first = branching_batch()
    return TrainBatch(step=2, spec=first.spec, groups=first.groups)
