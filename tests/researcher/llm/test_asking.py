"""Asking an LLM: one purse for all who ask, and settings from the environment."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from foundation.clock import ManualClock, SystemClock
from researcher.llm.asking import Asker, Purse
from researcher.llm.endpoint import LlmOutage, LlmSettings, LlmUnusable, llm_settings
from researcher.models import LlmCall
from researcher.refusals import PlanningRefused
from tests.fakes.scripted_llm import ScriptedLlm, completion


@pytest.mark.anyio
async def test_all_who_ask_for_one_study_share_its_purse_with_calls_that_are_under_way() -> None:
    answered, asking = asyncio.Event(), asyncio.Event()

    class Slow:
        async def answer(self, request: dict[str, Any]) -> dict[str, Any]:
            asking.set()
            await answered.wait()
            return completion("yes", prompt_tokens=10, completion_tokens=90)

    settings = LlmSettings(model="some-llm", max_tokens=1000, answer_tokens=600)
    purse, calls = Purse(), list[LlmCall]()
    one, other = (
        Asker(Slow(), settings, SystemClock(), keep=calls.append, tell=lambda _: None, purse=purse) for _ in range(2)
    )
    question: dict[str, Any] = {"messages": []}
    first = asyncio.ensure_future(one.ask("first", question))
    await asking.wait()
    with pytest.raises(LlmUnusable, match="limit of 1000 tokens"):
        await other.ask("second", question)
    answered.set()
    await first
    for _ in range(3):
        await other.ask("second", question)
    assert purse == Purse(tokens=400) == Purse.of(calls)
    with pytest.raises(LlmUnusable, match="limit of 1000 tokens"):
        await one.ask("third", question)


@pytest.mark.anyio
@pytest.mark.parametrize(("patience_s", "says"), [(0.5, "0.5 s"), (3, "3 s"), (600, "10 min"), (9000, "2.5 h")])
async def test_an_outage_that_outlasts_patience_says_how_long_that_was(patience_s: float, says: str) -> None:
    clock = ManualClock()
    settings = LlmSettings(model="some-llm", patience_s=patience_s)
    asker = Asker(ScriptedLlm(LlmOutage("no route")), settings, clock, keep=lambda _: None, tell=lambda _: None)
    asking = asyncio.ensure_future(asker.ask("first", {"messages": []}))
    while not asking.done():
        await asyncio.sleep(0)
        clock.advance(1.0)
    with pytest.raises(LlmUnusable, match=f"for {says}; .*no route"):
        await asking


def test_settings_come_from_the_environment_and_say_what_is_missing() -> None:
    assert llm_settings({}) is None
    named = {"RESEARCHER_LLM_MODEL": "m", "RESEARCHER_LLM_API_KEY": "secret"}
    found = llm_settings({**named, "RESEARCHER_LLM_MAX_TOKENS": "2e5", "RESEARCHER_LLM_ANSWER_TOKENS": "20000"})
    assert found is not None
    assert (found.model, found.max_tokens, found.answer_tokens) == ("m", 200_000, 20_000)
    assert "secret" not in repr(found)
    for environ, says in (
        ({"RESEARCHER_LLM_API_KEY": "k"}, "RESEARCHER_LLM_MODEL"),
        ({**named, "RESEARCHER_LLM_MAX_COST": "lots"}, "RESEARCHER_LLM_MAX_COST should be a valid number"),
        ({**named, "RESEARCHER_LLM_MAX_COST": "2"}, "RESEARCHER_LLM_PRICE_IN"),
        ({**named, "RESEARCHER_LLM_ANSWER_TOKENS": "0"}, "RESEARCHER_LLM_ANSWER_TOKENS"),
        ({**named, "RESEARCHER_LLM_MAX_TOKENS": "2.5"}, "RESEARCHER_LLM_MAX_TOKENS should be a valid integer"),
    ):
        with pytest.raises(PlanningRefused, match=says):
            llm_settings(environ)
