"""What every planner keeps, whoever drafts its studies. Subclass it and give a `planner`."""

from __future__ import annotations

from pathlib import Path

import pytest

from researcher.design.planning import plan_of
from researcher.instruments.catalogue import read_instrument
from researcher.planner.outcome import Declined, Outcome, Planner, Proposed, TopicRequest
from researcher.study.spec import StudySpec

ROOT = Path(__file__).parents[2]
ARITHMETIC = read_instrument(ROOT / "studies" / "arithmetic")
KITCHEN = read_instrument(ROOT / "tests" / "instruments" / "kitchen")
TOPIC = "Does GRPO learn one-digit sums faster with a learning rate of 1e-4 than with 1e-5?"


def request(topic: str = TOPIC, **given: object) -> TopicRequest:
    return TopicRequest(topic=topic, instruments=[ARITHMETIC, KITCHEN], given=given)


def spec_of(outcome: Outcome) -> StudySpec:
    assert isinstance(outcome, Proposed), outcome
    return StudySpec.model_validate(outcome.draft.fields)


class PlannerContract:
    pytestmark = pytest.mark.anyio

    @pytest.fixture
    def planner(self) -> Planner:
        raise NotImplementedError("a subclass gives its planner")

    async def test_a_proposal_is_a_whole_spec_that_can_be_planned(self, planner: Planner) -> None:
        spec = spec_of(await planner.propose(request()))
        plan = plan_of(spec, ARITHMETIC)
        assert {arm.levels["learning_rate"] for arm in plan.arms} == {1e-4, 1e-5}

    async def test_it_says_who_drafted_it_and_quotes_the_topic(self, planner: Planner) -> None:
        outcome = await planner.propose(request())
        assert isinstance(outcome, Proposed)
        assert outcome.draft.author == planner.name
        assert outcome.draft.fields["question"] == TOPIC

    async def test_the_treatment_is_what_the_topic_claims_something_of(self, planner: Planner) -> None:
        spec = spec_of(await planner.propose(request()))
        assert spec.compare["learning_rate"].baseline == 1e-5
        assert spec.compare["learning_rate"].levels == (1e-4,)
        assert spec.claim == "increase"

    async def test_every_setting_says_where_it_came_from(self, planner: Planner) -> None:
        outcome = await planner.propose(request())
        assert isinstance(outcome, Proposed)
        named = {path.partition(".")[0] for path in outcome.draft.sources}
        assert set(outcome.draft.fields) - {"question"} <= named

    async def test_the_same_request_gives_the_same_spec(self, planner: Planner) -> None:
        assert spec_of(await planner.propose(request())) == spec_of(await planner.propose(request()))

    async def test_what_a_person_has_fixed_holds_whatever_the_topic_says(self, planner: Planner) -> None:
        outcome = await planner.propose(request(steps=25, seeds={"min": 4, "max": 6}))
        spec = spec_of(outcome)
        assert (spec.steps, spec.seeds.min, spec.seeds.max) == (25, 4, 6)

    async def test_what_no_instrument_can_answer_is_declined_with_what_could_be_asked(self, planner: Planner) -> None:
        outcome = await planner.propose(request("Is the moon made of cheese?"))
        assert isinstance(outcome, Declined)
        assert outcome.reason
        assert 1 <= len(outcome.nearest) <= 5
