"""Calls that were drawn from a part of the vocabulary, or from changed logits: a step against plain GRPO under the same restriction."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from foundation.clock import SystemClock
from swarm.engine.local.forward import Policy
from swarm.engine.local.learner import Learner
from swarm.engine.local.mask_rows import encode
from swarm.engine.seam import TrainBatch, TrainCall, TrainingRefused
from swarm.engine.tree import Branch, cut, grow
from swarm.models.folder import ModelFolder
from swarm.protocol.sampling_mask import LogitChanges, SamplingMask
from tests.swarm.engine.batches import batch, branching_batch, conversation, group
from tests.swarm.engine.local.test_learner import FREE, distance, gradient
from tests.swarm.engine.plain_grpo import PlainGrpo

VOCABULARY = 300


def row(*tokens: int) -> bytes:
    """As vLLM's worker writes it. The vocabulary's size is not a multiple of eight."""
    allowed_RV = torch.zeros(1, VOCABULARY, dtype=torch.bool)
    allowed_RV[0, list(tokens)] = True
    return encode(allowed_RV)[0]


def mask_of(call: TrainCall, draw: random.Random) -> SamplingMask:
    """One choice, a few, and all but a few."""
    rows = []
    for token in call.sampled_ids:
        size = draw.choice([0, 1, 5, 100, VOCABULARY - 3])
        rows.append(row(token, *draw.sample(range(VOCABULARY), size)))
    return SamplingMask.of(rows)


def changes_of(draw: random.Random) -> LogitChanges | None:
    return LogitChanges.of(
        {
            "logit_bias": {str(draw.randrange(100)): draw.uniform(-5, 5) for _ in range(draw.randrange(4))},
            "repetition_penalty": draw.choice([None, 1.3, 0.8]),
            "frequency_penalty": draw.choice([None, 0.7, -0.3]),
            "presence_penalty": draw.choice([None, 1.1]),
        }
    )


def restricted_batch(draw: random.Random, **spec: Any) -> TrainBatch:
    """The usual one with some of its calls restricted, some in the same way."""
    made = branching_batch(optimizer=FREE, **spec)
    for some in made.groups:
        for each in some.episodes:
            for index, call in enumerate(each.calls):
                if draw.random() < 0.7:
                    found = replace(call, reproducible=False, mask=mask_of(call, draw), changes=changes_of(draw))
                    each.calls[index] = found
    return made


def compared(model: ModelFolder, made: TrainBatch) -> Learner:
    learner = Learner(Policy.load(model.path), SystemClock())
    outcome = learner.learn(made)
    plain = PlainGrpo(model.path).step(made)
    assert outcome.metrics["loss"] == pytest.approx(plain.loss, rel=1e-5, abs=1e-6)
    assert distance(gradient(learner), plain.gradient) < 1e-5
    return learner


@settings(
    max_examples=8,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(seed=st.integers(0, 2**32), algorithm=st.sampled_from([{}, {"kl": 0.3, "entropy": 0.02}, {"loss_agg": "token"}]))
def test_a_step_is_that_of_plain_grpo_under_the_same_restrictions(
    tiny_llama: ModelFolder, seed: int, algorithm: dict[str, Any]
) -> None:
    compared(tiny_llama, restricted_batch(random.Random(seed), algorithm=algorithm))


def test_heads_that_are_priced_a_few_at_a_time_are_restricted_alike(
    tiny_llama: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm.engine.local.head.CHUNK_LOGITS", 1500)
    monkeypatch.setattr("swarm.engine.local.head.BLOCK_LOGITS", 600)
    compared(tiny_llama, restricted_batch(random.Random(3), algorithm={"kl": 0.1, "entropy": 0.1}))


def test_tokens_without_an_alternative_teach_nothing_and_are_counted(tiny_llama: ModelFolder) -> None:
    def answer(name: str, reward: float, tokens: list[int]) -> Any:
        only = SamplingMask.of([row(token) for token in tokens])
        return conversation(name, reward, [tokens], reproducible=False, mask=only, logprobs=[0.0] * len(tokens))

    made = batch(group("a", answer("a1", 1.0, [70, 2]), answer("a2", 0.0, [71, 2])), optimizer=FREE)
    learner = Learner(Policy.load(tiny_llama.path), SystemClock())
    metrics = learner.learn(made).metrics
    assert metrics["tokens_forced"] == metrics["tokens_trained"] == 4
    assert metrics["grad_norm"] == metrics["logprob_mismatch_max"] == 0.0
    assert all(not grad.any() for grad in gradient(learner).values())


def test_off_leaves_restricted_calls_out_and_policy_trains_the_models_own_distribution(tiny_llama: ModelFolder) -> None:
    draw, plain = random.Random(5), branching_batch(optimizer=FREE, sampling={"train": "policy"})
    made = restricted_batch(draw, sampling={"train": "policy"})
    learner = Learner(Policy.load(tiny_llama.path), SystemClock())
    metrics = learner.learn(made).metrics
    assert 0 < metrics["tokens_off_policy"] < metrics["tokens_trained"]
    corrected = Learner(Policy.load(tiny_llama.path), SystemClock())
    all_corrected = plain.spec.model_copy(
        update={"algorithm": plain.spec.algorithm.model_copy(update={"importance_correction": "truncated"})}
    )
    for some in made.groups:
        for each in some.episodes:
            each.calls[:] = [replace(call, reproducible=False) for call in each.calls]
    learner.policy.adapt(None, seed=0)
    learner.learn(made)
    corrected.learn(replace(plain, spec=all_corrected))
    assert distance(gradient(learner), gradient(corrected)) < 1e-5
    off = learner.learn(replace(made, spec=made.spec.model_copy(update={"sampling": _off(made)})))
    assert set(off.untrained.values()) == {"unreproducible_sampling"}


def _off(made: TrainBatch) -> Any:
    return made.spec.sampling.model_copy(update={"train": "off"})


def test_equal_rows_share_a_distribution_and_a_mask_of_another_length_is_refused(tiny_llama: ModelFolder) -> None:
    (episode,) = [conversation("a", 1.0, [[70, 71, 2]])]
    call = replace(episode.calls[0], reproducible=False, mask=SamplingMask.of([row(70, 71, 2)] * 3))
    twin = replace(call, call_id="twin", mask=SamplingMask.of([row(70, 71, 2)] * 3))
    other = replace(call, call_id="other", mask=SamplingMask.of([row(70, 71)] * 2 + [row(2)]))
    free = replace(call, call_id="free", reproducible=True, mask=None)
    branches = [Branch(call=each, advantage=1.0, weight=1.0) for each in (call, twin, other, free)]
    (segment,) = cut(grow(branches), 1000)
    assert len(segment.head_at) == 3 * 3
    assert len(segment.use_head) == 4 * 3
    short = replace(call, call_id="short", mask=SamplingMask.of([row(70)]))
    with pytest.raises(TrainingRefused, match="its mask covers 1 tokens, but it sampled 3"):
        grow([Branch(call=short, advantage=1.0, weight=1.0)])
    assert torch.tensor(segment.head_at).unique().numel() == 3
