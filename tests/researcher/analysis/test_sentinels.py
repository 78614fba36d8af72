"""Each sentinel fires on its sign, keeps quiet without it, and says so when it could not look."""

from __future__ import annotations

from typing import Any

import pytest

from researcher.analysis.sentinels import SENTINELS, inspect
from researcher.instruments.instrument import Factor, Metric
from researcher.models import Attrition, HostedModel, TrialEvidence, TrialRecord
from researcher.study.plan import PLANNED_SENTINELS, Arm, Plan, PlanRole
from swarm.protocol.runspec import RunSpec
from tests.fakes.specs import planned
from tests.fakes.study import SENTINELS as ALL
from tests.fakes.study import done_trial, study_plan, trials_with

TREAT = "lr=4e-05"
WELL = TrialEvidence(
    spec={"optimizer": {"learning_rate": 4e-5}},
    changes=[],
    parameters={},
    train_tasks=["a", "b"],
    heldout_tasks=["c"],
    attrition=Attrition(),
)


def see(name: str, trials: list[TrialRecord], plan: Plan | None = None) -> dict[str, tuple[str, ...]]:
    """Severity → trials of what one sentinel finds."""
    plan = (plan or study_plan()).model_copy(update={"sentinels": (name,)})
    return {finding.severity: finding.trials for finding in inspect(plan, trials)}


def trial(series: dict[str, list[float]] | None = None, plan: Plan | None = None, **evidence: Any) -> TrialRecord:
    return done_trial(plan or study_plan(), TREAT, 0, 0.3, series=series, evidence=WELL.model_copy(update=evidence))


RISES: dict[str, list[float]] = {"reward_mean": [0.0, 0.2, 0.5, 0.9]}
FIRES: list[tuple[str, str, dict[str, list[float]], dict[str, Any]]] = [
    ("weights_did_not_change", "invalid", {"weights_change": [0.0, 0, 0, 0]}, {}),
    ("heldout_leak", "invalid", {}, {"heldout_tasks": ["b", "c"]}),
    ("factor_not_applied", "invalid", {}, {"spec": {"optimizer": {"learning_rate": 1e-5}}}),
    ("factor_not_applied", "invalid", {}, {"spec": {}}),
    ("factor_not_applied", "invalid", {"reward_mean": [0.3, 0.3]}, {}),
    ("unplanned_change", "invalid", {}, {"changes": [{"sampling": {"temperature": 0.1}}]}),
    ("sampled_by_other_weights", "warning", {"logprob_mismatch_mean": [6e-6, 1.8e-3, 4e-3, 6e-3]}, {}),
    ("collapse", "warning", {"entropy": [1.0, 0.5, 0.1, 0.01]}, {}),
    ("collapse", "warning", {"kl_to_start": [0.0, 0.5, 1.0, 2.0]}, {}),
    ("no_signal", "warning", {"zero_variance_share": [1.0, 1.0, 0.9, 0.95]}, {}),
    ("heldout_gap", "warning", {"reward_mean": [0.0, 0.5, 0.9, 1.0]}, {}),
    ("longer_without_reward", "warning", {"sampled_tokens_mean": [10, 15, 20, 30]}, {}),
    ("repetitive_answers", "warning", RISES | {"repetition_within": [0.05, 0.3, 0.6, 0.9]}, {}),
    ("repetitive_answers", "warning", RISES | {"repetition_across": [0.1, 0.3, 0.9, 1.0]}, {}),
]


@pytest.mark.parametrize(("name", "severity", "series", "evidence"), FIRES)
def test_a_sentinel_fires_on_its_sign(
    name: str, severity: str, series: dict[str, list[float]], evidence: dict[str, Any]
) -> None:
    one = trial(series, **evidence)
    assert see(name, [one]) == {severity: (one.key,)}


@pytest.mark.parametrize("name", [name for name in ALL if name != "shared_machine"])
def test_a_healthy_trial_rouses_no_sentinel(name: str) -> None:
    assert see(name, [trial()]) == {}


