"""Teams over two real servers with the echo engine: on both or on none, whoever is killed and when."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.serving import ServerProcess
from foundation.clock import ManualClock
from swarm.client import (
    EpisodeUnfinished,
    Forbidden,
    Outcome,
    Patience,
    RunSpec,
    ServerUnreachable,
    SwarmClient,
    SwarmError,
    Task,
    TeamAborted,
    team,
)
from swarm.client.episode import Episode
from swarm.client.team import Team
from swarm.protocol.episodes import Cause, EpisodeKind, LedgerEntry

pytestmark = pytest.mark.anyio

QUICK = Patience(connect_s=20.0, later_s=20.0)
SPEC = RunSpec.model_validate(
    {
        "batch": {"tasks": 2, "group_size": 2},
        "sampling": {"max_tokens": 16},
        "max_staleness": 0,
        "limits": {"steps": 50},
    }
)
SETTLE_S = 60.0


class Pair:
    """Two servers that can be killed and started again at their addresses."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.servers = {name: ServerProcess(folder / name, "--log-level", "warning") for name in ("a", "b")}
        self.urls = {name: server.url for name, server in self.servers.items()}

    def kill(self, name: str) -> None:
        self.servers[name].kill()

    def start(self, name: str) -> None:
        port = str(httpx.URL(self.urls[name]).port)
        self.servers[name] = ServerProcess(self.folder / name, "--log-level", "warning", "--port", port)

    def restart(self, name: str) -> None:
        self.kill(name)
        self.start(name)

    def stop(self) -> None:
        for server in self.servers.values():
            if server.process.poll() is None:
                server.stop()


@contextmanager
def booted(folder: Path) -> Iterator[Pair]:
    both = Pair(folder)
    try:
        yield both
    finally:
        both.stop()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """For all tests that kill no server."""
    with booted(tmp_path_factory.mktemp("pair")) as both:
        yield both


@pytest.fixture
def own_pair(tmp_path: Path) -> Iterator[Pair]:
    with booted(tmp_path) as both:
        yield both


@dataclass
class Swarms:
    """A client of each server, and its run there."""

    a: SwarmClient
    b: SwarmClient
    runs: dict[SwarmClient, str]

    async def ledger(self, swarm: SwarmClient) -> list[LedgerEntry]:
        return [entry async for entry in swarm.ledger(run_id=self.runs[swarm])]

    async def fates(self, team_ids: list[tuple[str, str]]) -> list[tuple[LedgerEntry, LedgerEntry]]:
        """Of both members of each team, once nothing is prepared or running any more."""
        async with asyncio.timeout(SETTLE_S):
            for swarm in (self.a, self.b):
                async for status in swarm.statuses(wait_s=0.5):
                    if not status.pool.prepared and not status.pool.running:
                        break
        return [(await self.a.entry(one), await self.b.entry(other)) for one, other in team_ids]


@asynccontextmanager
async def swarms(pair: Pair) -> AsyncIterator[Swarms]:
    async with (
        SwarmClient(pair.urls["a"], client_id="c", patience=QUICK) as a,
        SwarmClient(pair.urls["b"], client_id="c", patience=QUICK) as b,
    ):
        yield Swarms(a, b, {swarm: (await swarm.start_run(SPEC)).run_id for swarm in (a, b)})
        for swarm in (a, b):
            if (running := (await swarm.status()).run_id) is not None:
                await swarm.stop_run(running)


async def call(episode: Episode) -> None:
    async with httpx.AsyncClient(trust_env=False) as http:
        answer = await http.post(
            f"{episode.base_url}/chat/completions",
            headers={"Authorization": f"Bearer {episode.api_key}"},
            json={"model": "policy", "messages": [{"role": "user", "content": "Say red"}]},
        )
        assert answer.status_code == 200, answer.text


def counted(entry: LedgerEntry) -> bool:
    """Whether it got into the pool, whatever training made of it."""
    return entry.reward is not None


async def test_a_team_counts_on_both_servers_with_a_reward_of_its_own_on_each(pair: Pair) -> None:
    async with swarms(pair) as both:
        async with team(task_id="t-1", planner=both.a, solver=both.b) as ep:
            await call(ep["planner"])
            await call(ep["solver"])
            ids = [(ep["planner"].id, ep["solver"].id)]
            ep.end(rewards={"planner": 1.0, "solver": 0.25}, success=True, metrics={"turns": 2})
        assert ep.committed
        [(planner, solver)] = await both.fates(ids)
    assert (planner.reward, solver.reward) == (1.0, 0.25)
    assert planner.state == solver.state == "ended"
    assert planner.success
    assert solver.metrics == {"turns": 2.0}


