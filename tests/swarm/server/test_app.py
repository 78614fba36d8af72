"""The surface in process: problem documents, tokens, OpenAPI, both surfaces' error formats. Real service, echo engine."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hmac
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from httpx import ASGITransport

from swarm.engine.echo.engine import EchoEngine
from swarm.server.keys import ControlTokens
from swarm.server.routes import wire
from tests.swarm.server.in_process import in_process

pytestmark = pytest.mark.anyio

ADMIN, CLIENT = "swt_admin-0123456789", "swt_client-0123456789"


@dataclass(frozen=True)
class Served:
    """One server's surface, and what is behind it."""

    http: httpx.AsyncClient
    closing: asyncio.Event
    engine: EchoEngine

    async def start_run(self, **spec: Any) -> str:
        answer = await self.http.post("/swarm/v1/runs", json={"spec": spec}, headers=_bearer(ADMIN))
        assert answer.status_code == 201, answer.text
        return str(answer.json()["run_id"])

    async def claim(self, run_id: str, **fields: Any) -> dict[str, Any]:
        body = {"run_id": run_id, "client_id": "c", "task_id": "t-1", **fields}
        answer = await self.http.post("/swarm/v1/episodes:claim", json=body, headers=_bearer(ADMIN))
        assert answer.status_code == 200, answer.text
        return dict(answer.json())


def _bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


@contextlib.asynccontextmanager
async def serving(directory: Path, tokens: ControlTokens, public_url: str | None = None) -> AsyncIterator[Served]:
    async with (
        in_process(directory, tokens, public_url) as surface,
        httpx.AsyncClient(transport=ASGITransport(surface.app), base_url="http://127.0.0.1:8642") as http,
    ):
        yield Served(http, surface.closing, surface.engine)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with serving(tmp_path, ControlTokens(None, None)) as each:
        yield each


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[Served]:
    async with serving(tmp_path, ControlTokens(ADMIN, CLIENT)) as each:
        yield each


def assert_problem(answer: httpx.Response, status: int, code: str) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    document = dict(answer.json())
    assert document["code"] == code
    assert document["status"] == status
    assert document["detail"]
    return document


async def test_health_needs_no_token(guarded: Served) -> None:
    assert (await guarded.http.get("/health")).json() == {"status": "ok"}


async def test_a_misspelt_spec_is_refused_with_each_field_and_the_nearest_name(served: Served) -> None:
    spec = {"optimizer": {"learning_rte": 1e-5}, "bach": {}, "seed": -1}
    document = assert_problem(await served.http.post("/swarm/v1/runs", json={"spec": spec}), 422, "invalid_spec")
    found = {error["field"]: error["nearest"] for error in document["errors"]}
    assert found == {
        "spec.optimizer.learning_rte": "spec.optimizer.learning_rate",
        "spec.bach": "spec.batch",
        "spec.seed": None,
    }


@pytest.mark.parametrize("body", [b"{", b"[]", b"\xff", b'{"spec": {"optimizer": {"learning_rate": NaN}}}'])
async def test_a_body_that_is_no_request_is_refused(served: Served, body: bytes) -> None:
    assert_problem(await served.http.post("/swarm/v1/runs", content=body), 422, "invalid_spec")


@pytest.mark.parametrize(
    ("field", "name"),
    [("task_id", ""), *((field, "x" * 1_001) for field in ("task_id", "client_id", "client_version", "mix"))],
)
async def test_a_claim_names_a_task_and_no_name_is_a_whole_text(served: Served, field: str, name: str) -> None:
    claim = {"run_id": await served.start_run(), "client_id": "c", "task_id": "t"} | {field: name}
    document = assert_problem(await served.http.post("/swarm/v1/episodes:claim", json=claim), 422, "invalid_spec")
    assert [error["field"] for error in document["errors"]] == [field]