@pytest.mark.parametrize(
    ("name", "series"),
    [
        ("collapse", {"entropy": [1.0, 0.5, 0.1, 0.01], "reward_mean": [0.0, 0.2, 0.5, 0.9]}),
        ("longer_without_reward", {"sampled_tokens_mean": [10, 15, 20, 30], "reward_mean": [0.0, 0.2, 0.5, 0.9]}),
    ],
)
def test_what_comes_with_reward_is_learning_not_collapse(name: str, series: dict[str, list[float]]) -> None:
    assert see(name, [trial(series)]) == {}


def test_answers_that_always_were_alike_or_earned_nothing_by_it_are_no_trick() -> None:
    looping = {"repetition_within": [0.05, 0.3, 0.6, 0.9]}
    assert see("repetitive_answers", [trial(looping)]) == {}
    assert see("repetitive_answers", [trial(RISES | {"repetition_across": [0.9, 0.9, 0.95, 0.95]})]) == {}
    assert see("repetitive_answers", [trial(RISES | {"repetition_within": [0.05, 0.1, 0.3, 0.4]})]) == {}
    unseen = trial(RISES | {"repetition_within": []})
    assert see("repetitive_answers", [unseen]) == {"unchecked": (unseen.key,)}


def test_a_further_model_that_repeats_itself_is_named() -> None:
    plan = study_plan(roles={"planner": PlanRole(model="smollm2-135m")}, sentinels=("repetitive_answers",))
    own = {"reward_mean": RISES["reward_mean"], "reward_std": [0.3] * 4, "repetition_within": [0.05, 0.3, 0.6, 0.9]}
    one = trial({f"planner/{name}": line for name, line in (own | {"repetition_across": [0.1] * 4}).items()}, plan=plan)
    (found,) = inspect(plan, [one])
    assert found.text == "reward rose while the answers of the planner began to repeat themselves"
    assert found.value == 0.9


def test_a_learning_rate_of_zero_is_meant_to_change_no_weights() -> None:
    plan = study_plan((0.0,))
    still = done_trial(plan, "lr=0.0", 0, 0.3, series={"weights_change": [0.0, 0, 0, 0]})
    assert see("weights_did_not_change", [still], plan) == {}


NOTHING_TRAINED = {"weights_change": [0.0] * 4, "tokens_trained": [0.0] * 4}


def test_where_all_rewards_are_equal_nothing_could_change_the_weights() -> None:
    equal = trial(NOTHING_TRAINED | {"zero_variance_share": [1.0] * 4})
    assert see("weights_did_not_change", [equal]) == {}
    assert see("no_signal", [equal]) == {"warning": (equal.key,)}


def test_where_rewards_differ_and_no_token_could_be_trained_the_reason_is_that() -> None:
    unusable = trial(NOTHING_TRAINED | {"zero_variance_share": [1.0, 1.0, 0.9, 1.0]})
    plan = study_plan(sentinels=("weights_did_not_change",))
    (found,) = inspect(plan, [unusable])
    assert (found.severity, found.trials) == ("invalid", (unusable.key,))
    assert found.text == "the weights never changed: no token was trained, although rewards differed"


@pytest.mark.parametrize(("forced", "because"), [(200.0, ": all trained tokens were forced"), (199.0, "")])
def test_where_all_trained_tokens_were_forced_the_reason_is_that(forced: float, because: str) -> None:
    one = trial({"weights_change": [0.0] * 4, "tokens_trained": [200.0] * 4, "tokens_forced": [200.0] * 3 + [forced]})
    (found,) = inspect(study_plan(sentinels=("weights_did_not_change",)), [one])
    assert (found.severity, found.text) == ("invalid", f"the weights never changed although the run trained{because}")


@pytest.mark.parametrize(("share", "severity"), [(0.5, "invalid"), (1.0, "unchecked")])
def test_without_a_count_of_trained_tokens_rewards_that_differ_tell_of_weights_that_stood_still(
    share: float, severity: str
) -> None:
    one = trial({"weights_change": [0.0] * 4, "tokens_trained": [], "zero_variance_share": [share] * 4})
    assert see("weights_did_not_change", [one]) == {severity: (one.key,)}


