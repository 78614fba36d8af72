"""The written report: complete, readable, self-contained, and the same whenever it is written."""

from __future__ import annotations

import re
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from researcher.design.arms import with_own_seeds
from researcher.instruments.instrument import Factor
from researcher.models import Event, HostedModel, StudyData, TrialEvidence
from researcher.report.verify import verify
from researcher.report.writer import TEMPLATES, Written, quoted, write_report
from researcher.study.plan import Branch, Condition, Known, Plan, Verdict
from tests.fakes.concluded_study import (
    BASE,
    STUDIES,
    TREATMENT,
    concluded,
    equivalent,
    inconclusive,
    invalid,
    lossy,
    many_arms,
    refuted,
    supported,
    two_arms,
    underpowered,
    unfinished,
    with_failures,
)
from tests.fakes.raced_study import race_plan, run
from tests.fakes.study import THRESHOLD, done_trial, failed_trial, reaching_trial, study_plan, trials_with

SECTIONS = [
    "Answer",
    "Plan",
    "What was run",
    "What failed",
    "Effects",
    "Noise floor",
    "Learning curves",
    "Sentinels",
    "Decision path",
    "Cost",
    "Limits",
    "What to ask next",
]


def markdown(data: StudyData, folder: Path) -> str:
    return Path(write_report(data, folder).files["markdown"]).read_text()


def answer(data: StudyData, folder: Path) -> str:
    return markdown(data, folder).split("## Answer")[1].split("## Plan")[0].strip()


@pytest.fixture(params=sorted(STUDIES))
def written(request: pytest.FixtureRequest, tmp_path: Path) -> Written:
    return write_report(STUDIES[request.param](), tmp_path)


def test_every_report_has_every_section(written: Written) -> None:
    text = Path(written.files["markdown"]).read_text()
    assert re.findall(r"(?m)^## (.*)$", text) == SECTIONS


def test_the_answer_is_two_or_three_sentences(written: Written) -> None:
    text = Path(written.files["markdown"]).read_text().split("## Answer")[1].split("## Plan")[0].strip()
    assert len(re.findall(r"\.(?=\s|$)", text)) in (2, 3)
    assert "\n" not in text


def test_markdown_tables_have_as_many_cells_as_their_heads(written: Written) -> None:
    tables = [
        block for block in Path(written.files["markdown"]).read_text().split("\n\n") if block.lstrip().startswith("|")
    ]
    assert len(tables) >= 5
    for table in tables:
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.strip().splitlines()}) == 1
        assert "<table>" in MarkdownIt("commonmark").enable("table").render(table)


def test_the_html_fetches_nothing_and_runs_nothing(written: Written) -> None:
    text = Path(written.files["html"]).read_text()
    assert not re.search(r"https?://|@import|url\(|<script|<link|<iframe|<img|\bsrc=|\bon\w+=", text)
    assert str(written.folder) not in text


def test_a_report_says_what_was_the_same_in_all_arms(tmp_path: Path) -> None:
    plan = study_plan(run={"batch": {"group_size": 16}}, task={"digits": 1})
    levels = {factor.target for factor in plan.factors}
    assert "run.batch.group_size" not in levels
    text = markdown(concluded(plan, []), tmp_path)
    assert "- The same in all arms: `batch.group_size=16`, `task.digits=1`" in text


def test_an_engine_that_stood_in_for_the_model_is_named(tmp_path: Path) -> None:
    data = supported()
    for engine, said in (("local", False), ("echo", True)):
        told = TrialEvidence(model=HostedModel(name=data.plan.model.name, engine=engine))
        ran = replace(data, trials=tuple(each.model_copy(update={"evidence": told}) for each in data.trials))
        assert (markdown(ran, tmp_path / engine).count("replaced by `echo` here") == 2) == said


def test_a_report_says_who_amended_the_plan_to_what_and_why(tmp_path: Path) -> None:
    data = supported()
    detail = {"version": 2, "hash": "ab", "because": "more <seeds>", "by": "ada", "changed": "4 seeds per arm"}
    event = Event(seq=0, study_id="st-1", at=0.0, kind="amended", detail=detail)
    written = write_report(replace(data, events=(event, *data.events)), tmp_path)
    told = "by ada to version 2 (4 seeds per arm): more"
    assert f"- Amended {told} \\<seeds>\n" in Path(written.files["markdown"]).read_text()
    assert f"<dd>{told} &lt;seeds&gt;</dd>" in Path(written.files["html"]).read_text()
    event = event.model_copy(update={"detail": {"version": 2, "because": "more", "by": "ada"}})  # of an earlier version
    assert "- Amended by ada to version 2: more\n" in markdown(
        replace(data, events=(event, *data.events)), tmp_path / "old"
    )


