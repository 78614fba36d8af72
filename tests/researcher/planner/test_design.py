"""Plans are designed, priced before anything runs, and refused when they do not fit."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from pydantic import ValidationError

from researcher.design.design import checked
from researcher.models import Effect, Finding
from researcher.planner.graph import NO_LLM, plan_study
from researcher.planner.seam import PlanOptions
from researcher.refusals import PlanningRefused
from researcher.study.plan import Arm, Budget, Known, Plan, Verdict
from swarm.protocol.runspec import LoraSpec, RunSpec
from tests.contracts.planner_contract import ARITHMETIC, KITCHEN, TOPIC

pytestmark = pytest.mark.anyio
EFFECT = Effect.model_construct()


async def planned(topic: str = TOPIC, known: list[Finding] | None = None, **options: object) -> Plan:
    wanted = PlanOptions(**options)  # type: ignore[arg-type]
    return await plan_study(topic, wanted, instruments=[ARITHMETIC, KITCHEN], known=known or [])


async def test_arms_are_named_after_their_levels() -> None:
    plan = await planned()
    assert [arm.name for arm in plan.arms] == ["learning_rate=1e-5", "learning_rate=1e-4"]
    assert (plan.hypotheses[0].baseline, plan.hypotheses[0].treatment) == ("learning_rate=1e-5", "learning_rate=1e-4")


async def test_equal_arms_both_run_under_names_of_their_own() -> None:
    plan = await planned("Does a learning rate of 1e-5 learn sums faster than 1e-5?")
    assert [arm.name for arm in plan.arms] == ["learning_rate=1e-5", "learning_rate=1e-5-again"]
    assert plan.arms[0].levels == plan.arms[1].levels
    assert any("The two differ only by chance" in assumption for assumption in plan.assumptions)
    assert set(plan.stages[-1].arms) == {arm.name for arm in plan.arms}


async def test_swapped_arms_are_another_plan_with_the_same_arms() -> None:
    one, other = await planned(), await planned(TOPIC.replace("1e-4 than with 1e-5", "1e-5 than with 1e-4"))
    assert one.digest() != other.digest()
    assert one.hypotheses[0].treatment == other.hypotheses[0].baseline
    assert one.hypotheses[0].direction == other.hypotheses[0].direction


async def test_settings_hold_for_all_arms() -> None:
    plan = await planned("Does lr 1e-4 beat 1e-5 on two-digit sums with 16 steps and a group size of 4?")
    assert (plan.task, plan.steps) == ({"digits": 2}, 16)
    assert plan.run["batch"]["group_size"] == 4
    assert plan.run["sampling"] == ARITHMETIC.instrument.defaults.run["sampling"]


async def test_every_metric_that_the_instrument_names_is_recorded_and_the_asked_one_comes_first() -> None:
    plan = await planned("Does lr 1e-4 raise held-out accuracy on sums more than 1e-5?")
    assert plan.metrics[0].name == plan.hypotheses[0].metric == "heldout_accuracy"
    named = {metric.name for metric in ARITHMETIC.instrument.metrics if not metric.on_request}
    assert {metric.name for metric in plan.metrics} == named


async def test_seeds_that_a_person_gives_are_neither_less_nor_more() -> None:
    plan = await planned(seeds=4)
    assert [(stage.seeds, stage.max_seeds) for stage in plan.stages] == [(4, 4), (4, 4)]
    assert (await planned(TOPIC + " (6 seeds)", seeds=4)).stages[-1].seeds == 4
    with pytest.raises(PlanningRefused, match="at least 2"):
        await planned(seeds=1)


async def test_a_bound_on_seeds_moves_its_own_end() -> None:
    usual = ARITHMETIC.instrument.defaults
    least = (await planned(f"{TOPIC} (at least {usual.seeds + 1} seeds)")).stages[-1]
    assert (least.seeds, least.max_seeds) == (usual.seeds + 1, usual.max_seeds + 1)
    most = (await planned(f"{TOPIC} (up to {usual.max_seeds + 1} seeds)")).stages[-1]
    assert (most.seeds, most.max_seeds) == (usual.seeds, usual.max_seeds + 1)
    with pytest.raises(PlanningRefused, match="at least 6 seeds per arm and at most 4"):
        await planned(f"{TOPIC} (at least 6 seeds, at most 4 seeds)")


async def test_the_power_rule_is_left_out_only_where_that_is_asked_for() -> None:
    assert "power_below" in [branch.when.kind for branch in (await planned(seeds=2)).branches]
    assert "power_below" not in [branch.when.kind for branch in (await planned(allow_underpowered=True)).branches]


async def test_a_budget_between_least_and_most_takes_seeds_away_and_says_so() -> None:
    plan = await planned(budget_s=8.5 * 60)
    assert (plan.stages[-1].seeds, plan.stages[-1].max_seeds) == (3, 4)
    assert plan.budget.trials == 8
    assert any("pays for 4 seeds" in line for line in plan.assumptions)


async def test_prices_follow_length_and_size_and_servers() -> None:
    for topic in (TOPIC + " Over 12 steps.", TOPIC + " With a group size of 8."):
        with pytest.raises(PlanningRefused, match="about 12 min, the budget is 10 min: give --budget 12m"):
            await planned(topic, budget_s=600.0)
    await planned(TOPIC + " Over 12 steps.", budget_s=600.0, servers=2)


async def test_an_instruments_own_sigma_prices_seeds_and_warns() -> None:
    topic = "Do hints raise the reward in the kitchen?"
    plan = await planned(topic)
    assert any("probably end the study as underpowered" in line for line in plan.assumptions)
    paid = await planned(topic, budget_s=24 * 3600.0)
    assert paid.stages[-1].max_seeds > 5
    assert not any("underpowered" in line for line in paid.assumptions)


async def test_the_model_in_the_topic_must_be_there() -> None:
    assert (await planned("With SmolLM2-135M, " + TOPIC)).model.name == "smollm2-135m"
    assert (await planned("With SmolLM2, " + TOPIC)).model.name == "smollm2-135m"
    assert (await planned("With Qwen2.5-0.5B, " + TOPIC, models=("qwen2.5-0.5b",))).model.name == "qwen2.5-0.5b"
    with pytest.raises(PlanningRefused, match=r"'Qwen2\.5-0\.5B' is not available; there are: smollm2-135m"):
        await planned("With Qwen2.5-0.5B, " + TOPIC)


async def test_the_instrument_is_chosen_by_what_the_topic_is_about() -> None:
    assert (await planned("Do 20 steps of cooking beat 10?")).instrument == "kitchen"
    assert (await planned("Do 20 steps of adding numbers beat 10?")).instrument == "arithmetic"
    assert (await planned("Do 20 steps beat 10?", instrument="kitchen")).instrument == "kitchen"
    general = await planned("Do 20 steps beat 10?")
    assert general.instrument == "arithmetic"
    assert any("names no instrument" in line for line in general.assumptions)
    with pytest.raises(PlanningRefused, match="choose one with --instrument"):
        await planned("Do 20 steps of cooking sums beat 10?")
    with pytest.raises(PlanningRefused, match="kitchen can vary"):
        await planned("What does the moon do?", instrument="kitchen")


async def test_an_instrument_that_the_topic_does_not_name_is_stated_as_an_assumption() -> None:
    plan = await plan_study("temperature 0.7 vs 1.0", PlanOptions(), instruments=[ARITHMETIC])
    assert any("names no instrument" in line for line in plan.assumptions)


async def test_without_an_instrument_nothing_is_planned() -> None:
    with pytest.raises(PlanningRefused, match="there is no instrument"):
        await plan_study(TOPIC, PlanOptions(), instruments=[])


async def test_earlier_findings_on_the_same_factor_are_named() -> None:
    def finding(name: str, factor: str) -> Finding:
        return Finding(
            id=name, study_id="s", plan_hash="h", instrument="arithmetic", model="m", factor=factor, metric="auc_reward",
            statement="", verdict=Verdict.EQUIVALENT, at=0.0,
        )  # fmt: skip

    plan = await planned(known=[finding("f-1", "learning_rate"), finding("f-2", "temperature")])
    assert [each.id for each in plan.known if isinstance(each, Known)] == ["f-1"]


async def test_a_replication_counts_its_seeds_from_elsewhere() -> None:
    plan = await planned(first_seed=500)
    assert {stage.first_seed for stage in plan.stages} == {500}
    assert plan.budget == (await planned()).budget


async def test_a_planner_llm_is_asked_for_only_where_there_is_one() -> None:
    with pytest.raises(PlanningRefused, match="--planner builtin"):
        await planned(planner="llm")
    assert NO_LLM in (await planned()).assumptions
    assert NO_LLM not in (await planned(planner="builtin")).assumptions


async def test_an_arm_that_no_server_would_take_is_refused_by_name() -> None:
    plan = await planned()
    broken = (*plan.arms[:1], Arm(name="learning_rate=-1", levels={"learning_rate": -1.0}))
    with pytest.raises(PlanningRefused, match="arm learning_rate=-1 cannot be run"):
        checked(plan.model_copy(update={"arms": broken}))


async def test_a_plan_knows_how_long_its_longest_trial_takes() -> None:
    trial_s = ARITHMETIC.instrument.defaults.trial_s
    assert (await planned()).trial_s == trial_s
    assert (await planned("Do 12 steps beat 6 steps on sums in accuracy?")).trial_s == 2 * trial_s


async def test_what_came_later_leaves_no_trace_in_plans_that_do_not_use_it() -> None:
    plan = (await planned()).model_copy(update={"trial_s": None})
    assert "trial_s" not in plan.canonical()
    assert "direction_assumed" not in plan.canonical()
    open_question = await planned("Compare learning rates 1e-5 and 4e-5 for sums")
    assert '"direction_assumed":true' in open_question.canonical()
    assert open_question == Plan.model_validate_json(open_question.canonical())


async def test_adapters_asked_for_by_an_arm_are_those_of_the_study() -> None:
    plan = await planned("Does LoRA of rank 8 or full fine-tuning learn sums faster?")
    runs = {
        arm.name: RunSpec.model_validate(plan.run_fields({"run.parameters": arm.levels["parameters"]}))
        for arm in plan.arms
    }
    assert runs["parameters=full"].parameters == "full"
    assert runs["parameters=lora"].parameters == LoraSpec(rank=8)


@pytest.mark.parametrize(
    "topic",
    [
        "Without LoRA, is lr 1e-4 better than 4e-5 on sums?",
        "Is lr 1e-4 better than 4e-5 on sums with LoRA turned off?",
        "Don't use LoRA: is lr 1e-4 better than 4e-5 on sums?",
    ],
)
async def test_what_is_denied_is_not_set(topic: str) -> None:
    assert (await planned(topic)).run["parameters"] == "full"


@pytest.mark.parametrize(
    "topic",
    [
        "On sums, which is best: LoRA or full, and then which rank, 8 or 32?",
        "Do LoRA (lora or full) and lora rank (8 or 32) interact on sums?",
    ],
)
async def test_no_arm_has_all_weights_and_a_rank(topic: str) -> None:
    with pytest.raises(PlanningRefused, match="all weights have no rank"):
        await planned(topic)


@pytest.mark.parametrize(
    ("topic", "optimizer", "said"),
    [
        ("Does clipping at 0.3 rather than 0.2 help?", {"epochs": 2}, "epochs=2 in all arms"),
        ("Does clipping at 0.3 rather than 0.2 help with 1 epoch?", {"epochs": 1, "minibatches": 2}, "minibatches=2"),
        ("Does clipping at 0.3 rather than 0.2 help with 4 epochs?", {"epochs": 4}, None),
    ],
)
async def test_a_factor_that_needs_several_updates_gets_them(
    topic: str, optimizer: dict[str, int], said: str | None
) -> None:
    plan = await planned(topic)
    given = plan.run["optimizer"]
    assert {name: given[name] for name in ("epochs", "minibatches") if name in given} == optimizer
    notes = [line for line in plan.assumptions if "does nothing" in line]
    assert len(notes) == (said is not None)
    assert all(said in line for line in notes if said)


async def test_a_factor_that_the_topic_leaves_without_effect_is_refused() -> None:
    with pytest.raises(PlanningRefused, match="clip_range does nothing at epochs=1 and minibatches=1: raise"):
        await planned("Does clipping at 0.3 rather than 0.2 help with 1 epoch and 1 minibatch per step?")


async def test_a_clip_range_is_the_same_below_and_above() -> None:
    plan = await planned("Does a clip range of 0.1 beat 0.3 on sums?")
    both = {("run.algorithm.clip_high", level) for level in (0.1, 0.3)} | {
        ("run.algorithm.clip_low", level) for level in (0.1, 0.3)
    }
    assert {item for arm in plan.arms for item in plan.levels_of(arm).items()} == both
    assert plan.run_fields(plan.levels_of(plan.arms[0]))["algorithm"] == {"clip_high": 0.3, "clip_low": 0.3}


async def test_numbers_that_no_plan_takes_are_refused_by_name(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(KITCHEN.path, tmp_path / "kitchen"))
    text = (folder / "instrument.toml").read_text()
    steps = '[[factors]]\nname = "steps"\nlow = 0\n\n[[metrics]]'
    (folder / "instrument.toml").write_text(text.replace("[[metrics]]", steps, 1))
    topic = "Does a learning rate of 1e-3 cook better than 1e-5 with steps=0?"
    with pytest.raises(PlanningRefused, match="makes no plan: steps: should be greater than or equal to 1, got 0"):
        await plan_study(topic, PlanOptions(instrument=str(folder)))


async def test_a_budget_promises_no_cap_that_nothing_enforces() -> None:
    budget = (await planned()).budget
    assert budget.model_dump() == {"wall_s": budget.wall_s, "trials": budget.trials, "tokens": None}  # as it is hashed
    with pytest.raises(ValidationError):
        Budget.model_validate(budget.model_dump() | {"tokens": 2_000_000})
