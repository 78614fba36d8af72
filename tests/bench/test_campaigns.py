"""Simulated campaigns that an LLM leads, played by a program which knows what its messages say."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.campaigns import Bench, Campaign, campaign, main
from bench.hasty_llm import HastyLlm, Reading
from researcher.campaign.llm.prompt import first_messages
from researcher.campaign.llm.tools import ENDINGS, tool_schemas
from tests.fakes.strategists import campaign_at, strategist

pytestmark = pytest.mark.anyio

SEED = 749790684
"""Of a planted world whose conversations have everything in them."""


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def led() -> Campaign:
    return await campaign("planted", "llm", SEED, Bench())


def requests(of: Campaign) -> list[dict[str, Any]]:
    return [call["request"] for decision in of.decisions for call in decision.llm_calls]


async def test_it_leads_a_campaign_to_its_end_and_finds_something(led: Campaign) -> None:
    actions = [decision.action for decision in led.decisions]
    assert (actions[0], actions[-1], led.failure) == ("explore", "conclude", "")
    assert {decision.strategist for decision in led.decisions} == {"hasty"}
    assert led.claims
    assert not led.is_false()
    assert led.truth.worth(led.chosen()) > 0


async def test_it_looks_up_prices_through_the_strategists_tools(led: Campaign) -> None:
    said = [str(message["content"]) for request in requests(led) for message in request["messages"]]
    assert any(words.startswith("It can be planned") for words in said)
    assert all(call["answer"] for decision in led.decisions for call in decision.llm_calls)


async def test_whatever_it_says_first_comes_back_and_is_mended(tmp_path: Path) -> None:
    made, seen = await campaign_at(tmp_path, "screened")
    forms = set()
    for seed in range(12):
        asked = strategist(HastyLlm(seed, malformed=1.0), made, kept=False)
        assert await asked.propose(seen)
        calls = asked.calls()
        assert len(calls) >= 2
        forms.add(calls[-1].purpose.rpartition(", ")[2])
    assert forms == {"tools", "json_schema"}


async def test_the_same_messages_are_answered_in_the_same_way_by_whoever_has_the_same_seed(led: Campaign) -> None:
    asked = requests(led)[0]
    first, again, other = [await HastyLlm(seed).answer(asked) for seed in (1, 1, 2)]
    assert first == again
    assert first != other


async def test_it_reads_what_the_prompt_shows(tmp_path: Path) -> None:
    _, seen = await campaign_at(tmp_path, "confirmed")
    prompt = first_messages(seen, "tools", tool_schemas(), ENDINGS, 5)[1]["content"]
    reading = Reading.of(prompt)
    assert {name: tuple(levels) for name, levels in reading.factors.items()} == {
        factor.name: factor.levels for factor in seen.aim.factors
    }
    assert reading.defaults == {factor.name: factor.default for factor in seen.aim.factors}
    assert (reading.margin, reading.confirmations, reading.incumbent) == (0.1, 1, {"learning_rate": 1.6e-4})
    assert [study.action for study in reading.studies] == ["explore", "confirm"]
    assert [len(study.arms) for study in reading.studies] == [len(study.arms) for study in seen.studies]
    assert reading.studies[1].verdict == "supported"
    assert reading.ahead()[0][1] < 0


def test_one_strategist_is_played_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--strategist", "llm", "--null", "1", "--planted", "0", "--seed", "5")
    monkeypatch.setattr(sys, "argv", ["bench.campaigns", *words])
    assert main() == 0
    line, summary = map(json.loads, capsys.readouterr().out.splitlines())
    assert (line["world"], line["strategist"], line["campaigns"], line["given_up"]) == ("null", "llm", 1, 0)
    assert summary["failed"] == []
