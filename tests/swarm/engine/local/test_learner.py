"""A step of the trainer against plain, call-by-call GRPO on the same weights."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foundation.clock import SystemClock
from swarm.engine.local.forward import Policy, UnsupportedModel
from swarm.engine.local.learner import Learner
from swarm.engine.local.minibatch import pieces, read
from swarm.engine.seam import EngineError, TrainBatch, TrainCall, TrainingRefused
from swarm.engine.tree import Branch
from swarm.models.folder import ModelFolder
from tests.swarm.engine.batches import PROMPT, batch, branching_batch, call, conversation, episode, group
from tests.swarm.engine.plain_grpo import PlainGrpo

FREE = {"name": "adamw", "learning_rate": 1e-3, "max_grad_norm": 1e9}


def learner_of(model: ModelFolder) -> Learner:
    return Learner(Policy.load(model.path), SystemClock())


def gradient(learner: Learner) -> dict[str, Tensor]:
    return {name: weight.grad.clone() for name, weight in learner.policy.model.named_parameters()}


def distance(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Relative norm of the difference over all weights."""
    assert ours.keys() == theirs.keys()
    off = sum(float((ours[name] - theirs[name]).double().norm() ** 2) for name in ours)
    return math.sqrt(off / sum(float(grad.double().norm() ** 2) for grad in theirs.values()))


def weights_of(learner: Learner) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in learner.policy.model.named_parameters()}


ALGORITHMS: list[dict[str, Any]] = [
    {},
    {"loss_agg": "token"},
    {"loss_agg": "call", "advantage_norm": "none"},
    {"kl": 0.3, "entropy": 0.02},
    {"importance_correction": "truncated"},
]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
@pytest.mark.parametrize("segment_tokens", [4, pytest.param(1000, marks=pytest.mark.campaign)])
def test_tree_training_equals_call_by_call_training(
    tiny_llama: ModelFolder, algorithm: dict[str, Any], segment_tokens: int
) -> None:
    made = branching_batch(algorithm=algorithm, optimizer=FREE)
    learner = learner_of(tiny_llama)
    learner.policy.segment_tokens = segment_tokens
    outcome = learner.learn(made)
    plain = PlainGrpo(tiny_llama.path).step(made)
    assert outcome.metrics["loss"] == pytest.approx(plain.loss, rel=1e-5, abs=1e-6)
    assert distance(gradient(learner), plain.gradient) < 1e-5


