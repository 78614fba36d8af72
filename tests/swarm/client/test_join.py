"""People at a real server: judging pairs, playing the agent, talking to the model; and what each of it trains."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import os
import pty
import signal
import subprocess
import sys
import termios
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from bench.serving import ServerProcess
from foundation.ids import RandomIds
from swarm.client import Episode, Outcome, RunSpec, SwarmClient, Task, WorkflowFault
from swarm.client.join import PersonLeft, Session, TooLate
from swarm.client.join.endpoint import PersonEndpoint
from swarm.client.join.model import Model, ModelRefused, shown
from swarm.client.join.person import Terminal
from swarm.client.join.play import play
from swarm.client.join.session import judge, talk
from swarm.protocol.episodes import EpisodeReceipt, EpisodeResult, LedgerEntry
from tests.fakes.scripted_person import Line, ScriptedPerson

pytestmark = pytest.mark.anyio
ROOT = Path(__file__).parents[3]
TASK = Task(id="t-1", query="Repeat hello")


def spec(**changes: Any) -> RunSpec:
    return RunSpec.model_validate({"batch": {"tasks": 1, "group_size": 2}, "max_staleness": 0, "seed": 4} | changes)


@asynccontextmanager
async def joining(server: ServerProcess, *lines: Line, stays: bool = False, **limits: Any) -> AsyncIterator[Session]:
    async with SwarmClient(server.url, client_id="ann", client_version="join") as swarm:
        status = await swarm.status()
        run_id = status.run_id or (await swarm.start_run(spec())).run_id
        yield Session(swarm=swarm, person=ScriptedPerson(*lines, stays=stays), run_id=run_id, **limits)


def person(session: Session) -> ScriptedPerson:
    assert isinstance(session.person, ScriptedPerson)
    return session.person


async def entries(session: Session, **wanted: Any) -> list[LedgerEntry]:
    return [entry async for entry in session.swarm.ledger(run_id=session.run_id, **wanted)]


async def at_step(session: Session, step: int) -> None:
    async for status in session.swarm.statuses(wait_s=5.0):
        if status.step >= step:
            return


# -- judging ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("letter", ["a", "b"])
async def test_the_better_answer_gets_the_reward_and_both_are_trained_as_one_group(
    letter: str, echo_server: ServerProcess
) -> None:
    async with joining(echo_server, "x", letter) as session:
        await judge(session, TASK)
        assert "please answer with one of" in person(session).shown
        assert "Repeat hello" in person(session).shown
        await at_step(session, 1)
        one, other = await entries(session)
        assert one.group_id == other.group_id
        assert {one.reward, other.reward} == {0.0, 1.0}
        assert {one.state, other.state} <= {"in_step", "trained"}
        winner = one if one.reward else other
        assert winner.metadata["place"] == letter
        assert winner.metadata["judge"] == "ann"
        assert session.tally.ended == 2


async def test_a_tie_teaches_nothing_and_a_skip_gives_the_slots_back(echo_server: ServerProcess) -> None:
    async with joining(echo_server, "s", "t") as session:
        await judge(session, TASK)
        skipped = {(entry.detail, entry.cause) for entry in await entries(session, reason="aborted")}
        assert skipped == {("the judge skipped this pair", "person")}
        await judge(session, TASK)
        await at_step(session, 1)
        assert [entry.reward for entry in await entries(session, reason="zero_variance")] == [0.5, 0.5]
        assert (session.tally.ended, session.tally.given_up) == (2, 2)


async def test_a_pair_is_of_one_group_whatever_slots_others_hold(echo_server: ServerProcess) -> None:
    async with SwarmClient(echo_server.url) as swarm:
        await swarm.start_run(spec(batch={"tasks": 2, "group_size": 2}))
    async with joining(echo_server, "a") as session, AsyncExitStack() as stack:
        await stack.enter_async_context(other := session.episode(TASK))
        other.abort("only held a slot")
        await judge(session, TASK)
        ended = [entry for entry in await entries(session) if entry.reward is not None]
        assert len(ended) == 2
        assert len({entry.group_id for entry in ended}) == 1
        assert {entry.detail for entry in await entries(session, reason="aborted")} == {
            "its group had only one slot left; a pair needs two"
        }


async def test_two_judges_who_each_hold_a_slot_give_it_back_and_both_get_a_pair(
    echo_server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm.client.join.session.MATE_S", 1.0)
    monkeypatch.setattr("swarm.client.join.session.PAUSES_S", (0.0, 2.0))

    async def pair(session: Session) -> None:
        async with AsyncExitStack() as stack:
            for episode in await session.pair(TASK, stack):
                episode.abort("it was a pair")

    async with joining(echo_server) as one, joining(echo_server) as other:
        await asyncio.gather(pair(one), pair(other))
        assert [entry.detail for entry in await entries(one)].count("it was a pair") == 4


async def test_a_judges_verdict_counts_whatever_the_rollout_said_of_itself(echo_server: ServerProcess) -> None:
    async def rollout(episode: Episode, task: Task) -> float:
        return float("nan")

    async with joining(echo_server, "a") as session:
        await judge(session, TASK, rollout)
        found = await entries(session)
        assert {entry.reward for entry in found} == {0.0, 1.0}
        assert all("own_reward" not in entry.metrics for entry in found)


async def test_a_judge_sees_whole_rollouts_and_their_own_rewards_do_not_count(echo_server: ServerProcess) -> None:
    async def rollout(episode: Episode, task: Task) -> Outcome:
        async with Model(episode) as model:
            first = {"role": "user", "content": task.query}
            answer = (await model.chat({"messages": [first]}))["choices"][0]["message"]
            await model.chat({"messages": [first, answer, {"role": "user", "content": "Are you sure"}]})
        return Outcome(reward=7.0)

    async with joining(echo_server, "a") as session:
        await judge(session, TASK, rollout)
        assert person(session).shown.count("Are you sure") == 2
        assert {entry.metrics["own_reward"] for entry in await entries(session)} == {7.0}
        assert {entry.reward for entry in await entries(session)} == {0.0, 1.0}


async def test_a_judge_reads_completions_of_plain_text_too(echo_server: ServerProcess) -> None:
    async def rollout(episode: Episode, task: Task) -> Outcome:
        headers = {"Authorization": f"Bearer {episode.api_key}"}
        async with httpx.AsyncClient(base_url=episode.base_url, headers=headers, trust_env=False) as http:
            for prompt in ("Once upon a time", [104, 105]):
                body = {"model": "policy", "prompt": prompt, "max_tokens": 8}
                seen.append((await http.post("completions", json=body)).json()["choices"][0]["text"])
        return Outcome(reward=0.0)

    seen: list[str] = []
    async with joining(echo_server, "a") as session:
        await judge(session, TASK, rollout)
        assert person(session).shown.count("prompt:\n    Once upon a time\n") == 2
        assert person(session).shown.count("prompt:\n    (2 token ids)\n") == 2
        assert all(shown({"role": "assistant", "content": text}) in person(session).shown for text in seen)
        assert {entry.reward for entry in await entries(session)} == {0.0, 1.0}


async def test_a_rollout_that_ends_its_episode_itself_cannot_be_judged(echo_server: ServerProcess) -> None:
    async def rollout(episode: Episode, task: Task) -> None:
        episode.end(reward=1.0)

    async with joining(echo_server) as session:
        with pytest.raises(WorkflowFault):
            await judge(session, TASK, rollout)
        assert [entry.reason for entry in await entries(session)] == ["aborted", "aborted"]


# -- leaving, and being slow ------------------------------------------------------------------------------------------


async def test_who_leaves_loses_this_pair_alone(echo_server: ServerProcess) -> None:
    async with joining(echo_server, "a", "q") as session:
        await judge(session, TASK)
        with pytest.raises(PersonLeft):
            await judge(session, Task(id="t-2", query="Repeat bye"))
        left = [(entry.reason, entry.cause) for entry in await entries(session, task_id="t-2")]
        assert left == [("aborted", "person")] * 2
        await at_step(session, 1)


async def test_a_slow_person_holds_nobody_up_longer_than_the_limit(echo_server: ServerProcess) -> None:
    patient = {"tasks": 1, "group_size": 2, "group_patience_s": 1.0}
    async with SwarmClient(echo_server.url) as swarm:
        await swarm.start_run(spec(batch=patient))
    async with joining(echo_server, stays=True, max_episode_s=1.0) as session:
        with pytest.raises(TooLate):
            await judge(session, TASK)
        late = await entries(session, reason="aborted")
        assert all("TooLate" in str(entry.detail) and entry.cause == "limit" for entry in late)
        assert session.tally.given_up == 2
        async with session.swarm.episode(task_id="other", run_id=session.run_id, wait_s=60.0) as free:
            free.abort("there was room")


async def test_a_person_whose_machine_is_gone_is_noticed_by_the_idle_limit(echo_server: ServerProcess) -> None:
    async with joining(echo_server, stays=True, idle_limit_s=1.5) as session:
        grant = await session.swarm.claim(session.episode(TASK).claim)  # nobody renews this one
        judging = asyncio.ensure_future(judge(session, Task(id="t-2", query="x")))
        async with asyncio.timeout(60):
            while (await session.swarm.entry(grant.episode_id)).state == "running":
                await session.swarm.status((await session.swarm.status()).revision, 0.5)
        judging.cancel()
        await asyncio.gather(judging, return_exceptions=True)
        gone = await session.swarm.entry(grant.episode_id)
        assert (gone.reason, gone.cause) == ("expired", "client")


# -- playing the agent ------------------------------------------------------------------------------------------------


async def agent(episode: Episode, task: Task) -> Outcome:
    """Two turns, by the real SDK."""
    http: Any = httpx.AsyncClient(trust_env=False)
    async with AsyncOpenAI(
        base_url=episode.base_url, api_key=episode.api_key, max_retries=0, http_client=http
    ) as client:
        messages: list[Any] = [{"role": "user", "content": task.query}]
        for more in ("Repeat again", None):
            answer = await client.chat.completions.create(model="policy", messages=messages)
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})
            if more:
                messages.append({"role": "user", "content": more})
        said = [message["content"] for message in messages if message["role"] == "assistant"]
    return Outcome(reward=float("by a person" in said), success=True, metrics={"turns": 2.0})


async def test_accepted_drafts_get_the_rollouts_reward_as_one_timeline(echo_server: ServerProcess) -> None:
    async with joining(echo_server, "", "") as session:
        await play(session, TASK, agent)
        (entry,) = await entries(session)
        assert (entry.reward, entry.success, entry.metrics) == (0.0, True, {"turns": 2, "accepted": 2, "refused": 0})
        assert entry.agent_rewards == {"policy/turn-1": 0.0, "policy/turn-2": 0.0}
        first, second = (await session.swarm.trace(entry.episode_id)).calls
        assert second.parent_call_id == first.call_id
        assert person(session).shown.count("Repeat hello") == 2, "the task, and the message once"


async def test_what_a_person_writes_is_never_sampled_and_refused_drafts_get_their_own_reward(
    echo_server: ServerProcess,
) -> None:
    async with joining(echo_server, "m", "e", "by a person", "") as session:
        await play(session, TASK, agent, refused_reward=-1.0)
        (entry,) = await entries(session)
        assert entry.reward == 1.0
        assert entry.agent_rewards == {"policy/turn-1": -1.0, "policy/turn-1.2": -1.0, "policy/turn-2": 1.0}
        assert entry.metadata["written"] == ["by a person"]
        calls = (await session.swarm.trace(entry.episode_id)).calls
        assert [call.agent for call in calls] == ["policy/turn-1", "policy/turn-1.2", "policy/turn-2"]
        assert bytes(token for token in calls[2].prompt_ids if token < 256).count(b"by a person") == 1
        assert all(b"by a person" not in bytes(t for t in call.sampled_ids if t < 256) for call in calls)
        assert calls[2].parent_call_id is None, "an edited answer forks"
        assert calls[2].fork_cause == "answer_edited"


async def test_played_episodes_of_one_task_are_trained_as_a_group(echo_server: ServerProcess) -> None:
    async with joining(echo_server, "", "", "w", "by a person", "") as session:
        await play(session, TASK, agent)
        await play(session, TASK, agent)
        await at_step(session, 1)
        assert {entry.state for entry in await entries(session)} <= {"in_step", "trained"}


async def test_an_episode_by_hand_is_an_evaluation_and_asks_the_model_nothing(echo_server: ServerProcess) -> None:
    async with joining(echo_server, "by a person", "fine", kind="eval") as session:
        await play(session, TASK, agent, by_hand=True)
        (entry,) = await entries(session)
        assert (entry.kind, entry.reason, entry.reward, entry.calls) == ("eval", "eval", 1.0, 0)
        assert entry.metadata == {"played": "by hand", "written": ["by a person", "fine"]}


async def test_a_bare_query_asks_the_person_for_the_reward(echo_server: ServerProcess) -> None:
    async with joining(echo_server, "", "good", "nan", "0.75") as session:
        await play(session, TASK, ask_reward=True)
        assert [entry.reward for entry in await entries(session)] == [0.75]
        assert person(session).shown.count("please answer with a number") == 2


async def recovered(episode: Episode, task: Task) -> Outcome:
    return replace(await agent(episode, task), despite="it asked again")


async def test_what_an_outcome_counts_despite_is_handed_in_for_plays_and_judged_pairs(
    echo_server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str | None] = []
    end = SwarmClient.end

    async def noted(swarm: SwarmClient, episode_id: str, result: EpisodeResult) -> EpisodeReceipt:
        said.append(result.despite)
        return await end(swarm, episode_id, result)

    monkeypatch.setattr(SwarmClient, "end", noted)
    async with joining(echo_server, "a", "", "") as session:
        await judge(session, TASK, recovered)
        await play(session, TASK, recovered)
    assert said == ["it asked again"] * 3


class Hesitant(ScriptedPerson):
    """Says nothing before they are `ready`."""

    def __init__(self, *lines: Line) -> None:
        super().__init__(*lines)
        self.ready = asyncio.Event()

    async def ask(self, prompt: str) -> str:
        await self.ready.wait()
        return await super().ask(prompt)


async def test_an_agent_that_loses_patience_and_asks_again_gets_the_one_answer_of_its_turn(
    echo_server: ServerProcess,
) -> None:
    slow, sent, answers = Hesitant("", ""), list[str](), list[str]()

    async def count(request: httpx.Request) -> None:
        sent.append(request.headers["x-stainless-retry-count"])
        if len(sent) == 3:
            slow.ready.set()

    async def rollout(episode: Episode, task: Task) -> float:
        http: Any = httpx.AsyncClient(trust_env=False, event_hooks={"request": [count]})
        url, key = episode.base_url, episode.api_key
        async with AsyncOpenAI(base_url=url, api_key=key, timeout=0.3, max_retries=9, http_client=http) as client:
            messages: Any = [{"role": "user", "content": task.query}]
            answer = await client.chat.completions.create(model="policy", messages=messages)
            answers.append(str(answer.choices[0].message.content))
        return 1.0

    async with joining(echo_server) as session:
        await play(replace(session, person=slow), TASK, rollout)
        (entry,) = await entries(session)
        assert sent[:3] == ["0", "1", "2"]
        assert (slow.shown.count("--- turn"), len(slow.asked), len(answers)) == (1, 1, 1)
        assert (entry.calls, entry.agent_rewards) == (1, {"policy/turn-1": 1.0})
        assert entry.metrics == {"accepted": 1, "refused": 0}


async def test_a_draft_that_no_agent_waited_for_is_not_rewarded_as_accepted(echo_server: ServerProcess) -> None:
    slow = Hesitant("", "")

    async def rollout(episode: Episode, task: Task) -> float:
        headers = {"Authorization": f"Bearer {episode.api_key}"}
        async with httpx.AsyncClient(base_url=episode.base_url, headers=headers, trust_env=False) as http:
            first = {"messages": [{"role": "user", "content": "Repeat one"}]}
            with pytest.raises(httpx.ReadTimeout):
                await http.post("chat/completions", json=first, timeout=0.3)
            await http.get("models")
            slow.ready.set()
            other = {"messages": [{"role": "user", "content": "Repeat two"}]}
            assert (await http.post("chat/completions", json=other, timeout=60)).is_success
        return 1.0

    async with joining(echo_server) as session:
        await play(replace(session, person=slow), TASK, rollout, refused_reward=-1.0)
        (entry,) = await entries(session)
        assert entry.agent_rewards == {"policy/turn-1": -1.0, "policy/turn-2": 1.0}
        assert entry.metrics == {"accepted": 1, "refused": 1}


HELLO = {"messages": [{"role": "user", "content": "hello"}]}


@asynccontextmanager
async def asking(endpoint: PersonEndpoint) -> AsyncIterator[httpx.AsyncClient]:
    headers = {"Authorization": f"Bearer {endpoint.api_key}"}
    async with endpoint, httpx.AsyncClient(base_url=endpoint.base_url, headers=headers, trust_env=False) as http:
        yield http


async def test_equal_requests_side_by_side_are_two_questions() -> None:
    numbers, delivered, both = itertools.count(1), list[dict[str, Any]](), asyncio.Event()

    async def answer(body: dict[str, Any], agent: str | None) -> dict[str, Any]:
        number = next(numbers)
        if number == 2:
            both.set()
        await both.wait()
        return {"id": number}

    async with asking(PersonEndpoint(answer, RandomIds(), delivered.append)) as http:
        answers = await asyncio.gather(*(http.post("chat/completions", json=HELLO) for _ in range(2)))
    assert sorted(found.json()["id"] for found in answers) == [1, 2]
    assert sorted(found["id"] for found in delivered) == [1, 2]


async def test_a_refusal_that_nobody_waited_for_does_not_answer_the_next_request() -> None:
    numbers, delivered, late = itertools.count(1), list[dict[str, Any]](), asyncio.Event()

    async def answer(body: dict[str, Any], agent: str | None) -> dict[str, Any]:
        if next(numbers) == 1:
            await late.wait()
            raise ModelRefused(429, {"error": {"message": "busy"}})
        return {"id": 2}

    async with asking(PersonEndpoint(answer, RandomIds(), delivered.append)) as http:
        with pytest.raises(httpx.ReadTimeout):
            await http.post("chat/completions", json=HELLO, timeout=0.3)
        late.set()
        await http.get("models")
        assert (await http.post("chat/completions", json=HELLO)).json() == {"id": 2}
    assert delivered == [{"id": 2}]


async def test_tools_streams_and_refusals_pass_through_the_endpoint(echo_server: ServerProcess) -> None:
    seen: dict[str, Any] = {}
    tool: Any = {
        "type": "function",
        "function": {"name": "look", "parameters": {"properties": {"at": {"type": "string"}}}},
    }

    async def rollout(episode: Episode, task: Task) -> float:
        headers = {"Authorization": f"Bearer {episode.api_key}"}
        async with httpx.AsyncClient(base_url=episode.base_url, headers=headers, trust_env=False) as http:
            seen["models"] = (await http.get("models")).json()["data"][0]["id"]
            seen["elsewhere"] = (await http.post("responses", json={})).status_code
            seen["two"] = (await http.post("chat/completions", json={"messages": [], "n": 2})).status_code
            seen["nothing"] = (await http.post("chat/completions", content=b"{")).status_code
            stranger = await http.post("chat/completions", headers={"Authorization": "Bearer x"}, json={"messages": []})
            seen["stranger"] = stranger.status_code
            bad = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}
            seen["refused"] = (await http.post("chat/completions", json=bad)).status_code
        own: Any = httpx.AsyncClient(trust_env=False)
        async with AsyncOpenAI(base_url=episode.base_url, api_key=episode.api_key, http_client=own) as client:
            messages: Any = [{"role": "user", "content": "look"}]
            stream = await client.chat.completions.create(
                model="policy",
                messages=messages,
                tools=[tool],
                stream=True,
                stream_options={"include_usage": True},
            )
            chunks = [chunk async for chunk in stream]
        seen["call"] = [call.function for chunk in chunks for c in chunk.choices for call in c.delta.tool_calls or ()]
        seen["finish"] = [c.finish_reason for chunk in chunks for c in chunk.choices][-1]
        return 1.0

    async with joining(echo_server, "w", '/call look {"at": "sea"}') as session:
        await play(session, TASK, rollout)
        assert "tool look" in person(session).shown
    (call,) = seen.pop("call")
    assert (call.name, call.arguments) == ("look", '{"at": "sea"}')
    expected = {"models": "policy", "elsewhere": 404, "two": 400, "nothing": 400, "stranger": 401, "refused": 400}
    assert seen == {**expected, "finish": "tool_calls"}


async def test_leaving_in_the_middle_of_a_turn_aborts_the_episode_and_stops_the_rollout(
    echo_server: ServerProcess,
) -> None:
    async with joining(echo_server, "") as session:
        with pytest.raises(PersonLeft):
            await play(session, TASK, agent)
        (entry,) = await entries(session)
        assert (entry.reason, entry.detail, entry.cause) == ("aborted", "PersonLeft: the person left", "person")
        assert session.tally.given_up == 1


# -- talking ----------------------------------------------------------------------------------------------------------


async def test_a_talk_is_one_timeline_that_gets_the_persons_reward(echo_server: ServerProcess) -> None:
    async with joining(echo_server, "Repeat more", "", "0.5") as session:
        await talk(session, TASK)
        (entry,) = await entries(session)
        assert (entry.reward, entry.calls, entry.metrics) == (0.5, 2, {"turns": 2.0})
        first, second = (await session.swarm.trace(entry.episode_id)).calls
        assert second.parent_call_id == first.call_id


# -- in a terminal ----------------------------------------------------------------------------------------------------


def joined(server: ServerProcess, *arguments: str, **streams: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "swarm.main", "join", *arguments, "--url", server.url]
    environ = {name: value for name, value in os.environ.items() if name not in ("VISUAL", "EDITOR")}
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams
    return subprocess.Popen(command, cwd=ROOT, env=environ, text=True, preexec_fn=_not_ignoring_interrupts, **streams)


async def test_a_person_at_a_pipe_judges_until_the_group_is_full(echo_server: ServerProcess) -> None:
    async with SwarmClient(echo_server.url) as swarm:
        run = await swarm.start_run(spec(batch={"tasks": 1, "group_size": 4}))
        process = joined(echo_server, "judge", "--task", "Repeat hello", "--json")
        out, err = await asyncio.to_thread(process.communicate, "a\nb\n", 120)
        assert process.returncode == 0, err
        tally = json.loads(out)
        assert (tally["ended"], sorted(tally["rewards"])) == (4, [0.0, 0.0, 1.0, 1.0])
        assert {entry.client_version async for entry in swarm.ledger(run_id=run.run_id)} == {"join-judge"}


async def test_a_run_whose_groups_hold_no_pair_cannot_be_judged(echo_server: ServerProcess) -> None:
    async with SwarmClient(echo_server.url) as swarm:
        run = await swarm.start_run(spec(batch={"tasks": 1, "group_size": 1}, algorithm={"name": "reinforce_pp"}))
        process = joined(echo_server, "judge", "--task", "Repeat hello")
        out, err = await asyncio.to_thread(process.communicate, "", 120)
        assert (process.returncode, out) == (2, "")
        assert "batch.group_size is 1, but a judge compares two episodes of one group" in err
        assert [entry async for entry in swarm.ledger(run_id=run.run_id)] == []


async def test_a_study_is_played_in_a_terminal_and_ctrl_c_costs_one_episode(echo_server: ServerProcess) -> None:
    async with SwarmClient(echo_server.url) as swarm:
        run = await swarm.start_run(spec())
        person_end, terminal_end = pty.openpty()
        study = str(ROOT / "studies" / "arithmetic" / "workflow.py")
        process = joined(echo_server, "play", study, "--by-hand", stdin=terminal_end, stdout=terminal_end)
        os.close(terminal_end)
        await asyncio.to_thread(_read_until, person_end, "your answer: ")
        os.write(person_end, b"12345\n")
        await asyncio.to_thread(_read_until, person_end, "your answer: ")
        process.send_signal(signal.SIGINT)
        _, err = await asyncio.to_thread(process.communicate, None, 60)
        os.close(person_end)
        assert process.returncode == 130, err
        assert "Traceback" not in err
        ended, left = [entry async for entry in swarm.ledger(run_id=run.run_id, kind="eval")]
        assert (ended.reason, ended.reward, ended.metadata["written"]) == ("eval", 0.0, ["12345"])
        assert left.reason == "aborted"
        assert (await swarm.status()).pool.running == 0


async def test_a_closed_terminal_gives_the_episode_back(echo_server: ServerProcess) -> None:
    async with SwarmClient(echo_server.url) as swarm:
        run = await swarm.start_run(spec())
        process = joined(echo_server, "talk", "--task", "Repeat hello")
        assert process.stdout is not None
        await asyncio.to_thread(_read_until, process.stdout.fileno(), "ends it")
        process.send_signal(signal.SIGHUP)
        _, err = await asyncio.to_thread(process.communicate, None, 60)
        assert (process.returncode, "stopped" in err) == (1, True)
        assert [entry.reason async for entry in swarm.ledger(run_id=run.run_id)] == ["aborted"]


@pytest.mark.parametrize("stubborn", ["", "trap '' TERM;"])
async def test_an_editor_is_closed_with_its_question_and_leaves_the_terminal_as_it_was(
    stubborn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm.client.join.person.CLOSING_S", 0.1)
    person_end, terminal_end = pty.openpty()
    began, script = tmp_path / "began", tmp_path / "editor.sh"
    os.mkfifo(began)
    script.write_text(f"{stubborn} stty raw -echo < {os.ttyname(terminal_end)}; echo $$ > {began}; exec sleep 600\n")
    modes = termios.tcgetattr(terminal_end)
    terminal = Terminal(terminal_end, io.StringIO(), editor=f"sh {script}")
    editing = asyncio.ensure_future(terminal.edit("a draft"))
    process = int(await asyncio.to_thread(began.read_text))
    assert termios.tcgetattr(terminal_end) != modes
    editing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await editing
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)
    assert termios.tcgetattr(terminal_end) == modes
    os.close(person_end)
    os.close(terminal_end)


def _not_ignoring_interrupts() -> None:
    """In the child: a test run in the background hands an ignored Ctrl-C down."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _read_until(source: int, wanted: str) -> None:
    seen = b""
    while wanted.encode() not in seen:
        chunk = os.read(source, 65_536)
        assert chunk, seen.decode()
        seen += chunk
