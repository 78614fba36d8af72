"""Lost attempts take a verdict where they differ between the sides, or are too many; never otherwise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from researcher.analysis.attrition import ALPHA, MOST_LOST, loss_tests
from researcher.analysis.sentinels import inspect
from researcher.analysis.verdicts import conclude
from researcher.models import Attrition, EpisodeAttempts, TrialEvidence, TrialRecord
from researcher.study.plan import PLANNED_SENTINELS, Plan, Stage, StageKind, Verdict
from swarm.protocol.episodes import Cause
from tests.fakes.study import done_trial, study_plan

BASE, TREAT, OTHER = "lr=base", "lr=4e-05", "lr=0.0001"
REWARDS = 256
ANY = Cause.ROLLOUT


def lost(counts: Mapping[Cause, int], rewards: int = REWARDS) -> EpisodeAttempts:
    return EpisodeAttempts(attempts=rewards + sum(counts.values()), lost=dict(counts))


def trial(
    plan: Plan, arm: str, seed: int, *, kind: str = "train", rewards: int = REWARDS, **counts: int
) -> TrialRecord:
    own = lost({Cause(cause): count for cause, count in counts.items() if count}, rewards)
    parts = {"train": lost({}), "eval": lost({}, 24)} | {kind: own}
    return done_trial(plan, arm, seed, 0.3 + 0.01 * seed, evidence=TrialEvidence(attrition=Attrition(**parts)))


def trials(plan: Plan, counts: Mapping[str, Sequence[int]], **fields: Any) -> list[TrialRecord]:
    """Arm → how many attempts its trials lost to the rollout, by seed."""
    return [
        trial(plan, arm, seed, rollout=count, **fields)
        for arm, line in counts.items()
        for seed, count in enumerate(line)
    ]


def plan_of(seeds: int, treatments: Sequence[float] = (4e-5,)) -> Plan:
    return study_plan(treatments, seeds=seeds, max_seeds=seeds, sentinels=("attrition",))


def verdicts(plan: Plan, found: Sequence[TrialRecord]) -> dict[str, Verdict]:
    return {record.hypothesis: record.verdict for record in conclude(plan, found).verdicts}


def test_new_plans_name_it() -> None:
    assert "attrition" in PLANNED_SENTINELS


@pytest.mark.parametrize("seeds", [3, 4, 5, 6, 8])
def test_a_side_that_loses_a_tenth_of_its_attempts_is_found_beside_one_that_loses_a_twentieth(seeds: int) -> None:
    plan = plan_of(seeds)
    base, treat = ([number + seed for seed in range(seeds)] for number in (11, 40))
    found = trials(plan, {BASE: base, TREAT: treat})
    (finding,) = inspect(plan, found)
    assert (finding.severity, set(finding.arms), finding.hypotheses) == ("invalid", {BASE, TREAT}, ("H1",))
    assert verdicts(plan, found) == {"H1": Verdict.INVALID}
    (test,) = loss_tests(plan, found)
    assert test.method == ("permutation" if seeds >= 4 else "welch")


@pytest.mark.parametrize("cause", ["rollout", "grader", "client", "limit"])
@pytest.mark.parametrize("kind", ["train", "eval"])
def test_each_cause_that_an_arm_may_bring_about_counts_in_training_and_in_held_out_episodes(
    cause: str, kind: str
) -> None:
    plan = plan_of(6)
    found = [trial(plan, BASE, seed, kind=kind) for seed in range(6)]
    found += [trial(plan, TREAT, seed, kind=kind, **{cause: 30}) for seed in range(6)]
    assert verdicts(plan, found) == {"H1": Verdict.INVALID}
    (finding,) = inspect(plan, found)
    assert ("training" if kind == "train" else "held-out") in finding.text


@pytest.mark.parametrize("cause", ["server", "network", "person"])
def test_what_server_network_or_a_person_lost_never_counts(cause: str) -> None:
    plan = plan_of(6)
    found = [trial(plan, BASE, seed) for seed in range(6)]
    counts: dict[str, Any] = {cause: 5 * REWARDS}
    found += [trial(plan, TREAT, seed, **counts) for seed in range(6)]
    assert inspect(plan, found) == []


def test_the_unit_is_the_trial_one_trial_that_lost_many_shows_no_difference() -> None:
    plan = plan_of(6)
    assert inspect(plan, trials(plan, {BASE: [0] * 6, TREAT: [0, 0, 200, 0, 0, 0]})) == []
    few = plan_of(3)
    assert inspect(few, trials(few, {BASE: [0] * 3, TREAT: [0, 100, 0]})) == []


def test_losses_that_are_spread_over_both_sides_are_reported_and_take_no_verdict() -> None:
    plan = plan_of(6)
    found = trials(plan, {BASE: [60, 72, 81, 66, 70, 90], TREAT: [75, 63, 84, 58, 77, 88]})
    assert inspect(plan, found) == []
    (test,) = loss_tests(plan, found)
    assert 0.2 < test.baseline < 0.25
    assert test.p_adjusted > ALPHA


def test_an_arm_that_loses_more_than_the_limit_means_little_though_the_other_loses_as_much() -> None:
    plan = plan_of(6)
    most = round(REWARDS * MOST_LOST / (1 - MOST_LOST))
    assert inspect(plan, trials(plan, {BASE: [*range(most - 8, most - 2)], TREAT: [*range(most - 9, most - 3)]})) == []
    (finding,) = inspect(plan, trials(plan, {BASE: [*range(most + 1, most + 7)], TREAT: [*range(most + 2, most + 8)]}))
    assert (finding.severity, set(finding.arms)) == ("invalid", {BASE, TREAT})
    assert (finding.value or 0) > MOST_LOST


def test_only_the_comparison_whose_sides_differ_loses_its_verdict() -> None:
    plan = plan_of(6, (4e-5, 1e-4))
    found = trials(plan, {BASE: [3, 1, 0, 2, 1, 4], TREAT: [2, 2, 1, 0, 3, 2], OTHER: [40, 55, 38, 61, 44, 50]})
    assert {id for id, verdict in verdicts(plan, found).items() if verdict is Verdict.INVALID} == {"H2"}


def test_without_counts_it_is_unchecked_and_what_was_counted_is_looked_at_all_the_same() -> None:
    plan = plan_of(6)
    bare = done_trial(plan, BASE, 6, 0.3, evidence=TrialEvidence())
    (finding,) = inspect(plan_of(7), [done_trial(plan_of(7), BASE, 0, 0.3)])
    assert finding.severity == "unchecked"
    wide = plan_of(7)
    found = [*trials(wide, {BASE: [0] * 6, TREAT: [60] * 6}), bare.model_copy(update={"key": "bare"})]
    assert {(each.severity, each.trials[:1]) for each in inspect(wide, found)} == {
        ("invalid", (found[0].key,)),
        ("unchecked", ("bare",)),
    }


def test_plans_that_were_frozen_before_keep_their_verdicts() -> None:
    plan = plan_of(6).model_copy(update={"sentinels": ()})
    found = trials(plan, {BASE: [0] * 6, TREAT: [90] * 6})
    assert verdicts(plan, found)["H1"] is not Verdict.INVALID


def test_looks_spend_the_level_as_they_spend_the_plans_alpha() -> None:
    looks = [
        Stage(id=id, kind=StageKind.COMPARE, arms=(BASE, TREAT), seeds=n, max_seeds=n, share=share, spends=spends)
        for id, n, share, spends in (("look-1", 4, 0.5, 0.005), ("look-2", 8, 1.0, 0.045))
    ]
    plan = plan_of(8).model_copy(update={"stages": tuple(looks)})
    found = [each.model_copy(update={"stage": "look-1"}) for each in trials(plan, {BASE: [0] * 4, TREAT: [9] * 4})]
    (early,) = loss_tests(plan, found)
    assert early.level == pytest.approx(ALPHA / 10)
    assert early.method == "welch"


def test_noise_floor_trials_alone_are_no_comparison() -> None:
    plan = plan_of(6)
    assert loss_tests(plan, trials(plan, {BASE: [9] * 6})) == []
    assert loss_tests(plan, trials(plan, {BASE: [9] * 6, TREAT: [90]})) == []
