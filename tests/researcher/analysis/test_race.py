"""Races, fine stages and looks: who runs where, what gives a verdict and what never does."""

from __future__ import annotations

import numpy as np
import pytest

from researcher.analysis.decide import decide
from researcher.analysis.effects import method_for
from researcher.analysis.power import hypothesis_power, hypothesis_seeds, planning_alpha, seeds_for
from researcher.analysis.race import contenders, due, in_the_running, winning_chance
from researcher.analysis.samples import NotEnoughTrials
from researcher.analysis.verdicts import conclude
from researcher.design.arms import with_own_seeds
from researcher.design.stages import compared, raced, spending
from researcher.models import Effect, TrialRecord
from researcher.study.plan import ALPHA, Arm, Branch, Condition, Plan, Stage, StageKind, Verdict
from tests.fakes.raced_study import ARMS, BASE, race_plan, run, trials_of
from tests.fakes.study import done_trial, failed_trial, study_plan


def test_each_rung_halves_the_arms_and_doubles_the_seeds_and_the_best_is_confirmed_on_fresh_seeds() -> None:
    plan = race_plan()
    kinds = [(stage.kind, stage.keep, stage.seeds) for stage in plan.stages[1:]]
    assert kinds == [("coarse", None, 2), ("coarse", 3, 4), ("coarse", 2, 8), ("confirm", 1, 3)]
    trials = run(plan, until="confirm", arm0=0.1, arm1=0.5, arm2=0.2, arm3=0.4, arm4=0.3)
    assert set(contenders(plan, plan.stages[2], trials)) == {ARMS[1], ARMS[3], ARMS[4]}
    assert set(contenders(plan, plan.stages[3], trials)) == {ARMS[1], ARMS[3]}
    assert contenders(plan, plan.stages[4], trials) == (BASE, ARMS[1])
    confirmed = {trial.seed for trial in trials if trial.stage == "confirm"}
    assert not confirmed & {trial.seed for trial in trials if trial.stage != "confirm"}


def test_less_is_better_where_the_hypotheses_say_so() -> None:
    plan = race_plan()
    less = tuple(h.model_copy(update={"direction": "decrease"}) for h in plan.hypotheses)
    plan = plan.model_copy(update={"hypotheses": less})
    trials = run(plan, until="race-3", arm0=0.1, arm1=0.5, arm2=0.2, arm3=0.4, arm4=0.3)
    assert contenders(plan, plan.stages[4], trials) == (BASE, ARMS[0])


def test_a_race_gives_no_verdict_and_only_the_winner_is_tested_at_the_whole_alpha() -> None:
    plan = race_plan()
    for rung in ("race-1", "race-2", "race-3"):
        verdicts = conclude(plan, run(plan, until=rung, arm1=0.5)).verdicts
        assert {record.verdict for record in verdicts} == {Verdict.INCONCLUSIVE}
        assert all(record.effect is None for record in verdicts)
    trials = run(plan, until="confirm", arm1=0.5)
    by_name = {record.hypothesis: record for record in conclude(plan, trials).verdicts}
    winner = by_name.pop("H2")
    assert winner.verdict is Verdict.SUPPORTED
    assert winner.effect is not None
    assert winner.effect.level == pytest.approx(0.95)
    assert all("race" in record.reason for record in by_name.values())
    assert planning_alpha(plan, plan.hypotheses[0]) == ALPHA


def test_an_arm_whose_trials_all_failed_does_not_go_on_and_without_any_the_study_says_so() -> None:
    plan = race_plan()
    rung = plan.stages[1]
    failed = [
        failed_trial(plan, arm, seed).model_copy(update={"stage": rung.id})
        for arm, seed in due(plan, rung, rung.seeds, [])
    ]
    with pytest.raises(NotEnoughTrials, match="race-2"):
        contenders(plan, plan.stages[2], failed)
    onward = Branch(stage=rung.id, when=Condition(kind="always"), then="stage", to="race-2", reason="on")
    decision = decide(plan.model_copy(update={"branches": (onward,)}), rung.id, failed)
    assert (decision.action, decision.by_plan) == ("stop", False)
    one = [t for t in failed if t.arm != ARMS[2]] + [
        done_trial(plan, ARMS[2], seed, 0.1).model_copy(update={"stage": rung.id}) for seed in range(2)
    ]
    assert contenders(plan, plan.stages[2], one) == (ARMS[2],)


