"""Every acknowledged episode is trained or ledgered, and none twice; every team counts on both servers or on none: whatever fails between
and around.

SWARM_STORM_EPISODES, SWARM_STORM_TEAMS: how many (default 300 and 40); SWARM_STORM_SEED: of every random choice (default: drawn;
printed with a failure). The long runs are `python -m tests.faults.storm`.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

from swarm.protocol.episodes import DropReason, EpisodeState, LedgerEntry
from tests.fakes.proxy import Fault
from tests.faults.balance import Side
from tests.faults.storm import Storm, episodes, teams
from tests.faults.team_balance import count_teams

EPISODES = int(os.environ.get("SWARM_STORM_EPISODES", "300"))
TEAMS = int(os.environ.get("SWARM_STORM_TEAMS", "40"))
SEED = int(os.environ.get("SWARM_STORM_SEED", str(random.SystemRandom().randrange(10**6))))


@pytest.fixture
def _seed(capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print(f"\n[SWARM_STORM_SEED={SEED}]", end=" ")  # noqa: T201


@pytest.mark.campaign
@pytest.mark.anyio
@pytest.mark.usefixtures("_seed")
async def test_acknowledged_is_trained_plus_ledgered_and_none_twice(tmp_path: Path) -> None:
    storm = Storm(episodes(EPISODES, SEED), tmp_path)
    balance = await storm.rage()
    assert balance.faults == []
    assert balance.acknowledged + balance.unheard >= EPISODES
    assert balance.trained > 0
    assert storm.met["client_kills"] >= 2
    assert storm.met["kills_of_server"] >= 2
    assert all(storm.met.get(fault, 0) > 0 for fault in Fault), storm.met


@pytest.mark.campaign
@pytest.mark.anyio
@pytest.mark.usefixtures("_seed")
async def test_each_team_counts_on_both_servers_or_on_none(tmp_path: Path) -> None:
    storm = Storm(teams(TEAMS, SEED), tmp_path)
    balance = await storm.rage()
    assert balance.faults == []
    assert balance.both >= TEAMS
    assert balance.neither > 0  # the storm was one
    assert sum(balance.trained) > 0
    assert storm.met["kills_of_one"] >= 2
    assert storm.met["kills_of_other"] >= 2


def entry(name: str, reward: float | None) -> LedgerEntry:
    return LedgerEntry(
        episode_id=name,
        run_id="r",
        kind="train",
        task_id="t",
        mix=None,
        client_id="c",
        client_version="v",
        config_version=1,
        group_id="g",
        slot=0,
        state=EpisodeState.DROPPED,
        reason=DropReason.TEAM_ABORTED if reward is None else DropReason.RUN_ENDED,
        claimed_step=0,
        reward=reward,
        claimed_at=0.0,
    )


def notes(outcome: str) -> list[dict[str, object]]:
    team: dict[str, Any] = {"episode_id": "a", "other": "b"}
    said: list[dict[str, Any]] = [{"note": "claimed"}, {"note": "ending", "rewards": [0.5, 0.25]}, {"note": outcome}]
    return [team | note for note in said]


@pytest.mark.parametrize(
    ("outcome", "rewards", "fault"),
    [
        ("committed", (0.5, 0.25), None),
        ("aborted", (None, None), None),
        ("undecided", (0.5, 0.25), None),
        ("undecided", (0.5, None), "on one server alone"),
        ("committed", (None, None), "counts nowhere"),
        ("aborted", (0.5, 0.25), "was aborted and counts"),
        ("committed", (0.5, 0.5), "other rewards"),
    ],
)
def test_the_count_sees_what_must_not_be(
    outcome: str, rewards: tuple[float | None, float | None], fault: str | None
) -> None:
    sides = [Side([entry(name, reward)], {}) for name, reward in zip("ab", rewards, strict=True)]
    faults = count_teams(notes(outcome), sides).faults
    assert len(faults) == (fault is not None)
    assert fault is None or fault in faults[0]
