"""Crews, the synchronous twin and whole trials against a real server with the echo engine, through kills."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.serving import ServerProcess
from swarm.client import Episode, Outcome, RunSpec, SwarmClient, Task
from swarm.client import sync as synchronous
from swarm.client.trial import client_id
from swarm.client.workflow import load_workflow
from swarm.protocol.blueprint import HeldOut, TrialBlueprint

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parents[3]
REPEAT = ROOT / "tests" / "instruments" / "repeat"
STEPS, TASKS, GROUP, HELD_OUT = 5, 2, 4, 6


def spec(**changes: Any) -> RunSpec:
    fields: dict[str, Any] = {
        "seed": 3,
        "batch": {"tasks": TASKS, "group_size": GROUP},
        "sampling": {"max_tokens": 16},
        "limits": {"steps": STEPS},
        "max_staleness": 0,
    }
    return RunSpec.model_validate(fields | changes)


# -- many tasks ------------------------------------------------------------------------------------------------------------


async def test_run_tasks_trains_a_run_to_its_limit_and_leaves_nothing_open(echo_server: ServerProcess) -> None:
    workflow = load_workflow(REPEAT, "workflow.py")
    async with SwarmClient(echo_server.url, client_id="player") as swarm:
        run = await swarm.start_run(spec())
        stream = workflow.tasks("train", 1, None)
        report = await swarm.run_tasks(stream, workflow.rollout, concurrency=8, run_id=run.run_id)
        assert workflow.close is not None
        await workflow.close()
        assert report.run_over
        assert (report.crashed, report.lost, report.given_up) == (0, 0, 0)
        entries = [entry async for entry in swarm.ledger(run_id=run.run_id)]
        done = await swarm.run(run.run_id)
    assert done.status == "complete"
    assert [step.step for step in done.steps] == list(range(1, STEPS + 1))
    assert sum(step.values["episodes"] for step in done.steps) == STEPS * TASKS * GROUP
    assert {entry.state for entry in entries} <= {"trained", "in_step", "dropped"}
    assert len(entries) == report.ended


async def test_run_tasks_on_a_run_that_another_one_followed_says_that_it_is_over(echo_server: ServerProcess) -> None:
    workflow = load_workflow(REPEAT, "workflow.py")
    async with SwarmClient(echo_server.url, client_id="player-of-before") as swarm:
        earlier = await swarm.start_run(spec())
        await swarm.stop_run(earlier.run_id)
        later = await swarm.start_run(spec(seed=4))
        report = await swarm.run_tasks(workflow.tasks("train", 1, None), workflow.rollout, run_id=earlier.run_id)
        await swarm.stop_run(later.run_id)
    assert report.run_over
    assert report.ended == 0


async def test_run_tasks_rides_out_a_kill_of_the_server(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "state", "--log-level", "warning")
    port = httpx.URL(server.url).port
    workflow = load_workflow(REPEAT, "workflow.py")
    killed = False

    async def rollout(episode: Episode, task: Task) -> Outcome | float | None:
        nonlocal killed, server
        if not killed and episode.grant.weights_version.step == 2:
            killed = True
            server.kill()
            server = ServerProcess(tmp_path / "state", "--log-level", "warning", "--port", str(port))
        return await workflow.rollout(episode, task)

    try:
        async with SwarmClient(server.url, client_id="player") as swarm:
            run = await swarm.start_run(spec())
            report = await swarm.run_tasks(workflow.tasks("train", 1, None), rollout, concurrency=4)
            done = await swarm.run(run.run_id)
    finally:
        server.stop()
    assert workflow.close is not None
    await workflow.close()
    assert (report.run_over, done.status, len(done.steps)) == (True, "complete", STEPS)


PROCESS = """
import asyncio, sys
from swarm.client import Episode, SwarmClient, Task
from swarm.client.workflow import load_workflow
from pathlib import Path

workflow = load_workflow(Path(sys.argv[2]), "workflow.py")