def test_while_the_race_runs_nobody_is_in_the_running() -> None:
    plan = race_plan()
    begun = run(plan, until="race-1")
    with pytest.raises(NotEnoughTrials, match=r"'race-2', .* was not run"):
        in_the_running(plan, plan.hypotheses[0], begun)
    cut = [*begun, done_trial(plan, ARMS[0], 5, 0.1).model_copy(update={"stage": "race-2"})]
    with pytest.raises(NotEnoughTrials, match="not over"):
        in_the_running(plan, plan.hypotheses[0], cut)


def test_rungs_grow_with_the_noise_and_power_counts_the_race() -> None:
    plan = race_plan()
    quiet, loud = (
        [done_trial(plan, BASE, seed, value) for seed, value in enumerate(values)]
        for values in ((0.1, 0.101, 0.102), (0.0, 0.1, 0.2))
    )
    assert [seeds_for(plan, stage, quiet) for stage in plan.stages[1:4]] == [2, 4, 8]
    grown = [seeds_for(plan, stage, loud) for stage in plan.stages[1:4]]
    assert grown[0] > 2
    assert grown[1:] == [2 * grown[0], 4 * grown[0]]
    assert hypothesis_power(plan, plan.hypotheses[0], quiet) > 0.99
    assert hypothesis_power(plan, plan.hypotheses[0], loud) < 0.5
    chances = [winning_chance(plan, first_rung_seeds=n, sigma=0.15, effect=0.15) for n in (2, 8, 32)]
    assert chances == sorted(chances)


def test_levels_that_optuna_tries_beside_a_race_make_it_no_easier_to_win() -> None:
    plain = race_plan()
    stages = raced(ARMS, ("lr=3e-05", "lr=5e-05"), BASE, (3, 6), 2, racing=True)
    searched = plain.model_copy(update={"stages": stages})
    for seeds in (2, 4, 8):
        chances = [winning_chance(plan, first_rung_seeds=seeds, sigma=0.15, effect=0.15) for plan in (plain, searched)]
        assert chances[0] == chances[1]


def test_optuna_picks_among_the_frozen_arms_one_after_the_other_and_the_same_records_give_the_same_picks() -> None:
    plan = race_plan(fine=3)
    stage = next(stage for stage in plan.stages if stage.kind is StageKind.FINE)
    trials: list[TrialRecord] = []
    grown: list[int] = []
    while len(pairs := due(plan, stage, stage.seeds, trials)) > len(trials):
        grown.append(len({arm for arm, _ in pairs}))
        trials = trials_of(plan, stage, stage.seeds, trials, arm3=0.9)
    assert grown == [1, 2, 3]
    picks = contenders(plan, stage, trials)
    assert len(set(picks)) == 3
    assert set(picks) <= set(stage.arms)
    assert picks == contenders(plan, stage, list(reversed(trials)))
    assert contenders(plan, plan.stages[-1], trials) == (BASE, ARMS[3])


def test_beside_a_fine_stage_what_was_asked_is_tested_whichever_level_between_wins() -> None:
    plan = race_plan(fine=2)
    trials = run(plan, until="confirm", arm1=0.9, arm3=0.5)
    assert {BASE, *ARMS[:2]} <= {trial.arm for trial in trials}
    asked, further = (conclude(plan, trials).verdicts[part] for part in (slice(0, 2), slice(2, None)))
    assert all(record.effect is not None for record in asked)
    assert asked[1].verdict is Verdict.SUPPORTED
    assert [record.effect is not None for record in further].count(True) == 1
    assert planning_alpha(plan, plan.hypotheses[0]) == ALPHA / 2
    assert planning_alpha(plan, plan.hypotheses[-1]) == ALPHA


def look_plan() -> Plan:
    plan = study_plan(max_seeds=8)
    stages = compared([arm.name for arm in plan.arms], BASE, (4, 8), 2, ALPHA)
    return plan.model_copy(update={"stages": stages})


def test_the_looks_spend_alpha_and_no_more_little_of_it_early() -> None:
    for looks in (2, 3, 5):
        parts = spending([number / looks for number in range(1, looks + 1)], ALPHA)
        assert sum(parts) == pytest.approx(ALPHA)
        assert parts == sorted(parts)
    assert spending([0.5, 1.0], ALPHA)[0] == pytest.approx(0.0056, abs=1e-4)


