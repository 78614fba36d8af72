"""Real vLLM dies between two turns of an impatient agent that prints the error as its answer."""

from __future__ import annotations

import os
import signal
from typing import Any

import openai
import pytest

from swarm.engine.local.inference import VllmInference
from tests.swarm.server.gateway.conftest import Episode, Served
from tests.vllm_fixture import LoopThread

pytestmark = [pytest.mark.campaign]
IMPATIENT_S = 2.0


def answer(episode: Episode, messages: list[Any], timeout_s: float) -> str:
    """What the agent prints: the model's words, or the error's."""
    client = openai.OpenAI(
        base_url=episode.grant["base_url"], api_key=episode.grant["api_key"], max_retries=0, timeout=timeout_s
    )
    with client:
        try:
            told = client.chat.completions.create(model="policy", messages=messages)
        except openai.APIError as error:
            return f"error: {error}"
    return str(told.choices[0].message.content)


def test_an_agent_that_prints_the_error_of_a_killed_engine_is_not_trained_on_it(
    served_vllm: Served, vllm: VllmInference, vllm_loop: LoopThread
) -> None:
    episode = served_vllm.claim()
    messages: list[Any] = [{"role": "user", "content": "What is 2 + 2?"}]
    first = answer(episode, messages, 120.0)
    assert not first.startswith("error")
    assert vllm.process_id is not None
    os.kill(vllm.process_id, signal.SIGKILL)
    said = [{"role": "assistant", "content": first}, {"role": "user", "content": "And 3 + 3?"}]
    try:
        assert answer(episode, [*messages, *said], IMPATIENT_S).startswith("error")
        lease = {"lease": episode.grant["lease"], "reward": 0.0}
        ended = served_vllm.http.post(f"/swarm/v1/episodes/{episode.id}:end", json=lease).raise_for_status().json()
        assert (ended["status"], ended["dropped"]) == ("pooled", "tainted")
        trace = episode.trace()
        assert [call.failure and call.failure.reason for call in trace.calls] == [None, "engine_down"]
        entry = trace.entry
        assert (entry.state, entry.reason, entry.cause, entry.reward) == ("dropped", "tainted", "server", 0.0)
        query = {"reason": "tainted", "task_id": entry.task_id}
        counts = served_vllm.http.get("/swarm/v1/ledger/summary", params=query).raise_for_status().json()["counts"]
        assert [count["episodes"] for count in counts] == [1]
    finally:
        vllm_loop.run(vllm.boot())  # others use it after this test
    assert not answer(served_vllm.claim(), messages, 120.0).startswith("error")
