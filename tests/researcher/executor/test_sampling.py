"""A sample of episodes: spread over training and evaluations, bounded, without secrets."""

from __future__ import annotations

import json
from typing import Any

from researcher.executor.sampling import (
    EVAL,
    MOST_CALLS,
    MOST_CHARACTERS,
    TRAIN,
    _episode,
    bounded,
    chosen,
)
from swarm.client.interim import interim_id
from swarm.protocol.episodes import (
    EpisodeState,
    EpisodeTrace,
    LedgerEntry,
    RecordedCall,
    RecordedSampling,
    VersionSpan,
    WeightsVersion,
)


def an_entry(number: int, **changes: Any) -> LedgerEntry:
    fields: dict[str, Any] = {
        "episode_id": f"ep-{number:03}", "run_id": "run-1", "kind": "train", "task_id": "t", "mix": None,
        "client_id": "c", "client_version": "0", "config_version": 1, "group_id": None, "slot": None,
        "state": EpisodeState.TRAINED, "claimed_step": number // 8, "reward": 1.0, "calls": 1,
        "claimed_at": float(number), "ended_at": number + 1.0,
    }  # fmt: skip
    return LedgerEntry(**{**fields, **changes})


def a_call(index: int, **changes: Any) -> RecordedCall:
    fields: dict[str, Any] = {
        "call_id": f"call-{index}", "episode_id": "ep-000", "index": index, "agent": None, "dialect": "chat",
        "prompt_ids": [1, 2, 3], "sampled_ids": [4, 5], "logprobs": [-1.0, -2.0],
        "sampling": RecordedSampling(temperature=1.0),
        "versions": [VersionSpan(start=0, end=2, version=WeightsVersion(run_id="run-1", step=3))],
        "finish_reason": "stop", "started_at": 1.0, "latency_s": 0.5,
        "request": {"messages": [{"role": "user", "content": "hi"}]}, "answer": {"content": "ho"},
    }  # fmt: skip
    return RecordedCall(**{**fields, **changes})


def test_the_sample_reaches_from_the_first_training_episode_to_the_last_and_over_both_evaluations() -> None:
    train = [an_entry(number) for number in range(10, 90)]
    before = [an_entry(number, kind="eval", claimed_step=0, task_id=f"t-{number:02}") for number in range(10)]
    after = [an_entry(number, kind="eval", claimed_step=9, task_id=f"t-{number:02}") for number in range(90, 100)]
    unplayed = [an_entry(200, reward=None), an_entry(201, calls=0)]
    taken = [entry.episode_id for entry in chosen([*after, *train, *before, *unplayed])]
    assert len(taken) == TRAIN + 2 * EVAL
    assert taken == sorted(taken)
    assert {"ep-000", "ep-009", "ep-010", "ep-089", "ep-090", "ep-099"} <= set(taken)


def test_held_out_samples_are_of_the_same_tasks_whichever_was_answered_first() -> None:
    tasks = ["a", "b", "c"]
    one = [an_entry(number, kind="eval", claimed_step=0, task_id=task) for number, task in enumerate(tasks * 2)]
    other = [an_entry(number, kind="eval", claimed_step=0, task_id=task) for number, task in enumerate(tasks[::-1] * 2)]
    assert [entry.task_id for entry in chosen(one)] == ["a", "c"]
    assert sorted(entry.task_id for entry in chosen(other)) == ["a", "c"]


def test_of_interim_evaluations_the_newest_is_shown_and_one_halfway_on_the_same_tasks_as_around_them() -> None:
    tasks = ["a", "b", "c", "d"]
    around = [
        an_entry(number, kind="eval", claimed_step=step, task_id=task)
        for step in (0, 50)
        for number, task in enumerate(tasks, start=step * 100)
    ]
    between = [
        an_entry(step * 100 + number, kind="eval", claimed_step=step, task_id=task, client_id=interim_id("c"))
        for step in range(10, 50, 10)
        for number, task in enumerate(["b", "c"])
    ]
    taken = [(entry.claimed_step, entry.task_id) for entry in chosen([*around, *between])]
    assert taken == [(step, task) for step in (0, 20, 40, 50) for task in ("b", "c")]
    under_way = [(entry.claimed_step, entry.task_id) for entry in chosen([*around[:4], *between[:2]])]
    assert under_way == [(step, task) for step in (0, 10) for task in ("b", "c")]


def test_few_episodes_are_all_taken() -> None:
    assert [entry.episode_id for entry in chosen([an_entry(1), an_entry(0)])] == ["ep-000", "ep-001"]
    assert chosen([]) == []


def test_an_episode_of_many_calls_keeps_its_first_and_last() -> None:
    calls = [a_call(index) for index in range(100)]
    found = _episode(EpisodeTrace(entry=an_entry(0, calls=100), calls=calls))
    assert found.calls == 100
    assert [call.index for call in found.sampled] == [*range(MOST_CALLS // 2), *range(100 - MOST_CALLS // 2, 100)]
    first = found.sampled[0]
    assert (first.prompt_tokens, first.sampled_tokens, first.mean_logprob, first.step) == (3, 2, -1.5, 3)


def test_what_was_said_is_bounded_whatever_it_is() -> None:
    deep: Any = "x"
    for _ in range(50):
        deep = [deep]
    for value in ("x" * 100_000, [{"content": "y" * 5000}] * 300, {str(n): n for n in range(10_000)}, deep, None, 3.5):
        assert len(json.dumps(bounded(value), ensure_ascii=False)) <= MOST_CHARACTERS
    assert bounded({"messages": [{"role": "user", "content": "hi"}]}) == {
        "messages": [{"role": "user", "content": "hi"}]
    }


def test_secrets_and_what_a_database_refuses_are_taken_out() -> None:
    said = json.dumps(bounded({"content": "key sk-abcdefghijkl \x00 \ud800"}))
    assert "sk-abc" not in said
    assert "redacted" in said
    assert "\\u0000" not in said
    assert "\\ud800" not in said
