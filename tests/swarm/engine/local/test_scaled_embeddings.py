"""Models whose embedding scales the rows of its table, the output embedding being that table itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma3TextConfig, GemmaConfig, PretrainedConfig

from foundation.clock import SystemClock
from swarm.engine.local.attention import MicroBatch
from swarm.engine.local.forward import Policy, UnsupportedModel
from swarm.engine.local.learner import Learner
from swarm.engine.tree import Branch, cut, grow
from tests.swarm.engine.batches import PROMPT, branching_batch, call
from tests.swarm.engine.local.test_learner import FREE, distance, gradient
from tests.swarm.engine.plain_grpo import PlainGrpo

SMALL: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 48,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.08,
}
FAMILIES: dict[str, PretrainedConfig] = {
    "gemma": GemmaConfig(**SMALL),
    "gemma, padded with a late token": GemmaConfig(**SMALL | {"pad_token_id": 127}),
    "gemma3": Gemma3TextConfig(**SMALL, sliding_window=8, layer_types=["sliding_attention", "full_attention"]),
}


@pytest.fixture(params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return saved(FAMILIES[request.param], tmp_path)


def saved(config: PretrainedConfig, folder: Path) -> Path:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@torch.no_grad()
def test_untrained_the_first_weights_say_the_same_bit_for_bit(folder: Path, dtype: Any) -> None:
    policy = Policy.load(folder)
    policy.use_dtype(dtype)
    made = grow([Branch(call=call("c1", PROMPT, [70, 71, 2]), advantage=1.0, weight=1.0)])
    (segment,) = cut(made, 1000)
    micro = MicroBatch.of(segment)
    with policy.autocast():
        assert policy.start_hidden(micro).equal(policy.hidden(micro))


def test_a_step_away_from_the_first_weights_equals_one_of_plain_training(folder: Path) -> None:
    learner, plain = Learner(Policy.load(folder), SystemClock()), PlainGrpo(folder)
    learner.learn(branching_batch(optimizer=FREE))
    plain.model.load_state_dict(learner.policy.model.state_dict(), strict=False)
    made = branching_batch(step=2, algorithm={"kl": 0.3, "loss_agg": "token"}, optimizer=FREE)
    assert learner.learn(made).metrics["loss"] == pytest.approx(plain.step(made).loss, rel=1e-5)
    assert distance(gradient(learner), plain.step(made).gradient) < 1e-5


def test_the_factor_is_rounded_to_what_is_multiplied_in_as_the_samplers_is(folder: Path) -> None:
    policy = Policy.load(folder)
    scale = policy.model.get_input_embeddings().embed_scale
    policy.use_dtype("float32")
    assert float(scale) == pytest.approx(48**0.5, rel=1e-7)
    policy.use_dtype("bfloat16")
    assert float(scale) == 6.9375


@pytest.mark.parametrize("capped", ["final_logit_softcapping", "attn_logit_softcapping"])
def test_capped_scores_are_refused_before_anything_is_trained(tmp_path: Path, capped: str) -> None:
    caps: dict[str, Any] = {"final_logit_softcapping": None, "attn_logit_softcapping": None} | {capped: 30.0}
    with pytest.raises(UnsupportedModel, match=capped):
        Policy.load(saved(Gemma2Config(**SMALL, **caps), tmp_path))
