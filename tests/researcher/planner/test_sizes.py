"""Topics about the size of the model: which models they compare, what such a plan holds, and what is refused."""

from __future__ import annotations

import pytest

from researcher.design.hosting import BOOT_S, boots_s
from researcher.instruments.catalogue import open_instrument, read_instrument
from researcher.planner.graph import PlanOptions, plan_study
from researcher.refusals import PlanningRefused
from researcher.study.plan import Plan
from tests.contracts.planner_contract import ARITHMETIC, KITCHEN

pytestmark = pytest.mark.anyio

SMALL, LARGE = "model_size=smollm2-81m", "model_size=smollm2-135m"


async def planned(topic: str, **options: object) -> Plan:
    return await plan_study(topic, PlanOptions(planner="builtin", **options), instruments=[ARITHMETIC, KITCHEN])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("topic", "treatment", "direction"),
    [
        ("Does the larger model (smollm2-135m) learn one-digit sums faster than the half-size one?", LARGE, "increase"),
        ("Does the larger model learn one-digit sums faster than the smaller one?", LARGE, "increase"),
        ("Compare model sizes 135M and 80M on one-digit sums", LARGE, "increase"),
        ("How does model size affect the learning of one-digit sums?", LARGE, "increase"),
        ("Does the number of layers matter for sums?", LARGE, "increase"),
        ("smollm2-135m vs smollm2-81m", LARGE, "increase"),
        ("Does SmolLM2-81M learn sums as fast as SmolLM2-135M?", SMALL, "increase"),
        ("Does the 135M model beat the 81M model at sums?", LARGE, "increase"),
        ("Is smollm2-81m worse than smollm2-135m at sums?", SMALL, "decrease"),
        ("Does a larger model learn sums faster?", LARGE, "increase"),
        ("Does the smaller model learn sums slower?", SMALL, "decrease"),
        ("Does the big model learn sums faster than the small one?", LARGE, "increase"),
        ("Which learns sums better: the small model or the large?", SMALL, "increase"),
    ],
)
async def test_models_are_levels_of_a_factor(topic: str, treatment: str, direction: str) -> None:
    plan = await planned(topic)
    [hypothesis] = plan.hypotheses
    assert (hypothesis.treatment, hypothesis.direction) == (treatment, direction)
    assert {hypothesis.baseline, hypothesis.treatment} == {SMALL, LARGE}
    assert {plan.model_of(arm).name for arm in (SMALL, LARGE)} == {"smollm2-81m", "smollm2-135m"}
    assert {model.name for model in plan.models} == {"smollm2-81m", "smollm2-135m"}


async def test_a_size_that_was_rounded_is_read_and_said() -> None:
    assert "'80M' is read as smollm2-81m." in (await planned("Compare model sizes 135M and 80M on sums")).assumptions


@pytest.mark.parametrize(
    "topic",
    [
        "With smollm2-81m, does a learning rate of 4e-5 learn sums faster than 1e-5?",
        "Does a learning rate of 4e-5 learn sums faster than 1e-5 with the smaller model?",
        "Does a learning rate of 4e-5 learn sums faster than 1e-5 with the 81M model?",
        "Does a learning rate of 4e-5 learn sums faster than 1e-5 with the small model (81M)?",
    ],
)
async def test_one_model_for_all_arms_is_no_factor(topic: str) -> None:
    plan = await planned(topic)
    assert [arm.levels for arm in plan.arms] == [{"learning_rate": 1e-5}, {"learning_rate": 4e-5}]
    assert plan.model.name == "smollm2-81m"
    assert (plan.models, plan.hosted) == ((), (plan.model,))
    assert "models" not in plan.model_dump(mode="json"), "a plan that compares none hashes as it always did"


async def test_a_size_is_crossed_with_another_factor() -> None:
    plan = await planned("Do model size (81M or 135M) and learning rate (1e-5 or 4e-5) interact on sums?")
    assert len(plan.arms) == 4
    assert [plan.model_of(arm.name).name for arm in plan.arms] == ["smollm2-81m"] * 2 + ["smollm2-135m"] * 2


@pytest.mark.parametrize(
    ("topic", "says"),
    [
        ("Does a learning rate of 4e-5 learn sums faster than 1e-5 for the small model but not for the large?", "varies"),
        ("Does the small model need a larger learning rate on sums than the big model?", "varies .*whether they interact"),
        ("Does a learning rate of 4e-5 learn sums faster than 1e-5 for both models?", "'both models': .* one model; name it"),
        ("Is a group size of 8 better than 4 on sums regardless of model size?", "made on one model|varies"),
    ],
)  # fmt: skip
async def test_something_else_asked_of_several_models_is_refused_with_what_can_be(topic: str, says: str) -> None:
    with pytest.raises(PlanningRefused, match=says):
        await planned(topic)


@pytest.mark.parametrize(
    ("topic", "says"),
    [
        ("Does SmolLM2-360M learn sums faster than smollm2-135m?", r"'SmolLM2-360M' is not available.* smollm2-135m, smollm2-81m"),
        ("Compare model sizes 135M and 360M on sums", r"no model has '360M'; there are: smollm2-81m, smollm2-135m"),
        ("Does a learning rate of 4e-5 beat 1e-5 on sums with the 400M model?", r"no model has '400M model'; there are: .*81m"),
        ("Does the larger model (smollm2-81m) learn sums faster?", r"does not fit.*it is smollm2-135m"),
        ("Do 30 layers learn sums faster than 15?", "if 30 and 15 are levels of lora_rank"),
        ("Does smollm2-135m cook better with a recipe length of 4 than smollm2-81m with 8?", r"a study of kitchen trains one"),
    ],
)  # fmt: skip
async def test_a_model_that_is_not_to_be_had_is_refused_with_those_that_are(topic: str, says: str) -> None:
    with pytest.raises(PlanningRefused, match=says) as refused:
        await planned(topic, instrument="kitchen" if "cook" in topic else None)
    assert "\n" not in str(refused.value)


async def test_turns_on_one_machine_are_in_the_price() -> None:
    plan = await planned("Compare model sizes 135M and 81M on sums", seeds=3)
    assert boots_s(plan, at_most=True) == 2 * BOOT_S, "the noise floor runs the one, the comparison the other"
    compare = plan.model_copy(update={"stages": plan.stages[1:]})
    assert boots_s(compare, at_most=True) == 4 * BOOT_S, "A B, B A, A B"
    other = await planned("Does a learning rate of 4e-5 learn sums faster than 1e-5?")
    assert boots_s(other, at_most=True) == 0


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ('choices = ["smollm2-135m", "smollm2-81m"]', "from the smallest to the largest"),
        ('choices = ["smollm2-135m"]', "a choice of two or more"),
        ('model = "smollm2-135m"', "not known: factors.0.model|model"),
    ],
)
def test_a_declaration_of_models_that_cannot_be_right_is_refused(wrong: str, says: str, tmp_path) -> None:  # type: ignore[no-untyped-def]
    own = open_instrument("arithmetic").path
    declared = (own / "instrument.toml").read_text()
    (tmp_path / "instrument.toml").write_text(f'{declared}\n[[factors]]\nname = "model_size"\n{wrong}\n')
    (tmp_path / "workflow.py").write_text("")
    with pytest.raises(PlanningRefused, match=says):
        read_instrument(tmp_path)
