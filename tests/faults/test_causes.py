"""What clients, graders, agents, network and server lost on purpose is in the ledger under the cause it was lost for, to the last one.

SWARM_CAUSES_SEED: of every random choice (default: drawn; printed).
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from swarm.client import Cause
from tests.faults.planted import Fuzz

pytestmark = pytest.mark.anyio

SEED = int(os.environ.get("SWARM_CAUSES_SEED", str(random.SystemRandom().randrange(10**6))))


@pytest.mark.parametrize("episodes", [150, pytest.param(2_000, marks=pytest.mark.campaign)])
async def test_the_ledgers_counts_by_cause_are_those_that_were_planted(
    tmp_path: Path, episodes: int, capsys: pytest.CaptureFixture[str]
) -> None:
    async with Fuzz(tmp_path, SEED) as fuzz:
        await fuzz.play(episodes)
        causes, by_task, attempts = await fuzz.ledger()
    with capsys.disabled():
        print(f"\n[SWARM_CAUSES_SEED={SEED}: {attempts} attempts, {dict(fuzz.rounds)}, {causes}]", end=" ")  # noqa: T201
    assert attempts == fuzz.attempts >= episodes
    assert causes == fuzz.planted
    assert by_task == fuzz.by_task
    assert set(causes) == set(Cause)