async def test_an_exception_or_a_missing_reward_aborts_on_both(pair: Pair) -> None:
    async with swarms(pair) as both:
        with pytest.raises(ZeroDivisionError):
            async with team(task_id="t-1", planner=both.a, solver=both.b) as ep:
                raise ZeroDivisionError("boom")
        with pytest.raises(EpisodeUnfinished):
            async with team(task_id="t-1", planner=both.a, solver=both.b) as bare:
                bare["planner"].end(reward=1.0)
        fates = await both.fates([(one["planner"].id, one["solver"].id) for one in (ep, bare)])
    assert all(entry.reason == "aborted" for fate in fates for entry in fate)
    assert fates[0][0].detail == "ZeroDivisionError: boom"


# -- faults -----------------------------------------------------------------------------------------------------------

ROOT = Path(__file__).parents[3]
MOMENTS = [("prepare", "solver"), ("prepare", "planner"), ("commit", "planner"), ("commit", "solver")]
"""The requests of a team that is ended, in their order; the planner's server decides."""


class Killed(BaseException):
    """The client is no more."""


class Wrapped:
    """An episode's desk that does something just before, or just after, one of its requests. A dead one sends nothing."""

    def __init__(self, desk: Any, at: str, after: bool, event: Callable[[], None]) -> None:
        self.server, self.at, self.after, self.event = desk, at, after, event
        self.dead: list[bool] = []

    def __getattr__(self, name: str) -> Any:
        request = getattr(self.server, name)
        if name not in ("prepare", "commit", "abort", "renew"):
            return request

        async def sent(*given: Any) -> Any:
            if self.dead:
                raise Killed
            if name == self.at and not self.after:
                self.event()
            answer = await request(*given)
            if name == self.at and self.after:
                self.event()
            return answer

        return sent


async def one_team(both: Swarms, moment: tuple[str, str], after: bool, event: Callable[[], None]) -> Team:
    """A whole team during which `event` happens; whatever it raises is part of the story."""
    ep = team(task_id="t-1", planner=both.a, solver=both.b, patience_s=1.0)
    try:
        async with ep:
            await call(ep["planner"])
            await call(ep["solver"])
            ep.end(rewards={"planner": 1.0, "solver": 0.5})
            wrapped = {
                name: Wrapped(ep[name].server, moment[0] if name == moment[1] else "", after, event)
                for name in ep.members
            }
            for name, episode in ep.members.items():
                episode.server = wrapped[name]
                wrapped[name].dead = event.dead if isinstance(event, Death) else []
    except (SwarmError, Killed):
        for episode in ep.members.values():
            await episode.let_go()
    return ep


class Death:
    """The client is killed: from now on it sends nothing."""

    def __init__(self) -> None:
        self.dead: list[bool] = []

    def __call__(self) -> None:
        self.dead.append(True)
        raise Killed


def assert_on_both_or_on_none(fates: list[tuple[LedgerEntry, LedgerEntry]]) -> int:
    """How many teams counted."""
    assert all(counted(one) == counted(other) for one, other in fates), fates
    return sum(counted(one) for one, _ in fates)


async def test_a_server_killed_at_any_moment_leaves_a_team_on_both_or_on_none(own_pair: Pair) -> None:
    async with swarms(own_pair) as both:
        for moment, after, victim in [*itertools.product(MOMENTS, (False,), ("a", "b")), (MOMENTS[2], True, "a")]:
            ep = await one_team(both, moment, after, lambda victim=victim: own_pair.restart(victim))  # type: ignore[misc]
            fates = await both.fates([(ep["planner"].id, ep["solver"].id)])
            assert_on_both_or_on_none(fates)
            assert counted(fates[0][0]) == ep.committed, (moment, after, victim)


async def test_a_client_killed_at_any_moment_leaves_a_team_on_both_or_on_none(own_pair: Pair) -> None:
    async with swarms(own_pair) as both:
        counts = []
        for moment, after in itertools.product(MOMENTS, (False, True)):
            ep = await one_team(both, moment, after, Death())
            ids = [(ep["planner"].id, ep["solver"].id)]
            if moment[0] == "prepare":  # members that were not prepared yet would hold their leases for minutes
                for episode, swarm in ((ep["planner"], both.a), (ep["solver"], both.b)):
                    if (await swarm.entry(episode.id)).state == "running":
                        await swarm.abort(episode.id, episode.grant.lease, "the lease ran out")
            counts.append(assert_on_both_or_on_none(await both.fates(ids)))
    assert counts == [0, 0, 0, 0, 0, 1, 1, 1], "from the moment the decider has the commit, it stands"