def test_tiles_of_the_attention_do_not_show(tiny_llama: ModelFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.engine.local.attention._TILE", 3)
    made = branching_batch(optimizer=FREE)
    learner = learner_of(tiny_llama)
    learner.learn(made)
    assert distance(gradient(learner), PlainGrpo(tiny_llama.path).step(made).gradient) < 1e-5


def test_heads_are_priced_a_few_at_a_time_without_a_trace(
    tiny_llama: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm.engine.local.head.CHUNK_LOGITS", 1500)
    monkeypatch.setattr("swarm.engine.local.head.BLOCK_LOGITS", 600)
    made = branching_batch(algorithm={"kl": 0.1, "entropy": 0.1}, optimizer=FREE)
    learner = learner_of(tiny_llama)
    learner.learn(made)
    assert distance(gradient(learner), PlainGrpo(tiny_llama.path).step(made).gradient) < 1e-5


def test_the_second_step_measures_kl_and_mismatch_from_the_moved_weights(tiny_llama: ModelFolder) -> None:
    learner = learner_of(tiny_llama)
    first = learner.learn(branching_batch(optimizer=FREE))
    assert first.metrics["kl_to_start"] == 0.0
    plain = PlainGrpo(tiny_llama.path)
    plain.model.load_state_dict(weights_of(learner), strict=False)
    plain.model.tie_weights()
    made = branching_batch(step=2, algorithm={"kl": 0.3, "loss_agg": "token"}, optimizer=FREE)
    outcome = learner.learn(made)
    expected = plain.step(made)
    assert distance(gradient(learner), expected.gradient) < 1e-5
    calls = [made_call for some in made.groups for one in some.episodes for made_call in one.calls]
    gaps = torch.cat([(expected.logps[one.call_id] - torch.tensor(one.logprobs)).abs() for one in calls])
    assert outcome.metrics["logprob_mismatch_mean"] == pytest.approx(float(gaps.mean()), rel=1e-4)
    assert outcome.metrics["logprob_mismatch_max"] == pytest.approx(float(gaps.max()), rel=1e-4)
    assert outcome.metrics["entropy"] == pytest.approx(
        float(torch.cat([expected.entropies[one.call_id] for one in calls]).mean()), rel=1e-4
    )
    assert outcome.metrics["kl_to_start"] > 0


@pytest.mark.parametrize("minibatches", [1, 2])
def test_kl_is_measured_even_where_it_has_no_part_in_the_loss(tiny_llama: ModelFolder, minibatches: int) -> None:
    found = []
    for kl in (0.0, 1e-12):  # which reads every call beforehand: as many as the sample has here
        learner = learner_of(tiny_llama)
        optimizer = {"learning_rate": 1e-3, "minibatches": minibatches}
        learner.learn(branching_batch(optimizer=optimizer))
        outcome = learner.learn(branching_batch(step=2, algorithm={"kl": kl}, optimizer=optimizer))
        found.append(outcome.metrics["kl_to_start"])
    assert found[0] == pytest.approx(found[1], rel=1e-3)
    assert found[0] > 0


def test_several_epochs_clip_against_the_log_probabilities_before_the_step(tiny_llama: ModelFolder) -> None:
    fields = {"algorithm": {"clip_low": 0.05, "clip_high": 0.1}}
    made = branching_batch(optimizer=FREE | {"epochs": 2, "learning_rate": 3e-3}, **fields)
    learner = learner_of(tiny_llama)
    outcome = learner.learn(made)
    plain = PlainGrpo(tiny_llama.path)
    once = learner_of(tiny_llama)
    once.learn(branching_batch(optimizer=FREE | {"learning_rate": 3e-3}, **fields))
    plain.old = plain.step(made).logps
    plain.model.load_state_dict(weights_of(once), strict=False)
    plain.model.tie_weights()
    assert distance(gradient(learner), plain.step(made).gradient) < 1e-4
    assert outcome.metrics["clip_share"] > 0
    assert outcome.metrics["tokens_trained"] == once.learn(made_again(made)).metrics["tokens_trained"]


def made_again(made: TrainBatch) -> TrainBatch:
    return TrainBatch(step=made.step + 1, spec=made.spec, groups=made.groups)


def test_minibatches_are_steps_of_their_own_over_all_episodes(tiny_llama: ModelFolder) -> None:
    made = branching_batch(optimizer=FREE | {"minibatches": 3})
    learner = learner_of(tiny_llama)
    seen = learner.learn(made).metrics
    assert seen["tokens_trained"] == learner_of(tiny_llama).learn(branching_batch()).metrics["tokens_trained"]
    moments = learner.optimizer.state()
    assert {float(value) for name, value in moments.items() if name.endswith("/step")} == {3.0}


@pytest.mark.parametrize("algorithm", [{"kl": 0.01}, {"name": "ppo", "kl": 0.01}], ids=str)
def test_tokens_are_measured_before_the_first_minibatch_moves_the_weights(
    tiny_llama: ModelFolder, algorithm: dict[str, Any]
) -> None:
    whole, cut = (
        learner_of(tiny_llama).learn(
            as_sampled(
                learner_of(tiny_llama), branching_batch(algorithm=algorithm, optimizer=FREE | {"minibatches": parts})
            )
        )
        for parts in (1, 3)
    )
    assert cut.metrics["logprob_mismatch_max"] < 1e-5
    assert cut.metrics["kl_to_start"] == 0.0
    assert cut.metrics["entropy"] == pytest.approx(whole.metrics["entropy"], rel=1e-6)
    assert cut.metrics["tokens_trained"] == whole.metrics["tokens_trained"]


def as_sampled(learner: Learner, made: TrainBatch) -> TrainBatch:
    """The batch as a sampler with the learner's weights records it."""
    learner.policy.use_dtype(made.spec.dtype)
    return replace(
        made,
        groups=[
            replace(
                some,
                episodes=[replace(one, calls=[recorded(learner, call) for call in one.calls]) for one in some.episodes],
            )
            for some in made.groups
        ],
    )


def recorded(learner: Learner, made: TrainCall) -> TrainCall:
    logp_S = torch.empty(len(made.sampled_ids))
    for piece in pieces([Branch(call=made, advantage=0.0, weight=0.0)], learner.policy):
        assert piece.facts.place_U is not None
        logp_S[piece.facts.place_U] = read(learner.policy, piece)[0]
    return replace(made, logprobs=logp_S.clamp(max=0.0).tolist())


@pytest.mark.parametrize(("tokens", "spared", "told"), [(6, False, 1), (6, True, 0), (1000, False, 0)])
def test_contexts_that_take_far_more_memory_than_was_meant_are_told_of_once(
    tiny_llama: ModelFolder, caplog: pytest.LogCaptureFixture, tokens: int, spared: bool, told: int
) -> None:
    learner = learner_of(tiny_llama)
    learner.policy.segment_tokens = tokens
    for step in (1, 2):
        learner.learn(branching_batch(step=step, activation_checkpointing=spared))
    assert caplog.text.count("activation_checkpointing") == told


def test_a_type_that_is_left_open_is_refused(tiny_llama: ModelFolder) -> None:
    with pytest.raises(EngineError, match="dtype is still auto"):
        Learner(Policy.load(tiny_llama.path), SystemClock()).learn(branching_batch(dtype="auto"))


def test_bfloat16_is_close_to_float32(tiny_llama: ModelFolder) -> None:
    made = branching_batch(dtype="bfloat16", optimizer=FREE)
    learner = learner_of(tiny_llama)
    learner.learn(made)
    assert distance(gradient(learner), PlainGrpo(tiny_llama.path).step(made).gradient) < 0.03


def test_equal_batches_give_bit_equal_weights(tiny_llama: ModelFolder) -> None:
    runs = []
    for _ in range(2):
        learner = learner_of(tiny_llama)
        for step in (1, 2, 3):
            learner.learn(branching_batch(step=step, dtype="bfloat16", optimizer={"minibatches": 2}))
        runs.append(weights_of(learner))
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])


