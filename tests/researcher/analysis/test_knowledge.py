"""What findings say together: the same question is recognised, opposite answers are, and a replication is proposed."""

from __future__ import annotations

from typing import Any

import pytest

from researcher.analysis.knowledge import (
    SEEDS_APART,
    agreement,
    contradictions,
    findings_of,
    known_to,
    scope,
    spread,
    told,
    told_of,
)
from researcher.models import Effect, Finding, HostedModel, TrialEvidence, VerdictRecord
from researcher.study.plan import Plan, Verdict
from swarm.models.catalogue import hosted_name
from tests.fakes.example_plan import example_plan
from tests.fakes.study import done_trial, study_plan


def an_effect(diff: float, half: float = 0.05, n: int = 3) -> Effect:
    return Effect(
        hypothesis="H1", metric="heldout_accuracy", n_baseline=n, n_treatment=n, mean_baseline=0.2,
        mean_treatment=0.2 + diff, diff=diff, low=diff - half, high=diff + half, level=0.95, method="welch",
        p_value=0.01, p_adjusted=0.01,
    )  # fmt: skip


def a_finding(study: str, verdict: Verdict, effect: Effect | None, at: float = 0.0, **changes: Any) -> Finding:
    record = VerdictRecord(hypothesis="H1", verdict=verdict, reason="", effect=effect)
    [made] = findings_of(study, example_plan(), [record], at)
    return made.model_copy(update=changes)


def test_a_finding_says_everything_that_its_study_held_fixed() -> None:
    found = a_finding("st-1", Verdict.SUPPORTED, an_effect(0.3))
    plan = example_plan()
    assert (found.id, found.plan_hash, found.question) == ("st-1/H1", plan.digest(), plan.question)
    assert (found.baseline, found.treatment) == (({"learning_rate": 1e-5},), ({"learning_rate": 4e-5},))
    assert (found.margin, found.direction, found.recomputable) == (0.1, "increase", True)
    assert set(found.scope) == {
        "steps", "run", "task", "roles", "heldout_tasks", "heldout_episodes", "heldout_temperature"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("hosted", "engine", "model"),
    [
        ("echo", None, "echo"),
        ("smollm2-135m", "echo", "echo"),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "local", "smollm2-135m"),
        (None, None, "smollm2-135m"),
    ],
)
def test_a_finding_is_about_what_its_trials_trained(hosted: str | None, engine: str | None, model: str) -> None:
    plan = study_plan()
    plan = plan.model_copy(update={"model": plan.model.model_copy(update={"name": "smollm2-135m"})})
    told = None if hosted is None else TrialEvidence(model=HostedModel(name=hosted_name(hosted), engine=engine))
    trials = [done_trial(plan, arm.name, 0, 0.3, evidence=told) for arm in plan.arms]
    record = VerdictRecord(hypothesis=plan.hypotheses[0].id, verdict=Verdict.SUPPORTED, reason="", effect=None)
    [found] = findings_of("st-1", plan, [record], 0.0, trials)
    assert found.model == model


def test_nulls_are_findings_and_what_a_sentinel_called_invalid_is_none() -> None:
    records = [VerdictRecord(hypothesis="H1", verdict=verdict, reason="", effect=None) for verdict in Verdict]
    kept = [findings_of("s", example_plan(), [record], 0.0) for record in records]
    assert [bool(each) for each in kept] == [verdict is not Verdict.INVALID for verdict in Verdict]


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "other"},
        {"instrument_version": "2"},
        {"metric": "auc_reward"},
        {"scope": {"steps": 7}},
        {"treatment": ({"learning_rate": 5e-5},)},
    ],
)
def test_another_condition_is_another_scope(changes: dict[str, Any]) -> None:
    one = a_finding("st-1", Verdict.SUPPORTED, an_effect(0.3))
    other = a_finding("st-2", Verdict.REFUTED, an_effect(-0.3), **changes)
    assert scope(one) != scope(other)
    assert contradictions([one, other]) == []


def test_a_level_is_the_same_however_it_is_written() -> None:
    one = a_finding("st-1", Verdict.SUPPORTED, an_effect(0.3), treatment=({"steps": 8},))
    assert scope(one) == scope(one.model_copy(update={"treatment": ({"steps": 8.0},)}))


