"""A study of one factor and then another, through the whole executor: what goes on, what is left, and the report of it."""

from __future__ import annotations

import pytest

from bench.made_up_studies import INSTRUMENT, Laboratory, World, simulate
from researcher.models import TrialStatus
from researcher.report.page import page
from researcher.report.records import Records
from researcher.report.verify import verify
from researcher.report.writer import render
from researcher.study.plan import Plan, Verdict
from tests.fakes.specs import planned as designed

pytestmark = pytest.mark.anyio

COMPARED = {"learning_rate": {"levels": [1e-5, 2e-5, 4e-5]}, "temperature": {"baseline": 1.0, "levels": [0.7, 1.3]}}
FIRST, SECOND = "compare-learning_rate", "compare-temperature-at-learning_rate="


def planned() -> Plan:
    return designed(INSTRUMENT, compare=COMPARED, design="sequence", claim="increase")


def world(plan: Plan, effects: dict[str, float]) -> World:
    """The truth: every arm's mean is the sum of its levels' effects."""
    named = {arm.name: set(arm.name.split(",")) for arm in plan.arms}
    means = {name: sum(size for level, size in effects.items() if level in levels) for name, levels in named.items()}
    return World(means=means, sigma=0.02, seed=11)


async def test_the_best_level_goes_on_and_the_report_says_so_and_verifies() -> None:
    plan = planned()
    truth = world(plan, {"learning_rate=2e-5": 0.2, "learning_rate=4e-5": 0.4, "temperature=0.7": 0.3})
    async with Laboratory() as laboratory:
        ending = await laboratory.carry_out(plan, truth)
        [study] = laboratory.store.studies.all()
        data, claims = laboratory.store.study_data(study.id), laboratory.store.reports.claims(study.id)
        assert verify(data, claims, laboratory.store.reports.files(study.id)) == []
    verdicts = {record.hypothesis: record for record in ending.verdicts}
    said = {each.treatment: verdicts[each.id] for each in plan.hypotheses}
    assert said["learning_rate=2e-5,temperature=1"].verdict is Verdict.SUPPORTED
    assert said["learning_rate=4e-5,temperature=1"].verdict is Verdict.SUPPORTED
    assert said["learning_rate=4e-5,temperature=0.7"].verdict is Verdict.SUPPORTED
    assert said["learning_rate=4e-5,temperature=1.3"].verdict is Verdict.EQUIVALENT
    left = said["learning_rate=1e-5,temperature=0.7"]
    assert left.verdict is Verdict.INCONCLUSIVE
    assert (
        f"temperature was compared by stage '{SECOND}4e-5' instead, because the plan's branch led there" in left.reason
    )

    stages = {stage.id: stage for stage in plan.stages}
    ran = {trial.stage for trial in data.trials}
    assert ran == {"noise-floor", FIRST, f"{SECOND}4e-5"}
    first = {trial.seed for trial in data.trials if trial.stage in ("noise-floor", FIRST)}
    second = {trial.seed for trial in data.trials if trial.stage == f"{SECOND}4e-5"}
    assert not first & second
    assert min(second) == stages[f"{SECOND}4e-5"].first_seed
    assert all(trial.status is TrialStatus.DONE for trial in data.trials)
    assert ending.trials <= plan.budget.trials

    text = render(page(Records(data)))["markdown"][1]
    assert "By the plan's rule learning\\_rate=4e-5" in text or "By the plan's rule learning_rate=4e-5" in text
    path = text.split("## Decision path")[1].split("##")[0]
    assert f"continue with stage `{SECOND}4e-5`" in path
    assert f"{SECOND}1e-5" not in path


def test_where_no_level_is_better_the_default_goes_on() -> None:
    plan = planned()
    ending = simulate(plan, world(plan, {"learning_rate=2e-5": -0.2, "temperature=1.3": 0.3}))
    said = {plan.hypotheses[number].treatment: record for number, record in enumerate(ending.verdicts)}
    assert said["learning_rate=2e-5,temperature=1"].verdict is Verdict.REFUTED
    assert said["learning_rate=1e-5,temperature=1.3"].verdict is Verdict.SUPPORTED
    assert said["learning_rate=4e-5,temperature=1.3"].verdict is Verdict.INCONCLUSIVE


async def test_a_study_that_is_resumed_in_its_second_comparison_goes_the_same_way() -> None:
    plan = planned()
    truth = world(plan, {"learning_rate=4e-5": 0.4})
    async with Laboratory() as laboratory:
        whole = await laboratory.carry_out(plan, truth)
        study = laboratory.store.studies.all()[0].id
        journal = laboratory.store.journal.events(study, "decision")
        again = await laboratory.resume(study, truth)
        assert laboratory.store.journal.events(study, "decision") == journal
    assert again == whole
