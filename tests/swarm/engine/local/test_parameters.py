"""What is trained, and by which optimiser: adapters, Adafactor, layers that are computed again, and steps that did nothing."""

from __future__ import annotations

import gc
import json
import math
import weakref
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from foundation.clock import SystemClock
from swarm.engine.local.adapters import merged
from swarm.engine.local.checkpoints import hash_tensors
from swarm.engine.local.engine import LocalEngine
from swarm.engine.local.forward import DeviceShare, Policy
from swarm.engine.local.learner import Learner
from swarm.engine.memory.model import GIB
from swarm.engine.memory.plan import MOST_TOKENS, TRAINER_OVERHEAD, usable
from swarm.engine.memory.training import TrainerMemory
from swarm.engine.seam import EngineError, TrainingRefused
from swarm.engine.verl.engine import VerlEngine, VerlLayout
from swarm.models.folder import ModelFolder
from swarm.protocol.runspec import LoraSpec
from tests.swarm.engine.batches import branching_batch
from tests.swarm.engine.plain_grpo import PlainGrpo
from tests.tiny_llama import make_tiny_llama

from .test_learner import distance

FREE = {"name": "adamw", "learning_rate": 1e-3, "max_grad_norm": 1e9}
LORA = LoraSpec(rank=4, alpha=8.0, targets=("q_proj", "v_proj", "down_proj"))


def learner_of(model: ModelFolder, lora: LoraSpec | None = None) -> Learner:
    learner = Learner(Policy.load(model.path), SystemClock())
    if lora is not None:
        learner.policy.adapt(lora, seed=1)
        learner.optimizer.take(learner.policy.trained)
    return learner


def weights_of(learner: Learner) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in learner.policy.model.named_parameters()}


def gradients_of(learner: Learner) -> dict[str, Tensor]:
    return {name: weight.grad.clone() for name, weight in learner.policy.trained.items() if weight.grad is not None}


# -- adapters -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.03)])
def test_an_adapters_gradient_is_the_whole_weights_gradient_seen_through_it(
    tiny_llama: ModelFolder, dtype: str, tolerance: float
) -> None:
    """Where B is zero: dL/dB = alpha / rank · dL/dW · Aᵀ, and dL/dA = 0."""
    made = branching_batch(optimizer=FREE, dtype=dtype)
    learner = learner_of(tiny_llama, LORA)
    learner.learn(made)
    whole, ours, start = PlainGrpo(tiny_llama.path).step(made).gradient, gradients_of(learner), learner.policy.adapters
    assert start is not None
    assert len(ours) == 2 * 2 * len(LORA.targets)
    for name, gradient in ours.items():
        stem, _, which = name.removesuffix(".default.weight").rpartition(".")
        if which == "lora_A":
            assert not gradient.any()
        else:
            a = start.start[name.replace("lora_B", "lora_A")]
            expected = (LORA.alpha / LORA.rank) * whole[f"{stem}.weight"] @ a.T
            assert float((gradient - expected).norm() / expected.norm()) < tolerance


def test_adapters_that_have_moved_have_the_gradient_of_float32_on_a_bfloat16_base_too(tiny_llama: ModelFolder) -> None:
    narrow, wide = learner_of(tiny_llama, LORA), learner_of(tiny_llama, LORA)
    wide.learn(branching_batch(optimizer=FREE))
    with torch.no_grad():
        for name, weight in narrow.policy.trained.items():
            weight.copy_(wide.policy.trained[name])
    for learner, dtype in ((narrow, "bfloat16"), (wide, "float32")):
        learner.learn(branching_batch(step=2, optimizer=FREE, dtype=dtype))
    assert narrow.policy.output_weight.dtype is torch.bfloat16
    found, expected = gradients_of(narrow), gradients_of(wide)
    for which in ("lora_A", "lora_B"):
        assert distance(*({name: grads[name] for name in grads if which in name} for grads in (found, expected))) < 0.03


