"""What training shows and held-out tasks contradict: no claim of a campaign, and no setting that it goes on with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from researcher.analysis.opposed import NAME
from researcher.campaign.builtin import survivors
from researcher.campaign.goal import Aim, AimFactor, CampaignGoal, aim_of
from researcher.campaign.records import observe
from researcher.campaign.seen import StudySeen, study_seen
from researcher.instruments.catalogue import open_instrument
from researcher.models import DecisionRecord, Role, VerdictRecord
from researcher.study.plan import Verdict
from tests.fakes.campaign import MadeUpCampaign
from tests.fakes.study import METRIC, done_trial, study_plan


def seen_of(role: Role, *sentinels: str) -> StudySeen:
    """A study of two arms whose only verdict is invalid because of these sentinels."""
    plan = study_plan()
    lr = AimFactor(name="lr", default=1e-5, levels=(1e-5, 4e-5), ordered=True)
    aim = Aim(
        instrument="arithmetic",
        model=None,
        metric=METRIC.name,
        direction="increase",
        margin=0.1,
        sigma=None,
        factors=(lr,),
    )
    decision = DecisionRecord(
        seq=1,
        saw_digest="0" * 64,
        saw={},
        strategist="builtin",
        proposals=[],
        action="explore" if role == "explore" else "confirm",
        because="a look",
        hypothesis="H1",
        role=role,
    )
    trials = [
        done_trial(plan, arm, seed, value) for arm, value in (("lr=base", 0.3), ("lr=4e-05", 0.6)) for seed in (0, 1)
    ]
    verdict = VerdictRecord(hypothesis="H1", verdict=Verdict.INVALID, reason="words", effect=None, sentinels=sentinels)
    return study_seen(decision, aim, plan, trials, [verdict], status="done", reason="", spent={})


def test_an_exploration_that_is_contradicted_stays_sound_and_says_which_arm_misleads() -> None:
    seen = seen_of("explore", NAME)
    assert (seen.sentinels, seen.unfit) == ((), "")
    assert {arm.name: arm.misleads for arm in seen.arms} == {"lr=base": False, "lr=4e-05": True}


def test_a_confirmation_that_is_contradicted_supports_nothing() -> None:
    seen = seen_of("confirm", NAME)
    assert seen.unfit == "what looks better in training is worse on held-out tasks"
    assert not seen.supports


def test_another_sentinel_beside_it_makes_the_study_unsound() -> None:
    seen = seen_of("explore", "heldout_leak", NAME)
    assert (seen.sentinels, seen.unfit) == (("heldout_leak",), "a sentinel fired")
    assert not any(arm.misleads for arm in seen.arms)


@pytest.mark.anyio
async def test_a_setting_that_misleads_counts_as_the_worst_that_was_measured(tmp_path: Path) -> None:
    made = MadeUpCampaign(tmp_path)
    await made.carry_out()
    seen = observe(made.store, made.id)
    before = seen.on().measured()
    best = max(before, key=lambda key: before[key][2])
    studies = [
        study.model_copy(
            update={
                "arms": tuple(arm.model_copy(update={"misleads": arm.levels == before[best][0]}) for arm in study.arms)
            }
        )
        for study in seen.studies
    ]
    after = seen.model_copy(update={"studies": tuple(studies)}).on().measured()
    assert after[best][2] == min(mean for _, _, mean in before.values()) < before[best][2]
    assert {key: value for key, value in after.items() if key != best} == {
        key: value for key, value in before.items() if key != best
    }


@pytest.mark.anyio
async def test_a_factor_that_misleads_is_searched_last(tmp_path: Path) -> None:
    made = MadeUpCampaign(tmp_path)
    await made.carry_out()
    seen = observe(made.store, made.id)
    assert survivors(seen.on())[0].name == "learning_rate"
    studies = [
        study.model_copy(
            update={
                "effects": tuple(
                    effect.model_copy(update={"misleads": effect.factor == "learning_rate"}) for effect in study.effects
                )
            }
        )
        for study in seen.studies
    ]
    misled = seen.model_copy(update={"studies": tuple(studies)})
    assert survivors(misled.on())[-1].name == "learning_rate"


@pytest.mark.parametrize(
    ("fields", "varied"),
    [
        ({}, False),
        ({"objective": {"metric": "heldout_accuracy"}}, True),
        ({"factors": ["temperature"]}, True),
    ],
    ids=["measured in training", "measured on held-out tasks", "named by the goal"],
)
def test_the_temperature_is_no_usual_factor_of_what_is_measured_in_training(
    fields: dict[str, Any], varied: bool
) -> None:
    goal = CampaignGoal.model_validate(
        {"goal": "better", "instruments": ["arithmetic"], "budget": {"trials": 100}, **fields}
    )
    aim = aim_of(goal, open_instrument("arithmetic").instrument)
    assert ("temperature" in {factor.name for factor in aim.factors}) is varied
