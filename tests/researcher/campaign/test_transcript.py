"""A whole campaign led by an LLM behind a stub endpoint, whose answers were written by hand as a strong model gives them.

`transcript.jsonl` has a line for all that happens, in order: what the LLM answers and the words that it has to have seen before, an
outage, and what a person does as the next study begins. The studies are simulated; everything else is real.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from foundation.clock import ManualClock
from researcher.campaign.records import observe
from researcher.campaign.report import campaign_page
from researcher.campaign.verify import verify_campaign
from researcher.llm.asking import tokens_of
from researcher.llm.endpoint import LlmSettings, OpenAIEndpoint
from researcher.models import CampaignStatus, DecisionRecord
from tests.fakes.campaign import MadeUpCampaign
from tests.fakes.llm_server import LlmServer, llm_server
from tests.fakes.scripted_llm import called
from tests.fakes.strategists import Jumping, steps, strategist, texts

pytestmark = pytest.mark.anyio
HEADER, *LINES = [
    json.loads(line) for line in (Path(__file__).parent / "transcript.jsonl").read_text(encoding="utf-8").splitlines()
]
ANSWERS = [line for line in LINES if "calls" in line]
DECISIONS = ["explore", "explore", "explore", "confirm", "confirm", "explore", "conclude"]


class Killed(BaseException):
    """As a kill at that instruction."""


class Transcript:
    """Answers requests and acts for people, line by line. problems: what differs from the transcript."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock
        self._at = 0
        self._outage_since: float | None = None
        self.made: MadeUpCampaign | None = None
        self.problems: list[str] = []

    @property
    def left(self) -> int:
        return len(LINES) - self._at

    def answer(self, request: dict[str, Any]) -> dict[str, Any] | int:
        line = self._line
        if "outage_s" in line:
            since = self._outage_since = self._clock.now() if self._outage_since is None else self._outage_since
            if self._clock.now() - since < line["outage_s"]:
                return 503
            self._at += 1
            line = self._line
        shown = texts(request)
        self.problems += [f"{line.get('note')}: {word!r} was not shown" for word in line["sees"] if word not in shown]
        if "calls" not in line:
            self.problems.append(f"a request came where the transcript has: {line}")
            return 404
        self._at += 1
        text = json.dumps(line["calls"])
        assert self.made is not None
        for each in self.made.store.campaigns.decisions(self.made.id):
            text = text.replace(f"{{study {each.seq}}}", each.study_id or "")
        return called(*((name, given) for name, given in json.loads(text)), prompt_tokens=tokens_of(request))

    def before(self, study_id: str) -> None:
        """A study begins: what a person does then."""
        line = self._line
        if "person" not in line or self.made is None:
            return
        self._at += 1
        if line["person"] == "veto":
            self.made.store.campaigns.veto(self.made.id, line["words"], "ada")
        else:
            self.made.store.campaigns.record(self.made.id, "told", {"words": line["words"], "by": "ada"})

    @property
    def _line(self) -> dict[str, Any]:
        return LINES[self._at] if self._at < len(LINES) else {"note": "the end", "sees": []}


@pytest.fixture
def clock() -> Jumping:
    return Jumping()


@pytest.fixture
def transcript(clock: Jumping) -> Transcript:
    return Transcript(clock)


@pytest.fixture
def server(transcript: Transcript) -> Iterator[LlmServer]:
    with llm_server(when=transcript.answer) as served:
        yield served


@pytest.fixture
def made(tmp_path: Path, clock: Jumping, transcript: Transcript) -> MadeUpCampaign:
    factors = ["learning_rate", "temperature", "group_size"]
    budget = {"trials": 200, "llm_tokens": 500_000}
    found = MadeUpCampaign(tmp_path, clock=clock, goal=HEADER["goal"], factors=factors, budget=budget)
    found.runner.says = lambda arm: str(HEADER["answers_of_models"])
    found.runner.before = transcript.before
    transcript.made = found
    return found


def led(made: MadeUpCampaign, server: LlmServer) -> None:
    """As a fresh process has it."""
    settings = LlmSettings(model="some-llm", base_url=server.url, api_key="sk-test")
    made.strategist = strategist(OpenAIEndpoint(settings), made, clock=made.clock)


def checked(made: MadeUpCampaign, transcript: Transcript) -> list[DecisionRecord]:
    """The decisions, once it is sure that they follow from the transcript and the records."""
    assert transcript.problems == []
    assert transcript.left == 0
    decisions = made.store.campaigns.decisions(made.id)
    assert steps(decisions) == DECISIONS
    assert {each.strategist for each in decisions} == {"some-llm"}
    assert verify_campaign(made.store, made.id, made.folder / made.id) == []
    return decisions


async def test_a_strong_model_leads_a_campaign_to_its_answer(
    made: MadeUpCampaign, transcript: Transcript, server: LlmServer, clock: Jumping
) -> None:
    led(made, server)
    began = clock.now()
    outcome = await made.carry_out()
    assert outcome.status is CampaignStatus.DONE, (outcome.reason, transcript.problems)
    decisions = checked(made, transcript)
    assert clock.now() - began >= 7200
    assert all(tokens_of({**body, "messages": body["messages"][:2]}) <= 8000 for body in server.asked)

    calls = [call for each in decisions for call in each.llm_calls]
    answers = [call["answer"] for call in calls if call["answer"] is not None]
    assert len(answers) == len(ANSWERS)
    assert len(calls) == len(server.asked)
    assert sum(call["answer"] is None for call in decisions[1].llm_calls) > 20

    seen = observe(made.store, made.id)
    assert seen.on().incumbent == {"learning_rate": 1.6e-4}
    assert [each.status for each in seen.hypotheses] == [
        "dropped",
        "dropped",
        "explored",
        "supported",
        "supported",
        "dropped",
    ]
    assert outcome.report is not None
    told = (outcome.report / "report.md").read_text()
    assert "Learning_rate 1.6e-4 is the best that was confirmed." in told
    page = campaign_page(made.store, made.id)
    assert len(page.tree) == 6
    spent = 500_000 - sum(call["prompt_tokens"] + call["completion_tokens"] for call in calls)
    assert seen.left.llm_tokens == spent


async def test_killed_before_every_decision_is_written_it_asks_nothing_twice(
    made: MadeUpCampaign, transcript: Transcript, server: LlmServer
) -> None:
    real, killed = made.store.campaigns.decide, set[int]()

    def dies_once(campaign_id: str, decision: DecisionRecord, *rest: Any) -> DecisionRecord:
        if decision.seq not in killed:
            killed.add(decision.seq)
            raise Killed
        return real(campaign_id, decision, *rest)

    made.store.campaigns.decide = dies_once  # type: ignore[method-assign, assignment]
    for _ in DECISIONS:
        led(made, server)
        with pytest.raises(Killed):
            await made.carry_out()
    led(made, server)
    assert (await made.carry_out()).status is CampaignStatus.DONE
    decisions = checked(made, transcript)
    answered = [call for each in decisions for call in each.llm_calls if call["answer"] is not None]
    assert len(answered) == len(ANSWERS)
