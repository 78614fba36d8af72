"""What the reports of looks, races and interactions say of their designs."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from bench.made_up_studies import INSTRUMENT
from researcher.report.page import page
from researcher.report.records import Records
from researcher.report.verify import verify
from researcher.report.writer import marked_claims, write_report
from researcher.study.plan import Branch, Condition, Plan
from tests.fakes.concluded_study import concluded
from tests.fakes.raced_study import race_plan, run
from tests.fakes.specs import planned as designed
from tests.fakes.study import done_trial

TWO = {"learning_rate": {"levels": [2e-5]}}


def planned(**fields: Any) -> Plan:
    return designed(INSTRUMENT, **{"compare": TWO, "claim": "increase", "seeds": {"min": 6, "max": 6}, **fields})


def files(plan: Plan, folder: Path, *values: float) -> tuple[str, str]:
    """The report's Markdown and HTML. values: of the arms, in turn; each seed of them varies a little."""
    last = plan.stages[-1]
    trials = [
        done_trial(plan, arm.name, seed, value + 0.01 * (seed % 3)).model_copy(update={"stage": last.id})
        for arm, value in zip(plan.arms, itertools.cycle(values or (0.3,)), strict=False)
        for seed in range(last.max_seeds)
    ]
    data = concluded(plan, trials)
    written = write_report(data, folder)
    assert verify(data, written.claims, written.files) == []
    return Path(written.files["markdown"]).read_text(), Path(written.files["html"]).read_text()


def test_a_report_says_what_each_look_may_spend(tmp_path: Path) -> None:
    plan = planned(looks=2)
    claims = {claim.name: claim for claim in page(Records(concluded(plan, []))).claims}
    markdown, html = files(plan, tmp_path)
    looks = [stage for stage in plan.stages if stage.spends is not None]
    assert len(looks) == 2
    for look in looks:
        claim = claims[f"stage.{look.id}.spends"]
        assert claim.value == look.spends
        assert f"a look that may spend {claim.text} of alpha" in markdown
        assert (claim.expression, claim.text) in marked_claims(html)
    assert "on average too large" in markdown.split("## Limits")[1]


def test_a_study_without_looks_says_nothing_of_them(tmp_path: Path) -> None:
    markdown, _ = files(planned(), tmp_path)
    assert "may spend" not in markdown


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
    assert "which helps to say which arm is confirmed, was not run" in text
    assert "is not over" not in text
    assert text.split("## What to ask next")[1].count("seeds per arm, state a larger effect") == 1


@pytest.mark.parametrize(
    ("values", "said"),
    [((0.1, 0.1, 0.5, 0.5), "each level may be chosen by itself"), ((0.1, 0.2, 0.5, 0.9), "depends")],
)
def test_an_interaction_is_told_as_what_it_is(values: tuple[float, ...], said: str, tmp_path: Path) -> None:
    crossed = {"learning_rate": {"levels": [1e-5, 4e-5]}, "group_size": {"levels": [4, 8]}}
    plan = planned(compare=crossed, design="factorial", claim="none")
    markdown, html = files(plan, tmp_path, *values)
    assert ": unlike" not in markdown + html
    assert "the interaction `learning_rate x group_size` on" in markdown
    assert "H3  learning_rate x group_size<" in html
    advice = next(line for line in markdown.split("## What to ask next")[1].splitlines() if "`H3`" in line)
    assert said in advice
    assert "by cost" not in advice