def test_what_cannot_be_compared_has_no_scope() -> None:
    one = a_finding("st-1", Verdict.SUPPORTED, an_effect(0.3))
    assert scope(one.model_copy(update={"baseline": ()})) is None
    assert scope(one.model_copy(update={"baseline": one.treatment})) is None


S, R, E, U = Verdict.SUPPORTED, Verdict.REFUTED, Verdict.EQUIVALENT, Verdict.INCONCLUSIVE


@pytest.mark.parametrize(
    ("one", "other", "why"),
    [
        ((S, an_effect(0.3)), (S, an_effect(0.35)), None),
        ((S, an_effect(0.3)), (R, an_effect(-0.3)), "opposite"),
        ((S, an_effect(0.15, 0.14)), (E, an_effect(0.03, 0.06)), "rules out"),
        ((S, an_effect(0.3)), (S, an_effect(0.6)), "do not overlap"),
        ((S, an_effect(0.3)), (U, an_effect(0.1, 0.5)), None),
        ((U, an_effect(0.3, 0.1)), (U, an_effect(0.0, 0.1)), "do not overlap"),
        ((R, an_effect(-0.06, 0.05)), (E, an_effect(-0.04, 0.05)), None),
        ((S, an_effect(0.3)), (U, None), None),
    ],
)
def test_contradictions(one: tuple[Verdict, Effect], other: tuple[Verdict, Effect | None], why: str | None) -> None:
    found = contradictions([a_finding("st-1", *one), a_finding("st-2", *other, at=1.0)])
    assert ([] if why is None else [True]) == [why in each.why for each in found if why is not None] or why is None
    assert bool(found) == (why is not None)


def test_a_question_asked_the_other_way_round_is_the_same_question() -> None:
    one = a_finding("st-1", S, an_effect(0.3))
    turned: dict[str, Any] = {"baseline": one.treatment, "treatment": one.baseline}
    assert contradictions([one, a_finding("st-2", R, an_effect(-0.3), **turned)]) == []
    assert contradictions([one, a_finding("st-2", S, an_effect(-0.3), direction="decrease", **turned)]) == []
    assert len(contradictions([one, a_finding("st-2", S, an_effect(0.3), **turned)])) == 1


def test_a_study_does_not_contradict_itself() -> None:
    one = a_finding("st-1", S, an_effect(0.3))
    assert contradictions([one, one.model_copy(update={"id": "st-1/H2", "verdict": R})]) == []


def test_a_replication_asks_again_with_the_seeds_of_both_in_number_and_fresh_ones_and_settles_it() -> None:
    one, other = a_finding("st-1", S, an_effect(0.3, n=3)), a_finding("st-2", R, an_effect(-0.3, n=5), at=1.0)
    [found] = contradictions([other, one])
    assert (found.one.id, found.other.id, found.settled_by) == ("st-1/H1", "st-2/H1", None)
    assert found.replication.topic == one.question
    assert (found.replication.seeds, found.replication.first_seed) == (8, 2 * SEEDS_APART)
    small, large = a_finding("st-3", S, an_effect(0.3, n=4), at=2.0), a_finding("st-4", S, an_effect(0.3, n=8), at=3.0)
    of_both = [
        each
        for each in contradictions([one, other, small, large])
        if {each.one.id, each.other.id} == {"st-1/H1", "st-2/H1"}
    ]
    assert [each.settled_by for each in of_both] == [large]


@pytest.mark.parametrize(("largest", "first"), [(-1, 2000), (1999, 2000), (2000, 3000), (7005, 8000)])
def test_a_replication_draws_its_seeds_above_all_that_were_planned_here(largest: int, first: int) -> None:
    one, other = a_finding("st-1", S, an_effect(0.3)), a_finding("st-2", R, an_effect(-0.3), at=1.0)
    [found] = contradictions([one, other], largest_seed=largest)
    assert found.replication.first_seed == first


def test_a_replication_draws_its_seeds_above_those_that_findings_of_others_had() -> None:
    one = a_finding("st-1", S, an_effect(0.3), seeds=(0, 1))
    other = a_finding("st-2", R, an_effect(-0.3), at=1.0, origin="Others", seeds=(0, 4321))
    [found] = contradictions([one, other], largest_seed=1)
    assert found.replication.first_seed == 5000


