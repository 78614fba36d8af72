"""GPUs of four sizes are divided for four models; a model that does not fit is refused in words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from swarm.engine.memory.host import trainer_host_memory
from swarm.engine.memory.model import GIB, ModelShape
from swarm.engine.memory.plan import LORA, CardPlan, Plans, Wishes, planned, usable
from swarm.engine.memory.training import TrainerMemory, Training
from swarm.engine.seam import EngineError
from swarm.models.shapes import SHAPES

MODELS = {name.removeprefix("Qwen/Qwen3-"): shape for name, shape in SHAPES.items()}
"""The shapes of Qwen3."""
PARAMETERS = {"0.6B": 596_049_920, "1.7B": 1_720_574_976, "4B": 4_022_468_096, "8B": 8_190_735_360}
WISHES = Wishes(model_len=4096, dtype="bfloat16")
TABLE = {
    # GiB of the card: all weights; adapters. beside: side by side; turns: inference sleeps during a step; twice: activations computed
    # twice; offloaded: moments and the first weights lie in the machine's memory
    ("0.6B", 24): ("beside, twice", "beside"),
    ("0.6B", 48): ("beside", "beside"),
    ("0.6B", 80): ("beside", "beside"),
    ("0.6B", 141): ("beside", "beside"),
    ("1.7B", 24): ("turns, twice, offloaded", "beside, twice"),
    ("1.7B", 48): ("beside, twice", "beside"),
    ("1.7B", 80): ("beside", "beside"),
    ("1.7B", 141): ("beside", "beside"),
    ("4B", 24): ("no", "turns, twice"),
    ("4B", 48): ("turns, twice, offloaded", "beside"),
    ("4B", 80): ("beside, offloaded", "beside"),
    ("4B", 141): ("beside", "beside"),
    ("8B", 24): ("no", "no"),
    ("8B", 48): ("no", "beside, twice"),
    ("8B", 80): ("no", "beside"),
    ("8B", 141): ("beside, offloaded", "beside"),
}


def plans(model: str, gib: float, **wishes: Any) -> Plans:
    return planned(model, int(gib * GIB), ModelShape.described(MODELS[model]), replace(WISHES, **wishes))


def in_words(plan: CardPlan | None) -> str:
    if plan is None:
        return "no"
    ways = {"turns": plan.turns, "beside": not plan.turns, "twice": plan.training.checkpointing}
    return ", ".join(name for name, taken in (ways | {"offloaded": plan.training.offload}).items() if taken)


@pytest.mark.parametrize("model", MODELS)
def test_the_shapes_have_as_many_parameters_as_the_models(model: str) -> None:
    assert ModelShape.described(MODELS[model]).parameters == PARAMETERS[model]


@pytest.mark.parametrize(("model", "gib"), TABLE)
def test_a_card_is_divided_so_that_everything_fits(model: str, gib: int) -> None:
    made = plans(model, gib)
    assert (in_words(made.whole), in_words(made.adapters)) == TABLE[model, gib]
    for plan in filter(None, (made.whole, made.adapters)):
        assert max(plan.sampling, plan.at_peak) <= usable(gib * GIB)
        assert plan.tokens >= WISHES.model_len  # the longest call is computed at once
        assert plan.kv >= plan.sequences * WISHES.model_len // 4 * plan.shape.cached("bfloat16")
        memory = TrainerMemory(plan.shape, plan.training)
        assert memory.standing + memory.peak(plan.tokens) <= plan.trainer_room


@pytest.mark.parametrize("gib", [23, 40, 94])
def test_a_larger_card_is_never_divided_worse(gib: int) -> None:
    smaller, larger = (plans("0.6B", size).chosen for size in (gib, gib + 1))
    assert larger.sequences >= smaller.sequences or larger.tokens > smaller.tokens
    assert smaller.training.checkpointing >= larger.training.checkpointing


def test_what_the_operator_says_is_done_or_refused() -> None:
    assert plans("0.6B", 80, sequences=32, kv_bytes=3 * GIB).chosen.kv == 3 * GIB
    assert plans("0.6B", 80, sequences=32).chosen.sequences == 32
    assert plans("0.6B", 80, sleep=True).chosen.turns
    share = plans("0.6B", 80, utilization=0.5).chosen
    assert 33 * GIB < share.kv + share.served < 40 * GIB
    with pytest.raises(EngineError, match=r"--gpu-memory-utilization 0.05 gives inference 4.0 GiB"):
        plans("0.6B", 80, utilization=0.05)


def test_a_trainer_with_a_card_of_its_own_leaves_all_of_the_other() -> None:
    assert in_words(plans("1.7B", 40, apart=True).whole) == "beside, twice"
    assert in_words(plans("1.7B", 40).whole) == "beside, offloaded"
    apart, beside = plans("1.7B", 80, apart=True).chosen, plans("1.7B", 80).chosen
    assert apart.kv >= beside.kv
    assert apart.tokens > beside.tokens
    assert apart.trainer_room == usable(80 * GIB)


def test_what_does_not_fit_is_refused_with_what_would() -> None:
    nothing = plans("8B", 24)
    with pytest.raises(EngineError) as refused:
        _ = nothing.chosen
    assert str(refused.value).startswith("8B does not fit on this GPU of 24.0 GiB: it needs ")
    assert "a larger GPU, or several (--engine verl)" in str(refused.value)
    reason = plans("8B", 80).why_not_whole()
    assert 'train adapters (parameters = {"rank": 16})' in reason
    assert not plans("0.6B", 24).why_not_whole()
    long = plans("0.6B", 24, model_len=32_768, sleep=False)
    if long.adapters is None:
        assert "leave out --no-enable-sleep-mode" in long.advice(LORA)


def test_offloading_is_taken_where_nothing_else_fits_and_can_be_asked_for_or_forbidden() -> None:
    assert in_words(plans("4B", 48, offload=False).whole) == "no"
    assert in_words(plans("0.6B", 80, offload=True).whole) == "beside, offloaded"
    assert in_words(plans("4B", 80, sleep=True).whole) == "turns, offloaded"
    assert in_words(plans("8B", 80, offload=True).whole) == "no"


@pytest.mark.parametrize("model", MODELS)
def test_what_is_offloaded_leaves_the_card_for_the_machines_memory(model: str) -> None:
    shape = ModelShape.described(MODELS[model])
    on_card, offloaded = (
        TrainerMemory(shape, Training(dtype="bfloat16", on_gpu=True, offload=offload)) for offload in (False, True)
    )
    moments, first = 8 * shape.parameters, 2 * shape.parameters
    assert on_card.standing - offloaded.standing == moments + first
    assert on_card.resting - offloaded.resting == first
    assert trainer_host_memory(offloaded).standing == trainer_host_memory(on_card).standing + moments
    assert trainer_host_memory(offloaded, turns=True) == trainer_host_memory(offloaded)
    plan = plans(model, 400, offload=True, sleep=False).whole
    assert plan is not None
    assert plan.waiting == moments + first


def test_a_machine_without_the_memory_for_it_does_not_offload() -> None:
    least = plans("4B", 48).whole
    assert least is not None
    assert plans("4B", 48, memory=least.host).whole == least
    short = plans("4B", 48, memory=least.host - 1)
    assert short.whole is None
    assert in_words(short.chosen) == "beside"
    assert f"and {least.host / GIB:.1f} GiB of host memory, of which " in short.why_not_whole()
    assert "give the machine more memory" in short.why_not_whole()
    assert plans("1.7B", 48, memory=0).whole == plans("1.7B", 48).whole


def test_a_refusal_names_offloading_alone_where_it_helps() -> None:
    assert "or leave out --no-offload," in plans("4B", 48, offload=False).why_not_whole()
    assert "--no-offload" not in plans("8B", 80, offload=False).why_not_whole()
    assert "at least 83.5 GiB (all weights, offloaded, activations computed twice)" in plans("8B", 80).why_not_whole()
    assert "serve with --max-model-len 4096" in plans("4B", 48, model_len=8192).why_not_whole()


def test_a_plan_is_printed_in_lines() -> None:
    text = str(plans("1.7B", 24, offload=False))
    assert text.startswith(
        "1.7B on a GPU of 24.0 GiB, calls of up to 4,096 tokens, bfloat16\nall weights: do not fit\n"
    )
    assert "adapters of rank 16, activations computed twice: side by side" in text
    assert "keys and values" in text
    assert "kept in host memory" not in text
    offloaded = str(plans("4B", 48))
    assert "all weights, offloaded, activations computed twice: inference sleeps during a step" in offloaded
    assert "  kept in host memory               45.0 GiB" in offloaded
