"""Whole studies for the report: plan, trials, and the verdicts and decisions that a conduct would have recorded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from researcher.analysis.knowledge import findings_of
from researcher.analysis.verdicts import conclude
from researcher.models import Attrition, EpisodeAttempts, Event, StudyData, StudyStatus, TrialEvidence, TrialRecord
from researcher.report.records import Records
from researcher.study.plan import Plan
from swarm.protocol.episodes import Cause
from tests.fakes.study import SENTINELS, done_trial, failed_trial, planned_trial, study_plan, trials_with

BASE = (0.30, 0.31, 0.32)
TREATMENT = "lr=4e-05"


def concluded(plan: Plan, trials: Sequence[TrialRecord], *, topic: str | None = None) -> StudyData:
    """The study as the store would give it after its report was asked for."""
    bare = StudyData(
        study_id="st-1",
        topic=topic or plan.question,
        plan=plan,
        plan_hash=plan.digest(),
        trials=tuple(trials),
        verdicts=conclude(plan, trials).verdicts,
    )
    path = Records(bare).path
    over = bool(path) and path[-1].action != "stage"
    names = ("after", "action", "to", "seeds", "seeds_needed", "power", "reason")
    events = [
        Event(seq=number, study_id="st-1", at=0.0, kind="decision", detail={name: getattr(one, name) for name in names})
        for number, one in enumerate(path, start=1)
    ]
    findings = findings_of(bare.study_id, plan, bare.verdicts, 0.0, trials) if over else []
    return dataclasses.replace(bare, events=tuple(events), findings=tuple(findings))


def two_arms(treatment: Sequence[float], base: Sequence[float] = BASE) -> StudyData:
    plan = study_plan(sentinels=SENTINELS)
    return concluded(plan, trials_with(plan, {"lr=base": base, TREATMENT: treatment}))


def supported() -> StudyData:
    return two_arms((0.55, 0.56, 0.54))


def refuted() -> StudyData:
    return two_arms((0.05, 0.06, 0.04))


def equivalent() -> StudyData:
    return two_arms((0.305, 0.315, 0.31))


def inconclusive() -> StudyData:
    return two_arms((0.1, 0.5, 0.4))


def underpowered() -> StudyData:
    plan = study_plan()
    return concluded(plan, trials_with(plan, {"lr=base": (0.1, 0.5, 0.9)}))


def invalid() -> StudyData:
    plan = study_plan(sentinels=SENTINELS)
    trials = trials_with(plan, {"lr=base": BASE})
    trials += [
        done_trial(plan, TREATMENT, seed, value, series={"weights_change": [0.0] * 4})
        for seed, value in enumerate((0.55, 0.56, 0.54))
    ]
    return concluded(plan, trials)


def lossy(lost: Sequence[int] = (40, 52, 47)) -> StudyData:
    """So many attempts at training episodes were lost to the grader in the treatment's trials; two to the server in each trial."""
    plan = study_plan(sentinels=SENTINELS)
    trials = []
    for arm, counts in (("lr=base", (0, 0, 0)), (TREATMENT, lost)):
        for seed, count in enumerate(counts):
            causes = {Cause.GRADER: count, Cause.SERVER: 2} if count else {Cause.SERVER: 2}
            train = EpisodeAttempts(attempts=100 + sum(causes.values()), lost=causes, set_aside=int(count > 45))
            first = {Cause.GRADER: "Traceback:\n  File `grade.py`\n\n<b>KeyError</b>"} if count else {}
            found = Attrition(train=train, eval=EpisodeAttempts(attempts=8), first=first)
            value = (0.3 if arm == "lr=base" else 0.55) + 0.01 * seed
            trials.append(done_trial(plan, arm, seed, value, evidence=TrialEvidence(attrition=found)))
    return concluded(plan, trials)


def with_failures() -> StudyData:
    plan = study_plan()
    trials = trials_with(plan, {"lr=base": BASE, TREATMENT: (0.55, 0.56)})
    return concluded(plan, [*trials, failed_trial(plan, TREATMENT, 2)])


def all_failed() -> StudyData:
    plan = study_plan()
    trials = trials_with(plan, {"lr=base": BASE})
    return concluded(plan, trials + [failed_trial(plan, TREATMENT, seed) for seed in range(3)])


def unfinished() -> StudyData:
    plan = study_plan()
    trials = trials_with(plan, {"lr=base": BASE, TREATMENT: (0.55,)})
    return concluded(plan, trials + [planned_trial(plan, TREATMENT, seed) for seed in (1, 2)])


def stopped() -> StudyData:
    return dataclasses.replace(unfinished(), status=StudyStatus.STOPPED, reason="stopped on request")


def many_arms() -> StudyData:
    plan = study_plan((2e-5, 4e-5, 1e-4), sentinels=SENTINELS, assumptions=("the topic names no metric",))
    values = {
        "lr=base": BASE,
        "lr=2e-05": (0.31, 0.30, 0.32),
        "lr=4e-05": (0.55, 0.56, 0.54),
        "lr=0.0001": (0.1, 0.3, 0.2),
    }
    return concluded(plan, trials_with(plan, values))


STUDIES: Mapping[str, Callable[[], StudyData]] = {
    study.__name__: study
    for study in (
        supported,
        refuted,
        equivalent,
        inconclusive,
        underpowered,
        invalid,
        lossy,
        with_failures,
        all_failed,
        unfinished,
        stopped,
        many_arms,
    )
}