@pytest.mark.parametrize(
    ("method", "path", "body", "name"),
    [
        ("POST", "/swarm/v1/runs", '{"spec": {"seed": 1, "seed": 2}}', "seed"),
        ("PATCH", "/swarm/v1/runs/run-1", '{"limits": {"steps": 3}, "limits": {}}', "limits"),
        ("POST", "/swarm/v1/episodes:claim", '{"task_id": "t-1", "task_id": "t-2"}', "task_id"),
        ("POST", "/swarm/v1/episodes/ep-1:end", '{"lease": "l", "reward": 1, "reward": 0}', "reward"),
        ("POST", "/swarm/v1/episodes/ep-1:end", '{"lease": "l", "reward": 1, "metrics": {"m": 1, "\\u006d": 2}}', "m"),
    ],
)
async def test_a_name_that_stands_twice_in_a_body_is_refused(
    served: Served, method: str, path: str, body: str, name: str
) -> None:
    document = assert_problem(await served.http.request(method, path, content=body), 422, "invalid_spec")
    assert document["errors"] == [{"field": name, "problem": "appears twice in one object", "nearest": None}]


@pytest.mark.parametrize(
    ("method", "path", "sent", "field"),
    [
        ("GET", "/ledger?client_id=a&limit=2&client_id=b", {}, "client_id"),
        ("PATCH", "/runs/run-1", {"content": b"["}, "(whole)"),
        ("PATCH", "/runs/run-1", {"content": b"[]"}, "(whole)"),
        ("PATCH", "/runs/run-1", {"content": b"{}", "headers": {"If-Match": "newest"}}, "If-Match"),
        (
            "POST",
            "/episodes/EPISODE:end",
            {"content": b'{"reward": 1, "metadata": {"n": NaN}, "lease": "LEASE"}'},
            "metadata",
        ),
        (
            "POST",
            "/episodes/EPISODE:prepare",
            {
                "json": {
                    "lease": "l",
                    "decider": {"url": "http://[", "episode_id": "e", "key": "k"},
                    "result": {"reward": 1},
                }
            },
            "decider.url",
        ),
    ],
)
async def test_what_is_refused_as_invalid_names_its_field(
    served: Served, method: str, path: str, sent: dict[str, Any], field: str
) -> None:
    if "EPISODE" in path:
        grant = await served.claim(await served.start_run())
        path = path.replace("EPISODE", grant["episode_id"])
        if "content" in sent:
            sent = {"content": sent["content"].replace(b"LEASE", grant["lease"].encode())}
    answer = await served.http.request(method, f"/swarm/v1{path}", **sent)
    assert [error["field"] for error in assert_problem(answer, 422, "invalid_spec")["errors"]] == [field]


async def test_a_misspelt_query_parameter_is_refused(served: Served) -> None:
    document = assert_problem(await served.http.get("/swarm/v1/ledger?tsk_id=t"), 422, "invalid_spec")
    assert document["errors"][0]["nearest"] == "task_id"


async def test_the_ledger_is_searched_by_family_of_tasks(served: Served) -> None:
    await served.claim(await served.start_run(), mix="sums")
    for mix, episodes in (("sums", 1), ("words", 0)):
        page = await served.http.get(f"/swarm/v1/ledger?mix={mix}")
        counts = (await served.http.get(f"/swarm/v1/ledger/summary?mix={mix}")).json()["counts"]
        assert len(page.json()["entries"]) == sum(count["episodes"] for count in counts) == episodes


async def test_a_query_parameter_without_a_value_is_left_out(served: Served) -> None:
    grant = await served.claim(await served.start_run())
    await chat(served, grant["api_key"])
    end = {"lease": grant["lease"], "reward": 1.0}
    await served.http.post(f"/swarm/v1/episodes/{grant['episode_id']}:end", json=end)
    for path, query in (
        ("tasks", "client_id=&mix="),
        ("ledger", "step=&client_id=&task_id=&reason=&limit="),
        ("ledger/summary", "step=&state="),
    ):
        answer = await served.http.get(f"/swarm/v1/{path}?{query}")
        assert answer.status_code == 200
        assert answer.json() == (await served.http.get(f"/swarm/v1/{path}")).json() != []
    assert_problem(await served.http.get("/swarm/v1/ledger?tsk_id="), 422, "invalid_spec")


