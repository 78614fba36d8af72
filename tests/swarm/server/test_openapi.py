"""The server against its own OpenAPI document: whatever is asked, it answers in time, below 500, and only to whom it concerns.

SWARM_OPENAPI_EXAMPLES: how many requests to each operation, in each of two ways (default 6).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Iterator
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis import APIOperation, GenerationMode
from schemathesis.core.result import Ok

from bench.serving import ServerProcess
from swarm.server.keys import Keyring
from swarm.server.state.leases import API_KEY_PREFIX

ADMIN, CLIENT = "swt_admin-0123456789", "swt_client-0123456789"
LIMIT_S = 60.0
SEED = 1
EXAMPLES = int(os.environ.get("SWARM_OPENAPI_EXAMPLES", "6"))
SPEC: dict[str, Any] = {
    "batch": {"tasks": 8192, "group_size": 2, "max_pool_episodes": 100_000},
    "sampling": {"max_tokens": 32},
}
NOT_YET = {"not_rolling", "draining", "mix_full"}
"""Refusals with 503 that say when to come again."""
ENDS_THE_RUN = {"POST /swarm/v1/runs/{run_id}:stop"}
FOR_ADMINS = {
    "POST /swarm/v1/runs",
    "PATCH /swarm/v1/runs/{run_id}",
    "POST /swarm/v1/episodes/{episode_id}:resolve",
} | {f"POST /swarm/v1/runs/{{run_id}}:{wish}" for wish in ("stop", "restore", "quarantine", "checkpoint")}
OPEN = {"GET /health"}
BY_TEAM_KEY = {"GET /swarm/v1/episodes/{episode_id}/decision"}
SECRET = "bystander-4711"
CHAT: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "Repeat red"}], "max_tokens": 8}
ASKED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": "policy", "prompt": "Repeat red"},
    "/v1/responses": {"model": "policy", "input": "Repeat red"},
}
"""What each inference operation would answer; CHAT where it is not named."""
EXTREME = [2**31, 2**53 + 1, 2**63, -(2**63) - 1, 10**30]

searched = settings(
    max_examples=EXAMPLES,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


Operation = APIOperation[Any, Any, Any, Any]
Case = schemathesis.Case[Operation]


class World:
    """One server with tokens and a run, shared by all tests of this file."""

    def __init__(self, server: ServerProcess) -> None:
        self.url = server.url
        self.http = requests.Session()
        self.http.trust_env = False
        self.numbers = itertools.count()
        self.run_id = self.control("POST", "/swarm/v1/runs", {"spec": SPEC})["run_id"]
        self.schema = schemathesis.openapi.from_dict(self.control("GET", "/openapi.json"))

    @property
    def operations(self) -> list[Operation]:
        return [found.ok() for found in self.schema.get_all_operations() if isinstance(found, Ok)]

    def control(self, method: str, path: str, body: Any = None) -> Any:
        answer = self.ask(method, path, ADMIN, json=body)
        answer.raise_for_status()
        return answer.json()

    def ask(self, method: str, path: str, key: str | None, **options: Any) -> requests.Response:
        headers = options.pop("headers", {}) | ({} if key is None else {"Authorization": f"Bearer {key}"})
        return self.http.request(method, self.url + path, headers=headers, timeout=LIMIT_S, **options)

    def claim(self) -> dict[str, Any]:
        task = f"task-{next(self.numbers)}"
        body = {"run_id": self.run_id, "client_id": "c", "client_version": "of the test", "task_id": task}
        return dict(self.control("POST", "/swarm/v1/episodes:claim", body))

    def chat(self, grant: dict[str, Any], said: str, **headers: str) -> requests.Response:
        body = {"model": "policy", "messages": [{"role": "user", "content": said}], "seed": 5}
        return self.ask("POST", "/v1/chat/completions", grant["api_key"], json=body, headers=headers)

    def trace(self, grant: dict[str, Any]) -> Any:
        return self.control("GET", f"/swarm/v1/episodes/{grant['episode_id']}/trace")

    def end(self, grant: dict[str, Any]) -> None:
        body = {"lease": grant["lease"], "reward": 1.0}
        self.control("POST", f"/swarm/v1/episodes/{grant['episode_id']}:end", body)

    def send(self, case: Case, key: str | None, headers: dict[str, str] | None = None) -> requests.Response:
        """The case as generated, but for its authorisation."""
        request = case.as_transport_kwargs(base_url=self.url)
        request["headers"] = {
            name: value
            for name, value in request["headers"].items()
            if name.lower() not in ("authorization", "x-api-key")
        } | (headers or {})
        if key is not None:
            request["headers"]["Authorization"] = f"Bearer {key}"
        with self.http.request(**request, timeout=LIMIT_S, stream=True, allow_redirects=False) as answer:
            if not answer.headers.get("Content-Type", "").startswith("text/event-stream") or is_inference(case):
                answer.content  # noqa: B018 - to its end, or to the time limit
            else:
                next(answer.iter_content(1))  # events never end
                answer._content = b""
        return answer


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    environ = {"SWARM_ADMIN_TOKEN": ADMIN, "SWARM_CLIENT_TOKEN": CLIENT}
    state_dir = tmp_path_factory.mktemp("openapi") / "state"
    with ServerProcess(state_dir, "--log-level", "error", environ=environ) as server:
        shared = World(server)
        yield shared
        shared.http.close()
        assert "Traceback" not in server.log_path.read_text()


def is_inference(case: Case) -> bool:
    return bool(case.operation.path.startswith("/v1/"))


def made_real(case: Case, world: World, grant: dict[str, Any], data: st.DataObject) -> None:
    """Put what exists in place of what was made up, so that requests come further than to `not_found`. Nothing waits long."""
    real = {"run_id": world.run_id, "episode_id": grant["episode_id"], "lease": grant["lease"], "model": "policy"}
    for name in set(case.path_parameters or {}) & set(real):
        if case.operation.label not in ENDS_THE_RUN and data.draw(st.booleans()):
            case.path_parameters[name] = real[name]
    for given_values in (case.query, case.body):
        if not isinstance(given_values, dict):
            continue
        for name in sorted(set(given_values) & set(real)):
            if data.draw(st.booleans()):
                given_values[name] = real[name]
        if "wait_s" in given_values or case.operation.path.endswith((":claim", "/status")):
            given_values["wait_s"] = 0
        numbers: list[str] = sorted(
            name for name, value in given_values.items() if type(value) is int and name != "wait_s"
        )
        if numbers != [] and data.draw(st.booleans()):
            given_values[data.draw(st.sampled_from(numbers))] = data.draw(st.sampled_from(EXTREME))
    if is_inference(case) and isinstance(case.body, dict) and data.draw(st.booleans()):
        case.body = {**ASKED.get(case.operation.path, CHAT), **case.body}


def check(answer: requests.Response, case: Case) -> None:
    """Below 500 or a refusal that says when to come again; refusals in the form of their surface."""
    told = (answer.status_code, case.as_curl_command(), answer.text[:500])
    assert SECRET not in answer.text, told
    if answer.status_code < 400:
        return
    body = answer.json()
    if is_inference(case):
        assert answer.status_code < 500, told
        assert body["error"]["message"], told
    else:
        assert answer.status_code < 500 or body["code"] in NOT_YET, told
        declared = case.operation.definition.raw["responses"]["default"]["description"]
        assert body["code"] in re.findall("[a-z_]+", declared), (declared, *told)
        assert answer.headers["Content-Type"] == "application/problem+json", told


@pytest.mark.parametrize("mode", GenerationMode)
def test_nothing_that_the_document_allows_or_forbids_makes_the_server_fail_hang_or_leak(
    world: World, mode: GenerationMode
) -> None:
    bystander = world.claim()
    world.chat(bystander, f"Repeat {SECRET}").raise_for_status()
    before = world.trace(bystander)
    for operation in world.operations:

        @seed(SEED)
        @searched
        @given(data=st.data(), case=operation.as_strategy(generation_mode=mode))
        def try_it(data: st.DataObject, case: Case) -> None:
            grant = world.claim()
            made_real(case, world, grant, data)
            key = grant["api_key"] if is_inference(case) else ADMIN
            check(world.send(case, key), case)

        with contextlib.suppress(Unsatisfiable):  # nothing about it can be wrong
            try_it()
    assert world.trace(bystander) == before


def foreign_keys(grant: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Keys that say something true and were not made by this server for that."""
    elsewhere = Keyring(b"another server's secret, as long as it must be")
    secret = other["api_key"].rpartition(".")[2]
    return [
        f"{API_KEY_PREFIX}{grant['episode_id']}.{secret}",
        f"{API_KEY_PREFIX}{grant['episode_id']}.",
        f"{API_KEY_PREFIX}{grant['episode_id']}",
        grant["api_key"].removeprefix(API_KEY_PREFIX),
        elsewhere.team_key(grant["episode_id"]),
        grant["lease"],
        other["team_key"],
    ]