async def rollout(episode, task):
    print("holds", episode.id, flush=True)
    outcome = await workflow.rollout(episode, task)
    await asyncio.sleep(float(sys.argv[3]))
    await episode.end(reward=outcome.reward)
    print("ended", episode.id, flush=True)

async def main():
    async with SwarmClient(sys.argv[1], client_id="player") as swarm:
        report = await swarm.run_tasks(workflow.tasks("train", 1, 12), rollout, concurrency=3)
        print("done", report.ended + report.resumed, flush=True)

asyncio.run(main())
"""
"""A client that plays 12 tasks, and says which episodes it holds and which of its ends were acknowledged."""


def player(url: str, *, pace_s: float = 0.05) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROCESS, url, str(REPEAT), str(pace_s)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def said(lines: list[str], word: str) -> list[str]:
    return [line.split()[1] for line in lines if line.startswith(f"{word} ")]


def until_ended(process: subprocess.Popen[str], count: int) -> list[str]:
    """What a player prints until that many of its ends were acknowledged."""
    lines: list[str] = []
    assert process.stdout is not None
    while len(said(lines, "ended")) < count:
        line = process.stdout.readline()
        assert line, process.communicate()
        lines.append(line)
    return lines


async def check_once(url: str, run_id: str, *processes: list[str]) -> None:
    """Each of 12 tasks ended GROUP times, by one process each, and what was acknowledged is among it."""
    acknowledged, held = ([name for lines in processes for name in said(lines, word)] for word in ("ended", "holds"))
    assert len(held) == len(set(held)), "no two processes hold one episode"
    async with SwarmClient(url) as swarm:
        entries = {entry.episode_id: entry async for entry in swarm.ledger(run_id=run_id)}
        progress = await swarm.tasks(run_id=run_id, client_id="player")
    assert [row.ended for row in progress] == [GROUP] * 12
    rewarded = {name for name, entry in entries.items() if entry.reward is not None}
    assert set(acknowledged) <= rewarded
    assert len(rewarded) == 12 * GROUP
    assert not [entry for entry in entries.values() if entry.state == "running"]


async def test_of_two_processes_of_one_client_the_newer_plays_on_and_no_episode_is_held_by_both(
    echo_server: ServerProcess,
) -> None:
    async with SwarmClient(echo_server.url) as swarm:
        run_id = (await swarm.start_run(spec(limits={"steps": 100}, max_staleness=50))).run_id
    older = player(echo_server.url, pace_s=0.5)
    before = until_ended(older, 6)
    newer = player(echo_server.url)
    out, err = newer.communicate(timeout=60)
    assert newer.returncode == 0, err
    rest, complaint = older.communicate(timeout=60)
    assert older.returncode == 1
    assert "LeaseLost: another process has taken over as client 'player'" in complaint
    await check_once(echo_server.url, run_id, before + rest.splitlines(), out.splitlines())


async def test_a_killed_client_that_is_started_again_neither_loses_nor_doubles_what_was_acknowledged(
    echo_server: ServerProcess,
) -> None:
    async with SwarmClient(echo_server.url) as swarm:
        run_id = (await swarm.start_run(spec(limits={"steps": 100}, max_staleness=50))).run_id
    heard = []
    for ended in (5, 9):
        process = player(echo_server.url)
        lines = until_ended(process, ended)
        process.kill()
        heard.append(lines + process.communicate()[0].splitlines())
    out, err = (process := player(echo_server.url)).communicate(timeout=60)
    assert process.returncode == 0, err
    await check_once(echo_server.url, run_id, *heard, out.splitlines())


def test_the_synchronous_twin_does_the_same(echo_server: ServerProcess) -> None:
    def rollout(episode: synchronous.Episode, task: Task) -> Outcome:
        answer = httpx.post(
            f"{episode.base_url}/chat/completions",
            headers={"Authorization": f"Bearer {episode.api_key}"},
            json={"model": "policy", "messages": [{"role": "user", "content": task.query}]},
        )
        word = answer.raise_for_status().json()["choices"][0]["message"]["content"]
        return Outcome(reward=float(word == task.metadata["word"]))

    with synchronous.SwarmClient(echo_server.url) as swarm:
        run = swarm.start_run(spec(limits={"steps": 2}))
        with swarm.episode(task_id="t", kind="eval") as episode:
            receipt = episode.end(reward=1.0)
            assert receipt is not None
            assert receipt.status == "pooled"
        with pytest.raises(ZeroDivisionError), swarm.episode(task_id="t", kind="eval") as broken:
            raise ZeroDivisionError("boom")
        stream = load_workflow(REPEAT, "workflow.py").tasks("train", 1, None)
        assert not hasattr(stream, "__aiter__")
        report = swarm.run_tasks(stream, rollout, concurrency=4)
        assert report.run_over
        assert swarm.run(run.run_id).status == "complete"
        assert swarm.trace(episode.id).entry.reward == 1.0
        assert swarm.entry(broken.id).detail == "ZeroDivisionError: boom"
        assert sum(1 for _ in swarm.ledger(run_id=run.run_id, kind="train")) == report.ended
        assert swarm.status().run_id == swarm.current_run_id() == run.run_id


# -- trials -----------------------------------------------------------------------------------------------------------


def blueprint(server: ServerProcess, run_id: str, file: Path, **changes: Any) -> Path:
    made = TrialBlueprint(
        trial_key="abc/lr=4e-5/3",
        server_url=server.url,
        run_id=run_id,
        instrument_dir=str(REPEAT),
        workflow="workflow.py",
        code_version="v1",
        parameters={"syllables": 3},
        seed=3,
        group_size=GROUP,
        concurrency=8,
        heldout=HeldOut(tasks=HELD_OUT, episodes=2, temperature=1.0),
    )
    file.write_text(made.model_copy(update=changes).model_dump_json())
    return file


def trial(file: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "swarm.client.trial", str(file)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finished(process: subprocess.Popen[str]) -> tuple[int, list[dict[str, Any]], str]:
    out, err = process.communicate(timeout=60)
    return process.returncode, [json.loads(line) for line in out.splitlines()], err


async def check_whole(url: str, run_id: str) -> None:
    """The run of a finished trial: every held-out episode twice, every step once, nothing left open."""
    async with SwarmClient(url) as swarm:
        run = await swarm.run(run_id)
        progress = await swarm.tasks(run_id=run_id, client_id=client_id("abc/lr=4e-5/3"))
        entries = [entry async for entry in swarm.ledger(run_id=run_id)]
    assert (run.status, len(run.steps)) == ("complete", STEPS)
    evaluated = Counter((row.step, row.ended) for row in progress if row.kind == "eval")
    assert evaluated == {(0, 2): HELD_OUT, (STEPS, 2): HELD_OUT}
    assert all(entry.state != "running" for entry in entries)
    trained = {entry.task_id for entry in entries if entry.kind == "train"}
    assert trained.isdisjoint(entry.task_id for entry in entries if entry.kind == "eval")


async def test_a_trial_evaluates_trains_and_evaluates_again(echo_server: ServerProcess, tmp_path: Path) -> None:
    async with SwarmClient(echo_server.url) as swarm:
        run_id = (await swarm.start_run(spec())).run_id
    code, lines, err = finished(trial(blueprint(echo_server, run_id, tmp_path / "b.json")))
    assert code == 0, err
    events = [line["event"] for line in lines]
    assert events == ["before", "before_ended", "train", "train_ended", "after", "after_ended", "done"]
    await check_whole(echo_server.url, run_id)
    code, lines, _ = finished(trial(tmp_path / "b.json"))
    assert (code, lines[-1]["event"]) == (0, "done"), "a finished trial is finished again at once"
    await check_whole(echo_server.url, run_id)


@pytest.mark.parametrize(
    "event",
    [
        "train",
        "train_ended",
        pytest.param("before", marks=pytest.mark.campaign),
        pytest.param("after", marks=pytest.mark.campaign),
    ],
)
async def test_a_trial_that_was_killed_goes_on_where_it_stopped(event: str, tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "state", "--log-level", "warning", "--echo-latency-s", "0.05") as server:
        async with SwarmClient(server.url) as swarm:
            run_id = (await swarm.start_run(spec())).run_id
        file = blueprint(server, run_id, tmp_path / "b.json", concurrency=3)
        first = trial(file)
        assert first.stdout is not None
        assert first.stderr is not None
        while json.loads(first.stdout.readline())["event"] != event:
            continue
        async with SwarmClient(server.url) as swarm:
            async for status in swarm.statuses(wait_s=0.2):
                if status.pool.running or event == "train_ended":
                    break
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
        first.stdout.close()
        first.stderr.close()
        code, _, err = finished(trial(file))
        assert code == 0, err
        await check_whole(server.url, run_id)


async def test_a_trial_that_is_told_to_stop_gives_its_episodes_back(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "state", "--log-level", "warning", "--echo-latency-s", "0.2") as server:
        async with SwarmClient(server.url) as swarm:
            run_id = (await swarm.start_run(spec())).run_id
            process = trial(blueprint(server, run_id, tmp_path / "b.json"))
            async for status in swarm.statuses(wait_s=1.0):
                if status.pool.running:
                    break
            process.send_signal(signal.SIGTERM)
            code, _, err = finished(process)
            assert code == 1
            assert "SIGTERM" in err
            assert (await swarm.status()).pool.running == 0


async def test_a_trial_fails_with_its_traceback_when_its_rollouts_do(
    echo_server: ServerProcess, tmp_path: Path
) -> None:
    (tmp_path / "broken.py").write_text(
        "from swarm.client import Task\n"
        "def tasks(split, seed, count, **parameters):\n    return [Task('a', ''), Task('b', ''), Task('c', '')]\n"
        "async def rollout(episode, task):\n    raise LookupError('nothing here')\n"
    )
    async with SwarmClient(echo_server.url) as swarm:
        run_id = (await swarm.start_run(spec())).run_id
    changes = {"instrument_dir": str(tmp_path), "workflow": "broken.py", "retries": 0}
    code, _, err = finished(trial(blueprint(echo_server, run_id, tmp_path / "b.json", **changes)))
    assert code == 1
    assert "LookupError: nothing here" in err
    assert "RolloutsFailing" in err


@pytest.mark.parametrize("place", ["tasks", "rollout"])
async def test_a_trial_whose_code_exits_has_failed(place: str, echo_server: ServerProcess, tmp_path: Path) -> None:
    (tmp_path / "leaving.py").write_text(
        "import sys\nfrom swarm.client import Task\n"
        f"def leave(place):\n    if place == {place!r}:\n        sys.exit(0)\n"
        "def tasks(split, seed, count, **parameters):\n    leave('tasks')\n    return [Task('a', ''), Task('b', '')]\n"
        "async def rollout(episode, task):\n    leave('rollout')\n"
    )
    async with SwarmClient(echo_server.url) as swarm:
        run_id = (await swarm.start_run(spec())).run_id
    changes = {"instrument_dir": str(tmp_path), "workflow": "leaving.py", "retries": 0}
    code, _, err = finished(trial(blueprint(echo_server, run_id, tmp_path / "b.json", **changes)))
    assert code == 1
    assert f"leave('{place}')" in err
    assert "SystemExit: 0" in err


@pytest.mark.parametrize(("text", "said"), [("{}", "trial_key"), ('{"trial_keys": 1}', "did you mean 'trial_key'")])
def test_a_blueprint_that_cannot_be_used_is_one_line_and_exit_code_2(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "b.json").write_text(text)
    code, lines, err = finished(trial(tmp_path / "b.json"))
    assert (code, lines) == (2, [])
    assert said in err
    assert err.count("\n") == 1
