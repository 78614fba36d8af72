"""verl's FSDP2 worker trains what plain GRPO trains: one rank, in this process, without Ray."""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foundation.clock import SystemClock
from swarm.engine.local import checkpoints as of_any_engine
from swarm.engine.local.forward import Policy
from swarm.engine.local.learner import Learner as LocalLearner
from swarm.engine.seam import TrainBatch, TrainingRefused
from swarm.engine.training.checkpoints import folder_of
from swarm.models.folder import ModelFolder
from tests.swarm.engine.batches import batch, branching_batch, call, episode, group
from tests.swarm.engine.own_functions import own
from tests.swarm.engine.plain_grpo import PlainGrpo
from tests.swarm.engine.verl.handing_over import assert_goes_on, assert_takes_over, write_checkpoint

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="needs verl: `make verl`"),
    pytest.mark.filterwarnings("default"),  # verl's and hydra's own
]


@pytest.fixture(scope="module")
def learner(tiny_llama: ModelFolder, cpu_platform: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Of a model that was made with dropout, which whoever samples from it leaves out."""
    from swarm.engine.verl.learner import Learner
    from tests.swarm.engine.verl.one_rank import OneRank

    dropping = tmp_path_factory.mktemp("models") / "tiny-llama"
    shutil.copytree(tiny_llama.path, dropping)
    config = json.loads((dropping / "config.json").read_bytes())
    (dropping / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.1}))
    with OneRank(dropping) as cluster:
        yield Learner(cluster, SystemClock(), pad_token=0)


@pytest.fixture
def fresh(learner: Any) -> Any:
    learner._cluster.all_ranks("to_start", 1, 1)
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


@pytest.mark.parametrize(
    "algorithm",
    [{"name": "gspo", "clip_low": 0.01, "clip_high": 0.01}, {"importance_correction": "truncated_call"}],
    ids=["gspo", "truncated_call"],
)
@pytest.mark.parametrize("optimizer", [{}, {"epochs": 2, "minibatches": 2}], ids=["one update", "four updates"])
def test_whole_calls_are_priced_as_by_the_local_engine(
    fresh: Any, tiny_llama: ModelFolder, algorithm: dict[str, Any], optimizer: dict[str, Any]
) -> None:
    made = branching_batch(algorithm=algorithm, optimizer={"learning_rate": 1e-3} | optimizer)
    ours = fresh.learn(made).metrics
    local = LocalLearner(Policy.load(tiny_llama.path), SystemClock()).learn(made).metrics
    for name in ("loss", "grad_norm", "weights_change", "clip_share"):
        assert ours[name] == pytest.approx(local[name], rel=2e-3, abs=1e-5), name
    if optimizer and algorithm.get("name"):
        assert ours["clip_share"] > 0


def test_functions_of_users_train_as_in_the_local_engine(fresh: Any, tiny_llama: ModelFolder) -> None:
    functions = {"loss": "mine.py:coupled_loss", "importance_correction": "mine.py:correction"}
    algorithm = own(name="mine.py:advantage", **functions) | {"kl": 0.1}
    made = branching_batch(algorithm=algorithm, optimizer={"learning_rate": 1e-3, "minibatches": 2})
    ours = fresh.learn(made).metrics
    local = LocalLearner(Policy.load(tiny_llama.path), SystemClock()).learn(made).metrics
    for name in ("loss", "grad_norm", "weights_change", "kl_to_start"):
        assert ours[name] == pytest.approx(local[name], rel=2e-3, abs=1e-5), name


def test_a_long_row_beside_short_ones_is_the_same_step_in_bounded_parts(fresh: Any, tiny_llama: ModelFolder) -> None:
    calls = [call("long", [1, 30], [40 + at % 50 for at in range(400)])]
    calls += [call(f"short-{at}", [1, 30, 31], [40 + at, 41, 2]) for at in range(24)]
    made = batch(group("a", *(episode(one.call_id, float(at % 3), one) for at, one in enumerate(calls))))
    shapes: list[tuple[int, int]] = []
    model = fresh._cluster.rank.actor.engine.module
    hook = model.register_forward_pre_hook(lambda *told: shapes.append(told[2]["input_ids"].shape), with_kwargs=True)
    try:
        outcome = fresh.learn(made)
    finally:
        hook.remove()
    most = fresh._cluster.settings.tokens_per_rank
    assert all(rows * longest <= most for rows, longest in shapes), shapes
    plain = PlainGrpo(tiny_llama.path).step(made)
    norm = math.sqrt(sum(float(part.norm()) ** 2 for part in plain.gradient.values()))
    assert outcome.metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert outcome.metrics["loss"] == pytest.approx(plain.loss, abs=1e-5)


def test_an_entropy_that_is_only_looked_at_keeps_no_distribution(fresh: Any) -> None:
    kept: list[int] = []

    def look(tensor: Tensor) -> Tensor:
        if tensor.ndim > 1 and not tensor.is_nested and tensor.is_floating_point() and bool((tensor >= 0).all()):
            rows = tensor.detach().float().flatten(0, -2)
            kept.append(int(rows.shape[-1] > 100 and torch.allclose(rows.sum(-1), torch.ones(len(rows)))))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(look, lambda tensor: tensor):
        outcome = fresh.learn(branching_batch())
    assert outcome.metrics["entropy"] > 0
    assert not sum(kept)


def test_turns_are_computed_once_and_shared_prompts_are_not(fresh: Any) -> None:
    metrics = fresh.learn(branching_batch()).metrics
    assert metrics["tokens_merged"] < metrics["tokens_computed"] < metrics["tokens_called"]


def test_the_same_step_from_the_same_weights_is_the_same_bit_for_bit(fresh: Any) -> None:
    made = branching_batch(optimizer={"learning_rate": 1e-3, "minibatches": 2, "epochs": 2})
    once = fresh.learn(made).metrics
    fresh._cluster.all_ranks("to_start", 1, 1)
    again = fresh.learn(made).metrics
    assert {**once, "train_s": 0} == {**again, "train_s": 0}


def test_kl_to_the_first_weights_is_seen_once_they_moved(fresh: Any) -> None:
    assert fresh.learn(branching_batch()).metrics["kl_to_start"] == pytest.approx(0, abs=1e-6)
    assert fresh.learn(_second_step()).metrics["kl_to_start"] > 1e-3


def test_tokens_are_measured_before_the_first_minibatch_moves_the_weights(fresh: Any) -> None:
    whole = fresh.learn(branching_batch(algorithm={"kl": 0.01})).metrics
    fresh._cluster.all_ranks("to_start", 1, 1)
    cut = fresh.learn(
        branching_batch(algorithm={"kl": 0.01}, optimizer={"learning_rate": 1e-3, "minibatches": 3})
    ).metrics
    assert cut["kl_to_start"] == pytest.approx(0, abs=1e-6)
    for name in ("entropy", "logprob_mismatch_mean", "logprob_mismatch_max", "tokens_trained"):
        assert cut[name] == pytest.approx(whole[name], rel=1e-4)


def test_the_local_engine_goes_on_from_a_ranks_checkpoint(fresh: Any, tiny_llama: ModelFolder, tmp_path: Path) -> None:
    write_checkpoint(fresh, tmp_path, "full")
    assert_goes_on(fresh, Policy.load(tiny_llama.path), tmp_path, "full")
    fresh._cluster.all_ranks("load_checkpoint", str(folder_of(tmp_path, 1)))
    assert of_any_engine.fingerprint(tmp_path, 1) == of_any_engine.hash_tensors(fresh._cluster.rank._shards())


def test_a_rank_goes_on_from_a_checkpoint_of_the_local_engine(
    fresh: Any, tiny_llama: ModelFolder, tmp_path: Path
) -> None:
    assert_takes_over(fresh, Policy.load(tiny_llama.path), tmp_path, "full")


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
