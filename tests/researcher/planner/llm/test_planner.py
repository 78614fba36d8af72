"""The planner that asks an LLM: the contract, the ladder, outages, caps, replay."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from langgraph.checkpoint.sqlite import SqliteSaver

from foundation.clock import Clock, ManualClock, SystemClock
from researcher.instruments.catalogue import available
from researcher.llm.asking import Asker, Purse
from researcher.llm.endpoint import Endpoint, LlmOutage, LlmRefused, LlmUnusable, Replayed
from researcher.llm.settings import LlmSettings, llm_settings
from researcher.models import LlmCall
from researcher.planner.graph import BuiltinPlanner
from researcher.planner.llm.planner import LlmPlanner
from researcher.planner.seam import Planner, PlanOptions, PlanRequest
from researcher.refusals import PlanningRefused
from researcher.study.plan import Plan
from tests.contracts.planner_contract import PlannerContract, request
from tests.fakes.scripted_llm import SENSIBLE, ScriptedLlm, called, completion, said

pytestmark = pytest.mark.anyio


def planner(
    endpoint: Endpoint, *, clock: Clock | None = None, calls: list[LlmCall] | None = None, **settings: Any
) -> LlmPlanner:
    chosen = LlmSettings(model="some-llm", **settings)
    kept = [] if calls is None else calls
    return LlmPlanner(endpoint, chosen, clock or SystemClock(), BuiltinPlanner(), keep=kept.append)


class TestLlmPlanner(PlannerContract):
    @pytest.fixture
    def planner(self) -> Planner:
        def sensible(asked: dict[str, Any]) -> dict[str, Any]:
            return completion("It is made of rock.") if "cheese" in str(asked["messages"]) else said(SENSIBLE)

        return planner(ScriptedLlm(when=sensible))


async def test_the_strictest_form_is_asked_first_and_a_refused_form_gives_way_to_the_next() -> None:
    llm = ScriptedLlm(LlmRefused("no response_format here"), LlmRefused("no tools here"), said(SENSIBLE))
    plan = await planner(llm).plan(request())
    assert plan.planner == "some-llm"
    first, second, third = llm.asked
    assert first["response_format"]["type"] == "json_schema"
    assert second["tools"][0]["function"]["name"] == second["tool_choice"]["function"]["name"]
    assert not {"response_format", "tools"} & set(third)


async def test_a_tool_call_is_read() -> None:
    plan = await planner(ScriptedLlm(LlmRefused("no schema"), called(json.dumps(SENSIBLE)))).plan(request())
    assert plan.planner == "some-llm"


@pytest.mark.parametrize(
    "text",
    [
        "Sure! Here it is:\n```json\n{}\n```\nGood luck.",
        "{}",
        "I think {this} is best: {}",
        "<think>{{not json</think> {}",
    ],
)
async def test_json_is_found_in_prose(text: str) -> None:
    wrapped = text.replace("{}", json.dumps(SENSIBLE)[:-1] + ",}")
    assert (await planner(ScriptedLlm(completion(wrapped))).plan(request())).planner == "some-llm"


async def test_what_is_wrong_is_told_verbatim_and_mended() -> None:
    wrong = {**SENSIBLE, "factors": [{"name": "learning_rate", "baseline": 1e-5, "treatments": [5.0]}]}
    llm = ScriptedLlm(said(wrong), said({**SENSIBLE, "metric": "happiness"}), said(SENSIBLE))
    plan = await planner(llm).plan(request())
    assert plan.planner == "some-llm"
    assert "learning_rate goes from 0 to 0.001; 5 lies outside" in llm.asked[1]["messages"][-1]["content"]
    assert "happiness" in llm.asked[2]["messages"][-1]["content"]


async def test_only_the_author_of_a_topic_names_data_and_texts(tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text('{"prompt": "1+1?", "answer": "2"}\n')
    topic = f"Is a group size of 8 better than 4 on {file}, whose questions are in the column prompt?"
    factors = [{"name": "group_size", "baseline": 4, "treatments": [8]}]

    def choice(**levels: str) -> dict[str, Any]:
        settings = [{"name": name, "level": level} for name, level in levels.items()]
        return said({**SENSIBLE, "instrument": "dataset", "factors": factors, "settings": settings})

    llm = ScriptedLlm(
        choice(question_column="prompt"),
        choice(data="/etc/hosts.jsonl", question_column="secret"),
        choice(data=str(file), question_column="prompt"),
    )
    plan = await planner(llm).plan(PlanRequest(topic=topic, options=PlanOptions(), instruments=available({})))
    assert (plan.planner, plan.task["question_column"]) == ("some-llm", "prompt")
    assert str(plan.task["data"]).startswith(f"{file}#sha256=")
    assert "dataset needs its data" in llm.asked[1]["messages"][-1]["content"]
    assert (
        "'/etc/hosts.jsonl', 'secret' does not stand in the topic as it is" in llm.asked[2]["messages"][-1]["content"]
    )


async def test_after_three_attempts_the_built_in_planner_plans_and_the_plan_says_so() -> None:
    calls: list[LlmCall] = []
    llm = ScriptedLlm(completion("no"))
    plan = await planner(llm, calls=calls).plan(request())
    assert plan.planner == "builtin"
    assert any("some-llm gave no valid plan" in note for note in plan.assumptions)
    assert len(llm.asked) == len(calls) == 3
    assert calls[0].answer == completion("no")


async def test_several_factors_are_crossed_and_their_interaction_is_a_hypothesis() -> None:
    crossed = [
        {"name": "learning_rate", "baseline": 1e-5, "treatments": [4e-5]},
        {"name": "group_size", "baseline": 4, "treatments": [8]},
    ]
    plan = await planner(ScriptedLlm(said({**SENSIBLE, "factors": crossed}))).plan(request())
    assert len(plan.arms) == 4
    assert [hypothesis.factor for hypothesis in plan.hypotheses] == [
        "learning_rate",
        "group_size",
        "learning_rate x group_size",
    ]
    assert all(len(h.baselines) == len(h.treatments) == 2 for h in plan.hypotheses)


async def test_an_outage_of_hours_is_waited_out_with_growing_pauses() -> None:
    clock = ManualClock()
    llm = ScriptedLlm(*[LlmOutage("no route")] * 20, LlmOutage("slow down", 120.0), said(SENSIBLE))
    calls: list[LlmCall] = []
    planning = asyncio.create_task(planner(llm, clock=clock, calls=calls).plan(request()))
    while not planning.done():
        await asyncio.sleep(0)
        clock.advance(1.0)
    assert (await planning).planner == "some-llm"
    assert clock.monotonic() > 3600
    assert [call.error for call in calls].count("no route") == 20
    times = [call.at for call in calls]
    assert times[1] - times[0] < times[5] - times[4] < times[15] - times[14] <= 302


async def test_an_outage_without_end_is_a_labelled_fallback_and_a_refusal_where_the_llm_was_asked_for() -> None:
    down = ScriptedLlm(LlmOutage("no route"))
    assert (await planner(down, patience_s=0.5).plan(request())).planner == "builtin"
    with pytest.raises(PlanningRefused, match="--planner builtin"):
        await planner(down, patience_s=0.5).plan(request(planner="llm"))
    with pytest.raises(PlanningRefused, match="wrong key"):
        await planner(ScriptedLlm(LlmUnusable("wrong key"))).plan(request(planner="llm"))


async def test_tokens_and_cost_are_counted_and_capped_before_they_are_spent() -> None:
    calls: list[LlmCall] = []
    llm = ScriptedLlm(completion("no", prompt_tokens=30_000))
    plan = await planner(llm, calls=calls, max_tokens=50_000).plan(request())
    assert plan.planner == "builtin"
    assert 1 <= len(calls) < 3
    assert sum(call.prompt_tokens + call.completion_tokens for call in calls) <= 50_000 + 30_000
    priced: list[LlmCall] = []
    dear = ScriptedLlm(completion("no", cost=0.9))
    await planner(dear, calls=priced, max_cost=1.0, price_in=1.0, price_out=50.0).plan(request())
    assert [call.cost for call in priced] == [0.9]


async def test_recorded_answers_replay_to_the_same_plan_and_nobody_is_asked() -> None:
    calls: list[LlmCall] = []
    llm = ScriptedLlm(completion("hm"), LlmRefused("no tools"), said(SENSIBLE))
    plan = await planner(llm, calls=calls).plan(request())
    stored = [LlmCall.model_validate_json(call.model_dump_json()) for call in calls]
    refused = [call for call in stored if call.answer is None]
    assert len(refused) == 1
    again: Plan = await planner(_WithRefusals(stored)).plan(request())
    assert again.digest() == plan.digest()
    with pytest.raises(LlmUnusable, match="no recorded answer"):
        await Replayed(stored).answer({"messages": []})


class _WithRefusals(Replayed):
    """The record of a refused form is a refusal again."""

    def __init__(self, calls: list[LlmCall]) -> None:
        super().__init__(calls)
        self._refused = [call.request for call in calls if call.error]

    async def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        if request in self._refused:
            raise LlmRefused("no tools")
        return await super().answer(request)


async def test_what_was_answered_before_a_crash_is_not_asked_again(tmp_path: Path) -> None:
    calls, told = list[LlmCall](), list[str]()

    def placed(*answers: Any, **settings: Any) -> tuple[ScriptedLlm, LlmPlanner]:
        llm, url = ScriptedLlm(*answers), f"sqlite:///{tmp_path / 'researcher.db'}"
        made = LlmPlanner(
            llm, LlmSettings(model="some-llm", **settings), SystemClock(), BuiltinPlanner(),
            keep=calls.append, tell=told.append, checkpoints=url, thread="st-1",
        )  # fmt: skip
        return llm, made

    _, cut = placed(completion("hm", prompt_tokens=99_000), KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        await cut.plan(request())
    llm, again = placed(said(SENSIBLE), max_tokens=100_000)
    assert (await again.plan(request())).planner == "builtin", "the cap holds over the crash"
    assert not llm.asked
    assert "cap of 100000 tokens" in told[0]

    calls.clear()
    llm, rich = placed(said(SENSIBLE))
    plan = await rich.plan(request())
    assert plan.planner == "some-llm"
    assert [call.purpose for call in calls] == ["plan, attempt 2, tool"], "a first answer without a choice was kept"
    assert (await rich.plan(request())).digest() == plan.digest()
    assert len(llm.asked) == 1


async def test_what_was_spent_before_the_planning_counts_against_its_caps(tmp_path: Path) -> None:
    def spent(tokens: int, cost: float, *answers: Any) -> tuple[ScriptedLlm, LlmPlanner]:
        settings = LlmSettings(model="some-llm", max_tokens=100_000, max_cost=1.0, price_in=1.0)
        llm, url = ScriptedLlm(*answers), f"sqlite:///{tmp_path / 'researcher.db'}"
        made = LlmPlanner(
            llm, settings, SystemClock(), BuiltinPlanner(),
            spent=Purse(tokens, cost), checkpoints=url, thread=f"{tokens}/{cost}",
        )  # fmt: skip
        return llm, made

    for tokens, cost in ((99_000, 0.0), (0, 1.0)):
        llm, poor = spent(tokens, cost, said(SENSIBLE))
        assert (await poor.plan(request())).planner == "builtin"
        assert not llm.asked
    _, cut = spent(50_000, 0.2, completion("hm"), KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        await cut.plan(request())
    _, again = spent(50_000, 0.2, said(SENSIBLE))
    assert (await again.plan(request())).planner == "some-llm", "what was spent before is counted once"


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
    with pytest.raises(LlmUnusable, match="cap of 1000 tokens"):
        await other.ask("second", question)
    answered.set()
    await first
    for _ in range(3):
        await other.ask("second", question)
    assert purse == Purse(tokens=400) == Purse.of(calls)
    with pytest.raises(LlmUnusable, match="cap of 1000 tokens"):
        await one.ask("third", question)


async def test_half_a_character_at_the_end_of_an_answer_is_told_and_kept() -> None:
    llm = ScriptedLlm(completion('{"instrument": "\ud83d'), said(SENSIBLE))
    assert (await planner(llm).plan(request())).planner == "some-llm"


def test_settings_come_from_the_environment_and_say_what_is_missing() -> None:
    assert llm_settings({}) is None
    found = llm_settings(
        {"RESEARCHER_LLM_MODEL": "m", "RESEARCHER_LLM_API_KEY": "secret", "RESEARCHER_LLM_MAX_TOKENS": "9"}
    )
    assert found is not None
    assert (found.model, found.max_tokens) == ("m", 9)
    assert "secret" not in repr(found)
    for environ, says in (
        ({"RESEARCHER_LLM_API_KEY": "k"}, "RESEARCHER_LLM_MODEL"),
        ({"RESEARCHER_LLM_MODEL": "m", "RESEARCHER_LLM_MAX_COST": "lots"}, "no number"),
        ({"RESEARCHER_LLM_MODEL": "m", "RESEARCHER_LLM_MAX_COST": "2"}, "RESEARCHER_LLM_PRICE_IN"),
    ):
        with pytest.raises(PlanningRefused, match=says):
            llm_settings(environ)


async def test_two_comparisons_in_sequence_are_laid_out_by_code_alone() -> None:
    llm = ScriptedLlm(said(SENSIBLE))
    plan = await planner(llm).plan(
        request("Which learning rate is best, 1e-5 or 4e-5, and then which group size, 4 or 8?")
    )
    assert not llm.asked
    assert plan.planner == "builtin"
    assert [factor.name for factor in plan.factors] == ["learning_rate", "group_size"]
    assert any("in sequence" in line and "built-in planner" in line for line in plan.assumptions)


@pytest.mark.parametrize("write", range(1, 13))
async def test_a_database_that_is_held_at_any_write_costs_no_question_and_takes_each_reply_once(
    write: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes, real = list[bool](), SqliteSaver.put

    def put(*arguments: Any) -> Any:
        writes.append(True)
        if len(writes) == write:
            held = sqlite3.OperationalError("database is locked")
            held.sqlite_errorname = "SQLITE_BUSY"
            raise held
        return real(*arguments)

    monkeypatch.setattr(SqliteSaver, "put", put)
    wrong = {**SENSIBLE, "metric": "happiness"}
    llm = ScriptedLlm(said(wrong), said(SENSIBLE))
    url = f"sqlite:///{tmp_path}/researcher.db"
    asking = LlmPlanner(
        llm, LlmSettings(model="some-llm"), SystemClock(), BuiltinPlanner(), checkpoints=url, thread="st-1"
    )
    assert (await asking.plan(request())).planner == "some-llm"
    assert len(llm.asked) == 2
    assert len(writes) > 1
