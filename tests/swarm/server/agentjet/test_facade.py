"""AgentJet's requests against a real service with the echo engine: as recorded, and as nobody should send them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from swarm.server.agentjet.prefix import AT_ROOT
from swarm.server.keys import ControlTokens
from swarm.server.process import ServeFault, Settings
from tests.swarm.server.agentjet.served import ADMIN, ASK, CLIENT, JOB, PREFIXES, Served, replayed, serving


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with serving(tmp_path) as served:
        yield served


@pytest.mark.parametrize("name", ["batch", "throttled", "older"])
@pytest.mark.anyio
async def test_a_recorded_batch_is_trained_whole(served: Served, name: str) -> None:
    replay = await replayed(served, name)
    assert await served.fates() == ["t1 trained 1"] * 2 + ["t2 trained 1"] * 2
    entry = await served.service.entry(replay.claims[0]["episode_uuid"])
    assert (entry.reward, entry.success, entry.metrics) == (0.0, False, {"turns": 1.0, "l": 2.0})
    (call,) = (await served.service.trace(entry.episode_id)).calls
    assert (call.sampling.temperature, call.sampling.top_p) == (0.7, 0.9), (
        "what the agent asked for is sampled, and trained"
    )
    assert call.sampling.max_tokens == 16, "what it left open is the job's"
    assert all(claim["openai_base_url"] == "http://127.0.0.1:8642/v1" for claim in replay.claims)


@pytest.mark.anyio
async def test_a_recorded_abort_and_evaluations_train_nothing(served: Served) -> None:
    await replayed(served, "abort")
    assert await served.fates() == ["- dropped aborted", "t1 dropped eval", "- dropped aborted"]


@pytest.mark.anyio
async def test_pool_information_is_what_their_client_throttles_by(served: Served) -> None:
    await served.start()
    first = await served.play("t1", 1.0)
    policy = {"current_task_id": "t2", "expected_batch_size": 2, "expected_num_repeat": 2, "ratio": 1.5}
    running = await served.claim(client="c-2", throttle_policy=policy)
    found = await served.get("/get_current_batch_rollout_pool_information", CLIENT)
    assert found["completed_tasks_details"] == {"t1": [first["episode_uuid"]]}
    assert found["completed_tasks_rewards"] == {"t1": [1.0]}
    assert found["completed_tasks_client_uuids"] == {"t1": ["c-1"]}
    assert (found["completed_episodes"], found["completed_episode_target"]) == (1, 4)
    assert (found["completed_tasks"], found["completed_task_target"], found["task_expected_num_repeat"]) == (0, 2, 2)
    details = found["running_episode_details"][running["episode_uuid"]]
    assert details["optional_task_id"] == "t2"
    assert all(isinstance(value, str) for value in details.values())
    buffer = (await served.post("/get_episode_buffer", {}, prefix=CLIENT))["buffer"]
    assert [(one["client_uuid"], one["openai_api_key"], one["optional_task_id"]) for one in buffer] == [
        ("c-2", "", "t2")
    ]
    await served.end(running, "t1", 1.0, status=400, client_uuid="c-2")


@pytest.mark.anyio
async def test_a_repeated_end_counts_once_and_a_lost_one_is_refused(served: Served) -> None:
    await served.start()
    ended = await served.play("t1", 1.0)
    await served.end(ended, "t1", 1.0)
    await served.end(ended, "t1", 0.0)
    await served.end(ended, "t1", 1.0, status=404, client_uuid="c-2")
    await served.end({"episode_uuid": "ep-of-nobody"}, "t1", 1.0, status=400)
    lost = await served.claim()
    abort = {"client_uuid": "c-2", "episode_uuid": lost["episode_uuid"], "task_id": "", "workflow_output": {}}
    await served.post("/abort_episode", abort, prefix=CLIENT)
    mine = {"client_uuid": "c-1", "episode_uuid": lost["episode_uuid"]}
    assert (await served.post("/can_continue_episode", mine, prefix=CLIENT))["can_continue"] is True, "another's abort"
    await served.post("/abort_episode", abort | mine, prefix=CLIENT)
    assert (await served.post("/can_continue_episode", mine, prefix=CLIENT))["can_continue"] is False
    await served.end(lost, "t1", 1.0, status=400)
    await served.post("/v1/chat/completions", ASK, prefix=CLIENT, key=lost["openai_api_key"], status=403)
    assert await served.fates() == ["t1 ended", "- dropped aborted"]
    assert (await served.service.entry(ended["episode_uuid"])).reward == 1.0


@pytest.mark.anyio
async def test_an_end_without_a_usable_reward_or_task_is_refused_and_may_be_mended(served: Served) -> None:
    await served.start()
    claimed = await served.claim()
    await served.post("/v1/chat/completions", ASK, prefix=CLIENT, key=claimed["openai_api_key"])
    for reward in (None, [1.0, 0.0], True, 1e13):
        await served.end(claimed, "t1", reward, status=400)
    await served.end(claimed, "", 1.0, status=400)
    output = {"reward": 1.0, "metadata": {"task_id": "t2"}}
    await served.end(claimed, "t1", 1.0, workflow_output=output, status=400)
    await served.end(claimed, "t1", 1.0)
    assert await served.fates() == ["t1 ended"]


@pytest.mark.anyio
async def test_a_claim_that_must_wait_says_it_in_their_words(served: Served) -> None:
    refused = await served.claim()
    assert (refused["success"], refused["episode_uuid"], refused["openai_api_key"]) == (False, "", "")
    await served.start()
    await served.play("t1", 1.0)
    for _ in range(7):  # two batches of four, at the default staleness of one step
        assert (await served.claim())["success"]
    policy = {"current_task_id": "t9"}
    assert (await served.claim(throttle_policy=policy))["fail_cause"] == "No available episodes to claim."
    await served.post("/claim_episode", {"client_uuid": "c-1", "episode_type": "other"}, status=400)


@pytest.mark.anyio
async def test_a_client_s_prefix_starts_and_stops_nothing_and_a_wrong_one_is_nobody(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    for path in ("/sync_train_config", "/start_engine", "/stop_engine"):
        refused = await served.post(path, {"yaml_as_string": JOB}, prefix=CLIENT, status=403)
        assert PREFIXES.client not in str(refused)
    wrong = "/ajet/client-secret-012345679"
    answer = await served.http.get(wrong + "/get_engine_status")
    assert answer.status_code == 404
    assert wrong not in answer.text
    unknown = await served.http.get(f"{ADMIN}/is_episode_claimed")
    assert unknown.status_code == 404
    assert PREFIXES.admin not in unknown.text
    assert (await served.http.get(f"{ADMIN}/swarm/v1/status")).status_code == 404, "ours asks for tokens of its own"
    assert (await served.http.get("/get_engine_status")).status_code == 404
    assert (await served.get("//get_engine_status"))["global_step"] == 0, "their client joins addresses by hand"
    await served.post("/sync_train_code", {}, status=400)
    logged = [record.getMessage() for record in caplog.records if not record.name.startswith("httpx")]
    assert not [line for line in logged if PREFIXES.admin in line or PREFIXES.client in line]


@pytest.mark.anyio
async def test_a_start_is_answered_when_no_client_s_cache_says_offline_any_more(served: Served) -> None:
    await served.post("/sync_train_config", {"yaml_as_string": JOB})
    starting = asyncio.ensure_future(served.http.post(f"{ADMIN}/start_engine", json={}))
    await served.until(lambda status: status["engine_status"] == "ENGINE.ROLLING")
    assert not starting.done()
    assert (await served.started(starting)).json()["success"] is True


@pytest.mark.anyio
async def test_config_is_taken_while_offline_alone_and_names_what_does_not_fit(served: Served) -> None:
    await served.post("/start_engine", {}, status=400)
    refused = await served.post("/sync_train_config", {"yaml_as_string": JOB.replace("echo", "other")}, status=400)
    assert "ajet.model.path" in refused["detail"]
    await served.start()
    await served.post("/sync_train_config", {"yaml_as_string": JOB}, status=400)


@pytest.mark.anyio
async def test_every_dialect_is_served_under_the_prefix_and_without_it(served: Served) -> None:
    await served.start()
    claimed = await served.claim()
    bearer = {"Authorization": f"Bearer {claimed['openai_api_key']}"}
    of_anthropic = {"x-api-key": claimed["openai_api_key"]}
    message = {"model": "reserved_field", "max_tokens": 8, "messages": ASK["messages"]}
    for prefix in (CLIENT, "", f"{CLIENT}/"):
        sent = [
            await served.http.post(f"{prefix}/v1/chat/completions", json=ASK, headers=bearer),
            await served.http.post(
                f"{prefix}/v1/responses", json={"model": "AgentJet-Model", "input": "echo"}, headers=bearer
            ),
            await served.http.post(f"{prefix}/v1/messages", json=message, headers=of_anthropic),
            await served.http.get(f"{prefix}/v1/models/any-name", headers=bearer),
        ]
        assert [answer.status_code for answer in sent] == [200] * 4, [answer.text for answer in sent]
    stale = await served.http.post(f"{CLIENT}/v1/messages", json=message, headers={"x-api-key": "swk_of.nobody"})
    assert (stale.status_code, stale.json()["type"]) == (401, "error")
    assert PREFIXES.client not in stale.text


def test_at_the_root_of_a_server_with_tokens_they_would_be_open_to_everybody() -> None:
    tokens = ControlTokens("swt_admin-0123456789", None)
    with pytest.raises(ServeFault, match="secret prefixes"):
        Settings(host="127.0.0.1", port=0, tokens=tokens, agentjet=AT_ROOT)


@pytest.mark.anyio
async def test_on_loopback_without_tokens_the_routes_may_stand_at_the_root(tmp_path: Path) -> None:
    async with serving(tmp_path, AT_ROOT) as served:
        assert (await served.get("/get_engine_status", ""))["engine_status"] == "ENGINE.OFFLINE"
        assert (await served.get("/health", "")) == {"status": "ok"}
        assert (await served.get("/swarm/v1/status", ""))["phase"] in ("booting", "idle")
        foreign = await served.http.get("/get_engine_status", headers={"Origin": "https://pages.example.org"})
        assert foreign.status_code == 403