def test_a_further_model_that_had_nothing_to_learn_is_none_that_stood_still() -> None:
    plan = study_plan(roles={"planner": PlanRole(model="smollm2-135m")})
    still = {f"planner/{name}": values for name, values in NOTHING_TRAINED.items()}
    for share, severity in ((1.0, {}), (0.5, {"invalid"})):
        one = trial({**still, "planner/zero_variance_share": [share] * 4}, plan=plan)
        assert set(see("weights_did_not_change", [one], plan)) == set(severity)


def test_rounding_and_stale_episodes_are_no_other_weights() -> None:
    assert see("sampled_by_other_weights", [trial({"logprob_mismatch_mean": [6e-6, 9e-5, 9e-4, 9e-4]})]) == {}
    assert see("sampled_by_other_weights", [trial({"logprob_mismatch_mean": [0.01, 0.03, 0.06, 0.09]})]) == {}
    stale = {"logprob_mismatch_mean": [6e-6, 1.8e-3, 4e-3, 6e-3], "staleness_max": [0.0, 1.0, 1.0, 1.0]}
    some = trial(stale | {"staleness_max": [0.0, 1.0, 1.0, 0.0], "logprob_mismatch_mean": [6e-6, 1.8e-3, 4e-3, 9e-5]})
    assert see("sampled_by_other_weights", [some]) == {}
    all_stale = trial(stale)
    assert see("sampled_by_other_weights", [all_stale]) == {"unchecked": (all_stale.key,)}
    unseen = trial({"staleness_max": []})
    assert see("sampled_by_other_weights", [unseen]) == {"unchecked": (unseen.key,)}


def test_every_model_of_a_team_is_asked_what_it_was_sampled_by() -> None:
    plan = study_plan(roles={"planner": PlanRole(model="smollm2-135m")})
    series = {
        "planner/logprob_mismatch_mean": [6e-6, 1.8e-3, 4e-3, 6e-3],
        "planner/staleness_max": [0.0, 0.0, 0.0, 0.0],
    }
    one = trial(series, plan=plan)
    assert see("sampled_by_other_weights", [one], plan) == {"warning": (one.key,)}


@pytest.mark.parametrize("name", ["heldout_leak", "factor_not_applied", "unplanned_change"])
def test_what_was_not_recorded_is_reported_as_unchecked(name: str) -> None:
    blind = done_trial(study_plan(), TREAT, 0, 0.3)
    assert see(name, [blind]) == {"unchecked": (blind.key,)}


TIMED = study_plan(metrics=(Metric(name="time", kind="wall_s", margin=1.0),))


def paced(*steps: list[float]) -> list[TrialRecord]:
    """The baseline's trials, by the seconds that their steps took."""
    return [
        done_trial(study_plan(), "lr=base", seed, 0.1, series={"step_s": step_s}) for seed, step_s in enumerate(steps)
    ]


@pytest.mark.parametrize("others", [1, 2, 3])
def test_a_slow_trial_is_seen_beside_one_other_as_beside_many(others: int) -> None:
    trials = paced(*[[1.0] * 4] * others, [9.0] * 4)
    assert see("shared_machine", trials) == {"warning": (trials[-1].key,)}
    assert see("shared_machine", trials, TIMED) == {"invalid": (trials[-1].key,)}
    assert see("shared_machine", paced(*[[1.0] * 4] * others, [1.9] * 4)) == {}


def test_a_few_steps_far_slower_take_the_verdict_of_a_metric_that_is_their_sum_and_of_no_other() -> None:
    trials = paced([1.0] * 9, [1.0] * 9, [1.0] * 6 + [100.0] * 3)
    assert see("shared_machine", trials, TIMED) == {"invalid": (trials[-1].key,)}
    assert see("shared_machine", trials) == {}


def test_one_trial_has_no_other_to_be_compared_with() -> None:
    trials = paced([1.0] * 4)
    assert see("shared_machine", trials) == {"unchecked": (trials[0].key,)}
    blind = paced([1.0] * 4, [1.0] * 4, [])
    assert see("shared_machine", blind) == {"unchecked": (blind[-1].key,)}