def test_reset_gives_the_first_weights_back(tiny_llama: ModelFolder) -> None:
    learner = learner_of(tiny_llama)
    before = weights_of(learner)
    learner.learn(branching_batch())
    learner.policy.adapt(None, seed=0)
    assert all(torch.equal(weight, before[name]) for name, weight in weights_of(learner).items())


# -- what is not trained --------------------------------------------------------------------------------------------------


def test_equal_rewards_teach_nothing_and_leave_the_weights_alone(tiny_llama: ModelFolder) -> None:
    flat = batch(group("a", conversation("a1", 1.0, [[70, 2]]), conversation("a2", 1.0, [[71, 2]])))
    learner = learner_of(tiny_llama)
    before = weights_of(learner)
    outcome = learner.learn(flat)
    assert outcome.untrained == {"a1": "zero_variance", "a2": "zero_variance"}
    assert outcome.metrics["tokens_trained"] == outcome.metrics["weights_change"] == 0.0
    assert outcome.metrics["entropy"] > 0  # measured all the same
    assert all(torch.equal(weight, before[name]) for name, weight in weights_of(learner).items())


def test_equal_rewards_are_trained_where_kl_or_entropy_count(tiny_llama: ModelFolder) -> None:
    flat = batch(
        group("a", conversation("a1", 1.0, [[70, 2]]), conversation("a2", 1.0, [[71, 2]])), algorithm={"entropy": 0.1}
    )
    outcome = learner_of(tiny_llama).learn(flat)
    assert outcome.untrained == {}
    assert outcome.metrics["tokens_trained"] == 4


def test_calls_that_cannot_be_recomputed_are_left_out_and_named(tiny_llama: ModelFolder) -> None:
    made = batch(
        group(
            "a",
            conversation("good", 1.0, [[70, 2]]),
            conversation("greedy", 0.0, [[70, 2]], temperature=0.0),
            conversation("grammar", 0.0, [[70, 2]], reproducible=False),
            conversation("cut", 0.0, [[70, 71]], truncated=True),
            episode("silent", 0.0),
        ),
        algorithm={"train_truncated": False},
    )
    outcome = learner_of(tiny_llama).learn(made)
    assert outcome.untrained == {
        "greedy": "greedy",
        "grammar": "unreproducible_sampling",
        "cut": "truncated",
        "silent": "no_calls",
    }
    assert outcome.metrics["tokens_trained"] == 2


def test_tokens_without_provenance_are_refused_and_change_nothing(tiny_llama: ModelFolder) -> None:
    learner = learner_of(tiny_llama)
    before = weights_of(learner)
    bad = call("bad", PROMPT, [70, 71], logprobs=[-1.0])
    with pytest.raises(TrainingRefused):
        learner.learn(batch(group("a", episode("a1", 1.0, bad), conversation("a2", 0.0, [[70]]))))
    assert not learner.half_way
    assert all(torch.equal(weight, before[name]) for name, weight in weights_of(learner).items())


def test_a_gradient_that_is_not_finite_is_refused_before_the_weights_move(tiny_llama: ModelFolder) -> None:
    learner = learner_of(tiny_llama)
    with torch.no_grad():
        learner.policy.model.model.norm.weight[0] = math.inf
    with pytest.raises(TrainingRefused):
        learner.learn(branching_batch())
    assert not learner.half_way


def test_a_model_whose_logits_cannot_be_recomputed_is_refused(tiny_llama: ModelFolder, tmp_path: Path) -> None:
    folder = tmp_path / "capped"
    folder.mkdir()
    for file in tiny_llama.path.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = folder / "config.json"
    config.write_text(config.read_text().replace("{", '{"final_logit_softcapping": 30.0,', 1))
    with pytest.raises(UnsupportedModel, match="softcapping"):
        Policy.load(folder)


def test_a_step_in_bfloat16_begins_with_the_weights_that_the_step_before_made(tiny_llama: ModelFolder) -> None:
    learner, fresh = learner_of(tiny_llama), learner_of(tiny_llama)
    learner.learn(branching_batch(dtype="bfloat16", optimizer=FREE))
    with torch.no_grad():
        for name, weight in fresh.policy.model.named_parameters():
            weight.copy_(weights_of(learner)[name])
    second = branching_batch(step=2, dtype="bfloat16", optimizer=FREE)
    assert learner.learn(second).metrics["grad_norm"] == fresh.learn(second).metrics["grad_norm"]