async def test_a_participant_that_was_down_hears_the_decision_when_it_is_back(own_pair: Pair) -> None:
    async with swarms(own_pair) as both:
        ep = await one_team(both, ("commit", "planner"), True, lambda: own_pair.kill("b"))
        assert ep.committed
        own_pair.restart("a")
        own_pair.start("b")
        assert assert_on_both_or_on_none(await both.fates([(ep["planner"].id, ep["solver"].id)])) == 1
        entry = await both.b.entry(ep["solver"].id)
    assert (entry.state, entry.reward, entry.detail) == ("ended", 0.5, "its decider says so")


CLIENT = """
import asyncio, json, sys
from swarm.client import SwarmClient, team
from tests.swarm.client.test_team import call

async def main(a, b):
    async with SwarmClient(a, client_id="d") as planner, SwarmClient(b, client_id="d") as solver:
        for number in range(1000):
            ep = team(task_id="t-2", planner=planner, solver=solver, patience_s=1.0, idle_limit_s=2.0, decider="solver")
            async with ep:
                await call(ep["planner"])
                await call(ep["solver"])
                print(json.dumps([ep["planner"].id, ep["solver"].id]), flush=True)
                ep.end(rewards={"planner": number % 2, "solver": number % 3})

asyncio.run(main(*sys.argv[1:]))
"""


async def test_clients_that_are_really_killed_leave_nothing_half_done(pair: Pair) -> None:
    async with swarms(pair) as both:
        seen: list[tuple[str, str]] = []
        for last in (1, 2, 3):
            process = subprocess.Popen(  # noqa: ASYNC220 - it is waited for line by line, and killed
                [sys.executable, "-c", CLIENT, pair.urls["a"], pair.urls["b"]],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                text=True,
            )
            assert process.stdout is not None
            for _ in range(last):
                one, other = json.loads(process.stdout.readline())
                seen.append((one, other))
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            process.stdout.close()
        assert_on_both_or_on_none(await both.fates(seen))


async def test_a_decider_that_the_operator_does_not_know_is_refused(tmp_path: Path) -> None:
    tokens = {"SWARM_ADMIN_TOKEN": "swt_admin-0123456789", "SWARM_CLIENT_TOKEN": "swt_client-0123456789"}
    admin = tokens["SWARM_ADMIN_TOKEN"]
    refusals: list[str] = []
    with ServerProcess(tmp_path / "a", "--log-level", "warning", environ=tokens) as decider:
        for known in (False, True):
            peers = ("--peer", decider.url) if known else ()
            with ServerProcess(tmp_path / f"b{known}", "--log-level", "warning", *peers, environ=tokens) as other:
                async with SwarmClient(decider.url, admin) as a, SwarmClient(other.url, admin) as b:
                    for swarm in (a, b):
                        await swarm.start_run(SPEC, idempotency_key="the run")
                    ep = team(task_id="t", planner=a, solver=b)
                    try:
                        async with ep:
                            ep.end(rewards={"planner": 1.0, "solver": 1.0})
                    except Forbidden as error:
                        refusals.append(error.detail)
                    assert ep.committed == known
                    assert (await a.entry(ep["planner"].id)).reason == ("no_calls" if known else "aborted")
    assert len(refusals) == 1
    assert f"--peer {decider.url}" in refusals[0]


async def test_a_team_inside_a_rollout_counts_for_run_tasks(pair: Pair) -> None:
    """A rollout may bring its partner along: the episode that `run_tasks` claimed is one of the members."""

    async with swarms(pair) as both:

        async def rollout(episode: Episode, task: Task) -> Outcome | None:
            async with team(solver=episode, planner=both.b) as ep:
                await call(ep["planner"])
                await call(ep["solver"])
                ep.end(rewards={"planner": 0.5, "solver": 1.0})
            return None

        report = await both.a.run_tasks([Task("t-1", ""), Task("t-2", "")], rollout, progress=False)
        assert (report.ended, report.crashed, report.lost) == (4, 0, 0)
        rewards = [[entry.reward for entry in await both.ledger(swarm)] for swarm in (both.a, both.b)]
    assert rewards == [[1.0] * 4, [0.5] * 4]


@pytest.mark.parametrize("kind", ["train", "eval"])
async def test_a_team_in_which_nobody_called_the_own_model_does_not_count_for_run_tasks(
    pair: Pair, kind: EpisodeKind
) -> None:
    async with swarms(pair) as both:

        async def rollout(episode: Episode, task: Task) -> None:
            async with team(solver=episode, planner=both.b) as ep:
                await call(ep["planner"])
                ep.end(rewards={"planner": 0.5, "solver": 1.0})
            assert ep.committed

        report = await both.a.run_tasks([Task("t-1", "")], rollout, kind=kind, retries=0, progress=False)
        assert (report.ended, set(report.causes)) == (0, {Cause.ROLLOUT})
        assert {entry.reason for entry in await both.ledger(both.a)} == {"no_calls"}
        assert {entry.calls for entry in await both.ledger(both.b)} == {1}