def test_a_report_says_what_was_computed_in(tmp_path: Path) -> None:
    data = supported()
    told = TrialEvidence(model=HostedModel(name="smollm2-135m", dtype="float32"))
    ran = replace(data, trials=tuple(each.model_copy(update={"evidence": told}) for each in data.trials))
    assert "not ended; computed in float32." in markdown(ran, tmp_path / "ran")
    assert "computed in" not in markdown(data, tmp_path / "untold")


def test_trials_of_different_lengths_are_not_given_one(tmp_path: Path) -> None:
    length = Factor(name="lr", target="study.steps", type="int", default=5)
    plan = study_plan(treatments=(15,), factors=(length,))
    text = markdown(concluded(plan, []), tmp_path)
    assert text.count("as many optimiser steps as the arm sets") == 2
    assert f"{plan.steps} optimiser step" not in text


class _Tags(HTMLParser):
    """Collects tags that are closed out of order."""

    void = frozenset({"meta", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.wrong: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in self.void:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)


def test_the_html_is_well_formed(written: Written) -> None:
    tags = _Tags()
    tags.feed(Path(written.files["html"]).read_text())
    assert (tags.open, tags.wrong) == ([], [])


def test_every_number_that_is_marked_as_a_claim_is_one(written: Written) -> None:
    shown = re.findall(r'<data value="([^"]*)" title="([^"]*)">', Path(written.files["html"]).read_text())
    known = {claim.expression.replace('"', "&#34;") for claim in written.claims}
    assert len(shown) > 60
    assert {title for _, title in shown} <= known
    assert len({claim.name for claim in written.claims}) == len(written.claims)


def test_the_same_records_give_the_same_bytes(tmp_path: Path) -> None:
    one, other = write_report(many_arms(), tmp_path / "a"), write_report(many_arms(), tmp_path / "b")
    assert one.files.keys() == other.files.keys() == {"markdown", "html", "curves", "effects"}
    for kind, path in one.files.items():
        assert Path(path).read_bytes() == Path(other.files[kind]).read_bytes()


def test_no_digit_stands_in_the_prose_of_a_template() -> None:
    found = sorted(set(TEMPLATES.glob("*.jinja")) - {TEMPLATES / "style.jinja"})
    assert len(found) == 5
    for template in found:
        text = re.sub(r"\{\{.*?\}\}|\{%.*?%\}|\{#.*?#\}", "", template.read_text(), flags=re.DOTALL)
        if ".html" in template.name:
            text = re.sub(r"<style>.*?</style>|<[^>]*>", "", text, flags=re.DOTALL)
        digits = [line.strip() for line in text.splitlines() if re.search(r"\d", line)]
        assert digits == []


def test_answers_say_what_the_verdict_says(tmp_path: Path) -> None:
    assert "Yes: `lr=4e-05` beats `lr=base`." in answer(supported(), tmp_path)
    assert "+0.240 (95 % interval" in answer(supported(), tmp_path)
    assert "No difference that matters" in answer(equivalent(), tmp_path)
    assert "Not decided" in answer(inconclusive(), tmp_path)
    assert "No valid answer" in answer(invalid(), tmp_path)
    assert "weights never changed" in answer(invalid(), tmp_path)
    assert "Not answerable within this plan" in answer(underpowered(), tmp_path)
    assert "not over" in answer(unfinished(), tmp_path)
    assert "Of 3 hypotheses: 1 supported" in answer(many_arms(), tmp_path)


@pytest.mark.parametrize(("seeds", "said"), [(3, "Mean of treatment"), (20, "Interquartile mean of treatment")])
def test_what_is_compared_is_named_as_it_was_computed(seeds: int, said: str, tmp_path: Path) -> None:
    base, treatment = ([mean + 0.01 * (seed % 3) for seed in range(seeds)] for mean in (0.3, 0.5))
    plan = study_plan(seeds=seeds, max_seeds=seeds)
    files = write_report(concluded(plan, trials_with(plan, {"lr=base": base, "lr=4e-05": treatment})), tmp_path).files
    for kind in ("markdown", "html"):
        assert f" {said} " in Path(files[kind]).read_text()


def test_a_race_is_adjusted_over_what_is_tested_and_the_report_says_so(tmp_path: Path) -> None:
    plan = race_plan()
    over = markdown(concluded(plan, run(plan, until="confirm", arm1=0.5)), tmp_path / "over")
    assert "over the 1 tested, not over all 5 of the plan" in over
    assert "all 5 hypotheses of the plan" not in over
    racing = markdown(concluded(plan, run(plan, until="race-2", arm1=0.5)), tmp_path / "racing")
    assert "only the best is tested, on fresh seeds" in racing
    assert "tested, not over all" not in racing
    assert "over all 3 hypotheses of the plan" in markdown(many_arms(), tmp_path / "compared")


def test_beside_a_fine_stage_the_report_says_what_each_stage_has_tested(tmp_path: Path) -> None:
    plan = race_plan(fine=2)
    over = markdown(concluded(plan, run(plan, until="confirm", arm1=0.9, arm3=0.5)), tmp_path / "over")
    assert "of the levels between those compared only the best is tested, on fresh seeds" in over
    assert "Holm-adjusted over the hypotheses that one stage decides" in over
    assert "the fine stage tried other levels or found a better one" in over
    for said in ("tested, not over all", "went on from the first comparison", "the race left"):
        assert said not in over
    trying = markdown(concluded(plan, run(plan, until="compare", arm1=0.9)), tmp_path / "trying")
    assert "the fine stage tried" not in trying


def test_trials_that_never_reached_the_threshold_are_counted_by_arm(tmp_path: Path) -> None:
    plan = study_plan(metrics=(THRESHOLD,), margin=2.0, direction="decrease", planned_effect=20.0)
    rows = {"lr=base": (9, 10, None), "lr=4e-05": (8, None, None)}
    trials = [reaching_trial(plan, arm, seed, step) for arm, row in rows.items() for seed, step in enumerate(row)]
    data = concluded(plan, trials)
    written = write_report(data, tmp_path)
    text = Path(written.files["markdown"]).read_text()
    assert (
        "3 trials never reached the threshold of `steps_to_half` (1 of `lr=base`, 2 of `lr=4e-05`) and count as" in text
    )
    assert "never called equal" in text
    assert "- `H1`: train all arms for more steps" in text
    assert verify(data, written.claims, written.files) == []


def test_failures_are_in_the_denominators_and_named(tmp_path: Path) -> None:
    text = markdown(with_failures(), tmp_path)
    assert "6 trials: 5 done, 1 failed, 0 not ended." in text
    assert "Failed: `lr=4e-05` seed 2" in text
    assert "the client kept crashing" in text


def test_without_finished_trials_sentinels_are_not_called_quiet(tmp_path: Path) -> None:
    plan = study_plan(sentinels=("contention",))
    text = markdown(concluded(plan, [failed_trial(plan, "lr=base", seed) for seed in range(3)]), tmp_path)
    assert "`contention`: unchecked" in text
    assert "quiet" not in text


def test_quotations_cannot_become_markup_or_leak_keys(tmp_path: Path) -> None:
    topic = "a | b <script>alert(1)</script> [x](y) sk-abcdefghijklmnop"
    plan = study_plan()
    data = concluded(plan, trials_with(plan, {"lr=base": (0.30, 0.31, 0.32)}), topic=topic)
    files = write_report(data, tmp_path).files
    html, text = (Path(files[kind]).read_text() for kind in ("html", "markdown"))
    assert "<script" not in html
    assert "<script" not in MarkdownIt("commonmark").render(text)
    assert "](y)" not in text.replace("\\]", "")
    assert "sk-abc" not in html + text


def test_drawings_beside_the_markdown_stand_alone(tmp_path: Path) -> None:
    written = write_report(two_arms((0.55, 0.56, 0.54)), tmp_path)
    text = Path(written.files["markdown"]).read_text()
    for kind in ("curves", "effects"):
        assert f"]({kind}.svg)" in text
        assert Path(written.files[kind]).read_text().startswith('<svg xmlns="http://www.w3.org/2000/svg"')
    assert Path(written.files["curves"]).read_text().count("<polyline") == 6 + 2 + 2  # seeds, means, held-out points


def test_a_direction_that_nobody_claimed_is_marked_wherever_it_decides(tmp_path: Path) -> None:
    plan = study_plan()
    open_question = plan.hypotheses[0].model_copy(update={"direction_assumed": True})
    plan = plan.model_copy(update={"hypotheses": (open_question,)})
    study = concluded(plan, trials_with(plan, {"lr=base": (0.55, 0.56, 0.54), "lr=4e-05": (0.05, 0.06, 0.04)}))
    said = markdown(study, tmp_path)
    assert "expected to increase (assumed: no direction is claimed)" in said
    assert "contradicts the assumed direction" in said
    assert "did better than" in said
    assert "stated direction" not in said
    assert "assumed" not in markdown(refuted(), tmp_path / "stated")


@pytest.mark.parametrize(
    ("means", "said"),
    [
        ((0.1, 0.5, 0.5), "By the plan's rule the middle one is the best; of 2 hypotheses:"),
        ((0.1, 0.5, 0.7), "By the plan's rule these trials do not establish a ranking of the arms; of 2 hypotheses:"),
    ],
)
def test_where_the_plan_asks_for_an_order_the_answer_begins_with_it(
    means: tuple[float, ...], said: str, tmp_path: Path
) -> None:
    plan = study_plan((2e-5, 4e-5))
    arms = tuple(arm.name for arm in plan.arms)
    when = Condition(kind="order", arms=arms, relations=("≪", "≈"), metric="auc")
    best = Branch(stage="compare", when=when, then="stop", reason="the middle one is the best")
    plan = plan.model_copy(update={"branches": (*plan.branches[:2], best, *plan.branches[2:])})
    noise = (-0.01, 0.0, 0.01)
    trials = trials_with(plan, {arm: [mean + e for e in noise] for arm, mean in zip(arms, means, strict=True)})
    assert answer(concluded(plan, trials), tmp_path).replace("`", "").startswith(said)


def test_without_spread_between_seeds_no_more_seeds_are_advised(tmp_path: Path) -> None:
    text = markdown(two_arms((0.5, 0.5, 0.5), (0.3, 0.3, 0.3)), tmp_path)
    assert "check whether the measurement is broken" in text.split("## What to ask next")[1]
    assert "more seeds are needed" not in text
    assert "the noise floor's trials do not differ at all" in text
    assert "2 seeds" not in text
    assert "seeds needed" not in text
    assert not re.search(r"^\| `H1` \|[^|]*\| 2 \|", text, re.MULTILINE)


@pytest.mark.parametrize(
    "text",
    [
        "a &lt;b&gt; &#60; &amp;",
        "__init__ and _this_ and a_b",
        "~~gone~~",
        "<b>*x*</b> [l](u) `c` | \\",
        "5 ~ 6 & 7; A&B",
    ],
)
def test_a_quotation_reads_in_markdown_as_it_was_written(text: str) -> None:
    said = quoted(text)
    reader = MarkdownIt("commonmark").enable(["table", "strikethrough"])
    assert unescape(re.sub(r"</?p>\n?", "", reader.render(said))) == text


def test_addresses_in_a_quotation_are_no_links() -> None:
    assert quoted("see https://a.b, www.c.d: HTTP://e") == r"see https\://a.b, www\.c.d: HTTP\://e"
    assert quoted("auc_reward at 16:30") == "auc_reward at 16:30"


def test_what_would_turn_or_hide_text_is_named(tmp_path: Path) -> None:
    data = replace(supported(), topic="a \u202eb\x1b c")
    written = write_report(data, tmp_path)
    for kind in ("markdown", "html"):
        assert "[U+202E]b" in Path(written.files[kind]).read_text().replace("\\", "")
        assert not re.search("[\u202e\x1b]", Path(written.files[kind]).read_text())


def test_lost_attempts_stand_beside_trials_that_did_not_fail(tmp_path: Path) -> None:
    written = write_report(lossy(), tmp_path)
    text = Path(written.files["markdown"]).read_text()
    assert "No trial failed, but 151 of 799 attempts at episodes of finished trials were lost." in text
    assert "| `lr=4e-05` | training | 445 | 6 | 139 | 2 |" in text
    assert "| `H1` | training | 31.7 % | 0 % | welch |" in text
    assert "level 0.05 for the whole study" in text
    assert "if an arm lost more than 40 % of its attempts" in text
    assert "First attempt lost to grader in `lr=4e-05`, seed 0:\n\n    Traceback:\n      File `grade.py`" in text
    page = Path(written.files["html"]).read_text()
    assert "<pre>Traceback:" in page
    assert "&lt;b&gt;KeyError&lt;/b&gt;" in page


def test_where_nothing_was_lost_the_report_says_so_and_where_nobody_counted_too(tmp_path: Path) -> None:
    text = Path(write_report(lossy((0, 0, 0)), tmp_path).files["markdown"]).read_text()
    assert "No trial failed, but 12 of 660 attempts" in text
    text = Path(write_report(supported(), tmp_path).files["markdown"]).read_text()
    assert "No trial failed. Not every finished trial recorded its lost attempts at episodes." in text


def test_seeds_of_an_arms_own_are_said_with_the_plan(tmp_path: Path) -> None:
    plan = study_plan(sentinels=())
    same = tuple(arm.model_copy(update={"levels": {"lr": 1e-5}}) for arm in plan.arms)
    plan = with_own_seeds(plan.model_copy(update={"arms": same}))
    offset = plan.arms[1].seed_offset
    trials = trials_with(plan, {"lr=base": (0.3, 0.31, 0.32)})
    trials += [done_trial(plan, plan.arms[1].name, offset + seed, 0.3 + 0.01 * seed) for seed in range(3)]
    data = concluded(plan, trials)
    written = write_report(data, tmp_path)
    said = "repeats another one on different seeds, so the comparison is unpaired"
    assert all(said in Path(written.files[kind]).read_text() for kind in ("markdown", "html"))
    [claim] = [claim for claim in written.claims if claim.name.endswith(".seed_offset")]
    assert claim.value == offset > 0
    assert verify(data, written.claims, written.files, written.seal) == []


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
    assert "cannot be recomputed here" in markdown
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