def test_only_the_adapters_move_and_they_do(tiny_llama: ModelFolder) -> None:
    learner = learner_of(tiny_llama, LORA)
    before = weights_of(learner)
    first = learner.learn(branching_batch(optimizer=FREE))
    second = learner.learn(branching_batch(step=2, optimizer=FREE))
    assert first.metrics["kl_to_start"] == 0.0
    assert second.metrics["kl_to_start"] > 0.0
    moved = {name for name, weight in weights_of(learner).items() if not torch.equal(weight, before[name])}
    assert moved == set(learner.policy.trained)
    assert all("lora_" in name for name in moved)


def test_a_run_with_all_weights_after_one_with_adapters_begins_with_the_hosted_model(tiny_llama: ModelFolder) -> None:
    fresh, used = learner_of(tiny_llama), learner_of(tiny_llama, LORA)
    used.learn(branching_batch(dtype="bfloat16"))
    used.policy.adapt(None, seed=1)
    used.optimizer.take(used.policy.trained)
    for learner in (fresh, used):
        learner.learn(branching_batch(dtype="bfloat16"))
    ours, theirs = weights_of(used), weights_of(fresh)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_merged_weights_say_what_the_adapted_model_says(tiny_llama: ModelFolder) -> None:
    learner = learner_of(tiny_llama, LORA)
    for step in (1, 2):
        learner.learn(branching_batch(step=step, optimizer=FREE))
    ids = torch.tensor([[1, 30, 31, 32, 33]])
    plain = PlainGrpo(tiny_llama.path).model
    hosted = {name: weight.float() for name, weight in learner.policy.start.items()}
    plain.load_state_dict(merged(hosted, learner.policy.trained, LORA), strict=False)
    plain.tie_weights()
    adapted = learner.policy.model
    with torch.no_grad():
        wanted = {name: weight.detach() for name, weight in adapted.named_parameters()}
        layer = adapted.get_submodule("model.layers.0.self_attn.q_proj")
        x = torch.randn(3, layer.in_features)
        own = plain.get_submodule("model.layers.0.self_attn.q_proj")
        assert torch.allclose(layer(x), own(x), atol=1e-5)
        assert plain(ids).logits.isfinite().all()
    assert wanted


