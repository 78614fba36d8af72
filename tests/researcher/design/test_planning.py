"""From a spec to a plan: what is set, what is left at its default, and what is refused in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from researcher.design.planning import checked, plan_of
from researcher.instruments.catalogue import open_instrument, read_instrument
from researcher.models import Finding
from researcher.refusals import PlanningRefused
from researcher.study.plan import PLANNED_SENTINELS, Arm, Budget, Known, Plan, PlanModel, Verdict
from swarm.protocol.runspec import LoraSpec, RunSpec
from tests.fakes.specs import planned, spec

ARITHMETIC = open_instrument("arithmetic", {})
KITCHEN = read_instrument(Path(__file__).parents[2] / "instruments" / "kitchen")
BASE, TREATED = "learning_rate=1e-5", "learning_rate=4e-5"


def compare(name: str, baseline: Any, *levels: Any) -> dict[str, Any]:
    return {name: {"baseline": baseline, "levels": list(levels)}}


def test_trained_models_are_scored_on_other_instruments_for_secondary_metrics() -> None:
    plan, usual = planned(evaluate_on=["guess_number"]), planned()
    [transfer] = plan.transfers
    assert (transfer.instrument, transfer.code) == ("guess_number", open_instrument("guess_number", {}).code)
    added = [metric for metric in plan.metrics if metric.on is not None]
    assert [metric.name for metric in plan.metrics if metric.on is None] == [metric.name for metric in usual.metrics]
    assert {(metric.part, metric.when) for metric in added} == {("on:guess_number", "after")}
    assert all(metric.name.startswith("guess_number_heldout_") for metric in added)
    assert plan.hypotheses == usual.hypotheses
    assert "decide nothing" in plan.assumptions[-1]
    assert "transfers" not in usual.model_dump(mode="json")


def test_a_plan_says_what_it_is_for_and_the_same_spec_gives_the_same_plan() -> None:
    plan = planned()
    assert (plan.question, plan.planner) == ("Is it better?", "spec")
    assert (plan.instrument, plan.instrument_code) == ("arithmetic", ARITHMETIC.code)
    assert plan.model.name == ARITHMETIC.instrument.model
    assert plan.sentinels == PLANNED_SENTINELS
    assert planned().digest() == plan.digest() != planned(question="Is it worse?").digest()
    assert Plan.model_validate_json(plan.canonical()) == plan


def test_settings_hold_for_all_arms_and_the_rest_stands_at_the_instruments_defaults() -> None:
    plan = planned(set={"digits": 2, "group_size": 8}, steps=16)
    assert (plan.task, plan.steps) == ({"digits": 2, "answer": "text"}, 16)
    assert plan.run["batch"]["group_size"] == 8
    assert plan.run["sampling"] == ARITHMETIC.instrument.defaults.run["sampling"]


@pytest.mark.parametrize(("wrong", "said"), [("nan", "not nan"), ("inf", "not inf"), ("many", "not many")])
@pytest.mark.parametrize("factor", ["learning_rate", "group_size"])
def test_a_level_that_is_no_number_is_refused(factor: str, wrong: str, said: str) -> None:
    with pytest.raises(PlanningRefused, match=f"{factor} takes numbers, {said}"):
        planned(compare=compare(factor, 8, wrong))


def test_levels_are_of_their_factors_own_type() -> None:
    plan = planned(compare=compare("group_size", "4", 8.0), set={"learning_rate": "2e-5"})
    assert [arm.levels for arm in plan.arms] == [{"group_size": 4}, {"group_size": 8}]
    assert plan.run["optimizer"]["learning_rate"] == 2e-5
    switched = planned(KITCHEN, compare=compare("hints", "off", "on"))
    assert [arm.levels for arm in switched.arms] == [{"hints": False}, {"hints": True}]


@pytest.mark.parametrize(
    ("levels", "baseline", "which"),
    [
        ([1e-5, 4e-5], 1e-5, "the first level, 1e-5"),
        ([2e-5, 1e-5], 2e-5, "the first level, 2e-5"),
        ([1e-5], 4e-5, "the instrument's default, 4e-5"),
    ],
)
def test_without_a_baseline_one_is_found_and_the_plan_says_which(
    levels: list[float], baseline: float, which: str
) -> None:
    plan = planned(compare={"learning_rate": {"levels": levels}})
    assert plan.arm(plan.hypotheses[0].baseline).levels == {"learning_rate": baseline}
    said = f"No baseline is named for learning_rate: it is {which}."
    assert said in plan.assumptions
    named = planned(compare={"learning_rate": {"baseline": baseline, "levels": [3e-5]}})
    assert not any("baseline" in each for each in named.assumptions)


def test_interim_evaluations_that_would_never_come_are_refused() -> None:
    with pytest.raises(PlanningRefused, match=r"^heldout_every: trials have 6 steps, .*: give at most 5$"):
        planned(heldout_every=6)
    with pytest.raises(PlanningRefused, match=r"^heldout_every: trials have one step: leave it out$"):
        planned(heldout_every=1, steps=1)
    longer = planned(compare=compare("steps", 6, 30), heldout_every=10)
    assert [longer.interim_evaluations(arm.name) for arm in longer.arms] == [0, 2]
    with pytest.raises(PlanningRefused, match=r"^heldout_every: models that are trained together"):
        planned(open_instrument("team", {}), heldout_every=2, compare=compare("learning_rate", 1e-5, 4e-5))


def test_a_claim_is_tested_as_it_is_made() -> None:
    (higher,) = planned(claim="increase").hypotheses
    assert (higher.direction, higher.direction_assumed) == ("increase", False)
    assert higher.statement == f"{TREATED} has a higher auc_reward than {BASE}"
    (lower,) = planned(claim="decrease", metric="wall_s", margin=3).hypotheses
    assert (lower.direction, lower.metric, lower.margin) == ("decrease", "wall_s", 3.0)


def test_an_unclaimed_direction_is_the_better_one_and_the_plan_says_so() -> None:
    for metric, direction, word in (("auc_reward", "increase", "higher"), ("wall_s", "decrease", "lower")):
        plan = planned(claim="none", metric=metric)
        assert (plan.hypotheses[0].direction, plan.hypotheses[0].direction_assumed) == (direction, True)
        assert plan.assumptions == (
            f"No direction is claimed: tested as {word} {metric}; the other way reads as refuted.",
        )
    (equal,) = planned(claim="equal").hypotheses
    assert equal.statement == f"{TREATED} and {BASE} have the same auc_reward, within 0.15"


def test_the_metric_that_decides_comes_first_and_others_are_reported_beside_it() -> None:
    every = {metric.name for metric in ARITHMETIC.instrument.metrics if not metric.on_request}
    plan = planned(metric="heldout_accuracy")
    assert plan.metrics[0].name == plan.hypotheses[0].metric == "heldout_accuracy"
    assert {metric.name for metric in plan.metrics} == every
    few = planned(metric="heldout_accuracy", secondary=["wall_s", "heldout_accuracy"])
    assert [metric.name for metric in few.metrics] == ["heldout_accuracy", "wall_s"]


@pytest.mark.parametrize(
    ("seeds", "least", "most"),
    [({}, 3, 5), ({"min": 4, "max": 4}, 4, 4), ({"min": 4}, 4, 6), ({"max": 6}, 3, 6), ({"max": 2}, 2, 2)],
)
def test_a_bound_on_seeds_moves_its_own_end(seeds: dict[str, int], least: int, most: int) -> None:
    last = planned(seeds=seeds).stages[-1]
    assert (last.seeds, last.max_seeds) == (least, most)


def test_a_replication_counts_its_seeds_from_elsewhere() -> None:
    plan = planned(seeds={"first": 500})
    assert {stage.first_seed for stage in plan.stages} == {500}
    assert plan.budget == planned().budget


def test_the_power_rule_is_left_out_only_where_that_is_asked_for() -> None:
    assert "power_below" in [branch.when.kind for branch in planned().branches]
    bold = plan_of(spec(), ARITHMETIC, allow_underpowered=True)
    assert "power_below" not in [branch.when.kind for branch in bold.branches]


def test_earlier_findings_on_the_same_factor_are_named() -> None:
    def finding(name: str, factor: str) -> Finding:
        return Finding(
            id=name, study_id="s", plan_hash="h", instrument="arithmetic", model="m", factor=factor, metric="auc_reward",
            statement="", verdict=Verdict.EQUIVALENT, at=0.0,
        )  # fmt: skip

    known = [finding("f-1", "learning_rate"), finding("f-2", "temperature")]
    plan = plan_of(spec(), ARITHMETIC, known=known)
    assert [each.id for each in plan.known if isinstance(each, Known)] == ["f-1"]


def test_adapters_of_an_arm_are_those_that_a_server_gets() -> None:
    plan = planned(arms={"full": {"parameters": "full"}, "lora": {"parameters": "lora", "lora_rank": 8}})
    runs = [RunSpec.model_validate(plan.run_fields(plan.levels_of(arm))).parameters for arm in plan.arms]
    assert runs == ["full", LoraSpec(rank=8)]


@pytest.mark.parametrize(
    "fields",
    [
        {"compare": compare("parameters", "full", "lora") | compare("lora_rank", 8, 32), "design": "factorial"},
        {"compare": compare("parameters", "full", "lora") | compare("lora_rank", 8, 32), "design": "sequence"},
        {"arms": {"usual": {}, "both": {"parameters": "full", "lora_rank": 8}}},
    ],
)
def test_no_arm_has_all_weights_and_a_rank(fields: dict[str, Any]) -> None:
    with pytest.raises(PlanningRefused, match="full fine-tuning has no rank"):
        planned(**fields)


@pytest.mark.parametrize(
    ("given", "optimizer", "said"),
    [
        ({}, {"epochs": 2}, "epochs=2 in all arms"),
        ({"epochs": 1}, {"epochs": 1, "minibatches": 2}, "minibatches=2 in all arms"),
        ({"epochs": 4}, {"epochs": 4}, None),
    ],
)
def test_a_factor_that_needs_several_updates_gets_them(
    given: dict[str, int], optimizer: dict[str, int], said: str | None
) -> None:
    plan = planned(compare=compare("clip_range", 0.2, 0.3), claim="increase", set=given)
    found = plan.run["optimizer"]
    assert {name: found[name] for name in ("epochs", "minibatches") if name in found} == optimizer
    assert len(plan.assumptions) == (said is not None)
    assert all(said in line for line in plan.assumptions if said)


def test_a_clip_range_is_the_same_below_and_above() -> None:
    plan = planned(compare=compare("clip_range", 0.3, 0.1))
    assert plan.run_fields(plan.levels_of(plan.arms[0]))["algorithm"] == {"clip_high": 0.3, "clip_low": 0.3}


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"compare": compare("learning_rat", 1e-5, 4e-5)}, r"^compare\.learning_rat: .* did you mean learning_rate\?"),
        ({"compare": compare("moon", 1, 2)}, r"^compare\.moon: arithmetic has no factor 'moon'; there are digits, "),
        ({"compare": compare("lr", 1, 2)}, r"^compare\.lr: .* did you mean learning_rate\?"),
        ({"set": {"group_siz": 4}}, r"^set\.group_siz: .* did you mean group_size\?"),
        ({"set": {"group_size": 1}}, r"^set\.group_size: group_size goes from 2 to .*; 1 lies outside"),
        ({"set": {"steps": 8}}, r"^set\.steps: set the length of a trial with the top-level field `steps: N`"),
        ({"set": {"algorithm": "grop"}}, r"^set\.algorithm: algorithm must be one of grpo, .* not grop"),
        ({"metric": "acuracy"}, r"^metric: arithmetic has no metric 'acuracy'; did you mean heldout_accuracy\?"),
        ({"metric": "entropy"}, "^metric: arithmetic has no metric for entropy; it is only a factor"),
        ({"secondary": ["wal_s"]}, r"^secondary: .* did you mean wall_s\?"),
        ({"arms": {"a": {}, "b": {"group_siz": 4}}}, r"^arms\.b\.group_siz: .* did you mean group_size\?"),
        ({"compare": compare("model", "a", "b")}, r"^compare\.model: models are compared as `model: \[ONE, OTHER\]`"),
        ({"compare": compare("kl_in", "loss", "reward")}, r"^compare\.kl_in: kl_in does nothing while kl is 0"),
        (
            {"compare": compare("clip_range", 0.2, 0.3), "set": {"epochs": 1, "minibatches": 1}},
            r"^compare\.clip_range: clip_range does nothing at epochs=1 and minibatches=1: raise epochs or minibatches",
        ),
        ({"evaluate_on": ["countdwn"]}, "^evaluate_on: no instrument is called 'countdwn'; did you mean 'countdown'"),
        ({"evaluate_on": ["arithmetic"]}, "^evaluate_on: arithmetic is the study's own instrument"),
        ({"evaluate_on": ["countdown", "countdown"]}, "^evaluate_on: .* named twice"),
        ({"evaluate_on": ["team"]}, "^evaluate_on: team takes several models"),
        ({"evaluate_on": [str(KITCHEN.path)]}, "^evaluate_on: give the instrument's name .kitchen.*, not its folder"),
        ({"start_from": "st-1/k"}, "^start_from: there are no studies here yet"),
        ({"start_from": "st-1/k", "model": "smollm2-81m"}, "^start_from: all arms start from the weights of st-1/k"),
        ({"arms": {"a": {}, "b": {"learning_rate": -1.0}}}, r"^arms\.b\.learning_rate: "),
    ],
)
def test_what_cannot_be_is_refused_by_the_path_of_its_field(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(PlanningRefused, match=why) as refused:
        planned(**fields)
    assert "\n" not in str(refused.value)
    with pytest.raises(PlanningRefused, match=r"^set\.data: dataset needs data"):
        planned("dataset")


def test_an_arm_that_no_server_would_take_is_refused_by_name() -> None:
    plan = planned()
    broken = (*plan.arms[:1], Arm(name="learning_rate=-1", levels={"learning_rate": -1.0}))
    with pytest.raises(PlanningRefused, match="arm learning_rate=-1 cannot be run"):
        checked(plan.model_copy(update={"arms": broken}))


def test_what_came_later_leaves_no_trace_in_plans_that_do_not_use_it() -> None:
    plan = planned().model_copy(update={"trial_s": None})
    for later in ("trial_s", "direction_assumed", "seed_offset", "merged_looks", "models"):
        assert f'"{later}"' not in plan.canonical()
    assert '"direction_assumed":true' in planned(claim="none").canonical()


def test_all_arms_start_from_the_weights_that_a_kept_trial_has_trained(tmp_path: Path) -> None:
    start = PlanModel(name="a-seed0", fingerprint="f" * 64, path=str(tmp_path), origin="st-1/a-seed0")
    asked = spec(start_from="st-1/a-seed0")
    plan = plan_of(asked, ARITHMETIC, kept=lambda _: start)
    assert (plan.model, plan.hosted) == (start, (start,))
    assert Plan.model_validate_json(plan.canonical()) == plan
    assert plan.digest() != planned().digest()
    with pytest.raises(PlanningRefused, match="start_from: trials of team train further models"):
        plan_of(spec("team", start_from="st-1/a"), open_instrument("team", {}), kept=lambda _: start)


def test_a_budget_of_tokens_stands_in_the_plan_and_in_no_plan_without_one() -> None:
    plain, capped = planned(), planned(budget={"tokens": "2M"})
    budget = plain.budget
    assert budget.model_dump() == {"wall_s": budget.wall_s, "trials": budget.trials, "tokens": None}  # as it is hashed
    assert "trial_tokens" not in plain.canonical()
    assert capped.budget == budget.model_copy(update={"tokens": 2_000_000})
    assert capped.trial_tokens is not None
    assert capped.digest() != plain.digest()
    assert capped.model_copy(update={"budget": budget, "trial_tokens": None}).digest() == plain.digest()
    for wrong in (0, -1):
        with pytest.raises(ValidationError):
            Budget.model_validate(budget.model_dump() | {"tokens": wrong})


def test_arms_whose_settings_do_nothing_are_refused_or_given_what_they_need() -> None:
    with pytest.raises(PlanningRefused, match="kl_in does nothing while kl is 0"):
        planned(arms={"a": {"kl_in": "loss"}, "b": {"kl_in": "reward"}})
    plan = planned(arms={"a": {}, "b": {"clip_high": 0.28}})
    assert plan.settings["run.optimizer.epochs"] == 2
    assert any("clip_high does nothing at" in text for text in plan.assumptions)
    own = planned(arms={"a": {"epochs": 2}, "b": {"epochs": 2, "clip_high": 0.28}})
    assert "run.optimizer.epochs" not in own.settings


@pytest.mark.parametrize("metric", ["heldout_accuracy", "heldout_reward", "final_reward", "auc_reward"])
def test_a_margin_that_no_accuracy_and_no_bounded_reward_can_exceed_is_refused(metric: str) -> None:
    with pytest.raises(PlanningRefused, match=f"margin: {metric} can differ by at most 1"):
        planned(metric=metric, claim="equal", margin=5)
    assert planned(KITCHEN, compare=compare("hints", "off", "on"), metric="auc_reward", margin=5).hypotheses