def test_a_finding_says_which_seeds_its_study_had() -> None:
    plan = study_plan()
    trials = [done_trial(plan, plan.arms[0].name, seed, 0.3) for seed in (3, 0, 3)]
    earlier = done_trial(study_plan(seeds=2), plan.arms[0].name, 99, 0.3)
    record = VerdictRecord(hypothesis="H1", verdict=S, reason="", effect=None)
    [found] = findings_of("st-1", plan, [record], 0.0, [*trials, earlier])
    assert found.seeds == (0, 3)


@pytest.mark.parametrize(("level", "says"), [(0.95, "95"), (0.984312, "98.4"), (0.9999, "99.99")])
def test_confidence_is_told_as_the_report_has_it(level: float, says: str) -> None:
    finding = a_finding("st-1", S, an_effect(0.3).model_copy(update={"level": level}))
    assert f"at {says} % confidence" in told_of(finding)


def test_a_plan_quotes_what_is_known_and_which_of_its_hypotheses_ask_the_same() -> None:
    plan = example_plan(factors=(study_plan().factors[0].model_copy(update={"name": "learning_rate"}),))
    same = a_finding("st-1", S, an_effect(0.3))
    longer = a_finding("st-2", E, an_effect(0.0), at=5.0, scope={"steps": 99}, origin="Others")
    elsewhere = a_finding("st-3", S, an_effect(0.3), instrument="other")
    factor = a_finding("st-4", S, an_effect(0.3), factor="temperature")
    crossed = a_finding("st-5", U, None, at=-1.0, factor="learning_rate x temperature", scope={})
    known = known_to(plan, [same, longer, elsewhere, factor, crossed])
    assert [(each.id, each.same_as) for each in known] == [("st-1/H1", {"H1": 1}), ("st-2/H1", {}), ("st-5/H1", {})]
    assert known[1].origin == "Others"
    again = plan.model_copy(update={"known": known})
    assert Plan.model_validate_json(again.canonical()) == again
    assert told_of(same).startswith(told(known[0]))


def test_the_quotation_has_effect_interval_confidence_and_n() -> None:
    said = told_of(a_finding("st-1", S, an_effect(0.3)))
    assert ": supported, +0.3 [+0.25, +0.35] at 95 % confidence, n = 3 against 3 (st-1/H1); " in said
    assert "nothing was measured" in told_of(a_finding("st-1", U, None))
    assert "by Group 7; cannot be recomputed here" in told_of(a_finding("st-1", S, an_effect(0.3), origin="Group 7"))


def test_a_finding_is_told_with_all_that_it_holds_for() -> None:
    plan = study_plan()
    trials = [
        done_trial(plan, arm.name, 0, 0.3).model_copy(update={"started_at": 10.0, "ended_at": 70.0})
        for arm in plan.arms
    ]
    record = VerdictRecord(hypothesis=plan.hypotheses[0].id, verdict=S, reason="", effect=an_effect(0.3))
    [found] = findings_of("st-1", plan, [record], 0.0, trials)
    told_so = told_of(found).partition("; ")[2]
    for part in (plan.instrument, plan.model.name, f"{plan.steps} steps", "0.5 against 0.2", "60 s per trial"):
        assert part in told_so
    assert "which trains no model" in told_of(found.model_copy(update={"model": "echo"}))
    assert spread(an_effect(0.3, half=0.05, n=3)) == pytest.approx(0.05 / 2.776 / (2 / 3) ** 0.5, rel=1e-3)
    assert spread(an_effect(0.3).model_copy(update={"method": "paired"})) is None


def test_a_studys_verdict_is_held_against_what_was_known() -> None:
    plan = example_plan(factors=(study_plan().factors[0].model_copy(update={"name": "learning_rate"}),))
    [hypothesis] = plan.hypotheses
    [known] = known_to(plan, [a_finding("st-1", S, an_effect(0.3))])

    def now(verdict: Verdict, effect: Effect | None) -> str:
        return agreement(known, hypothesis, VerdictRecord(hypothesis="H1", verdict=verdict, reason="", effect=effect))

    assert now(S, an_effect(0.32)) == "agrees"
    assert now(R, an_effect(-0.3)) == "contradicts: their verdicts are opposite"
    assert now(U, None) == now(Verdict.INVALID, an_effect(0.3)) == "not measured"
    assert (
        agreement(
            known,
            hypothesis.model_copy(update={"id": "H2"}),
            VerdictRecord(hypothesis="H2", verdict=S, reason="", effect=None),
        )
        == "asks something else"
    )