async def test_run_tasks_stops_once_the_run_of_its_partner_was_stopped(pair: Pair) -> None:
    async with swarms(pair) as both:

        async def rollout(episode: Episode, task: Task) -> None:
            if task.id == "t-2" and (running := (await both.b.status()).run_id):
                await both.b.stop_run(running)
            async with team(planner=episode, solver=both.b) as ep:
                await call(ep["planner"])
                await call(ep["solver"])
                ep.end(rewards={"planner": 1.0, "solver": 1.0})

        stream = (Task(f"t-{number}", "") for number in itertools.count(1))
        async with asyncio.timeout(SETTLE_S):
            report = await both.a.run_tasks(stream, rollout, concurrency=1, progress=False)
        assert (report.run_over, report.ended, report.lost) == (True, 2, 0)
        status = await both.a.status()
    assert (status.pool.running, status.pool.prepared) == (0, 0)


async def test_a_member_that_was_lost_takes_the_team_with_it(own_pair: Pair) -> None:
    async with swarms(own_pair) as both:
        ep = team(task_id="t-1", planner=both.a, solver=both.b)
        await ep.__aenter__()
        await call(ep["planner"])
        own_pair.restart("b")
        ep.end(rewards={"planner": 1.0, "solver": 1.0})
        with pytest.raises(TeamAborted):
            await ep.__aexit__(None, None, None)
        [(planner, solver)] = await both.fates([(ep["planner"].id, ep["solver"].id)])
    assert (planner.reason, solver.reason) == ("aborted", "server_restarted")


async def test_a_team_key_is_good_for_one_question_only(pair: Pair) -> None:
    async with swarms(pair) as both, team(task_id="t-1", planner=both.a, solver=both.b) as ep:
        grant = ep["planner"].grant
        url = f"{pair.urls['a']}/swarm/v1/episodes/{grant.episode_id}/decision"
        async with httpx.AsyncClient(trust_env=False) as http:
            right = await http.get(url, headers={"Authorization": f"Bearer {grant.team_key}"})
            wrong = await http.get(url, headers={"Authorization": f"Bearer {ep['solver'].grant.team_key}"})
            agent = await http.get(url, headers={"Authorization": f"Bearer {grant.api_key}"})
        ep.abort("enough")
    assert right.json() == {"episode_id": grant.episode_id, "decision": "undecided", "cause": None}
    assert wrong.status_code == agent.status_code == 401


async def test_a_decider_without_a_record_of_the_episode_says_that_it_is_aborted(own_pair: Pair) -> None:
    """An older copy of its state directory was put back: it made the key, and will never hear of the episode again."""
    async with swarms(own_pair) as both:
        own_pair.kill("a")
        shutil.copytree(own_pair.folder / "a", own_pair.folder / "older")
        own_pair.start("a")
        ep = await one_team(both, ("prepare", "solver"), True, Death())
        own_pair.kill("a")
        shutil.rmtree(own_pair.folder / "a")
        (own_pair.folder / "older").rename(own_pair.folder / "a")
        own_pair.start("a")
        grant = ep["planner"].grant
        url = f"{own_pair.urls['a']}/swarm/v1/episodes/{grant.episode_id}/decision"
        async with httpx.AsyncClient(trust_env=False) as http:
            told = await http.get(url, headers={"Authorization": f"Bearer {grant.team_key}"})
        assert (told.status_code, told.json()["decision"]) == (200, "aborted")
        async with asyncio.timeout(SETTLE_S):
            async for status in both.b.statuses(wait_s=0.5):
                if not status.pool.prepared:
                    break
        solver = await both.b.entry(ep["solver"].id)
    assert (solver.reason, solver.detail) == ("team_aborted", "its decider says so")


async def test_a_server_that_never_answered_is_named_before_a_slot_is_held_anywhere(pair: Pair) -> None:
    clock = Rushed()
    async with (
        SwarmClient(pair.urls["a"], client_id="c", patience=QUICK) as a,
        SwarmClient("http://127.0.0.1:1", client_id="c", clock=clock) as b,
    ):
        run = await a.start_run(SPEC)
        with pytest.raises(ServerUnreachable, match=r"no swarm server answers at http://127\.0\.0\.1:1"):
            async with team(task_id="t-1", planner=a, solver=b):
                pass
        assert 19.0 < sum(clock.slept) < 21.0
        assert [entry async for entry in a.ledger(run_id=run.run_id)] == []
        await a.stop_run(run.run_id)


class Rushed(ManualClock):
    """Sleeping takes no time."""

    def __init__(self) -> None:
        super().__init__()
        self.slept: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.advance(seconds)
        await asyncio.sleep(0)