async def test_unknown_routes_and_methods_are_problems_that_help(served: Served) -> None:
    document = assert_problem(await served.http.get("/swarm/v1/statu"), 404, "not_found")
    assert "/swarm/v1/status" in document["detail"]
    answer = await served.http.delete("/swarm/v1/status")
    assert_problem(answer, 405, "not_found")
    assert answer.headers["allow"] == "GET"
    assert (await served.http.delete("/swarm/v1/runs/run-1")).headers["allow"] == "GET, PATCH"
    for path in ("/v1/chat/completions", "/v1/messages"):
        answer = await served.http.get(path)
        assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
        assert f"GET is not supported at {path}; allowed: POST" in answer.json()["error"]["message"]


async def test_unknown_runs_and_episodes_are_not_found(served: Served) -> None:
    assert_problem(await served.http.get("/swarm/v1/runs/run-none"), 404, "not_found")
    assert_problem(await served.http.get("/swarm/v1/episodes/ep-none"), 404, "not_found")
    for path in ("ledger", "ledger/summary"):
        document = assert_problem(await served.http.get(f"/swarm/v1/{path}?run_id=run-none"), 404, "not_found")
        assert document["detail"] == "no run 'run-none' on this server"
    claim = {"run_id": "run-none", "client_id": "c", "task_id": "t"}
    assert_problem(await served.http.post("/swarm/v1/episodes:claim", json=claim), 404, "not_found")


async def test_a_missing_or_wrong_token_is_refused(guarded: Served) -> None:
    for headers in ({}, _bearer("swt_wrong-0123456789")):
        answer = await guarded.http.get("/swarm/v1/status", headers=headers)
        assert_problem(answer, 401, "unauthorized")
        assert answer.headers["www-authenticate"] == "Bearer"
        assert "swt_wrong" not in answer.text
        assert "SWARM_TOKEN" in answer.text
        assert ("no token was sent" in answer.text) == (not headers)


@pytest.mark.parametrize(
    "origin", ["http://elsewhere.example", "https://127.0.0.1.elsewhere.example", "null", "http://["]
)
async def test_a_web_page_from_elsewhere_steers_no_server_without_tokens(served: Served, origin: str) -> None:
    answer = await served.http.post("/swarm/v1/runs", json={"spec": {}}, headers={"Origin": origin})
    assert_problem(answer, 403, "forbidden")
    own = await served.http.get("/swarm/v1/status", headers={"Origin": "http://localhost:3000"})
    assert own.status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example:8642", "evil.example", "127.0.0.1.evil.example", "evil.example.", "evil.arpa", "evillocal.example"],
)
async def test_a_server_without_tokens_answers_no_page_whose_name_was_turned_to_this_machine(
    served: Served, guarded: Served, host: str
) -> None:
    document = assert_problem(await served.http.get("/swarm/v1/ledger", headers={"Host": host}), 403, "forbidden")
    assert "--public-url" in document["detail"]
    assert (await guarded.http.get("/swarm/v1/ledger", headers={"Host": host} | _bearer(CLIENT))).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        *("localhost:8642", "localhost.localdomain", "[::1]:8642", "10.0.0.2", "swarm:8642", "swarm.example:443", ""),
        *(
            "host.docker.internal",
            "GPU.local.",
            "gpu.lan:8642",
            "gpu.home.arpa",
            "swarm.jobs.svc.cluster.local",
            "a.test",
        ),
    ],
)
async def test_a_server_without_tokens_answers_under_addresses_private_names_and_its_public_url(
    tmp_path: Path, host: str
) -> None:
    async with serving(tmp_path, ControlTokens(None, None), public_url="https://swarm.example") as served:
        assert (await served.http.get("/swarm/v1/ledger", headers={"Host": host})).status_code == 200


async def test_a_client_token_reads_and_claims_but_starts_no_run(guarded: Served) -> None:
    assert (await guarded.http.get("/swarm/v1/status", headers=_bearer(CLIENT))).status_code == 200
    answer = await guarded.http.post("/swarm/v1/runs", json={"spec": {}}, headers=_bearer(CLIENT))
    assert_problem(answer, 403, "forbidden")
    run_id = await guarded.start_run()
    claim = {"run_id": run_id, "client_id": "c", "task_id": "t"}
    granted = await guarded.http.post("/swarm/v1/episodes:claim", json=claim, headers=_bearer(CLIENT))
    assert granted.status_code == 200


