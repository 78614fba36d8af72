"""The expression language says what the records say, and nothing else can be said in it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from researcher.analysis.power import detectable_effect
from researcher.design.stages import compared
from researcher.models import Event, StudyData
from researcher.refusals import RecordsDisagree, UnknownName
from researcher.report.expressions import BadExpression, Evaluator, call
from researcher.report.records import Records
from researcher.study.plan import ALPHA, Branch, Condition
from tests.fakes.concluded_study import BASE, concluded, supported, two_arms, underpowered, with_failures
from tests.fakes.study import study_plan, trials_with

HUGE = "1" + "0" * 400
"""No number of the records is as large."""


def value(expression: str, data: StudyData | None = None) -> object:
    return Evaluator(Records(data or supported())).value(expression)


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ('effect("H1").diff', 0.24),
        ('effect("H1").mean_treatment - effect("H1").mean_baseline', 0.24),
        ('mean("auc", arm="lr=base")', 0.31),
        ('sd("auc", arm="lr=base")', float(np.std(BASE, ddof=1))),
        ('iqm("auc", arm="lr=base", stage="compare")', 0.31),
        ('final("auc", arm="lr=base", seed=0)', 0.30),
        ('count_trials(arm="lr=base", status="done") / count_trials()', 0.5),
        ('sigma("auc")', 0.01),
        ('margin("H1") * 2', 0.2),
        ('total("step_s", arm="lr=base")', 24.0),
        ('plan("steps")', 4),
        ('-level("lr=4e-05", "lr")', -4e-5),
        ("1.5 + 2", 3.5),
    ],
)
def test_words_answer_from_the_records(expression: str, expected: float) -> None:
    assert value(expression) == pytest.approx(expected)


def test_words_answer_with_texts_too() -> None:
    assert value('verdict("H1")') == "supported"
    assert value('decision("floor").to') == "compare"
    assert value("plan_hash()") == supported().plan.digest()


@pytest.mark.parametrize(
    "expression",
    [
        'effect("H1").diff',
        'final("auc", arm="lr=4e-05", seed=0)',
        'total("tokens_of_old")',
        "sampled_tokens()",
        'effect("H1").diff + 1',
        "1 / 0",
    ],
)
def test_what_the_records_cannot_tell_is_nothing_rather_than_a_number(expression: str) -> None:
    assert value(expression, underpowered()) is None


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os')",
        "().__class__",
        "effect.__globals__",
        'effect("H1").__class__',
        "_records",
        '_check("H1")',
        "[1][0]",
        "(lambda: 1)()",
        'effect(*["H1"])',
        'effect(**{"hypothesis": "H1"})',
        "2 ** 9",
        '"a" + 1',
        "1 if 1 else 2",
        "True",
        "1 +",
        'effect("H1")',
        'effect("H1").wrong',
        'mean("auc", arm=effect("H1"))',
        'mean("auc", arms="lr=base")',
        "1" * 600,
        "(" * 300,
        "-" * 499 + "1",
        "1+" * 249 + "a",
        HUGE,
        f"-{HUGE}",
        f"{HUGE} / 3",
        f"{HUGE} * 1.5",
        f"{HUGE[:200]} * {HUGE[:200]}",
    ],
)
def test_what_is_not_in_the_language_is_refused(expression: str) -> None:
    with pytest.raises(BadExpression):
        value(expression)


def test_verdicts_and_states_that_there_are_not_are_refused_with_those_that_are() -> None:
    for expression, known in (
        ('count_verdicts("won")', "'supported'"),
        ('count_trials(status="won")', "'done'"),
        ("count_trials(status=1)", "'failed', 'open'"),
    ):
        with pytest.raises(UnknownName, match=known):
            value(expression)


@pytest.mark.parametrize(
    "expression",
    [
        'effect("H9").diff',
        'mean("speed", arm="lr=base")',
        'mean("auc", arm="lr=9")',
        'stage("x").seeds',
        'plan("arms")',
    ],
)
def test_names_that_the_plan_does_not_have_are_refused_with_those_it_has(expression: str) -> None:
    with pytest.raises(UnknownName, match="the plan has no"):
        value(expression)


def test_a_stored_final_that_its_series_do_not_give_is_an_error_that_names_trial_and_metric() -> None:
    data = supported()
    changed = data.trials[0].model_copy(update={"finals": {"auc": 0.9}})
    evaluator = Evaluator(Records(dataclasses.replace(data, trials=(changed, *data.trials[1:]))))
    for expression in ('final("auc", arm="lr=base", seed=0)', 'effect("H1").diff', 'sigma("auc")', 'verdict("H1")'):
        with pytest.raises(RecordsDisagree, match=f"{changed.key}.*'auc'"):
            evaluator.value(expression)
    assert evaluator.value('final("auc", arm="lr=base", seed=1)') == pytest.approx(0.31)


def test_a_finished_trial_without_its_series_or_its_final_is_an_error() -> None:
    data = supported()
    change: dict[str, Any]
    for change in ({"series": {}}, {"finals": {}}):
        trials = (data.trials[0].model_copy(update=change), *data.trials[1:])
        with pytest.raises(RecordsDisagree, match="auc"):
            value('mean("auc", arm="lr=base")', dataclasses.replace(data, trials=trials))


def test_failed_trials_count_as_failed_and_never_as_values() -> None:
    data = with_failures()
    assert value('count_trials(arm="lr=4e-05", status="failed")', data) == 1
    assert value('effect("H1").n_treatment', data) == 2
    assert value('effect("H1").failed_treatment', data) == 1
    assert value('final("auc", arm="lr=4e-05", seed=2)', data) is None


def test_the_effect_that_sides_of_several_arms_could_show_is_by_the_noise_of_a_side() -> None:
    """What a main effect could show with the seeds that it needs for the planned effect is that effect, and no larger one."""
    plan = study_plan((2e-5, 4e-5, 8e-5), seeds=4, max_seeds=4)
    names = [arm.name for arm in plan.arms]
    whole = {"baseline_arms": tuple(names[:2]), "treatment_arms": tuple(names[2:])}
    plan = plan.model_copy(update={"hypotheses": (plan.hypotheses[0].model_copy(update=whole),)})
    data = concluded(plan, trials_with(plan, dict.fromkeys(names, (0.3, 0.31, 0.32, 0.33))))
    noise = value('sigma_upper("auc")', data)
    assert isinstance(noise, float)
    shown = detectable_effect(4, sigma=noise / math.sqrt(2), alpha=0.05, power=plan.power)
    assert value('detectable("H1")', data) == pytest.approx(shown)


def test_the_effect_that_an_early_look_could_show_is_by_what_that_look_may_spend() -> None:
    plan = study_plan(max_seeds=8)
    stages = compared([arm.name for arm in plan.arms], "lr=base", (4, 8), 2, ALPHA)
    ends = tuple(Branch(stage=s.id, when=Condition(kind="always"), then="stop", reason="") for s in stages)
    plan = plan.model_copy(update={"stages": stages, "branches": ends})
    rows = {"lr=base": (0.1, 0.11, 0.12, 0.13), "lr=4e-05": (0.5, 0.51, 0.52, 0.53)}
    early = [trial.model_copy(update={"stage": stages[1].id}) for trial in trials_with(plan, rows)]
    data = concluded(plan, early)
    noise = value('sigma_upper("auc")', data)
    assert isinstance(noise, float)
    shown = detectable_effect(4, sigma=noise, alpha=stages[1].spends or 0.0, power=plan.power)
    assert value('detectable("H1")', data) == pytest.approx(shown)


def test_calls_are_written_so_that_any_name_can_be_read_back() -> None:
    name = 'a "quoted"\\ näme\n'
    assert call("mean", "auc", arm="x", seed=0) == 'mean("auc", arm="x", seed=0)'
    with pytest.raises(UnknownName) as refused:
        value(call("mean", "auc", arm=name))
    assert repr(name) in str(refused.value)


def test_time_between_a_failed_attempt_and_the_next_is_no_time_of_the_trial() -> None:
    data = two_arms((0.55, 0.56, 0.54))
    trial = data.trials[0].model_copy(update={"started_at": 100.0, "ended_at": 1000.0})
    kinds = [("trial_begun", 100.0), ("attempt_failed", 150.0), ("trial_begun", 900.0), ("trial_done", 1000.0)]
    events = tuple(
        Event(seq=100 + number, study_id="st-1", at=at, kind=kind, detail={"trial": trial.key})
        for number, (kind, at) in enumerate(kinds)
    )
    bare = [each.model_copy(update={"started_at": None, "ended_at": None}) for each in data.trials[1:]]
    told = dataclasses.replace(data, trials=(trial, *bare), events=events)
    assert Evaluator(Records(told)).value("trial_s()") == 150.0


def test_where_no_spread_was_seen_no_effect_is_said_to_be_detectable() -> None:
    assert Evaluator(Records(two_arms((0.5, 0.5, 0.5), (0.3, 0.3, 0.3)))).value('detectable("H1")') is None