def test_a_look_is_judged_at_what_it_may_spend_and_the_last_one_that_began_counts() -> None:
    plan = look_plan()
    first, last = plan.stages[1:]
    rows = {BASE: [0.1, 0.11, 0.12, 0.13], "lr=4e-05": [0.5, 0.52, 0.51, 0.53]}

    def drawn(stage: Stage, seeds: range) -> list[TrialRecord]:
        return [
            done_trial(plan, arm, seed, values[seed % 4]).model_copy(update={"stage": stage.id})
            for arm, values in rows.items()
            for seed in seeds
        ]

    early = conclude(plan, drawn(first, range(2))).verdicts[0]
    assert early.effect is not None
    assert early.effect.level == pytest.approx(1 - (first.spends or 0))
    late = conclude(plan, [*drawn(first, range(2)), *drawn(last, range(2, 4))]).verdicts[0]
    assert late.verdict is Verdict.SUPPORTED
    assert late.effect is not None
    assert late.effect.level == pytest.approx(1 - (last.spends or 0))
    begun = [*drawn(first, range(2)), *drawn(last, range(2, 3))]
    assert conclude(plan, begun).verdicts[0].verdict is Verdict.INCONCLUSIVE


@pytest.mark.parametrize("treatments", [(4e-5,), (2e-5, 3e-5, 4e-5)])
@pytest.mark.parametrize("effect", [0.0, 0.5])
def test_an_early_look_at_many_seeds_says_what_its_p_values_say(treatments: tuple[float, ...], effect: float) -> None:
    """What it may spend is less than any p-value that resamples can show."""
    plan = study_plan(treatments)
    plan = plan.model_copy(update={"stages": compared([arm.name for arm in plan.arms], BASE, (80, 80), 4, ALPHA)})
    look = plan.stages[1]
    rng = np.random.default_rng(0)
    trials = [
        done_trial(plan, arm.name, seed, value).model_copy(update={"stage": look.id})
        for arm in plan.arms
        for seed, value in enumerate(rng.normal(0.0 if arm.name == BASE else effect, 0.03, 20).tolist())
    ]
    for record in conclude(plan, trials).verdicts:
        found = record.effect
        assert found is not None
        assert found.method == "welch"
        assert (found.low > 0 or found.high < 0) == (found.p_adjusted <= (look.spends or 0))
        assert record.verdict is (Verdict.SUPPORTED if effect else Verdict.EQUIVALENT)


def test_a_look_takes_its_share_of_the_seeds() -> None:
    plan = look_plan()
    floor = [done_trial(plan, BASE, seed, value) for seed, value in enumerate((0.0, 0.05, 0.1, 0.15))]
    needed = hypothesis_seeds(plan, plan.hypotheses[0], floor)
    assert needed > 8
    assert [seeds_for(plan, stage, floor) for stage in plan.stages[1:]] == [4, 8]


def test_what_a_later_rung_finds_does_not_change_who_came_through_an_earlier_one() -> None:
    plan = race_plan()
    trials = run(plan, until="race-1", arm0=0.1, arm1=0.5, arm2=0.4, arm3=0.3, arm4=0.2)
    through = contenders(plan, plan.stages[2], trials)
    later = trials_of(plan, plan.stages[2], 4, trials, arm0=0.1, arm1=-5.0, arm2=0.4, arm3=0.3, arm4=0.2)
    assert contenders(plan, plan.stages[2], later) == through
    assert ARMS[1] not in contenders(plan, plan.stages[3], later)


def test_equal_arms_are_compared_unpaired_and_differ_by_chance() -> None:
    plan = study_plan(seeds=4, max_seeds=4)
    same = tuple(Arm(name=arm.name, levels={"lr": 1e-5}) for arm in plan.arms)
    plan = with_own_seeds(plan.model_copy(update={"arms": same}))
    stage = plan.stages[-1]
    trials = [
        done_trial(plan, arm, seed, 0.3 + 0.01 * ((7 * seed) % 5)) for arm, seed in due(plan, stage, stage.seeds, [])
    ]
    effect = conclude(plan, trials).effects["H1"]
    assert isinstance(effect, Effect)
    assert (effect.method, effect.n_baseline, effect.n_treatment) == ("welch", 4, 4)
    assert effect.low < effect.high
    assert method_for(plan, plan.hypotheses[0], trials) == "welch"
