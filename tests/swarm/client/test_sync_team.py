"""Teams and rollouts of plain scripts: the synchronous twins do what the asynchronous ones do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.serving import ServerProcess
from swarm.client import EpisodeUnfinished, RunSpec, Task
from swarm.client.sync import Episode, SwarmClient, team

SPEC = RunSpec.model_validate({"batch": {"tasks": 2, "group_size": 2}, "sampling": {"max_tokens": 8}})


@pytest.fixture
def swarms(tmp_path: Path) -> Iterator[tuple[SwarmClient, SwarmClient]]:
    with (
        ServerProcess(tmp_path / "a") as a,
        ServerProcess(tmp_path / "b") as b,
        SwarmClient(a.url) as one,
        SwarmClient(b.url) as other,
    ):
        one.start_run(SPEC)
        other.start_run(SPEC)
        yield one, other


def ask(episode: Episode, model: str = "policy") -> None:
    body = {"model": model, "messages": [{"role": "user", "content": "hello"}]}
    headers = {"Authorization": f"Bearer {episode.api_key}"}
    with httpx.Client(trust_env=False, timeout=60.0) as http:
        http.post(f"{episode.base_url}/chat/completions", json=body, headers=headers).raise_for_status()


def rewards(swarm: SwarmClient) -> list[Any]:
    return [entry.reward for entry in swarm.ledger()]


def test_a_team_counts_on_both_servers_with_a_reward_for_each(swarms: tuple[SwarmClient, SwarmClient]) -> None:
    one, other = swarms
    with team(task_id="t", planner=one, solver=other) as both:
        ask(both["planner"])
        ask(both["solver"])
        both.end(rewards={"planner": 0.25, "solver": 1.0}, success=True)
    assert both.committed
    assert (rewards(one), rewards(other)) == ([0.25], [1.0])


def test_members_may_be_ended_one_by_one(swarms: tuple[SwarmClient, SwarmClient]) -> None:
    one, other = swarms
    with team(task_id="t", planner=one, solver=other) as both:
        ask(both["planner"], "policy@critic")
        ask(both["solver"])
        both["planner"].end(reward=1.0, agent_rewards={"critic": 0.5})
        both["solver"].end(reward=0.0)
    assert both.committed
    (entry,) = one.ledger()
    assert (entry.reward, entry.agent_rewards, rewards(other)) == (1.0, {"critic": 0.5}, [0.0])


def test_a_team_that_is_left_early_counts_on_none(swarms: tuple[SwarmClient, SwarmClient]) -> None:
    one, other = swarms
    with team(task_id="t", planner=one, solver=other) as both:
        ask(both["planner"])
        both.end(rewards={"planner": 0.25, "solver": 1.0})
        both.abort("changed my mind")
    with pytest.raises(EpisodeUnfinished, match=r"planner, solver"), team(task_id="t", planner=one, solver=other):
        pass
    assert not both.committed
    assert {*rewards(one), *rewards(other)} == {None}


def test_an_episode_of_run_tasks_may_be_a_member_and_limits_of_calls_are_its_own(
    swarms: tuple[SwarmClient, SwarmClient],
) -> None:
    one, other = swarms
    limits = []

    def rollout(episode: Episode, task: Task) -> None:
        with team(solver=episode, planner=other) as both:
            ask(both["solver"])
            ask(both["planner"])
            limits.append(both["solver"].inner.claim.max_call_s)
            both.end(rewards={"solver": 1.0, "planner": 0.5})

    report = one.run_tasks([Task(id="t", query="?")], rollout, max_call_s=77.0, progress=False)
    assert (report.ended, limits) == (2, [77.0, 77.0])
    assert (rewards(one), rewards(other)) == ([1.0, 1.0], [0.5, 0.5])


def test_without_members_there_is_no_team() -> None:
    with pytest.raises(ValueError, match="at least two members"):
        team(task_id="t")


def test_a_team_has_a_server_each() -> None:
    with (
        SwarmClient("http://127.0.0.1:1") as one,
        SwarmClient("http://127.0.0.1:1") as same,
        pytest.raises(ValueError, match="planner and solver are on the same server"),
    ):
        team(task_id="t", planner=one, solver=same)
