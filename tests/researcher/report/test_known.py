"""What was known beforehand stands in the report with effect, interval, confidence and n, and is held against the verdict."""

from __future__ import annotations

from pathlib import Path

from researcher.models import StudyData
from researcher.report.verify import verify
from researcher.report.writer import write_report
from researcher.study.plan import Known, Plan, Verdict
from tests.fakes.concluded_study import BASE, TREATMENT, concluded
from tests.fakes.study import study_plan, trials_with


def known(verdict: Verdict, size: float, **changes: object) -> Known:
    fields = {
        "id": "st-0/H1", "statement": "lr=4e-05 beats lr=base", "verdict": verdict, "direction": "increase",
        "margin": 0.1, "diff": size, "low": size - 0.05, "high": size + 0.05, "level": 0.95, "n_baseline": 4,
        "n_treatment": 5, "plan_hash": "0" * 64, "same_as": {"H1": 1},
    }  # fmt: skip
    return Known.model_validate({**fields, **changes})


def study(*quoted: Known | str) -> StudyData:
    plan: Plan = study_plan(known=quoted)
    return concluded(plan, trials_with(plan, {"lr=base": BASE, TREATMENT: (0.55, 0.56, 0.54)}))


def texts(data: StudyData, folder: Path) -> tuple[str, str]:
    files = write_report(data, folder).files
    return Path(files["markdown"]).read_text(), Path(files["html"]).read_text()


def test_an_earlier_finding_is_quoted_whole_and_agrees_or_not(tmp_path: Path) -> None:
    markdown, html = texts(study(known(Verdict.SUPPORTED, 0.25)), tmp_path)
    line = next(line for line in markdown.splitlines() if "Already known" in line)
    assert "supported, difference 0.25 (95 % interval 0.2 to 0.3), n = 5 against 4 (`st-0/H1`)" in line
    assert line.endswith("`H1` asks the same: agrees")
    assert "Already known" in html
    assert "contradicts" not in markdown


def test_a_contradiction_is_named_and_asks_for_a_replication(tmp_path: Path) -> None:
    markdown, html = texts(study(known(Verdict.REFUTED, -0.3, origin="Group <7>")), tmp_path)
    assert "asks the same: contradicts: their verdicts are opposite" in markdown
    assert "not recomputable here" in markdown
    assert "This contradicts `st-0/H1`: replicate it on fresh seeds" in markdown.split("## What to ask next")[1]
    assert "Group &lt;7&gt;" in html
    assert "Group <7>" not in html


def test_what_was_known_is_verified_like_every_number(tmp_path: Path) -> None:
    data = study(known(Verdict.SUPPORTED, 0.25), known(Verdict.INCONCLUSIVE, 0.0, id="st-9/H2", diff=None, same_as={}))
    written = write_report(data, tmp_path)
    assert {claim.name for claim in written.claims} >= {"known.st-0/H1.diff", "known.st-0/H1.H1", "known.st-9/H2.diff"}
    assert verify(data, written.claims, written.files) == []


def test_plans_of_the_first_release_quote_bare_ids(tmp_path: Path) -> None:
    markdown, _ = texts(study("st-0/H1"), tmp_path)
    assert "- Known beforehand: `st-0/H1`" in markdown