async def test_a_second_run_is_refused_while_one_is_going_on(served: Served) -> None:
    run_id = await served.start_run()
    document = assert_problem(await served.http.post("/swarm/v1/runs", json={"spec": {}}), 409, "server_busy")
    assert document["run_id"] == run_id


async def test_equal_idempotency_keys_give_one_run_and_other_bodies_a_conflict(served: Served) -> None:
    first = await served.http.post("/swarm/v1/runs", json={"spec": {}, "idempotency_key": "k"})
    again = await served.http.post("/swarm/v1/runs", json={"spec": {}, "idempotency_key": "k"})
    assert first.json() == again.json()
    other = await served.http.post("/swarm/v1/runs", json={"spec": {"seed": 9}, "idempotency_key": "k"})
    assert_problem(other, 409, "idempotency_conflict")


async def test_a_patch_needs_the_config_version_it_was_made_from(served: Served) -> None:
    path = f"/swarm/v1/runs/{await served.start_run()}"
    before = await served.http.get(path)
    patch = {"optimizer": {"learning_rate": 3e-5}}
    patched = await served.http.patch(path, json=patch, headers={"If-Match": before.headers["etag"]})
    assert patched.status_code == 200, patched.text
    assert patched.json()["spec"]["optimizer"]["learning_rate"] == 3e-5
    assert patched.headers["etag"] != before.headers["etag"]
    assert patched.json()["changes"][-1]["by"].startswith("admin")
    late = await served.http.patch(path, json=patch, headers={"If-Match": before.headers["etag"]})
    assert_problem(late, 409, "config_conflict")
    assert_problem(await served.http.patch(path, json=patch, headers={"If-Match": "x"}), 422, "invalid_spec")
    endless = await served.http.patch(path, json=patch, headers={"If-Match": "9" * 5000})
    assert_problem(endless, 422, "invalid_spec")
    huge = assert_problem(await served.http.patch(path, json={"limits": {"wall_s": 10**20}}), 422, "invalid_spec")
    assert "64-bit" in huge["errors"][0]["problem"]
    misspelt = {"optimizer": {"learning_rte": 3e-5}}
    document = assert_problem(await served.http.patch(path, json=misspelt), 422, "invalid_spec")
    assert document["errors"][0]["nearest"].endswith("optimizer.learning_rate")


async def test_a_long_poll_wakes_when_something_changes(served: Served) -> None:
    run_id = await served.start_run()
    await served.claim(run_id)
    before = (await served.http.get("/swarm/v1/status")).json()
    poll = asyncio.create_task(served.http.get("/swarm/v1/status", params={"since": before["revision"], "wait_s": 60}))
    await served.claim(run_id, task_id="t-2")
    after = (await poll).json()
    assert after["revision"] > before["revision"]


async def test_waiting_requests_are_answered_when_the_server_closes(served: Served) -> None:
    status = (await served.http.get("/swarm/v1/status")).json()
    run_id = await served.start_run(batch={"tasks": 1, "group_size": 2}, max_staleness=0)
    await served.claim(run_id)
    await served.claim(run_id)
    claim = {"run_id": run_id, "client_id": "c", "task_id": "t-9", "wait_s": 60}
    waiting = asyncio.create_task(served.http.post("/swarm/v1/episodes:claim", json=claim))
    stream = asyncio.create_task(served.http.get("/swarm/v1/events"))
    done, _ = await asyncio.wait({waiting}, timeout=0.2)
    assert not done
    served.closing.set()
    assert_problem(await waiting, 503, "not_rolling")
    assert f'"server_id":"{status["server_id"]}"' in (await stream).text