def test_plans_that_name_contention_are_judged_as_they_were() -> None:
    assert "contention" not in PLANNED_SENTINELS
    assert see("contention", paced([1.0] * 4, [9.0] * 4), TIMED) == {}


def test_contention_warns_and_takes_the_verdict_of_a_wall_time_metric_only() -> None:
    plan = study_plan()
    trials = trials_with(plan, {"lr=base": [0.1, 0.1, 0.1]})
    assert see("contention", trials) == {}
    slow = done_trial(plan, "lr=base", 3, 0.1, series={"step_s": [9.0] * 4})
    assert see("contention", [*trials, slow]) == {"warning": (slow.key,)}
    timed = study_plan(metrics=(Metric(name="time", kind="wall_s", margin=1.0),))
    assert see("contention", [*trials, slow], timed) == {"invalid": (slow.key,)}
    blind = done_trial(plan, "lr=base", 3, 0.1, series={"step_s": []})
    assert set(see("contention", [blind])) == {"unchecked"}


def test_code_that_was_mended_warns_and_takes_the_verdict_only_where_it_parts_the_arms() -> None:
    plan = study_plan()
    old = plan.instrument_code

    def ran(arm: str, seed: int, **versions: int) -> TrialRecord:
        evidence = WELL.model_copy(update={"code_versions": versions or None})
        return done_trial(plan, arm, seed, 0.3, evidence=evidence)

    assert see("mixed_code", [ran("lr=base", 0), ran(TREAT, 0)]) == {}
    assert see("mixed_code", [ran("lr=base", 0, new=8), ran(TREAT, 0, new=8)]) == {}
    amidst = ran(TREAT, 0, **{old: 3, "new": 5})
    assert see("mixed_code", [ran("lr=base", 0), amidst]) == {"warning": (amidst.key,)}
    parted = [ran("lr=base", 0), ran(TREAT, 0, new=8)]
    assert see("mixed_code", parted) == {"invalid": tuple(each.key for each in parted), "warning": (parted[1].key,)}
    both = [*parted, ran("lr=base", 1, new=8), ran(TREAT, 1, new=8)]
    assert set(see("mixed_code", both)) == {"warning"}
    blind = done_trial(plan, TREAT, 0, 0.3)
    assert see("mixed_code", [blind]) == {"unchecked": (blind.key,)}


def test_number_types_warn_where_they_differ_and_take_the_verdict_only_where_they_part_the_arms() -> None:
    plan = study_plan()

    def ran(arm: str, seed: int, dtype: str) -> TrialRecord:
        return done_trial(plan, arm, seed, 0.3, evidence=WELL.model_copy(update={"spec": {"dtype": dtype}}))

    mixed = [ran("lr=base", 0, "bfloat16"), ran("lr=base", 1, "float32"), ran(TREAT, 0, "float32")]
    keys = tuple(each.key for each in mixed)
    assert see("mixed_types", mixed[1:]) == {}
    assert see("mixed_types", mixed) == {"warning": keys}
    parted = [mixed[0], mixed[2]]
    both = tuple(each.key for each in parted)
    assert see("mixed_types", parted) == {"invalid": both, "warning": both}
    blind = done_trial(plan, TREAT, 0, 0.3)
    assert see("mixed_types", [blind]) == {"unchecked": (blind.key,)}


def test_what_is_sampled_in_counts_too_and_what_further_models_are_trained_in() -> None:
    plan = study_plan()

    def ran(arm: str, trained: str, sampled: str | None, buyer: str = "float32") -> TrialRecord:
        told: dict[str, Any] = {"spec": {"dtype": trained}, "roles": {"buyer": {"dtype": buyer}}}
        model = HostedModel.model_validate({"name": "tiny", "dtype": sampled})
        return done_trial(plan, arm, 0, 0.3, evidence=WELL.model_copy(update={**told, "model": model}))

    base = ran("lr=base", "float32", "float32")
    assert see("mixed_types", [base, ran(TREAT, "float32", None)]) == {}
    for other in (ran(TREAT, "float32", "bfloat16"), ran(TREAT, "float32", "float32", "bfloat16")):
        assert set(see("mixed_types", [base, other])) == {"invalid", "warning"}
    by_type = plan.factors[0].model_copy(update={"name": "type", "target": "run.dtype"})
    wanted = plan.model_copy(update={"factors": (*plan.factors, by_type)})
    assert see("mixed_types", [base, ran(TREAT, "bfloat16", "float32")], wanted) == {}
    assert set(see("mixed_types", [base, ran(TREAT, "bfloat16", "bfloat16")], wanted)) == {"invalid", "warning"}
    assert set(see("mixed_types", [base, ran(TREAT, "bfloat16", None)], wanted)) == {"unchecked"}