def require_refusals(
    world: World, operation: Operation, grant: dict[str, Any], keys: st.SearchStrategy[str | None]
) -> None:
    """Whatever is asked with one of these keys is answered 401."""

    @seed(SEED)
    @searched
    @given(data=st.data(), case=operation.as_strategy(), key=keys)
    def try_it(data: st.DataObject, case: Case, key: str | None) -> None:
        made_real(case, world, grant, data)
        assert world.send(case, key).status_code == 401, (operation.label, key)
        if is_inference(case) and key is not None:
            assert world.send(case, None, {"x-api-key": key}).status_code == 401, (operation.label, key)

    try_it()


def test_wrong_expired_and_foreign_keys_are_refused_everywhere(world: World) -> None:
    grant, other, over = world.claim(), world.claim(), world.claim()
    world.end(over)
    strangers = [*foreign_keys(grant, other), "", "swt_", ADMIN + "x", ADMIN[:-1], ADMIN.upper()]
    texts = st.text(st.characters(min_codepoint=33, max_codepoint=255, exclude_characters="\x7f"), max_size=60)
    for operation in world.operations:
        inference = operation.path.startswith("/v1/")
        wrong = [None, *strangers, *([ADMIN, CLIENT] if inference else [grant["api_key"], over["api_key"]])]
        if operation.label in OPEN:
            continue
        if operation.label in BY_TEAM_KEY:
            wrong += [ADMIN, CLIENT]

        keys = st.sampled_from(wrong) | texts
        require_refusals(world, operation, grant, keys)
        if operation.label in FOR_ADMINS:
            assert (
                world.send(operation.Case(path_parameters={"run_id": "r", "episode_id": "e"}), CLIENT).status_code
                == 403
            )
        if inference:
            body = ASKED.get(operation.path, CHAT)
            path = operation.path.replace("{model}", "policy")
            asked = {} if operation.method.upper() == "GET" else {"json": body}
            late = world.ask(operation.method.upper(), path, over["api_key"], **asked)
            assert (late.status_code, "is closed" in late.text) == (403, True), (operation.label, late.text)