async def test_who_waits_for_a_checkpoint_is_answered_when_the_server_closes(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, written = asyncio.Event(), asyncio.Event()

    async def slow(*, best: int | None = None) -> int:
        begun.set()
        await written.wait()
        raise AssertionError

    monkeypatch.setattr(served.engine, "checkpoint", slow)
    run_id = await served.start_run(batch={"tasks": 1, "group_size": 2}, checkpoint={"every_steps": 1})
    for reward in (0.0, 1.0):
        grant = await served.claim(run_id)
        await chat(served, grant["api_key"])
        result = {"lease": grant["lease"], "reward": reward}
        await served.http.post(f"/swarm/v1/episodes/{grant['episode_id']}:end", json=result)
    async with asyncio.timeout(20):
        await begun.wait()
        waiting = asyncio.create_task(served.http.post(f"/swarm/v1/runs/{run_id}:checkpoint"))
        done, _ = await asyncio.wait({waiting}, timeout=0.2)
        assert not done
        served.closing.set()
        assert_problem(await waiting, 503, "not_rolling")


async def test_the_openapi_document_describes_every_call_and_body(guarded: Served) -> None:
    document = (await guarded.http.get("/openapi.json")).json()
    operations = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    for expected in (
        ("POST", "/swarm/v1/episodes:claim"),
        ("POST", "/swarm/v1/episodes/{episode_id}:end"),
        ("PATCH", "/swarm/v1/runs/{run_id}"),
        ("GET", "/swarm/v1/status"),
        ("POST", "/v1/chat/completions"),
    ):
        assert expected in operations
    claim = document["paths"]["/swarm/v1/episodes:claim"]["post"]
    assert claim["requestBody"]["content"]["application/json"]["schema"] == {
        "$ref": "#/components/schemas/EpisodeClaim"
    }
    granted = claim["responses"]["200"]["content"]["application/json"]["schema"]
    assert granted == {"$ref": "#/components/schemas/EpisodeGrant"}
    assert not _dangling(document)


async def test_the_openapi_document_declares_the_codes_that_are_answered(served: Served) -> None:
    document = (await served.http.get("/openapi.json")).json()

    async def refused(method: str, path: str, code: str, url: str = "", **sent: Any) -> None:
        answer = await served.http.request(method, f"/swarm/v1{url or path}", **sent)
        assert answer.json()["code"] == code, answer.text
        described = document["paths"][f"/swarm/v1{path}"][method.lower()]["responses"]["default"]["description"]
        assert code in re.findall("[a-z_]+", described), (path, described)

    run_id = await served.start_run(limits={"drain_limit_s": 0.01})
    claimed = {"run_id": run_id, "client_id": "c", "task_id": "t-1", "idempotency_key": "k"}
    grant = await served.claim(**claimed)
    await refused("POST", "/episodes:claim", "idempotency_conflict", json=claimed | {"task_id": "t-2"})
    await chat(served, grant["api_key"])
    end = {"lease": grant["lease"], "reward": 1.0, "idempotency_key": "e"}
    ended = f"/episodes/{grant['episode_id']}:end"
    assert (await served.http.post(f"/swarm/v1{ended}", json=end)).status_code == 200
    other = end | {"reward": 0.0}
    await refused("POST", "/episodes/{episode_id}:end", "idempotency_conflict", ended, json=other)
    for path, query in (
        ("/status", "?wait_s=-1"),
        ("/ledger", "?stepp=1"),
        ("/ledger/summary", "?stepp=1"),
        ("/tasks", "?stepp=1"),
        ("/runs/{run_id}", "?since_step=x"),
        ("/episodes/{episode_id}", "?text=true"),
        ("/episodes/{episode_id}/trace", "?text=so"),
        ("/events", "?since=1"),
    ):
        url = path.format(run_id=run_id, episode_id=grant["episode_id"]) + query
        await refused("GET", path, "invalid_spec", url)
    stopped = await served.http.post(f"/swarm/v1/runs/{run_id}:stop")
    while stopped.json()["phase"] != "idle":
        status = (await served.http.get("/swarm/v1/status")).json()
        await served.http.get("/swarm/v1/status", params={"since": status["revision"], "wait_s": 0.5})
        stopped = await served.http.get(f"/swarm/v1/runs/{run_id}")
    await refused("POST", "/episodes:claim", "over_limit", json=claimed | {"idempotency_key": None})
    run = "/runs/{run_id}"
    await refused("PATCH", run, "over_limit", f"/runs/{run_id}", json={"max_staleness": 2})
    await refused("POST", f"{run}:checkpoint", "over_limit", f"/runs/{run_id}:checkpoint")


def _dangling(document: dict[str, Any]) -> set[str]:
    """References of the document that point nowhere."""
    known = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    used: set[str] = set()

    def visit(node: Any, found: Callable[[str], None]) -> None:
        for key, value in node.items() if isinstance(node, dict) else ():
            if key == "$ref":
                found(value)
            visit(value, found)
        for value in node if isinstance(node, list) else ():
            visit(value, found)

    visit(document, used.add)
    return used - known


async def test_metrics_are_prometheus_text(served: Served) -> None:
    run_id = await served.start_run()
    await served.claim(run_id)
    lost = await served.claim(run_id)
    abort = {"lease": lost["lease"], "reason": "no", "cause": "grader"}
    await served.http.post(f"/swarm/v1/episodes/{lost['episode_id']}:abort", json=abort)
    text = (await served.http.get("/metrics")).text
    assert 'swarm_attempts_lost_total{cause="grader"} 1.0' in text
    assert 'swarm_attempts_lost_total{cause="server"} 0.0' in text
    summary = (await served.http.get("/swarm/v1/ledger/summary", params={"cause": "grader"})).json()
    assert summary["causes"] == {"grader": 1}
    assert len((await served.http.get("/swarm/v1/ledger", params={"cause": "grader"})).json()["entries"]) == 1
    assert (await served.http.get("/swarm/v1/ledger", params={"cause": "graders"})).status_code == 422
    assert "swarm_episodes_running 1.0" in text
    assert 'swarm_phase{phase="rolling"} 1.0' in text


# -- inference ----------------------------------------------------------------------------------------------------


async def chat(served: Served, api_key: str, **fields: Any) -> httpx.Response:
    body = {"model": "echo", "messages": [{"role": "user", "content": "Say red"}], **fields}
    return await served.http.post("/v1/chat/completions", json=body, headers=_bearer(api_key))


def assert_openai_error(answer: httpx.Response, status: int, code: str | None) -> None:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) >= {"message", "type", "param", "code"}
    assert error["code"] == code