def test_a_type_that_was_left_open_was_applied_whatever_it_came_to() -> None:
    plan = study_plan(run={"dtype": "auto"})
    spec = {"optimizer": {"learning_rate": 4e-5}, "dtype": "float32"}
    assert see("factor_not_applied", [trial(plan=plan, spec=spec)], plan) == {}


def test_shared_settings_of_the_plan_are_checked_as_well() -> None:
    plan = study_plan(run={"sampling": {"temperature": 0.7}}, task={"digits": 2})
    spec = {"optimizer": {"learning_rate": 4e-5}, "sampling": {"temperature": 0.7}}
    good = trial(plan=plan, spec=spec, parameters={"digits": 2})
    assert see("factor_not_applied", [good], plan) == {}
    bad = trial(plan=plan, spec=spec, parameters={"digits": 1})
    assert see("factor_not_applied", [bad], plan) == {"invalid": (bad.key,)}


def test_adapters_and_all_weights_are_known_by_their_names() -> None:
    by = Factor(name="parameters", target="run.parameters", type="choice", default="full", choices=("full", "lora"))
    arms = (Arm(name="lr=base", levels={"parameters": "full"}), Arm(name=TREAT, levels={"parameters": "lora"}))
    plan = study_plan(arms=arms, factors=(by,), run={"parameters": {"rank": 8}})
    adapters: dict[str, Any] = {"parameters": {"rank": 8, "alpha": 32.0, "targets": ["q_proj"]}}

    def ran(arm: str, spec: dict[str, Any]) -> TrialRecord:
        return done_trial(plan, arm, 0, 0.3, evidence=WELL.model_copy(update={"spec": spec}))

    assert see("factor_not_applied", [ran("lr=base", {"parameters": "full"}), ran(TREAT, adapters)], plan) == {}
    for arm, spec in ((TREAT, {"parameters": "full"}), ("lr=base", adapters)):
        assert set(see("factor_not_applied", [ran(arm, spec)], plan)) == {"invalid"}


def test_a_plan_may_name_only_sentinels_that_exist() -> None:
    assert (*ALL, "reward_against_success", "worse_on_heldout") == PLANNED_SENTINELS
    assert set(PLANNED_SENTINELS) == set(SENTINELS) - {"contention"}
    with pytest.raises(ValueError, match="crystal_ball"):
        see("crystal_ball", [])


@pytest.mark.parametrize(("words", "larger", "fits"), [(0.15, 0.15, True), (0.3, 0.3, False)])
def test_the_sentinel_holds_the_whole_mix_against_the_plan(words: float, larger: float, fits: bool) -> None:
    mixed = planned("cocktail", compare={"sums_ratio": {"baseline": 0.4, "levels": [0.7]}}, claim="increase")
    plan = mixed.model_copy(update={"sentinels": ("factor_not_applied",)})
    fields = plan.run_fields(plan.levels_of(plan.arms[1]))
    spec = RunSpec.model_validate(fields).model_dump(mode="json")
    spec["batch"]["mix"]["words"]["ratio"], spec["batch"]["mix"]["larger"]["ratio"] = words, larger
    curve = {"reward_mean": [0.3] * plan.steps}
    trial = done_trial(plan, plan.arms[1].name, 0, 0.3, series=curve, evidence=TrialEvidence(spec=spec, parameters={}))
    found = inspect(plan, [trial])
    assert (found == []) is fits
    assert fits or "batch.mix.words.ratio" in found[0].text
