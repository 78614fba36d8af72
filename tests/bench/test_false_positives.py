"""The bench's own machinery: simulated and whole studies agree, and a bar fails only on evidence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bench.false_positives import DESIGNS, Tally, judged
from bench.made_up_studies import INSTRUMENT, Laboratory, World, simulate
from bench.planted_attrition import Losses, Setting, line_of, run_setting
from bench.planted_attrition import judged as judged_losses
from researcher.study.plan import Plan, Verdict
from tests.fakes.specs import planned as designed

pytestmark = pytest.mark.anyio


TWO = {"compare": {"learning_rate": {"levels": [2e-5]}}, "claim": "increase"}
RACE = {
    "compare": {"learning_rate": {"levels": [1e-5, 2e-5, 4e-5, 8e-5, 1.6e-4]}},
    "claim": "increase",
    "design": "race",
}
CROSSED = {
    "compare": {"learning_rate": {"levels": [1e-5, 4e-5]}, "temperature": {"levels": [0.5, 1.0]}},
    "design": "factorial",
}


def planned(fields: dict[str, Any], *, looks: int = 1, fine: int = 0) -> Plan:
    return designed(INSTRUMENT, **fields, looks=looks, fine=fine)


@pytest.mark.parametrize(
    ("fields", "looks", "fine"), [(TWO, 1, 0), (TWO, 2, 0), (TWO, 1, 2), (RACE, 1, 0), (CROSSED, 1, 0)]
)
async def test_a_study_comes_out_the_same_by_simulation_and_through_the_whole_executor(
    fields: dict[str, Any], looks: int, fine: int
) -> None:
    plan = planned(fields, looks=looks, fine=fine)
    best = plan.arms[-1].name
    world = World(means={best: 0.4}, sigma=0.03, seed=7)
    async with Laboratory() as laboratory:
        whole = await laboratory.carry_out(plan, world)
    drawn = simulate(plan, world)
    assert [(one.hypothesis, one.verdict) for one in whole.verdicts] == [
        (one.hypothesis, one.verdict) for one in drawn.verdicts
    ]
    assert (whole.trials, whole.action) == (drawn.trials, drawn.action)
    assert Verdict.SUPPORTED in {record.verdict for record in whole.verdicts} or fine


def test_a_fine_stage_leaves_no_treatment_that_was_asked_about_untested() -> None:
    plan = planned(TWO, fine=4)
    asked = plan.hypotheses[0]
    ending = simulate(plan, World(means={asked.treatment: 0.4}, sigma=0.02, seed=3))
    assert ending.verdicts[0].verdict is Verdict.SUPPORTED


def test_an_interaction_is_found_where_there_is_one_and_not_where_effects_add_up() -> None:
    plan = planned(CROSSED)
    low, high = (sorted(h.treatments) for h in plan.hypotheses[:2])
    corner = next(arm for arm in low if arm in high)
    additive = {arm.name: 0.2 * (arm.name in low) + 0.2 * (arm.name in high) for arm in plan.arms}
    for means, expected in ((additive, Verdict.EQUIVALENT), ({corner: 0.4}, Verdict.SUPPORTED)):
        ending = simulate(plan, World(means=means, sigma=0.02, seed=3))
        found = [record.verdict for record in ending.verdicts]
        assert found[:2] == [Verdict.SUPPORTED, Verdict.SUPPORTED]
        assert found[2] is expected


def test_a_bar_is_missed_only_where_the_exact_interval_excludes_it() -> None:
    null, planned_effect = DESIGNS[0], DESIGNS[1]
    fair = Tally(studies=100, supported=7, intervals=100, covered=95)
    strong = Tally(studies=100, supported=75, intervals=100, covered=95)
    summary, missed = judged([(null, fair), (planned_effect, strong), (DESIGNS[2], Tally(studies=10))])
    assert not missed
    assert (summary["null_supported_rate"], summary["power"], summary["coverage"]) == (0.07, 0.75, 0.95)
    bad = Tally(studies=1000, supported=90, intervals=1000, covered=900)
    _, missed = judged([(null, bad), (planned_effect, strong), (DESIGNS[2], Tally(studies=10))])
    assert {line.split(":")[0] for line in missed} == {"two", "false support", "coverage"}


RANDOM = Setting(background=0.05)
SELECTIVE = Setting(background=0.05, selective=0.1)


@pytest.mark.parametrize(
    ("setting", "tally", "name"),
    [
        (RANDOM, Losses(studies=300, flagged=60), "random_flagged"),
        (RANDOM, Losses(studies=300, supported=60), "null_supported_rate"),
        (SELECTIVE, Losses(studies=300, caught=240), "selective_caught"),
    ],
)
def test_a_rate_far_from_its_bar_is_named(setting: Setting, tally: Losses, name: str) -> None:
    summary, missed = judged_losses([(setting, tally)])
    assert len(missed) == 1
    assert missed[0].startswith(name)
    assert summary["pass"] is False


def test_luck_is_no_miss() -> None:
    results = [(RANDOM, Losses(studies=300, flagged=20)), (SELECTIVE, Losses(studies=300, caught=280))]
    assert judged_losses(results)[1] == []


@pytest.mark.anyio
async def test_wrong_answers_that_one_arm_loses_make_an_effect_which_the_sentinel_takes() -> None:
    setting = Setting(background=0.02, selective=0.3)
    tally = await run_setting(setting, 5, np.random.default_rng(0))
    assert (tally.studies, tally.caught, tally.supported) == (5, 5, 0)
    assert tally.bare >= 4
    line = line_of(setting, tally, 0.0)
    assert line["selective_caught"] == 1.0
