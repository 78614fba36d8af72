"""What every planner keeps, whoever makes its plans. Subclass it and give a `planner`."""

from __future__ import annotations

from pathlib import Path

import pytest

from researcher.analysis.sentinels import SENTINELS
from researcher.instruments.catalogue import read_instrument
from researcher.planner.seam import Planner, PlanOptions, PlanRequest
from researcher.refusals import PlanningRefused
from researcher.study.plan import StageKind
from swarm.protocol.runspec import RunSpec

ROOT = Path(__file__).parents[2]
ARITHMETIC = read_instrument(ROOT / "studies" / "arithmetic")
KITCHEN = read_instrument(ROOT / "tests" / "instruments" / "kitchen")
TOPIC = "Does GRPO learn one-digit sums faster with a learning rate of 1e-4 than with 1e-5?"


def request(topic: str = TOPIC, **options: object) -> PlanRequest:
    return PlanRequest(topic=topic, options=PlanOptions(**options), instruments=[ARITHMETIC, KITCHEN])  # type: ignore[arg-type]


class PlannerContract:
    pytestmark = pytest.mark.anyio

    @pytest.fixture
    def planner(self) -> Planner:
        raise NotImplementedError("a subclass gives its planner")

    async def test_a_plan_says_who_made_it_and_for_which_code(self, planner: Planner) -> None:
        plan = await planner.plan(request())
        assert plan.planner == planner.name
        assert plan.instrument_code == ARITHMETIC.code
        assert plan.question == TOPIC

    async def test_the_same_request_gives_the_same_plan(self, planner: Planner) -> None:
        assert (await planner.plan(request())).digest() == (await planner.plan(request())).digest()

    async def test_the_arms_differ_in_the_factor_and_could_be_run(self, planner: Planner) -> None:
        plan = await planner.plan(request())
        assert {factor.name for factor in plan.factors} == {"learning_rate"}
        assert {arm.levels["learning_rate"] for arm in plan.arms} == {1e-4, 1e-5}
        RunSpec.model_validate(plan.run)

    async def test_noise_is_measured_before_anything_is_compared(self, planner: Planner) -> None:
        plan = await planner.plan(request())
        floor, compare = plan.stages
        assert floor.kind is StageKind.NOISE_FLOOR
        assert set(floor.arms) < set(compare.arms)
        assert floor.first_seed == compare.first_seed == 0
        assert [b.when.kind for b in plan.branches if b.stage == floor.id] == ["power_below", "always"]

    async def test_every_stage_ends_in_a_decision_whatever_happens(self, planner: Planner) -> None:
        plan = await planner.plan(request())
        for stage in plan.stages:
            assert [b for b in plan.branches if b.stage == stage.id][-1].when.kind == "always"

    async def test_hypotheses_speak_of_arms_and_metrics_that_exist(self, planner: Planner) -> None:
        plan = await planner.plan(request())
        for hypothesis in plan.hypotheses:
            assert plan.arm(hypothesis.treatment) != plan.arm(hypothesis.baseline)
            assert hypothesis.margin == plan.metric(hypothesis.metric).margin
        assert plan.planned_effect == pytest.approx(1.5 * plan.hypotheses[0].margin)
        assert set(plan.sentinels) <= set(SENTINELS)

    async def test_what_cannot_be_asked_is_refused_in_one_line_with_what_could_be(self, planner: Planner) -> None:
        with pytest.raises(PlanningRefused) as refused:
            await planner.plan(request("Is the moon made of cheese?"))
        assert "\n" not in str(refused.value)
        assert "learning_rate" in refused.value.nearest

    async def test_a_budget_that_does_not_fit_is_refused_with_one_that_would(self, planner: Planner) -> None:
        with pytest.raises(PlanningRefused, match=r"--budget 6m"):
            await planner.plan(request(budget_s=60.0))
