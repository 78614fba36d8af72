"""What the reports of screens and trends say, and that every number of theirs is computed again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.made_up_studies import INSTRUMENT
from researcher.design.planning import plan_of
from researcher.instruments.catalogue import read_instrument
from researcher.models import StudyData
from researcher.report.page import page
from researcher.report.records import Records
from researcher.report.verify import verify
from researcher.report.writer import write_report
from researcher.study.plan import Arm, Plan
from researcher.study.spec import StudySpec
from tests.fakes.concluded_study import concluded
from tests.fakes.study import done_trial, failed_trial

SCREENED = {"learning_rate": {"levels": [1e-5, 4e-5]}, "temperature": {"levels": [1.0, 0.7]}}
TREND = {"learning_rate": {"levels": [1e-5, 2e-5, 4e-5, 8e-5]}}


def planned(design: str, compare: dict[str, Any], **more: Any) -> Plan:
    fields = {"question": "What matters?", "instrument": "simulation", "design": design, "compare": compare, **more}
    return plan_of(StudySpec.model_validate(fields), read_instrument(INSTRUMENT))


def study(plan: Plan, value: Callable[[int, Arm], float], *, broken: str = "", idle: str = "") -> StudyData:
    """Trials whose seeds differ a little. broken: an arm whose first trial failed; idle: one whose weights never changed."""
    stage = plan.stages[-1]
    trials = [
        failed_trial(plan, arm.name, seed)
        if arm.name == broken and seed == 0
        else done_trial(
            plan,
            arm.name,
            seed,
            value(number, arm) + 0.02 * ((7 * seed + 3 * number) % 4),
            series={"weights_change": [0.0] * 4} if arm.name == idle else None,
        )
        for number, arm in enumerate(plan.arms)
        for seed in range(stage.seeds)
    ]
    return concluded(plan, [trial.model_copy(update={"stage": stage.id}) for trial in trials])


def written(data: StudyData, folder: Path) -> str:
    """The Markdown, of a report that recomputes."""
    found = write_report(data, folder)
    assert verify(data, found.claims, found.files) == []
    return Path(found.files["markdown"]).read_text()


def answer(text: str) -> str:
    return text.split("## Answer")[1].split("## Plan")[0]


def both(_: int, arm: Arm) -> float:
    return 0.1 * (arm.levels["learning_rate"] == 4e-5) + 0.3 * (arm.levels["temperature"] == 0.7)


def test_a_screen_ranks_its_effects_gives_no_verdict_and_says_what_would_confirm_them(tmp_path: Path) -> None:
    data = study(planned("screen", SCREENED), both)
    text = written(data, tmp_path)
    said = answer(text)
    assert "it explores and gives no verdict" in said
    assert "from `temperature=1` to `temperature=0.7` by +0.300 (95 % interval" in said
    assert said.index("temperature=0.7") < said.index("learning_rate=4e-5")
    assert "compare these factors on fresh seeds" in said
    assert "Holm" not in text
    assert "supported" not in text
    rows = [line for line in text.split("## Effects")[1].splitlines() if line.startswith("| `H")]
    assert [row[2:6] for row in rows] == ["`H2`", "`H1`"]
    assert "ranked by the same trials that measured them" in text.split("## Limits")[1]
    advice = text.split("## What to ask next")[1]
    assert "compare `temperature=0.7` with `temperature=1` in a study of its own, on seeds from 2 on" in advice
    assert advice.count("study of its own") == 1


def test_a_screen_says_which_effects_are_invalid(tmp_path: Path) -> None:
    plan = planned("screen", SCREENED)
    said = answer(written(study(plan, both, idle=plan.arms[0].name), tmp_path))
    assert said.count("which is invalid") == 2


def test_a_screen_with_a_failed_trial_rests_on_the_others(tmp_path: Path) -> None:
    plan = planned("screen", SCREENED)
    data = study(plan, both, broken=plan.arms[1].name)
    effect = page(Records(data)).hypotheses[0].claims
    assert (effect["n_baseline"].value, effect["n_treatment"].value) == (3, 4)
    assert effect["failed_baseline"].value == 1
    assert "7 finished trials" in answer(written(data, tmp_path))


@pytest.mark.parametrize(
    ("slope", "said"),
    [
        (0.1, "Yes: `final_reward` rises with `learning_rate`: by +0.302 (95 % interval +0."),
        (-0.1, "No: `final_reward` falls with `learning_rate`: by −0.298 (95 % interval −0."),
        (0.0, "No trend that matters: with `learning_rate` `final_reward` changes by +0.002 (95 % interval −0."),
    ],
)
def test_a_trend_is_said_in_plain_words(slope: float, said: str, tmp_path: Path) -> None:
    text = written(study(planned("trend", TREND, claim="increase"), lambda number, _: slope * number), tmp_path)
    assert said in answer(text)
    assert "from 1e-05 to 8e-05, on a log scale" in answer(text)
    assert "20 finished trials of all levels" in answer(text)
    assert "do not lie on a line" not in text
    assert "5, 5 and 10 between" in text
    assert "speaks of a straight line over `learning_rate` on a log scale" in text.split("## Limits")[1]


def test_a_trend_in_no_claimed_direction_is_neither_yes_nor_no(tmp_path: Path) -> None:
    data = study(planned("trend", TREND), lambda number, _: -0.1 * number)
    assert answer(written(data, tmp_path)).strip().startswith("`final_reward` falls with `learning_rate`: by −0.298")


def test_a_trend_whose_levels_bend_says_so(tmp_path: Path) -> None:
    data = study(planned("trend", TREND, claim="increase"), lambda number, _: 0.2 * min(number, 2))
    assert "The levels do not lie on a line (p of the lack of fit below 0.001)" in answer(written(data, tmp_path))


def test_a_trend_that_a_sentinel_takes_is_no_answer(tmp_path: Path) -> None:
    plan = planned("trend", TREND, claim="increase")
    data = study(plan, lambda number, _: 0.1 * number, idle=plan.arms[1].name)
    assert "No valid answer: with `learning_rate`" in answer(written(data, tmp_path))


def test_a_trend_without_its_highest_level_is_not_measured(tmp_path: Path) -> None:
    plan = planned("trend", TREND, claim="increase")
    data = study(plan, lambda number, _: 0.1 * number)
    kept = [
        failed_trial(plan, each.arm, each.seed).model_copy(update={"stage": each.stage})
        if each.arm == plan.arms[-1].name
        else each
        for each in data.trials
    ]
    said = answer(written(concluded(plan, kept), tmp_path))
    assert "could not be measured, as arm 'learning_rate=8e-5' has no finished trial" in said
