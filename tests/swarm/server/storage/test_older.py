"""A state directory that an older server left when it was killed opens, tells the same, and goes on."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from foundation.clock import ManualClock
from foundation.ids import RandomIds
from swarm.engine.seam import EngineHealth
from swarm.protocol.episodes import EpisodeClaim, EpisodeResult
from swarm.protocol.summary import LedgerFilter
from swarm.protocol.teams import EpisodeCommit
from swarm.server.service import Service
from swarm.server.state import health, teams
from tests.swarm.server.state.process import INFO

pytestmark = pytest.mark.anyio
OLDER = Path(__file__).parent / "older"
RESTARTED = {"state": "dropped", "reason": "server_restarted", "cause": "server"}


async def test_a_state_directory_of_an_older_server_opens_and_goes_on(tmp_path: Path) -> None:
    (tmp_path / "pool.sqlite").write_bytes(gzip.decompress((OLDER / "pool.sqlite.gz").read_bytes()))
    before: dict[str, Any] = json.loads((OLDER / "expected.json").read_text())
    clock = ManualClock()
    service = Service.open(tmp_path, INFO, clock=clock, ids=RandomIds())
    try:
        assert (await service.status()).server_id == before["server_id"]
        entries = [entry.model_dump(mode="json") for entry in (await service.ledger()).entries]
        assert {entry.pop("restricted_tokens") for entry in entries} == {0}, "which it did not count"
        *same, prepared, running = before["ledger"]
        assert entries[:-2] == same
        assert entries[-2] == prepared
        assert entries[-1] == running | RESTARTED | {"ended_at": clock.now()}
        report = (await service.report(before["run_id"])).model_dump(mode="json")
        assert (report["steps"], report["config_version"]) == (before["steps"], before["config_version"])
        assert [one.model_dump(mode="json") for one in await service.tasks()] == before["tasks"]
        assert (await service.summary(LedgerFilter())).recent == before["summary"]["recent"]

        service.engine_health(EngineHealth(ready=True))
        service.tell(lambda t: health.engine_opened(t, before["run_id"]))
        assert teams.in_doubt(service.state) == [prepared["episode_id"]]
        with pytest.raises(Exception, match="this lease does not hold"):
            await service.commit(prepared["episode_id"], EpisodeCommit(lease="swl_forged"))
        claim = EpisodeClaim(run_id=before["run_id"], client_id="c-1", task_id="t-3", wait_s=0)
        granted = await service.claim(claim)
        assert granted.group_id == same[-1]["group_id"], "it joins the group that was open"
        receipt = await service.end(granted.episode_id, EpisodeResult(lease=granted.lease, reward=1.0))
        assert receipt.dropped == "no_calls"
    finally:
        await service.close()