def test_beside_adapters_the_hosted_matrices_take_no_memory_of_their_own(tiny_llama: ModelFolder) -> None:
    learner = learner_of(tiny_llama, LORA)
    learner.learn(branching_batch(dtype="bfloat16"))
    policy = learner.policy
    frozen = {name: weight for name, weight in policy.model.named_parameters() if not weight.requires_grad}
    matrices = [name for name, weight in frozen.items() if weight.ndim > 1]
    assert len(matrices) == 15
    assert all(
        frozen[name].data_ptr() == policy.start[name.replace(".base_layer.", ".")].data_ptr() for name in matrices
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_learn_the_same_whatever_the_hosted_weights_are_stored_in(tmp_path: Path, dtype: str) -> None:
    """bfloat16 weights that are stored in float32 are the same numbers."""
    narrow, wide = tmp_path / "narrow", tmp_path / "wide"
    make_tiny_llama(narrow)
    make_tiny_llama(wide)
    weights = load_file(narrow / "model.safetensors")
    save_file({name: weight.float() for name, weight in weights.items()}, wide / "model.safetensors", {"format": "pt"})
    config = json.loads((wide / "config.json").read_text())
    (wide / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    found = []
    for path in (narrow, wide):
        learner = Learner(Policy.load(path, trained=False), SystemClock())
        learner.policy.adapt(LORA, seed=1)
        learner.begin_run()
        for step in (1, 2):
            outcome = learner.learn(branching_batch(step=step, dtype=dtype))
        found.append((hash_tensors(learner.policy.trained), outcome.metrics["kl_to_start"]))
    assert found[0] == found[1]


def test_a_misspelt_target_is_refused_with_the_nearest_name(tiny_llama: ModelFolder) -> None:
    with pytest.raises(EngineError, match="did you mean 'q_proj'"):
        learner_of(tiny_llama, LoraSpec(targets=("q_prj", "v_proj")))


def test_an_engine_names_the_layers_that_adapters_can_be_put_on(tiny_llama: ModelFolder, tmp_path: Path) -> None:
    layers = LocalEngine(tiny_llama, logs=tmp_path, clock=SystemClock()).info.layers
    layout = VerlLayout(max_model_len=512)
    assert VerlEngine(tiny_llama, layout, logs=tmp_path, clock=SystemClock()).info.layers == layers
    assert layers == set(LoraSpec().targets)
    learner_of(tiny_llama, LoraSpec(targets=tuple(sorted(layers))))


# -- layers that are computed again -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_activation_checkpointing_gives_equal_gradients_bit_for_bit(
    tiny_llama: ModelFolder, dtype: str, lora: LoraSpec | None
) -> None:
    found: list[dict[str, Tensor]] = []
    for wanted in (False, True):
        learner = learner_of(tiny_llama, lora)
        for step in (1, 2):
            learner.learn(branching_batch(step=step, dtype=dtype, activation_checkpointing=wanted))
        found.append(gradients_of(learner) | weights_of(learner))
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_activation_checkpointing_keeps_fewer_activations(tiny_llama: ModelFolder) -> None:
    kept: dict[bool, int] = {}
    for wanted in (False, True):
        learner, sizes = learner_of(tiny_llama), []

        def pack(tensor: Tensor, sizes: list[int] = sizes) -> Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            learner.learn(branching_batch(activation_checkpointing=wanted))
        kept[wanted] = sum(sizes)
    assert kept[True] < 0.5 * kept[False]


@pytest.mark.parametrize("limit", ["room", "card"])
@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_layers_are_computed_again_where_a_card_cannot_keep_those_of_the_longest_call(
    tiny_llama: ModelFolder, lora: LoraSpec | None, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = 2048

    def fitted(size: int) -> Policy:
        """As on a card of this size, or with so much room on a larger one."""
        total, room = (100 * size, size) if limit == "room" else (size, None)
        policy = Policy.load(tiny_llama.path, trained=False, share=DeviceShare(room=room, context=context))
        with monkeypatch.context() as patch:
            patch.setattr(Policy, "device", torch.device("cuda"))
            patch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=total))
            policy.use_dtype("bfloat16")
            policy.adapt(lora, seed=1)
            memory = policy.memory
        assert memory.training.on_gpu
        memories.append(memory)
        return policy

    memories: list[TrainerMemory] = []
    large = fitted(80 * GIB)
    assert (large.has_to_recompute, large.segment_tokens) == (False, MOST_TOKENS)
    kept = memories[0]
    least = TRAINER_OVERHEAD + kept.standing + kept.peak(context)
    near = least * least // usable(least) - 4
    size = least if limit == "room" else next(size for size in count(near) if usable(size) >= least)
    for less, recomputes in ((0, False), (2, True)):
        policy = fitted(size - less)
        assert policy.has_to_recompute == recomputes
        again = replace(kept, training=replace(kept.training, checkpointing=recomputes))
        assert again.peak(policy.segment_tokens) <= least - TRAINER_OVERHEAD - kept.standing
        assert policy.segment_tokens >= context
        learner = Learner(policy, SystemClock())
        learner.begin_run()
        learner.learn(branching_batch(dtype="bfloat16"))
        assert policy.recompute == recomputes


# -- the optimisers ---------------------------------------------------------------------------------------------------------


def adafactor(**fields: Any) -> dict[str, Any]:
    return {"name": "adafactor", "learning_rate": 1e-2} | fields


def test_adafactor_keeps_a_row_and_a_column_of_each_matrix(tiny_llama: ModelFolder) -> None:
    learner = learner_of(tiny_llama)
    learner.learn(branching_batch(optimizer=adafactor()))
    weights = sum(weight.numel() for weight in learner.policy.trained.values())
    assert sum(value.numel() for value in learner.optimizer.state().values()) < 0.05 * weights


