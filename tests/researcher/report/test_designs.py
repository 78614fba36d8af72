"""What reports say of designs: looks, races, interactions, screens and trends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bench.made_up_studies import INSTRUMENT
from researcher.analysis.metrics import finals
from researcher.models import StudyData, TrialRecord
from researcher.report.page import page
from researcher.report.records import Records
from researcher.report.verify import verify
from researcher.report.writer import marked_claims, write_report
from researcher.study.plan import Arm, Branch, Condition, Plan, PlanModel
from tests.fakes.concluded_study import concluded
from tests.fakes.raced_study import race_plan, run
from tests.fakes.specs import planned as designed
from tests.fakes.study import done_trial, failed_trial

TWO: dict[str, Any] = {
    "compare": {"learning_rate": {"levels": [2e-5]}},
    "claim": "increase",
    "seeds": {"min": 6, "max": 6},
}
SCREENED = {"learning_rate": {"levels": [1e-5, 4e-5]}, "temperature": {"levels": [1.0, 0.7]}}
TREND = {"learning_rate": {"levels": [1e-5, 2e-5, 4e-5, 8e-5]}}
planned = partial(designed, INSTRUMENT)


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


def written(data: StudyData, folder: Path) -> tuple[str, str]:
    """Markdown and HTML of a report that recomputes."""
    found = write_report(data, folder)
    assert verify(data, found.claims, found.files) == []
    return Path(found.files["markdown"]).read_text(), Path(found.files["html"]).read_text()


def answer(text: str) -> str:
    return text.split("## Answer")[1].split("## Plan")[0]


def test_a_report_says_what_each_look_may_spend(tmp_path: Path) -> None:
    plan = planned(**TWO, looks=2)
    claims = {claim.name: claim for claim in page(Records(concluded(plan, []))).claims}
    markdown, html = written(study(plan, lambda *_: 0.3), tmp_path)
    looks = [stage for stage in plan.stages if stage.spends is not None]
    assert len(looks) == 2
    for look in looks:
        claim = claims[f"stage.{look.id}.spends"]
        assert claim.value == look.spends
        assert f"a look that may spend {claim.text} of alpha" in markdown
        assert (claim.expression, claim.text) in marked_claims(html)
    assert "overestimated on average" in markdown.split("## Limits")[1]


def test_a_study_without_looks_says_nothing_of_them(tmp_path: Path) -> None:
    markdown, _ = written(study(planned(**TWO), lambda *_: 0.3), tmp_path)
    assert "may spend" not in markdown


def test_a_report_says_its_true_level_and_which_held_out_tasks_were_scored(tmp_path: Path) -> None:
    plan = designed(INSTRUMENT, alpha=0.0076, heldout_from=32, heldout_tasks=16, **TWO)
    markdown, html = written(study(plan, lambda number, _: 0.3 + 0.3 * number), tmp_path)
    assert "(99.2 % interval" in answer(markdown)
    assert "alpha 0.0076" in markdown
    assert "95 %" not in markdown + html
    assert "16 held-out tasks" in markdown
    assert "held-out tasks 33 to 48" in markdown


def test_a_report_says_whose_trained_weights_a_study_starts_from(tmp_path: Path) -> None:
    start = PlanModel(name="a-seed0", fingerprint="f" * 64, path="/models/a-seed0", origin="st-1/a-seed0")
    plan = planned(**TWO).model_copy(update={"model": start})
    markdown, html = written(study(plan, lambda *_: 0.3), tmp_path)
    assert "from the folder `/models/a-seed0`, as trained by `st-1/a-seed0`" in markdown
    assert "st-1/a-seed0" in html


def test_a_race_that_was_never_begun_was_not_run_and_takes_one_line_of_advice(tmp_path: Path) -> None:
    plan = race_plan()
    when = Condition(kind="power_below", value=0.99)
    stops = Branch(stage=plan.stages[0].id, when=when, then="underpowered", reason="too noisy")
    plan = plan.model_copy(update={"branches": (stops, *plan.branches)})
    noisy = [
        trial.model_copy(
            update=dict(done_trial(plan, trial.arm, trial.seed, 0.5 * trial.seed)) | {"stage": trial.stage}
        )
        for trial in run(plan, until=plan.stages[0].id)
    ]
    text = Path(write_report(concluded(plan, noisy), tmp_path).files["markdown"]).read_text()
    assert "Not answerable within this plan" in text
    assert "which helps to choose the arm to confirm, was not run" in text
    assert "is not over" not in text
    assert text.split("## What to ask next")[1].count("seeds per arm, state a larger effect") == 1


@pytest.mark.parametrize(
    ("values", "said"),
    [((0.1, 0.1, 0.5, 0.5), "each level can be chosen separately"), ((0.1, 0.2, 0.5, 0.9), "depends")],
)
def test_an_interaction_is_told_as_what_it_is(values: tuple[float, ...], said: str, tmp_path: Path) -> None:
    crossed = {"learning_rate": {"levels": [1e-5, 4e-5]}, "group_size": {"levels": [4, 8]}}
    plan = planned(compare=crossed, design="factorial", claim="none", seeds=TWO["seeds"])
    markdown, html = written(study(plan, lambda number, _: values[number]), tmp_path)
    assert ": unlike" not in markdown + html
    assert "the interaction `learning_rate x group_size` on" in markdown
    assert "H3  learning_rate x group_size<" in html
    advice = next(line for line in markdown.split("## What to ask next")[1].splitlines() if "`H3`" in line)
    assert said in advice
    assert "by cost" not in advice


def both(_: int, arm: Arm) -> float:
    return 0.1 * (arm.levels["learning_rate"] == 4e-5) + 0.3 * (arm.levels["temperature"] == 0.7)


def test_a_screen_ranks_its_effects_gives_no_verdict_and_says_what_would_confirm_them(tmp_path: Path) -> None:
    data = study(planned(design="screen", compare=SCREENED), both)
    text, _ = written(data, tmp_path)
    said = answer(text)
    assert "it explores and gives no verdict" in said
    assert "from `temperature=1` to `temperature=0.7` by +0.300 (95 % interval" in said
    assert said.index("temperature=0.7") < said.index("learning_rate=4e-5")
    assert "compare these factors on fresh seeds" in said
    assert "Holm" not in text
    assert "supported" not in text
    rows = [line for line in text.split("## Effects")[1].splitlines() if line.startswith("| `H")]
    assert [row[2:6] for row in rows] == ["`H2`", "`H1`"]
    assert "ranked by the trials that measured them" in text.split("## Limits")[1]
    advice = text.split("## What to ask next")[1]
    assert "compare `temperature=0.7` with `temperature=1` in a separate study, on seeds from 2 on" in advice
    assert advice.count("in a separate study") == 1


def test_a_screen_says_which_effects_are_invalid(tmp_path: Path) -> None:
    plan = planned(design="screen", compare=SCREENED)
    said = answer(written(study(plan, both, idle=plan.arms[0].name), tmp_path)[0])
    assert said.count("which is invalid") == 2


def test_a_screen_with_a_failed_trial_rests_on_the_others(tmp_path: Path) -> None:
    plan = planned(design="screen", compare=SCREENED)
    data = study(plan, both, broken=plan.arms[1].name)
    effect = page(Records(data)).hypotheses[0].claims
    assert (effect["n_baseline"].value, effect["n_treatment"].value) == (3, 4)
    assert effect["failed_baseline"].value == 1
    assert "7 finished trials" in answer(written(data, tmp_path)[0])


def test_a_screen_of_arms_sets_each_against_the_first(tmp_path: Path) -> None:
    arms: dict[str, Any] = {"plain": {}, "slow": {"learning_rate": 2e-5}, "hot": {"temperature": 1.2}}
    data = study(planned(design="screen", arms=arms), lambda number, _: 0.2 * number)
    text, html = written(data, tmp_path)
    said = answer(text)
    assert "it explores and gives no verdict" in said
    assert said.index("from `plain` to `hot` by +0.4") < said.index("from `plain` to `slow` by +0.2")
    assert "compare these arms on fresh seeds" in said
    assert "Each arm minus the first" in text
    assert "t on the means of all arms" in text
    assert "main effect" not in text + html
    assert "Holm" not in text
    assert "compare `hot` with `plain` in a separate study, on seeds from 2 on" in text.split("## What to ask next")[1]


@pytest.mark.parametrize(
    ("slope", "said"),
    [
        (0.1, "Yes: `final_reward` rises with `learning_rate`: by +0.302 (95 % interval +0."),
        (-0.1, "No: `final_reward` falls with `learning_rate`: by −0.298 (95 % interval −0."),
        (0.0, "No trend that matters: with `learning_rate`, `final_reward` changes by +0.002 (95 % interval −0."),
    ],
)
def test_a_trend_is_said_in_plain_words(slope: float, said: str, tmp_path: Path) -> None:
    text, _ = written(
        study(planned(design="trend", compare=TREND, claim="increase"), lambda number, _: slope * number), tmp_path
    )
    assert said in answer(text)
    assert "from 1e-05 to 8e-05, on a log scale" in answer(text)
    assert "20 finished trials of all levels" in answer(text)
    assert "do not lie on a line" not in text
    assert "5, 5 and 10 between" in text
    assert "assumes a straight line over `learning_rate` on a log scale" in text.split("## Limits")[1]


def test_a_trend_in_no_claimed_direction_is_neither_yes_nor_no(tmp_path: Path) -> None:
    data = study(planned(design="trend", compare=TREND), lambda number, _: -0.1 * number)
    assert answer(written(data, tmp_path)[0]).strip().startswith("`final_reward` falls with `learning_rate`: by −0.298")


def test_a_trend_whose_levels_bend_says_so(tmp_path: Path) -> None:
    data = study(planned(design="trend", compare=TREND, claim="increase"), lambda number, _: 0.2 * min(number, 2))
    assert "The levels do not lie on a line (lack-of-fit p below 0.001)" in answer(written(data, tmp_path)[0])


def test_a_trend_that_a_sentinel_takes_is_no_answer(tmp_path: Path) -> None:
    plan = planned(design="trend", compare=TREND, claim="increase")
    data = study(plan, lambda number, _: 0.1 * number, idle=plan.arms[1].name)
    assert "No valid answer: with `learning_rate`" in answer(written(data, tmp_path)[0])


def test_a_trend_without_its_highest_level_is_not_measured(tmp_path: Path) -> None:
    plan = planned(design="trend", compare=TREND, claim="increase")
    data = study(plan, lambda number, _: 0.1 * number)
    kept = [
        failed_trial(plan, each.arm, each.seed).model_copy(update={"stage": each.stage})
        if each.arm == plan.arms[-1].name
        else each
        for each in data.trials
    ]
    said = answer(written(concluded(plan, kept), tmp_path)[0])
    assert "could not be measured, because arm 'learning_rate=8e-5' has no finished trial" in said


@pytest.mark.parametrize(
    "asked",
    [
        {"compare": TREND},
        {"compare": TREND, "design": "trend"},
        {"compare": TREND, "design": "screen"},
        {"compare": TREND, "design": "balance"},
        {"compare": SCREENED, "design": "screen"},
        {"compare": SCREENED, "design": "factorial"},
        {"compare": TWO["compare"], "seeds": {"min": 8, "max": 8}, "looks": 2},
    ],
    ids=lambda asked: str(asked.get("design", "compare")),
)
def test_secondary_metrics_have_intervals_in_every_design_and_decide_nothing(
    asked: dict[str, Any], tmp_path: Path
) -> None:
    """The deciding metric is the same in all arms; the secondary one differs by far."""
    plan = designed(metric="auc_reward", secondary=["final_reward"], **asked)
    apart = {arm.name: 0.2 * number for number, arm in enumerate(plan.arms)}
    data = study(plan, lambda *_: 0.3)
    trials = [
        done_trial(
            plan, each.arm, each.seed, 0.3 + 0.01 * (each.seed % 3), series={"reward_mean": _rising(each, apart)}
        ).model_copy(update={"stage": each.stage, "finals": {}})
        for each in data.trials
    ]
    trials = [each.model_copy(update={"finals": finals(plan.metrics, each.series)}) for each in trials]
    text, _ = written(concluded(plan, trials), tmp_path)
    table = text.split("## Secondary metrics")[1].split("## Noise floor")[0]
    rows = [line for line in table.splitlines() if line.startswith("| `H")]
    assert len(rows) == len(plan.hypotheses)
    parts = page(Records(concluded(plan, trials))).hypotheses
    for part in parts:
        own = part.secondary["final_reward"]
        assert f"{own['diff'].text} ({own['low'].text} to {own['high'].text})" in table
        assert own["level"].value == 0.95
        assert part.verdict in ("equivalent", "inconclusive")
    assert any(float(part.secondary["final_reward"]["low"].value or 0) > 0 for part in parts)


def _rising(trial: TrialRecord, apart: Mapping[str, float]) -> list[float]:
    """Curves with one area under all of them, that end apart by arm."""
    ends = apart[trial.arm] + 0.01 * (trial.seed % 3)
    return [0.5 - ends / 2, 0.5 + 0.01 * (trial.seed % 2), 0.5, 0.5 + ends / 2]
