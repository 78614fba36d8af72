"""The tools of `researcher mcp`, called by the SDK's client in one process: the commands' work, their refusals, their gates."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp import Client, MCPError
from mcp_types import CallToolResult, TextContent, TextResourceContents

from researcher.campaign.records import observe
from researcher.cli import USAGE, resume
from researcher.cli.drafting import TextDrafting
from researcher.home import Home
from researcher.main import main
from researcher.mcp.server import create_server
from researcher.mcp.tools import LONGEST_WAIT_S, TOOLS, Research
from researcher.models import CampaignStatus
from researcher.ownership import owned_now
from researcher.schedule.daemon import only_daemon
from tests.fakes import shown_study
from tests.fakes.llm_server import llm_server
from tests.fakes.scripted_llm import called, proposed
from tests.fakes.shown_campaign import ShownCampaign
from tests.researcher.campaign.test_honesty import Cheat
from tests.researcher.campaign.test_new_instrument import WANTED, Writer

pytestmark = pytest.mark.anyio

STUDY = """\
question: Is a higher learning rate better?
instrument: arithmetic
compare: {learning_rate: {baseline: 1e-5, levels: [4e-5]}}
claim: increase
"""
SMALL = STUDY + "budget: {wall: 1h}\n"
TOPIC = "Does GRPO learn one-digit sums faster with a learning rate of 4e-5 than with 1e-5?"
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def daemons(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """No LLM is configured, and the daemon is only asked for: an entry each time."""
    for name in ("MODEL", "BASE_URL", "API_KEY"):
        monkeypatch.delenv(f"RESEARCHER_LLM_{name}", raising=False)
    monkeypatch.setenv("RESEARCHER_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("RESEARCHER_DATABASE_URL", raising=False)
    monkeypatch.chdir(tmp_path)
    asked: list[int] = []
    monkeypatch.setattr(resume, "ensure_daemon", lambda: asked.append(1))
    return asked


@pytest.fixture
def home(daemons: list[int], tmp_path: Path) -> Home:
    return shown_study.opened(tmp_path / "home")[0]


class Agent:
    """A coding agent that is connected."""

    def __init__(self, client: Client) -> None:
        self.client = client

    async def call(self, tool: str, **arguments: Any) -> CallToolResult:
        return await self.client.call_tool(tool, arguments)

    async def told(self, tool: str, **arguments: Any) -> dict[str, Any]:
        """The document of a call that succeeds."""
        answer = await self.call(tool, **arguments)
        assert not answer.is_error, words(answer)
        document: dict[str, Any] = answer.structured_content
        return document

    async def refused(self, tool: str, **arguments: Any) -> str:
        """The one sentence of a call that does not."""
        answer = await self.call(tool, **arguments)
        assert answer.is_error, words(answer)
        assert answer.structured_content["error"] == words(answer)
        assert "\n" not in words(answer)
        return words(answer)


def words(answer: CallToolResult) -> str:
    (part,) = answer.content
    assert isinstance(part, TextContent)
    return part.text


@asynccontextmanager
async def connected(home: Home, *, folder: Path | None = None, limit: str = "1h") -> AsyncIterator[Agent]:
    research = Research(home, TextDrafting(home, folder=folder), limit, "ada through MCP")
    try:
        async with Client(create_server(research)) as client:
            yield Agent(client)
    finally:
        research.closing.set()


async def test_every_tool_says_what_it_takes_and_whether_it_changes_anything(home: Home) -> None:
    async with connected(home) as agent:
        listed = (await agent.client.list_tools()).tools
    assert [tool.name for tool in listed] == [tool.name for tool in TOOLS]
    hints = {tool.name: tool.annotations for tool in listed}
    assert {name for name, each in hints.items() if each and not each.read_only_hint} == {
        *("draft", "start", "report", "stop", "campaign_tell", "campaign_approve")
    }
    assert {name for name, each in hints.items() if each and each.destructive_hint} == {"stop"}
    for tool in listed:
        assert tool.description
        assert tool.input_schema["additionalProperties"] is False
        assert all("description" in each for each in tool.input_schema.get("properties", {}).values()), tool.name


async def test_what_is_misspelt_is_refused_with_the_nearest_name(home: Home) -> None:
    async with connected(home) as agent:
        assert await agent.refused("stat") == "there is no tool 'stat'; did you mean 'start'?"
        assert await agent.refused("price", stduy=STUDY) == (
            "study: is missing; stduy: unknown field (did you mean 'study'?)"
        )
        assert "did you mean arithmetic?" in await agent.refused("instruments", name="arithmetik")
        assert "wait_s" in await agent.refused("status", wait_s=LONGEST_WAIT_S + 1)


async def test_a_price_is_that_of_a_dry_run_and_records_nothing(home: Home, capsys: Capture, tmp_path: Path) -> None:
    (tmp_path / "study.yaml").write_text(SMALL)
    assert main(["start", "study.yaml", "--dry-run", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    async with connected(home) as agent:
        answer = await agent.call("price", study=SMALL)
    priced, text = answer.structured_content, words(answer)
    same = ("hash", "spec", "price", "uncovered")
    assert {name: priced[name] for name in same} == {name: shown[name] for name in same}
    assert priced["budget"]["wall_s"] == 3600
    assert (priced["needs_approval"], text.endswith("`start` begins it")) == (False, True)
    assert home.store.studies.all() == []


@pytest.mark.parametrize(
    ("old", "new"), [("learning_rate:", "learning_rat:"), ("claim: increase", "claim: up"), ("1h", "1m"), ("{", "[")]
)
async def test_a_wrong_study_gets_the_command_lines_own_sentence(
    old: str, new: str, home: Home, capsys: Capture, tmp_path: Path
) -> None:
    wrong = SMALL.replace(old, new)
    (tmp_path / "study.yaml").write_text(wrong)
    code = main(["start", "study.yaml", "--dry-run", "--json"])
    said = json.loads(capsys.readouterr().err)
    async with connected(home) as agent:
        for tool in ("price", "start"):
            answer = await agent.call(tool, study=wrong)
            assert answer.is_error
            refusal = {**said, "error": said["error"].replace("study.yaml", "the text"), "exit_code": code}
            assert answer.structured_content == refusal


async def test_a_study_over_the_limit_starts_with_the_hash_that_was_priced_alone(
    home: Home, daemons: list[int]
) -> None:
    async with connected(home) as agent:
        asks = await agent.refused("start", study=STUDY)
        priced = await agent.told("price", study=STUDY)
        assert (priced["needs_approval"], priced["plan"][-1].endswith("8 h 00 min")) == (True, True)
        assert re.search(r"8 h 00 min, but the limit without approval is 1h: write budget: {wall: 1h} into it", asks)
        changed = STUDY.replace("4e-5", "5e-5")
        stale = await agent.refused("start", study=changed, approve=priced["hash"])
        assert re.search(
            r"is not the hash of this plan, .* a study that has ended since or a changed text gives a new hash", stale
        )
        assert (home.store.studies.all(), daemons) == ([], [])
        started = await agent.told("start", study=STUDY, approve=priced["hash"][:16])
        assert started["hash"] == priced["hash"]
        (listed,) = (await agent.told("studies"))["studies"]
        assert (listed["id"], daemons) == (started["study"], [1])
        priced = await agent.told("price", study=SMALL.replace("1h", "59m"), engine="echo")
        assert priced["plan"][0].startswith("engine      echo: no model is trained")
        assert (await agent.told("price", study=STUDY))["same_spec"] == [
            {"study": started["study"], "status": "planning"}
        ]
        twice = await agent.refused("start", study=STUDY, approve=started["hash"])
        assert f"{started['study']} asks the same" in twice
        assert "again: true starts another" in twice
        again = await agent.told("start", study=STUDY, approve=started["hash"], again=True)
        assert [each["study"] for each in again["same_spec"]] == [started["study"]]
    schedule = home.store.studies.schedule(started["study"])
    assert schedule is not None
    assert schedule["carried"]


async def test_refusals_name_tools_and_leave_a_persons_commands(home: Home) -> None:
    async with connected(home) as agent:
        assert "start one with `draft`" in await agent.refused("status")
        await agent.told("start", study=SMALL)
        assert "has an id that begins with 'st-zz'; `studies` shows all" in await agent.refused("status", study="st-zz")
        assert (await agent.refused("price", study="- a")).endswith("it has no keys; `draft` writes one")
        small = await agent.refused("price", study=STUDY + "budget: {wall: 2m}\n")
        assert "give a budget of 6m" in small
        assert "--budget" not in small
        assert "`researcher resume`" in words(await agent.call("status"))


async def test_hints_name_tools_and_what_others_wrote_stays_as_it_is(home: Home) -> None:
    async with connected(home) as agent:
        assert words(await agent.call("instruments")).endswith("own factors, its defaults, and how to start.")
        assert "`instruments` of NAME shows" in words(await agent.call("instruments"))
        assert words(await agent.call("studies")) == "no studies yet; start one with `draft`"
        asks = SMALL.replace("better?", "better, as `researcher report` says?")
        study = (await agent.told("start", study=asks))["study"]
        for tool in ("status", "studies"):
            assert "as `researcher report` says?" in words(await agent.call(tool))
        await agent.told("stop", study=study, confirm=study)
        assert f"`researcher verify {study}` recomputes" in words(await agent.call("report"))


async def test_a_started_study_is_said_to_go_on_with_the_daemon_only_where_one_runs(home: Home) -> None:
    async with connected(home) as agent:
        assert "no daemon is running: `researcher daemon` or" in words(await agent.call("start", study=SMALL))
        with only_daemon():
            assert "the daemon continues it; `status`" in words(await agent.call("start", study=SMALL, again=True))


async def test_a_draft_is_text_to_price_or_says_what_is_open(home: Home) -> None:
    async with connected(home) as agent:
        drafted = await agent.told("draft", topic=TOPIC)
        assert drafted["problems"] == []
        assert (await agent.told("price", study=drafted["study"]))["spec"]["instrument"] == "arithmetic"
        unclear = await agent.told("draft", topic=f"{TOPIC[:-1]} on Tuesdays?")
        assert any("tuesdays" in each.lower() for each in unclear["problems"])
        (_, offer) = (await agent.told("draft", topic="What makes GRPO learn one-digit sums fastest?"))["said"]
        assert "`researcher campaign start --topic" in offer
        assert "the topic is empty" in await agent.refused("draft", topic=" ")


async def test_a_planner_that_asks_is_answered_by_the_next_call(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    asks = called(("ask", {"question": "Which rates?"}))
    declines = called(("decline", {"reason": "No instrument plays chess.", "nearest": ["frozenlake"]}))
    with llm_server([asks, proposed(), declines]) as llm:
        monkeypatch.setenv("RESEARCHER_LLM_MODEL", "some-model")
        monkeypatch.setenv("RESEARCHER_LLM_BASE_URL", llm.url)
        async with connected(home) as agent:
            assert await agent.told("draft", topic="Is a higher rate better?") == {"asks": "Which rates?"}
            drafted = await agent.told("draft", topic="Is a higher rate better?", answers=["1e-5 and 1e-4"])
            assert drafted["problems"] == []
            assert "written by some-model" in drafted["study"]
            assert "instrument: arithmetic" in drafted["study"]
            answer = await agent.call("draft", topic="Does it learn chess?")
            assert (answer.is_error, answer.structured_content["nearest"]) == (True, ["frozenlake"])
    assert "1e-5 and 1e-4" in json.dumps(llm.asked[1])


async def test_instruments_in_folders_run_for_the_agent_of_this_machine_alone(home: Home, tmp_path: Path) -> None:
    repeat = Path(__file__).parents[2] / "instruments" / "repeat"
    (tmp_path / "mine").symlink_to(repeat)
    study = SMALL.replace("arithmetic", "mine")
    async with connected(home, folder=tmp_path) as agent:
        assert (await agent.told("price", study=study, engine="echo"))["plan"]
    async with connected(home) as agent:
        for refused in (
            await agent.refused("price", study=SMALL.replace("arithmetic", str(repeat)), engine="echo"),
            await agent.refused("instruments", name=str(repeat)),
        ):
            assert "only installed instruments can be started from here" in refused
        own = SMALL.replace(
            "learning_rate: {baseline: 1e-5, levels: [4e-5]}", "algorithm: {baseline: grpo, levels: [/tmp/x.py:f]}"
        )
        assert "is a function in a file" in await agent.refused("price", study=own)
        assert "over HTTP, only servers on this machine" in await agent.refused(
            "price", study=SMALL, servers=["http://192.0.2.1:8642"]
        )


async def test_a_study_that_trains_shows_its_curves_and_is_stopped_by_its_whole_id_alone(home: Home) -> None:
    study, trial = shown_study.running(home.store)
    async with connected(home) as agent:
        status = await agent.told("status")
        assert (status["id"], status["exit_code"], "curves" in status["trials"][0]) == (study, 3, False)
        curves = await agent.told("curves", metrics=["reward_mean"])
        assert curves["trials"][1]["curves"] == {"reward_mean": [[1, 0.1], [2, 0.25]]}
        assert trial.key in words(await agent.call("curves"))
        assert "did you mean reward_mean?" in await agent.refused("curves", metrics=["reward_meen"])
        assert (await agent.told("samples"))["samples"] == []
        assert "has no report to verify yet" in await agent.refused("verify")
        for other in ("latest", study[:-1], "yes"):
            assert f"pass confirm: {study}" in await agent.refused("stop", study="latest", confirm=other)
        assert not home.store.studies.get(study).stop_requested
        assert "told" in await agent.told("stop", study="latest", confirm=study)
        assert home.store.studies.get(study).stop_requested


async def test_an_agent_that_leaves_keeps_nobody_waiting(home: Home) -> None:
    shown_study.running(home.store)
    with anyio.fail_after(LONGEST_WAIT_S / 2):
        async with connected(home) as agent, anyio.create_task_group() as calls:
            calls.start_soon(lambda: agent.call("status", wait_s=LONGEST_WAIT_S))
            await agent.told("studies")
            calls.cancel_scope.cancel()


async def test_a_study_that_is_done_has_a_report_as_answer_and_as_resource(home: Home) -> None:
    study = shown_study.done(home)
    async with connected(home) as agent:
        assert (await agent.told("status", wait_s=LONGEST_WAIT_S))["exit_code"] == 0  # there is nothing to wait for
        report = words(await agent.call("report"))
        assert "## Answer" in report
        with owned_now(home.store, study):  # as its worker has it, which still copies records
            assert words(await agent.call("report")) == report
        assert (await agent.told("verify"))["claims"] > 100
        assert (await agent.told("findings", instrument="arithmetic"))["findings"]
        assert "did you mean" in words(await agent.call("findings", instrument="arithmetics"))
        (listed,) = (await agent.client.list_resources()).resources
        assert listed.uri == f"researcher://studies/{study}/report"
        (content,) = (await agent.client.read_resource("researcher://studies/latest/report")).contents
        assert isinstance(content, TextResourceContents)
        assert content.text == report
        for astray, says in (
            ("researcher://studies/st-none/report", "st-none"),
            ("researcher://studies/..%2F/report", "no study"),
            ("file:///etc/passwd", "is not a report"),
        ):
            with pytest.raises(MCPError, match=says):
                await agent.client.read_resource(astray)


async def test_a_campaign_hears_words_and_an_approval_of_the_decision_that_waits(home: Home, tmp_path: Path) -> None:
    made = ShownCampaign(
        home, f"sqlite:///{tmp_path / 'home' / 'researcher.db'}", approve="study", budget={"wall": "2h"}
    )
    async with connected(home) as agent:
        assert "is empty" in await agent.refused("campaign_tell", words=" ")
        await agent.told("campaign_tell", words="rates diverge")
        (said,) = observe(home.store, made.id).said
        assert (said.words, said.by) == ("rates diverge", "ada through MCP")
        assert "is not a factor" in await agent.refused("campaign_tell", words="leave it", leave=["weather"])
        assert (await agent.told("campaign_tell", words="leave it", leave=["learning_rate"]))["leave"] == [
            "learning_rate"
        ]
        await made.to(CampaignStatus.WAITING)
        status = await agent.told("campaign_status")
        waits = status["waits_for"]["decision"]
        assert "an earlier decision" in await agent.refused("campaign_approve", decision=waits - 1)
        assert (await agent.told("campaign_approve", decision=waits, words="go on"))["decision"] == waits
        assert "is not waiting for approval" in await agent.refused("campaign_approve", decision=waits)


async def test_an_instrument_that_an_llm_wrote_is_approved_by_no_agent(home: Home, tmp_path: Path) -> None:
    made = ShownCampaign(home, f"sqlite:///{tmp_path / 'home' / 'researcher.db'}", strategist=Cheat(WANTED))
    made.write = Writer(made)
    await made.to(CampaignStatus.WAITING)
    async with connected(home) as agent:
        waits = (await agent.told("campaign_status"))["waits_for"]["decision"]
        refused = await agent.refused("campaign_approve", decision=waits)
        assert f"`researcher campaign approve {made.id}` in the terminal" in refused
    assert home.store.campaigns.events(made.id, "approved") == []


def test_a_limit_is_a_length_of_time(daemons: list[int], capsys: Capture) -> None:
    assert main(["mcp", "--limit", "soon"]) == USAGE
    assert "'soon' is not a time" in capsys.readouterr().err
    assert main(["mcp", "--port", "0", "--public-url", "https://a.org"]) == USAGE
    assert "--port, --public-url only works with --http" in capsys.readouterr().err
