"""The built-in planner keeps the contract, and its graph keeps its place in the study's own database."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from researcher.planner.llm.graph import Conversation

from researcher.planner import graph, saving
from researcher.planner.graph import BuiltinPlanner
from researcher.planner.seam import Planner
from researcher.refusals import PlanningRefused
from researcher.store.checkpoints import Gate
from researcher.store.store import Store
from tests.contracts.planner_contract import PlannerContract, request
from tests.fakes.postgres import fresh_database, postgres


class TestBuiltinPlanner(PlannerContract):
    @pytest.fixture
    def planner(self) -> Planner:
        return BuiltinPlanner()


class TestCheckpointedPlanner(PlannerContract):
    @pytest.fixture
    def planner(self, tmp_path: Path) -> Planner:
        return _Fresh(f"sqlite:///{tmp_path / 'researcher.db'}")


class _Fresh:
    """A thread for each plan, as each study has one."""

    name = "builtin"

    def __init__(self, url: str) -> None:
        self._url = url
        self._made = 0

    async def plan(self, asked: object) -> object:
        self._made += 1
        return await BuiltinPlanner(self._url, f"s-{self._made}").plan(asked)  # type: ignore[arg-type]


@pytest.mark.anyio
async def test_a_finished_thread_gives_its_plan_again_in_the_studys_own_database(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'researcher.db'}"
    Store.open(url).close()
    plan = await BuiltinPlanner(url, "s-1").plan(request())
    with sqlite3.connect(tmp_path / "researcher.db") as database:
        steps = database.execute("select count(*) from checkpoints where thread_id = 'plan/s-1'").fetchone()[0]
    assert steps > 6
    again = await BuiltinPlanner(url, "s-1").plan(request("What does temperature do to sums?"))
    assert again == plan
    Store.open(url).close()


@pytest.mark.anyio
async def test_a_person_who_starts_a_study_waits_for_a_held_database_less_long_than_a_gate_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patience = list[float]()
    monkeypatch.setattr(saving, "patiently", lambda work, patience_s: patience.append(patience_s) or work())
    url = f"sqlite:///{tmp_path / 'researcher.db'}"
    await BuiltinPlanner(url, "s-1").plan(request())
    Conversation(request(), "some-llm", url, "s-1").begin()
    Gate(url, "s-1", "plan/1").answer()
    assert patience == [60.0, 60.0, 600.0]


@pytest.mark.anyio
async def test_a_thread_that_was_cut_goes_on_from_its_last_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"sqlite:///{tmp_path / 'researcher.db'}"
    calls: list[str] = []
    choose, design = graph.choose, graph.design

    def counted(*args: object) -> object:
        calls.append("match")
        return choose(*args)  # type: ignore[arg-type]

    def cut(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(graph, "choose", counted)
    monkeypatch.setattr(graph, "design", cut)
    with pytest.raises(KeyboardInterrupt):
        BuiltinPlanner(url, "s-1")._run(request())
    monkeypatch.setattr(graph, "design", design)
    plan = await BuiltinPlanner(url, "s-1").plan(request())
    assert plan == await BuiltinPlanner().plan(request())
    assert calls == ["match", "match"]


@pytest.mark.anyio
async def test_postgresql_keeps_the_place_as_well() -> None:
    with postgres() as server, fresh_database(server) as url:
        plan = await BuiltinPlanner(url, "s-1").plan(request())
        assert await BuiltinPlanner(url, "s-1").plan(request("What does temperature do to sums?")) == plan


@pytest.mark.anyio
async def test_a_refusal_leaves_no_plan_behind(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'researcher.db'}"
    for _ in range(2):
        with pytest.raises(PlanningRefused, match="cheese"):
            await BuiltinPlanner(url, "s-1").plan(request("Is the moon made of cheese?"))