PROMPTS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=40)


def test_nothing_of_one_episode_comes_out_of_another(world: World) -> None:
    mine = world.claim()
    told = world.chat(mine, f"Repeat {SECRET}", **{"Idempotency-Key": "the same"}).json()
    body = {"model": "policy", "input": f"Repeat {SECRET}"}
    answered = world.ask("POST", "/v1/responses", mine["api_key"], json=body).json()
    before = world.trace(mine)

    @seed(SEED)
    @searched
    @given(said=PROMPTS, retried=st.booleans())
    def try_it(said: str, retried: bool) -> None:
        other = world.claim()
        headers = {"Idempotency-Key": "the same"} if retried else {"x-stainless-retry-count": "1"}
        answer = world.chat(other, said, **headers)
        assert answer.status_code == 200
        assert SECRET not in answer.text
        assert answer.json()["id"] != told["id"]
        follow = {"model": "policy", "input": said, "previous_response_id": answered["id"]}
        assert world.ask("POST", "/v1/responses", other["api_key"], json=follow).status_code in (400, 404)
        for wish in ({"reward": 1.0}, {"reason": "not mine"}):
            verb = "end" if "reward" in wish else "abort"
            path = f"/swarm/v1/episodes/{mine['episode_id']}:{verb}"
            theirs = world.ask("POST", path, CLIENT, json={"lease": other["lease"], **wish})
            assert theirs.json()["code"] == "lease_lost"
        (call,) = world.trace(other)["calls"]
        assert call["episode_id"] == other["episode_id"]
        assert SECRET not in str(call)

    try_it()
    assert world.trace(mine) == before


def test_an_equal_request_under_an_equal_key_is_a_new_sample_in_another_episode(world: World) -> None:
    one, two = world.claim(), world.claim()
    key = {"Idempotency-Key": "k"}
    answers = [world.chat(grant, "Repeat red", **key).json()["id"] for grant in (one, one, two, two)]
    assert answers[0] == answers[1] != answers[2] == answers[3]
    assert [len(world.trace(grant)["calls"]) for grant in (one, two)] == [1, 1]


@pytest.mark.parametrize("number", EXTREME)
def test_whole_numbers_that_no_store_keeps_are_refused_not_stumbled_over(world: World, number: int) -> None:
    queries = {
        "/swarm/v1/ledger": "step",
        "/swarm/v1/ledger/summary": "step",
        f"/swarm/v1/runs/{world.run_id}": "since_step",
    }
    for path, name in queries.items():
        answer = world.ask("GET", path, ADMIN, params={name: number})
        assert answer.status_code == (200 if 0 <= number < 2**63 else 422), answer.text
    if number > 2**53:
        for patch in ({"max_staleness": number}, {"limits": {"steps": number}}, {"optimizer": {"warmup": number}}):
            answer = world.ask("PATCH", f"/swarm/v1/runs/{world.run_id}", ADMIN, json=patch)
            assert (answer.status_code, answer.json()["code"]) == (422, "invalid_spec"), answer.text
        answer = world.ask("POST", "/swarm/v1/runs", ADMIN, json={"spec": {"checkpoint": {"keep": number}}})
        assert (answer.status_code, answer.json()["code"]) == (422, "invalid_spec"), answer.text


def test_infinite_numbers_are_refused_in_a_spec(world: World) -> None:
    raw = '{"spec": {"optimizer": {"learning_rate": Infinity}}}'
    answer = world.ask("POST", "/swarm/v1/runs", ADMIN, data=raw)
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_spec"), answer.text