def test_adafactor_raises_what_is_rewarded(tiny_llama: ModelFolder) -> None:
    learner = learner_of(tiny_llama)
    losses = [
        learner.learn(branching_batch(step=step, optimizer=adafactor(learning_rate=0.03))).metrics["loss"]
        for step in range(1, 6)
    ]
    change = learner.learn(branching_batch(step=6, optimizer=adafactor())).metrics["weights_change"]
    assert all(math.isfinite(loss) for loss in losses)
    assert 1e-4 < change < 0.1


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_restored_moments_make_the_same_next_step(tiny_llama: ModelFolder, name: str) -> None:
    options = {"name": name, "learning_rate": 1e-3}
    learner, other = learner_of(tiny_llama), learner_of(tiny_llama)
    learner.learn(branching_batch(optimizer=options))
    with torch.no_grad():
        for one, weight in other.policy.model.named_parameters():
            weight.copy_(weights_of(learner)[one])
    other.optimizer.restore(learner.optimizer.state())
    for each in (learner, other):
        each.learn(branching_batch(step=2, optimizer=options))
    assert all(torch.equal(weights_of(learner)[one], weight) for one, weight in weights_of(other).items())


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_a_rest_between_steps_changes_no_bit(tiny_llama: ModelFolder, name: str) -> None:
    restless, rested = learner_of(tiny_llama), learner_of(tiny_llama)
    for step in (1, 2, 3):
        made = branching_batch(step=step, optimizer=FREE | {"name": name}, dtype="bfloat16")
        restless.learn(made)
        rested.learn(made)
        rested.rest()
        assert all(weight.grad is None for weight in rested.policy.trained.values())
    assert hash_tensors(weights_of(rested)) == hash_tensors(weights_of(restless))
    assert hash_tensors(rested.state()) == hash_tensors(restless.state())


def test_copies_of_weights_are_gone_at_rest(tiny_llama: ModelFolder) -> None:
    learner = learner_of(tiny_llama)
    learner.learn(branching_batch(optimizer=FREE, dtype="bfloat16"))
    copies = [weakref.ref(cast.current()) for cast in learner.policy._casts.values()]
    learner.rest()
    gc.collect()
    assert copies
    assert not any(copy() is not None for copy in copies)


def test_another_optimiser_in_mid_run_begins_with_moments_of_its_own(tiny_llama: ModelFolder) -> None:
    learner = learner_of(tiny_llama)
    learner.learn(branching_batch(optimizer=FREE))
    learner.learn(branching_batch(step=2, optimizer=adafactor()))
    assert {path.rpartition("/")[2] for path in learner.optimizer.state()} == {"step", "row_var", "col_var", "variance"}


# -- steps that did nothing ---------------------------------------------------------------------------------------------------


def test_a_step_that_left_the_weights_as_they_were_is_refused(tiny_llama: ModelFolder) -> None:
    with pytest.raises(TrainingRefused, match="did not change the weights"):
        learner_of(tiny_llama).learn(branching_batch(optimizer={"learning_rate": 1e-30}))


def test_a_learning_rate_of_zero_is_a_control_and_not_refused(tiny_llama: ModelFolder) -> None:
    outcome = learner_of(tiny_llama).learn(branching_batch(optimizer={"learning_rate": 0.0}))
    assert outcome.metrics["weights_change"] == 0.0


def test_a_loss_that_is_not_finite_is_refused_before_the_weights_move(
    tiny_llama: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = learner_of(tiny_llama)
    before = weights_of(learner)
    monkeypatch.setattr(Learner, "_accumulate", lambda *given, **named: math.nan)
    with pytest.raises(TrainingRefused, match="the loss is nan"):
        learner.learn(branching_batch())
    assert not learner.half_way
    assert all(torch.equal(weight, before[name]) for name, weight in weights_of(learner).items())
