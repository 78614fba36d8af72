"""Advantages, and the weights of tokens in the loss."""

from __future__ import annotations

from statistics import fmean, pstdev

import pytest

from swarm.engine.algorithms.rewards import group_relative
from swarm.engine.lesson import branches, reward_metrics, select, token_metrics
from swarm.protocol.runspec import AlgorithmSpec

from .batches import PROMPT, batch, branching_batch, call, conversation, episode, group


def test_advantages_have_zero_mean_and_unit_deviation() -> None:
    advantages = group_relative([0.0, 0.5, 1.0, 1.0], "std")
    assert fmean(advantages) == pytest.approx(0.0, abs=1e-12)
    assert pstdev(advantages) == pytest.approx(1.0, rel=1e-5)


def test_without_norm_they_are_differences_to_the_mean() -> None:
    assert group_relative([0.0, 1.0], "none") == [-0.5, 0.5]


def test_equal_rewards_have_no_advantage_whatever_rounding_does() -> None:
    assert group_relative([0.1 + 0.2] * 3, "std") == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("unit", ["token", "call", "timeline", "episode"])
def test_the_weights_of_all_tokens_add_up_to_one(unit: str) -> None:
    algorithm = AlgorithmSpec.model_validate({"loss_agg": unit, "entropy": 0.1})
    made = branches(select(branching_batch(algorithm={"entropy": 0.1})).lessons, algorithm)
    assert sum(branch.weight * len(branch.call.sampled_ids) for branch in made) == pytest.approx(1.0)


def test_timelines_weigh_the_same_however_many_calls_they_have() -> None:
    first = call("long/0", PROMPT, [70, 71])
    second = call("long/1", [*PROMPT, 70, 71, 9], [72, 73])
    fork = call("fork/0", [*PROMPT, 70, 75, 9], [74])
    algorithm = AlgorithmSpec.model_validate({"loss_agg": "timeline", "entropy": 0.1})
    made = branches(
        select(batch(group("a", episode("e", 1.0, fork, second, first)), algorithm={"entropy": 0.1})).lessons, algorithm
    )
    weights = {branch.call.call_id: branch.weight for branch in made}
    assert weights == {"long/0": 1 / 8, "long/1": 1 / 8, "fork/0": 1 / 2}


def test_calls_without_advantage_are_left_out_and_the_others_keep_their_weight() -> None:
    made = batch(
        group(
            "a",
            conversation("low", 0.0, [[70, 2]]),
            conversation("middle", 0.5, [[71, 2]]),
            conversation("high", 1.0, [[72, 2]]),
        )
    )
    selection = select(made)
    assert selection.untrained == {}
    kept = branches(selection.lessons, made.spec.algorithm)
    assert [branch.call.call_id for branch in kept] == ["low/0", "high/0"]
    assert [branch.weight for branch in kept] == [pytest.approx(1 / 6)] * 2


def test_each_agent_is_compared_by_its_own_rewards() -> None:
    made = batch(
        group(
            "a",
            episode(
                "a1",
                1.0,
                call("p1", PROMPT, [70], agent="planner"),
                call("s1", PROMPT, [71], agent="solver"),
                planner=5.0,
            ),
            episode(
                "a2",
                0.0,
                call("p2", PROMPT, [72], agent="planner"),
                call("s2", PROMPT, [73], agent="solver"),
                planner=5.0,
            ),
        )
    )
    first, second = select(made).lessons
    assert [round(advantage, 3) for advantage in first.advantages] == [0.0, 1.0]
    assert [round(advantage, 3) for advantage in second.advantages] == [0.0, -1.0]


def test_metrics_count_every_episode_and_every_token_of_the_batch() -> None:
    made = batch(
        group("a", conversation("a1", 1.0, [[70, 2]]), conversation("a2", 0.0, [[70, 3]])),
        group("b", conversation("b1", 0.5, [[70, 2]]), conversation("b2", 0.5, [[70, 2]])),
    )
    assert reward_metrics(made) == {
        "reward_mean": 0.5,
        "reward_std": pytest.approx(0.3535533905932738),
        "zero_variance_share": 0.5,
    }
    assert token_metrics(made) == {"tokens_called": 40.0, "tokens_merged": 11.0, "token_ratio": 40 / 11}
