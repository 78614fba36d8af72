"""What every strategist keeps, whoever has its ideas."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bench.hasty_llm import HastyLlm
from researcher.campaign.builtin import BuiltinStrategist
from researcher.campaign.graph import decide
from researcher.campaign.judging import chosen, judged
from researcher.campaign.proposals import Proposal
from researcher.campaign.seen import Seen
from researcher.campaign.strategist import Strategist
from researcher.models import STUDIES, LlmCall
from tests.fakes.campaign import MadeUpCampaign
from tests.fakes.scripted_llm import ScriptedLlm
from tests.fakes.strategists import as_builtin, campaign_at, strategist

STATES = ("fresh", "screened", "confirmed", "spent")
Make = Callable[[MadeUpCampaign, Seen], Strategist]


class StrategistContract:
    """Subclass it and give `make`."""

    pytestmark = pytest.mark.anyio

    @pytest.fixture
    def make(self) -> Make:
        raise NotImplementedError("a subclass makes its strategist")

    @pytest.mark.parametrize("when", STATES)
    async def test_a_step_can_be_taken_in_every_state(self, make: Make, tmp_path: Path, when: str) -> None:
        made, seen = await campaign_at(tmp_path, when)
        found = await make(made, seen).propose(seen)
        assert 1 <= len(found) <= 5
        assert all(isinstance(each, Proposal) for each in found)
        judgements = [judged(each, seen, made.planner) for each in found]
        step = chosen(judgements)
        assert step is not None, [each.problems for each in judgements]
        if when == "fresh":
            assert (step.proposal.action, step.alpha) == ("explore", None)
        if when == "spent":
            assert step.proposal.action not in STUDIES

    async def test_the_same_input_gives_the_same_proposals(self, make: Make, tmp_path: Path) -> None:
        made, seen = await campaign_at(tmp_path, "screened")
        again = Seen.model_validate_json(seen.canonical())
        assert again.digest() == seen.digest()
        assert await make(made, seen).propose(seen) == await make(made, again).propose(again)

    async def test_nothing_that_is_codes_is_in_its_specs(self, make: Make, tmp_path: Path) -> None:
        made, seen = await campaign_at(tmp_path, "screened")
        for each in await make(made, seen).propose(seen):
            assert not each.spec.keys() & {"metric", "margin", "claim", "budget", "instrument", "question"}
            assert "first" not in each.spec.get("seeds", {})

    async def test_a_decision_carries_its_name_and_its_calls_once(self, make: Make, tmp_path: Path) -> None:
        made, seen = await campaign_at(tmp_path, "fresh")
        asked = make(made, seen)
        assert asked.name
        decided = await decide(seen, asked, made.planner)
        assert decided.step is not None
        calls = asked.calls()
        assert all(isinstance(call, LlmCall) for call in calls)
        assert asked.calls() == []


class TestBuiltin(StrategistContract):
    @pytest.fixture
    def make(self) -> Make:
        return lambda made, seen: BuiltinStrategist()


class TestLlm(StrategistContract):
    @pytest.fixture
    def make(self) -> Make:
        return lambda made, seen: strategist(ScriptedLlm(when=as_builtin(lambda: seen)), made)


class TestHastyLlm(StrategistContract):
    """The LLM that the bench plays: the same strategist, with answers from what the prompt says."""

    @pytest.fixture
    def make(self) -> Make:
        return lambda made, seen: strategist(HastyLlm(seed=4, eager=0.0), made)
