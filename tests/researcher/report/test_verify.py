"""A report holds exactly as long as the records say what it says."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from researcher.models import (
    AttemptRecord,
    Attrition,
    EpisodeAttempts,
    StudyData,
    TrialEvidence,
    TrialRecord,
    TrialStatus,
)
from researcher.report.conducted import Difference
from researcher.report.verify import verify
from researcher.report.writer import Written, claims_digest, digest, wording, write_report
from researcher.study.plan import Verdict
from swarm.protocol.episodes import Cause
from tests.fakes.concluded_study import STUDIES, concluded, many_arms, supported, with_failures
from tests.fakes.raced_study import race_plan, run
from tests.fakes.study import THRESHOLD, reaching_trial, study_plan


def changed(data: StudyData, number: int, **fields: Any) -> StudyData:
    trials = list(data.trials)
    trials[number] = trials[number].model_copy(update=fields)
    return dataclasses.replace(data, trials=tuple(trials))


def with_point(trial: TrialRecord, name: str, value: float) -> dict[str, Any]:
    line = trial.series[name]
    return {**trial.series, name: [(line[0][0], value), *line[1:]]}


def named(differences: list[Difference]) -> set[str]:
    return {difference.claim for difference in differences}


@pytest.fixture
def data() -> StudyData:
    return supported()


@pytest.fixture
def report(data: StudyData, tmp_path: Path) -> Written:
    return write_report(data, tmp_path)


@pytest.mark.parametrize("name", sorted(STUDIES))
def test_an_untouched_report_holds(name: str, tmp_path: Path) -> None:
    data = STUDIES[name]()
    written = write_report(data, tmp_path)
    assert verify(data, written.claims, written.files) == []


@pytest.mark.parametrize("until", ["race-1", "confirm"])
def test_an_untouched_report_of_a_race_holds(until: str, tmp_path: Path) -> None:
    plan = race_plan()
    data = concluded(plan, run(plan, until=until, arm1=0.5))
    written = write_report(data, tmp_path)
    assert verify(data, written.claims, written.files) == []


def test_every_altered_final_is_found_and_its_claims_are_named(data: StudyData, report: Written) -> None:
    for number, trial in enumerate(data.trials):
        found = verify(changed(data, number, finals={"auc": 0.9}), report.claims, report.files)
        claim = f"trial.{trial.arm}.{trial.seed}.auc"
        first = next(difference for difference in found if difference.claim == claim)
        assert found[0] == first
        assert first.expression == f'final("auc", arm="{trial.arm}", seed={trial.seed})'
        assert first.reported == pytest.approx(trial.finals["auc"])
        assert first.recomputed == 0.9
        assert trial.key in first.problem
        assert "H1.diff" in named(found)


@pytest.mark.parametrize("series", ["reward_mean", "step_s", "entropy", "eval_reward_after"])
def test_every_altered_value_of_a_step_is_found_and_a_claim_is_named(
    data: StudyData, report: Written, series: str
) -> None:
    tampered = changed(data, 1, series=with_point(data.trials[1], series, 0.77))
    assert "trial.lr=base.1.fingerprint" in named(verify(tampered, report.claims, report.files))


def test_a_final_altered_together_with_its_series_is_found(data: StudyData, report: Written) -> None:
    series = {**data.trials[0].series, "reward_mean": [(step, 0.1) for step in range(1, 5)]}
    found = verify(changed(data, 0, finals={"auc": 0.1}, series=series), report.claims, report.files)
    assert {"trial.lr=base.0.auc", "H1.diff", "H1.low", "noise.auc.sigma"} <= named(found)
    diff = next(difference for difference in found if difference.claim == "H1.diff")
    assert diff.reported == pytest.approx(0.24)
    assert diff.recomputed == pytest.approx(0.24 + 0.2 / 3)


def test_a_removed_or_renamed_failure_is_found(tmp_path: Path) -> None:
    data = with_failures()
    report = write_report(data, tmp_path)
    without = dataclasses.replace(data, trials=data.trials[:-1])
    assert "study.failed" in named(verify(without, report.claims, report.files))
    other = changed(data, -1, reason="nothing to see")
    assert named(verify(other, report.claims, report.files)) >= {"trial.lr=4e-05.2.fingerprint", "file report.md"}


def test_a_plan_changed_after_it_was_frozen_is_found(data: StudyData, report: Written) -> None:
    easier = data.plan.model_copy(update={"planned_effect": 0.3})
    found = verify(dataclasses.replace(data, plan=easier), report.claims, report.files)
    assert found[0].claim == "plan"
    assert (found[0].reported, found[0].recomputed) == (data.plan_hash, easier.digest())


def test_a_recorded_verdict_that_does_not_follow_is_found(data: StudyData, report: Written) -> None:
    record = data.verdicts[0]
    assert record.effect is not None
    other = record.model_copy(update={"verdict": Verdict.REFUTED})
    shifted = record.model_copy(update={"effect": record.effect.model_copy(update={"high": 9.0})})
    for verdicts in ((other,), (shifted,), ()):
        found = verify(dataclasses.replace(data, verdicts=verdicts), report.claims, report.files)
        assert named(found) == {"verdict H1"}


def test_a_recorded_decision_that_does_not_follow_is_found(data: StudyData, report: Written) -> None:
    first = data.events[0]
    more = first.model_copy(update={"detail": {**first.detail, "seeds": 99}})
    found = verify(dataclasses.replace(data, events=(more, *data.events[1:])), report.claims, report.files)
    assert [(one.claim, one.expression, one.reported) for one in found] == [("decision floor", "seeds", 99)]
    found = verify(dataclasses.replace(data, events=data.events[:1]), report.claims, report.files)
    assert named(found) == {"decision compare"}
    emptied = first.model_copy(update={"detail": {}})
    found = verify(dataclasses.replace(data, events=(emptied, *data.events[1:])), report.claims, report.files)
    assert "decision floor" in named(found)


@pytest.mark.parametrize("kind", ["markdown", "html", "curves", "effects"])
def test_one_changed_byte_in_a_file_is_found(data: StudyData, report: Written, kind: str) -> None:
    path = Path(report.files[kind])
    path.write_text(path.read_text().replace("0.240", "0.340", 1).replace("optimiser", "optimizer", 1))
    (found,) = verify(data, report.claims, report.files)
    assert found.claim == f"file {path.name}"
    assert "line" in found.problem
    path.unlink()
    (missing,) = verify(data, report.claims, report.files)
    assert "missing" in missing.problem


def test_altered_missing_and_added_claims_are_found(data: StudyData, report: Written) -> None:
    claims = {claim.name: claim for claim in report.claims}
    diff = claims["H1.diff"]
    for wrong in (
        diff.model_copy(update={"value": 0.5}),
        diff.model_copy(update={"text": "+0.500"}),
        diff.model_copy(update={"expression": "0.24"}),
        diff.model_copy(update={"expression": "open('x')"}),
        diff.model_copy(update={"expression": 'count_verdicts("won")'}),
        diff.model_copy(update={"expression": 'count_trials(status="won")'}),
        diff.model_copy(update={"expression": f"1{'0' * 400} / 3"}),
        diff.model_copy(update={"value": 10**400}),
    ):
        assert named(verify(data, [*({**claims, "H1.diff": wrong}).values()], report.files)) == {"H1.diff"}
    fewer = [claim for claim in report.claims if claim.name != "H1.diff"]
    assert named(verify(data, fewer, report.files)) == {"H1.diff"}
    more = [*report.claims, diff.model_copy(update={"name": "H1.extra"})]
    assert named(verify(data, more, report.files)) == {"H1.extra"}


def test_a_report_that_another_version_worded_is_held_against_what_that_version_wrote(
    data: StudyData, report: Written
) -> None:
    path = Path(report.files["markdown"])
    path.write_text(path.read_text().replace("optimiser", "optimizer", 1))
    seal = report.seal.model_copy(
        update={"wording": "another", "files": {**report.seal.files, "markdown": digest(path.read_bytes())}}
    )
    assert named(verify(data, report.claims, report.files, report.seal)) == {"file report.md"}
    assert verify(data, report.claims, report.files, seal) == []
    assert "H1.diff" in named(verify(changed(data, 0, finals={"auc": 0.9}), report.claims, report.files, seal))
    assert named(verify(data, report.claims[1:], report.files, seal)) == {"report", "file report.html"}
    assert named(verify(data, report.claims, {"markdown": str(path)}, seal)) >= {"file html"}
    path.write_text(path.read_text() + "It holds everywhere.")
    assert named(verify(data, report.claims, report.files, seal)) == {"file report.md"}
    path.unlink()
    assert named(verify(data, report.claims, report.files, seal)) == {"file report.md"}


def test_what_another_version_computed_otherwise_is_told_without_accusing_the_records(
    data: StudyData, report: Written
) -> None:
    diff = next(claim for claim in report.claims if claim.name == "H1.diff")
    claims = [diff.model_copy(update={"value": 9.5}) if claim is diff else claim for claim in report.claims]
    [finding] = data.findings
    [verdict] = data.verdicts
    then = dataclasses.replace(
        data,
        findings=(finding.model_copy(update={"verdict": Verdict.REFUTED}),),
        verdicts=(verdict.model_copy(update={"verdict": Verdict.REFUTED}),),
    )
    seal = report.seal.model_copy(update={"wording": "another", "claims": claims_digest(claims)})
    told = {each.claim: each.problem for each in verify(then, claims, report.files, seal)}
    assert "a different version of researcher computed it; `researcher report` rewrites the report" in told["H1.diff"]
    for name in ("verdict H1", f"finding {finding.id}"):
        assert "a different version of researcher concluded the study" in told[name]
    told = {each.claim: each.problem for each in verify(then, claims, report.files, report.seal)}
    assert not any("a different version" in told[name] for name in ("H1.diff", "verdict H1", f"finding {finding.id}"))


@pytest.mark.parametrize("kept", [(1, 2, 4, 5, 6, 7, 8, 9, 10), ()])
def test_steps_that_are_gone_are_told_of_by_the_claims_of_their_trial(kept: tuple[int, ...], tmp_path: Path) -> None:
    """With a threshold, which is looked for among the steps again when trials are compared."""
    plan = study_plan(metrics=(THRESHOLD,), margin=2.0, direction="decrease")
    rows = {"lr=base": (8, 9, 9), "lr=4e-05": (2, 3, 3)}
    data = concluded(
        plan, [reaching_trial(plan, arm, seed, at) for arm, row in rows.items() for seed, at in enumerate(row)]
    )
    report = write_report(data, tmp_path)
    series = {
        **data.trials[0].series,
        "reward_mean": [point for point in data.trials[0].series["reward_mean"] if point[0] in kept],
    }
    found = verify(changed(data, 0, series=series), report.claims, report.files, report.seal)
    assert found[0].claim.startswith("trial.lr=base.0.")
    assert {"trial.lr=base.0.steps_to_half", "H1.diff", "report"} <= named(found)


@pytest.mark.parametrize("kind", ["markdown", "html"])
def test_a_report_of_another_version_has_to_say_its_claims(data: StudyData, report: Written, kind: str) -> None:
    path = Path(report.files[kind])
    claim = next(claim for claim in report.claims if claim.name == "H1.diff")
    path.write_text(path.read_text().replace(claim.text, "+0.9999"))
    files = {**report.seal.files, kind: digest(path.read_bytes())}
    seal = report.seal.model_copy(update={"wording": "another", "files": files})
    assert "H1.diff" in named(verify(data, report.claims, report.files, seal))


def test_a_page_of_another_version_says_its_claims_wherever_it_says_them(data: StudyData, report: Written) -> None:
    path = Path(report.files["html"])
    claim = next(claim for claim in report.claims if claim.name == "H1.diff")
    marked = f">{claim.text}</data>"
    assert path.read_text().count(marked) > 1
    path.write_text(path.read_text().replace(marked, ">+0.9999</data>", 1))
    files = {**report.seal.files, "html": digest(path.read_bytes())}
    seal = report.seal.model_copy(update={"wording": "another", "files": files})
    (found,) = verify(data, report.claims, report.files, seal)
    assert (found.claim, found.expression, found.reported) == ("file report.html", claim.expression, "+0.9999")


@pytest.mark.parametrize("kind", ["markdown", "html"])
def test_a_report_of_another_version_says_no_number_that_no_claim_has(
    data: StudyData, report: Written, kind: str
) -> None:
    """Though the true one stands elsewhere in it."""
    path = Path(report.files[kind])
    text = path.read_text().replace("Yes: ", "It is so: ", 1)
    seal = report.seal.model_copy(update={"wording": "another"})

    def told(said: str) -> list[tuple[str, object]]:
        path.write_text(said)
        files = {**report.seal.files, kind: digest(path.read_bytes())}
        sealed = seal.model_copy(update={"files": files})
        return [(each.claim, each.reported) for each in verify(data, report.claims, report.files, sealed)]

    assert told(text) == []
    forged = text.replace("This rests on", "With 0.9999 in half of the trials, this rests on", 1)
    assert forged != text
    assert told(forged) == [(f"file {path.name}", "0.9999")]


def test_where_another_version_concluded_a_study_its_reasons_are_held_to_their_numbers(
    data: StudyData, tmp_path: Path
) -> None:
    """Also once the report is ours."""
    [verdict] = data.verdicts
    first = data.events[0]

    def told(reason: str, decided: str, wording: str) -> set[str]:
        seal = {"files": {}, "claims": "", "wording": wording}
        written = first.model_copy(update={"seq": 99, "kind": "report", "detail": {"seal": seal}})
        decision = first.model_copy(update={"detail": {**first.detail, "reason": decided}})
        then = dataclasses.replace(
            data,
            verdicts=(verdict.model_copy(update={"reason": reason}),),
            events=(decision, *data.events[1:], written),
        )
        report = write_report(then, tmp_path)
        return named(verify(then, report.claims, report.files, report.seal))

    assert told("in other words", "so it was decided", "another") == set()
    assert told("in 7 words", "so it was decided", "another") == {"verdict H1"}
    assert told(verdict.reason, "on 7 grounds", "another") == {"decision floor"}
    assert told("in other words", first.detail["reason"], wording()) == {"verdict H1"}


def test_a_reason_that_another_version_worded_is_no_forgery(data: StudyData, report: Written) -> None:
    reason = next(claim for claim in report.claims if claim.name == "H1.reason")
    claims = [reason.model_copy(update={"value": "so it is"}) if claim is reason else claim for claim in report.claims]
    seal = report.seal.model_copy(update={"wording": "another", "claims": claims_digest(claims)})
    assert verify(data, claims, report.files, seal) == []
    assert named(verify(data, claims, report.files, report.seal.model_copy(update={"claims": seal.claims}))) == {
        "H1.reason"
    }


def test_findings_that_the_study_does_not_leave_are_named(data: StudyData, report: Written) -> None:
    [finding] = data.findings
    for found, field in (
        ((), ""),
        ((finding, finding.model_copy(update={"id": "st-1/H9"})), ""),
        ((finding.model_copy(update={"verdict": Verdict.REFUTED}),), "verdict"),
        ((finding.model_copy(update={"scope": {}}),), "scope"),
    ):
        told = verify(dataclasses.replace(data, findings=found), report.claims, report.files, report.seal)
        assert [(each.claim[:8], each.expression) for each in told] == [("finding ", field)]


def test_what_was_sent_is_what_was_run(data: StudyData, tmp_path: Path) -> None:
    sent = {"seed": 0, "dtype": "auto", "optimizer": {"learning_rate": 1e-5, "warmup": 0}, "newer": 1}
    held = {"seed": 0, "dtype": "float32", "optimizer": {"learning_rate": 1e-5, "warmup": 0}}
    evidence = TrialEvidence(spec=held, changes=[])
    data = changed(data, 0, attempt=1, evidence=evidence)
    report = write_report(data, tmp_path)

    def told(spec: dict[str, Any], evidence: TrialEvidence = evidence) -> list[tuple[str, object, object]]:
        found = changed(data, 0, evidence=evidence)
        tried = {trial.key: attempts(trial, spec) for trial in found.trials}
        differences = verify(dataclasses.replace(found, attempts=tried), report.claims, report.files, report.seal)
        return [(each.expression, each.reported, each.recomputed) for each in differences if "attempts" in each.claim]

    assert told(sent) == []
    other = sent | {"optimizer": {"learning_rate": 1.0, "warmup": 0}}
    assert told(other) == [("optimizer.learning_rate", 1.0, 1e-5)]
    assert told(other, evidence.model_copy(update={"changes": [{"patch": {}}]})) == []


def test_a_client_that_scored_other_held_out_tasks_than_planned_is_found(data: StudyData, tmp_path: Path) -> None:
    plan = data.plan.model_copy(update={"heldout_from": 20})
    data = changed(concluded(plan, data.trials), 0, attempt=1)
    report = write_report(data, tmp_path)

    def told(heldout: dict[str, Any]) -> list[tuple[str, object, object]]:
        tried = {
            trial.key: [each.model_copy(update={"blueprint": {"heldout": heldout}}) for each in attempts(trial, {})]
            for trial in data.trials
        }
        differences = verify(dataclasses.replace(data, attempts=tried), report.claims, report.files, report.seal)
        return [
            (each.expression, each.reported, each.recomputed) for each in differences if "heldout" in each.expression
        ]

    scored = {"tasks": plan.heldout_tasks, "episodes": 1, "temperature": 0.0}
    assert told(scored | {"first": 20}) == []
    assert told(scored) == [("blueprint heldout.first", None, 20)]


def attempts(trial: TrialRecord, spec: dict[str, Any]) -> list[AttemptRecord]:
    """As many as the trial counts, the last one done."""
    made = AttemptRecord(
        study_id="st-1",
        trial_key=trial.key,
        number=1,
        server_url="http://a",
        idempotency_key="k",
        spec=spec,
        outcome="done",
        intent_at=0.0,
        heartbeat_at=0.0,
    )
    return [made.model_copy(update={"number": number}) for number in range(1, trial.attempt + 1)]


def test_verdicts_of_no_hypothesis_and_lost_decisions_are_named(data: StudyData, report: Written) -> None:
    extra = data.verdicts[0].model_copy(update={"hypothesis": "H9"})
    told = verify(dataclasses.replace(data, verdicts=(*data.verdicts, extra)), report.claims, report.files, report.seal)
    assert named(told) == {"verdict H9"}
    begun = data.events[-1].model_copy(update={"kind": "trial_begun", "detail": {}})
    told = verify(dataclasses.replace(data, events=(begun,)), report.claims, report.files, report.seal)
    assert {name.partition(" ")[0] for name in named(told)} == {"decision"}


def test_a_report_that_was_written_before_the_study_went_on_says_so(data: StudyData, report: Written) -> None:
    last = data.events[-1]
    written = last.model_copy(update={"seq": last.seq + 1, "kind": "report", "detail": {}})
    done = last.model_copy(update={"seq": last.seq + 2, "kind": "trial_done", "detail": {}})
    over = dataclasses.replace(data, events=(*data.events, written))
    assert verify(over, report.claims, report.files, report.seal) == []
    (found,) = verify(dataclasses.replace(over, events=(*over.events, done)), [], {}, report.seal)
    assert "`researcher report` rewrites the report" in found.problem


def test_a_trial_that_goes_on_is_no_tampering(data: StudyData, tmp_path: Path) -> None:
    """Its steps are recorded as they are made, which no event tells."""
    resting = changed(data, -1, status=TrialStatus.PAUSED, finals={}, series=data.trials[-1].series)
    resting = dataclasses.replace(resting, verdicts=(), events=(), findings=())
    written = write_report(resting, tmp_path)
    further = changed(resting, -1, series={**resting.trials[-1].series, "reward_mean": [(1, 0.9), (2, 0.1)]})
    assert verify(further, written.claims, written.files, written.seal) == []
    at = data.events[-1].model_copy(update={"kind": "report", "detail": {}})
    on = at.model_copy(update={"seq": at.seq + 1, "kind": "trial_continued"})
    (found,) = verify(dataclasses.replace(further, events=(at, on)), written.claims, written.files, written.seal)
    assert "the study has continued since" in found.problem


def test_a_report_that_was_never_written_does_not_hold(data: StudyData) -> None:
    assert {"H1.diff", "file report.md", "file report.html"} <= named(verify(data, [], {}))


def test_claims_survive_json(tmp_path: Path) -> None:
    data = many_arms()
    written = write_report(data, tmp_path)
    again = [type(claim).model_validate_json(claim.model_dump_json()) for claim in written.claims]
    assert verify(data, again, written.files) == []


def test_rows_of_lost_attempts_that_are_not_those_of_the_evidence_are_named(data: StudyData, report: Written) -> None:
    trial = data.trials[0]
    counts = EpisodeAttempts(attempts=9, lost={Cause.GRADER: 2})
    data = changed(data, 0, evidence=TrialEvidence(attrition=Attrition(train=counts)))
    rows = {(trial.arm, "train", "none"): 7, (trial.arm, "train", "grader"): 2, (trial.arm, "eval", "none"): 0}
    data = dataclasses.replace(data, attrition={trial.key: rows})
    subject = f"trial_attrition {trial.key}"
    assert subject not in named(verify(data, report.claims, report.files))
    for other in (rows | {(trial.arm, "train", "grader"): 1}, {}, rows | {("other", "train", "client"): 4}):
        altered = dataclasses.replace(data, attrition={trial.key: other})
        assert subject in named(verify(altered, report.claims, report.files))