async def test_an_agent_is_answered_under_its_episodes_key(served: Served) -> None:
    grant = await served.claim(await served.start_run())
    assert grant["base_url"] == "http://127.0.0.1:8642/v1"
    answer = await chat(served, grant["api_key"])
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"] in {"red", "~der"}
    models = await served.http.get("/v1/models", headers=_bearer(grant["api_key"]))
    assert [card["id"] for card in models.json()["data"]] == ["echo"]
    for name in ("echo", "policy", "echo@planner", "policy@planner"):
        assert (await served.http.get(f"/v1/models/{name}", headers=_bearer(grant["api_key"]))).json()["id"] == "echo"
    for name in ("other", "other@planner"):
        assert (await served.http.get(f"/v1/models/{name}", headers=_bearer(grant["api_key"]))).status_code == 404


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/runs"), ("PATCH", "/runs/run-1"), ("POST", "/episodes/ep-1:end")]
)
async def test_a_control_body_that_would_keep_everybody_waiting_is_refused(
    served: Served, method: str, path: str
) -> None:
    small_objects = b'{"metadata": [' + b"{}," * (wire.MAX_CONTROL_BYTES // 3) + b"{}]}"
    document = assert_problem(
        await served.http.request(method, f"/swarm/v1{path}", content=small_objects), 413, "invalid_spec"
    )
    assert "larger than 4 MiB" in document["detail"]


async def test_a_body_that_is_too_large_is_refused_with_its_limit(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    grant = await served.claim(await served.start_run())
    monkeypatch.setattr(wire, "MAX_BODY_BYTES", 2**20)
    answer = await chat(served, grant["api_key"], note="x" * 2**20)
    assert_openai_error(answer, 413, "invalid_spec")
    assert "larger than 1 MiB" in answer.json()["error"]["message"]
    told = await served.http.post("/v1/messages", content=b" " * (2**20 + 1), headers=_bearer(grant["api_key"]))
    assert (told.status_code, told.json()["error"]["type"]) == (413, "request_too_large")


@pytest.mark.parametrize("path", ["/swarm/v1/runs", "/v1/chat/completions"])
async def test_a_client_that_hangs_up_while_it_sends_is_no_fault_of_the_server(
    served: Served, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    grant = await served.claim(await served.start_run())
    transport = served.http._transport
    assert isinstance(transport, ASGITransport)
    scope = {"type": "http", "http_version": "1.1", "method": "POST", "scheme": "http", "path": path, "raw_path": b""}
    scope |= {"query_string": b"", "server": ("127.0.0.1", 8642), "client": ("127.0.0.1", 1)}
    of_model = path.startswith("/v1/")
    scope["headers"] = [(b"authorization", f"Bearer {grant['api_key']}".encode())] if of_model else []
    told = iter([{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}])
    answers: list[Any] = []

    async def receive() -> Any:
        return next(told)

    async def send(message: Any) -> None:
        answers.append(message)

    await transport.app(scope, receive, send)
    assert answers[0]["status"] == 499
    assert not caplog.records


async def test_a_key_that_is_not_ours_is_refused_in_openais_format(served: Served) -> None:
    assert_openai_error(await chat(served, "sk-something"), 401, "invalid_api_key")
    grant = await served.claim(await served.start_run())
    for key in ("swk_", "swk_ep-1.secret", grant["api_key"][:-1], f"{grant['api_key']}x", "swk_" + "e" * 10_000):
        assert_openai_error(await chat(served, key), 401, "invalid_api_key")


async def test_the_key_of_an_episode_that_is_over_says_so(served: Served) -> None:
    grant = await served.claim(await served.start_run())
    await chat(served, grant["api_key"])
    end = {"lease": grant["lease"], "reward": 1.0}
    await served.http.post(f"/swarm/v1/episodes/{grant['episode_id']}:end", json=end)
    for key in (grant["api_key"], f"{grant['api_key']}x"):
        answer = await chat(served, key)
        genuine = key == grant["api_key"]
        assert_openai_error(answer, 403 if genuine else 401, "lease_lost" if genuine else "invalid_api_key")
        assert answer.headers["x-should-retry"] == "false"


async def test_a_repeated_claim_gets_the_key_that_it_was_granted(served: Served) -> None:
    run_id = await served.start_run()
    first, again = [await served.claim(run_id, idempotency_key="k") for _ in range(2)]
    other = await served.claim(run_id)
    assert first["api_key"] == again["api_key"] != other["api_key"]
    assert first["lease"] not in first["api_key"]


async def test_a_key_that_an_older_server_issued_says_that_its_episode_is_closed(tmp_path: Path) -> None:
    secret = b"k" * 32
    async with serving(tmp_path, ControlTokens(None, None)) as served:
        grant = await served.claim(await served.start_run())
    body = f"{_unpadded(grant['episode_id'].encode())}.{_unpadded(b'sealed')}"
    mac = _unpadded(hmac.digest(secret, body.encode(), "sha256")[:18])
    async with serving(tmp_path, ControlTokens(None, None)) as served:
        for key in (f"swk_{body}.{mac}", grant["api_key"]):
            answer = await chat(served, key)
            assert_openai_error(answer, 403, "lease_lost")
            assert "server_restarted" in answer.json()["error"]["message"]


def _unpadded(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


async def test_what_the_engine_refuses_keeps_its_status_and_body(served: Served) -> None:
    grant = await served.claim(await served.start_run())
    for stream in (False, True):
        answer = await chat(served, grant["api_key"], max_tokens=10**6, stream=stream)
        assert_openai_error(answer, 400, "context_length_exceeded")


async def test_a_stream_is_server_sent_events_to_the_end(served: Served) -> None:
    grant = await served.claim(await served.start_run())
    answer = await chat(served, grant["api_key"], stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = [line for line in answer.text.split("\n\n") if line]
    assert all(event.startswith("data: ") for event in events)
    assert events[-1] == "data: [DONE]"


async def test_unknown_inference_routes_answer_in_openais_format(served: Served) -> None:
    assert_openai_error(await served.http.post("/v1/embeddings", json={}), 404, "not_found")
    grant = await served.claim(await served.start_run())
    answer = await served.http.post("/v1/chat/completions", content=b"{", headers=_bearer(grant["api_key"]))
    assert_openai_error(answer, 400, "invalid_spec")
