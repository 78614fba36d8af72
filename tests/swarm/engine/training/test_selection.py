"""Advantages, the weights of tokens in the loss, and minibatches: every episode once, sizes even, drawn by the seed."""

from __future__ import annotations

from statistics import fmean, pstdev

import pytest

from swarm.engine.algorithms.rewards import group_relative
from swarm.engine.training.selection import (
    TrainedEpisode,
    branches,
    minibatches,
    reward_metrics,
    select,
    token_metrics,
)
from swarm.protocol.runspec import AlgorithmSpec, RunSpec
from tests.swarm.engine.batches import PROMPT, batch, branching_batch, call, conversation, episode, group


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
    made = branches(select(branching_batch(algorithm={"entropy": 0.1})).trained, algorithm)
    assert sum(branch.weight * len(branch.call.sampled_ids) for branch in made) == pytest.approx(1.0)


def test_timelines_weigh_the_same_however_many_calls_they_have() -> None:
    first = call("long/0", PROMPT, [70, 71])
    second = call("long/1", [*PROMPT, 70, 71, 9], [72, 73])
    fork = call("fork/0", [*PROMPT, 70, 75, 9], [74])
    algorithm = AlgorithmSpec.model_validate({"loss_agg": "timeline", "entropy": 0.1})
    made = branches(
        select(batch(group("a", episode("e", 1.0, fork, second, first)), algorithm={"entropy": 0.1})).trained, algorithm
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
    kept = branches(selection.trained, made.spec.algorithm)
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
    first, second = select(made).trained
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
    assert token_metrics(made) == {
        "tokens_called": 40.0,
        "tokens_merged": 11.0,
        "token_ratio": 40 / 11,
        "tokens_forced": 0.0,
    }


def trained() -> list[TrainedEpisode]:
    return [
        TrainedEpisode(episode_id=f"{group}-{slot}", group=group, calls=[], advantages=[])
        for group in range(4)
        for slot in range(3)
    ]


def spec(count: int, seed: int = 0) -> RunSpec:
    return RunSpec.model_validate({"optimizer": {"minibatches": count}, "seed": seed})


def names(parts: list[list[TrainedEpisode]]) -> list[list[str]]:
    return [[episode.episode_id for episode in part] for part in parts]


def test_every_episode_is_in_one_part_and_groups_stay_together() -> None:
    parts = minibatches(trained(), spec(4), step=1)
    assert sorted(name for part in names(parts) for name in part) == sorted(episode.episode_id for episode in trained())
    assert all(len({episode.group for episode in part}) == 1 for part in parts)


def test_the_order_follows_from_seed_and_step() -> None:
    assert names(minibatches(trained(), spec(2), 1)) == names(minibatches(trained(), spec(2), 1))
    drawn = [names(minibatches(trained(), spec(2, seed), step)) for seed in range(4) for step in (1, 2)]
    assert any(other != drawn[0] for other in drawn)


def test_there_are_no_more_parts_than_trained() -> None:
    assert len(minibatches(trained()[:2], spec(8), 1)) == 2
    assert names(minibatches(trained()[:2], spec(1), 1)) == [["0-0", "0-1"]]
