"""Every acknowledged episode is trained or ledgered, and none twice, whatever fails between and around.

SWARM_STORM_EPISODES: how many (default 300); SWARM_STORM_SEED: of every random choice (default: drawn; printed with a failure).
The long run of 10,000 is `python -m tests.faults.storm`.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.fakes.proxy import Fault
from tests.faults.storm import Plan, Storm

pytestmark = pytest.mark.anyio

EPISODES = int(os.environ.get("SWARM_STORM_EPISODES", "300"))
SEED = int(os.environ.get("SWARM_STORM_SEED", str(random.SystemRandom().randrange(10**6))))


@pytest.mark.campaign
async def test_acknowledged_is_trained_plus_ledgered_and_none_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with capsys.disabled():
        print(f"\n[storm of {EPISODES} episodes, SWARM_STORM_SEED={SEED}]", end=" ")  # noqa: T201
    storm = Storm(Plan.of(EPISODES, SEED), tmp_path)
    balance = await storm.rage()
    assert balance.faults == []
    assert balance.acknowledged + balance.unheard >= EPISODES
    assert balance.trained > 0
    assert storm.met["client_kills"] >= 2
    assert storm.met["server_kills"] >= 2
    assert all(storm.met.get(fault, 0) > 0 for fault in Fault), storm.met
