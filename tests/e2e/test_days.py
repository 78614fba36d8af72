"""A study of three days in a minute or two of real time; two orchestrators that want one study; a database that comes and
goes. Real processes, real servers with the echo engine, and a town clock that the test moves.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest

from bench.serving import ServerProcess
from researcher.models import StudyStatus, TrialStatus
from researcher.store.store import Store
from tests.fakes.postgres import postgres_server
from tests.fakes.town import REPEAT, Town
from tests.fakes.town_clock import TownClock

pytestmark = pytest.mark.campaign

T = TypeVar("T")
LATENCY = ("--echo-latency-s", "0.4")
HOUR_S = 3600.0
STEPS, SEEDS = 6, 4
LIMIT_S = 900.0
"""For anything that is waited for: machines are shared."""


def _make_light(declaration: Path) -> None:
    """Eight episodes a step: what is tested here is everything around them. Such loud trials need a wide margin."""
    text = declaration.read_text()
    for heavy, light in (
        ("tasks = 4\ngroup_size = 8", "tasks = 2\ngroup_size = 4"),
        ("heldout_tasks = 8", "heldout_tasks = 4"),
        ("margin = 0.2", "margin = 0.4"),
    ):
        assert text.count(heavy) == 1
        text = text.replace(heavy, light)
    declaration.write_text(text)


def at(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


class Play:
    """A town with one study, and the processes that a test has begun in it."""

    def __init__(self, folder: Path, stack: ExitStack, servers: list[str], **facts: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        TownClock.set_up(folder / "clock", at("2026-03-02 12:00"))
        self.town = Town(folder, facts.pop("database", ""))
        self.clock = self.town.clock
        self.instrument = folder / "repeat"
        shutil.copytree(REPEAT, self.instrument, ignore=shutil.ignore_patterns("__pycache__"))
        _make_light(self.instrument / "instrument.toml")
        arranged = {"seeds": 3, "windows": [], "days": None, "budget_s": 30 * HOUR_S, **facts}
        known = {"instrument": str(self.instrument), "servers": servers, **arranged}
        (folder / "town.json").write_text(json.dumps(known))
        self.study = ""
        self._begun: list[subprocess.Popen[bytes]] = []
        stack.callback(self._end_all)
        self._stack = stack

    def begin(self, *arguments: str, log: str = "town.log") -> subprocess.Popen[bytes]:
        process = self.town.spawn(*arguments, log=log)
        self._begun.append(process)
        return process

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        process.kill()
        assert process.wait() == -signal.SIGKILL

    def plan(self) -> None:
        planning = self.begin("plan", log="plan.log")
        assert planning.wait(timeout=LIMIT_S) == 0, self.said("plan.log")
        self.store = Store.open(self.town.database, clock=self.clock)
        self._stack.callback(self.store.close)
        self.study = self.store.studies.resolve("latest")

    def said(self, log: str = "town.log") -> str:
        file = self.town.folder / log
        return file.read_text() if file.exists() else ""

    def until(self, what: str, found: Callable[[], T], meanwhile: Callable[[], None] = lambda: None) -> T:
        """What `found` gives, once that is something."""
        deadline = time.monotonic() + LIMIT_S
        while not (seen := found()):
            assert time.monotonic() < deadline, f"waited in vain until {what}:\n{self.said()[-5000:]}\n{self.journal()}"
            meanwhile()
            time.sleep(0.05)
        return seen

    def worker(self) -> int | None:
        """The process that owns the study."""
        lease = self.store.leases.holder(self.study)
        return None if lease is None else int(lease.owner.split("/")[1])

    def kill_worker(self) -> None:
        worker = self.worker()
        assert worker is not None
        os.kill(worker, signal.SIGKILL)

    def running(self, least_step: int, server: str | None = None) -> list[str]:
        """Trials that run, on this server where one is given, and have come so far."""
        found = []
        for trial in self.store.trials.all(self.study):
            if trial.status is TrialStatus.RUNNING and len(trial.series.get("reward_mean", ())) >= least_step:
                attempt = self.store.trials.attempts(self.study, trial.key)[-1]
                if server in (None, attempt.server_url):
                    found.append(trial.key)
        return found

    def count(self, status: TrialStatus) -> int:
        return sum(trial.status is status for trial in self.store.trials.all(self.study))

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event.detail for event in self.store.journal.events(self.study, kind)]

    def journal(self) -> str:
        if not self.study:
            return ""
        events = self.store.journal.events(self.study)
        return "\n".join(f"{datetime.fromtimestamp(e.at, UTC):%a %H:%M:%S} {e.kind} {e.detail}" for e in events)

    def finals(self) -> dict[str, dict[str, float]]:
        return {f"{trial.arm}/{trial.seed}": trial.finals for trial in self.store.trials.all(self.study)}

    def verdicts(self) -> list[tuple[str, str]]:
        return [(record.hypothesis, record.verdict) for record in self.store.verdicts.all(self.study)]

    def assert_each_trial_once_and_whole(self) -> None:
        for trial in self.store.trials.all(self.study):
            outcomes = Counter(attempt.outcome for attempt in self.store.trials.attempts(self.study, trial.key))
            assert (trial.status, outcomes["done"], outcomes["open"]) == (TrialStatus.DONE, 1, 0), trial
            assert [step for step, _ in trial.series["reward_mean"]] == [*range(1, STEPS + 1)]
            assert len(trial.series["eval_reward_before"]) == len(trial.series["eval_reward_after"]) == 4
        done = Counter(detail["trial"] for detail in self.events("trial_done"))
        assert set(done.values()) == {1}

    def _end_all(self) -> None:
        with suppress(ProcessLookupError, AttributeError):
            worker = self.worker()
            if worker is not None:
                os.kill(worker, signal.SIGKILL)
        for process in self._begun:
            if process.poll() is None:
                process.kill()
            process.wait()
        if self.study:
            self.store.close()
        for file in self.town.home.glob("studies/*/trials/**/pid"):  # clients that outlived their researcher
            with suppress(ProcessLookupError, ValueError):
                os.killpg(int(file.read_text()), signal.SIGKILL)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def server(stack: ExitStack, folder: Path, *arguments: str) -> ServerProcess:
    made = ServerProcess(folder, *arguments)
    stack.callback(lambda: made.process.poll() is None and made.stop())
    return made


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Play]:
    with ExitStack() as stack:
        folder = tmp_path_factory.mktemp("undisturbed")
        servers = [server(stack, folder / name).url for name in ("a", "b")]
        play = Play(folder / "town", stack, servers, seeds=SEEDS)
        play.plan()
        sitting = play.begin("sit", play.study)
        assert sitting.wait(timeout=LIMIT_S) == 0, play.said()
        play.assert_each_trial_once_and_whole()
        yield play


def test_three_days_of_trouble_end_within_budget_in_the_verdict_of_a_quiet_study(
    tmp_path: Path, stack: ExitStack, undisturbed: Play
) -> None:
    one, other = (server(stack, tmp_path / name, *LATENCY) for name in ("a", "b"))
    facts = {"windows": ["22:00-07:00"], "days": 3, "seeds": SEEDS}
    play = Play(tmp_path / "town", stack, [one.url, other.url], **facts)
    daemon = _monday(play)
    daemon = _first_night(play, daemon, one, other)
    play.kill(daemon)
    play.clock.until(at("2026-03-03 12:00"))
    play.town.copy_is_away.unlink()
    daemon = play.begin("daemon")
    _second_night(play, daemon, one, other)
    play.kill(play.begin("daemon"))
    daemon = play.begin("daemon")
    play.clock.until(at("2026-03-04 22:00"))
    play.until("the lost server is missed", lambda: f"{other.url} does not answer" in play.said())
    play.clock.pass_time(31)
    play.until("it is done", lambda: play.store.studies.get(play.study).status is StudyStatus.DONE)
    assert daemon.wait(timeout=LIMIT_S) == 0  # nothing is left in its care: but it looks only now and then
    _assert_as_good_as_quiet(play, undisturbed)
    _assert_the_journal_explains_it(play, other)


def _monday(play: Play) -> subprocess.Popen[bytes]:
    """The daemon is killed before it had anything to do."""
    play.plan()
    daemon = play.begin("daemon")
    play.until("the daemon looks", lambda: "the daemon looks" in play.said())
    play.kill(daemon)
    return play.begin("daemon")


def _first_night(
    play: Play, daemon: subprocess.Popen[bytes], one: ServerProcess, other: ServerProcess
) -> subprocess.Popen[bytes]:
    """Daemon and worker are killed in mid-trial, and the records' copy goes away."""
    play.clock.until(at("2026-03-02 22:00"))
    play.until("both servers train", lambda: play.running(2, one.url) and play.running(2, other.url))
    play.kill(daemon)
    play.kill_worker()
    play.town.copy_is_away.touch()
    daemon = play.begin("daemon")
    play.until("another goes on", lambda: play.events("taken_over") and play.count(TrialStatus.DONE) >= 2)
    play.until("others are at it", lambda: play.running(1))
    play.clock.until(at("2026-03-03 07:00"))
    _assert_rests(play, one, other)
    return daemon


def _second_night(play: Play, daemon: subprocess.Popen[bytes], one: ServerProcess, other: ServerProcess) -> None:
    """An edit breaks the client; a person takes it back, and resumes. A server is lost for good."""
    workflow = play.instrument / "workflow.py"
    sound = workflow.read_bytes()
    play.clock.until(at("2026-03-03 22:00"))
    play.until("a trial goes on", lambda: play.events("trial_continued"))
    workflow.write_bytes(sound.replace(b"said = answer.json()", b"said = answer.jason()"))
    play.until("somebody is needed", lambda: play.store.studies.get(play.study).status is StudyStatus.FAILED)
    play.until("nobody works on it", lambda: play.worker() is None)
    if daemon.poll() is None:  # it may not have looked since
        play.kill(daemon)
    workflow.write_bytes(sound)
    play.begin("sit", play.study)
    play.until("the other server trains", lambda: play.running(1, other.url))
    other.kill()
    beats = itertools.count()
    play.until(
        "its trial is taken from it",
        lambda: any(other.url in detail["because"] for detail in play.events("attempt_withdrawn")),
        meanwhile=lambda: play.clock.pass_time(30) if next(beats) % 60 == 59 else None,
    )
    play.until("the last server trains", lambda: play.running(1, one.url))
    play.clock.until(at("2026-03-04 07:00"))
    _assert_rests(play, one)


def _assert_rests(play: Play, *servers: ServerProcess) -> None:
    """Outside its windows nobody works on it, what ran has a checkpoint, and the servers are free."""
    play.until("nobody works on it", lambda: play.worker() is None)
    study = play.store.studies.get(play.study)
    assert study.status is StudyStatus.WAITING
    assert "window" in (study.reason or "")
    assert play.count(TrialStatus.PAUSED) >= 1
    assert play.count(TrialStatus.RUNNING) == play.count(TrialStatus.SUBMITTED) == 0
    for one in servers:
        with one.client() as client:
            status: httpx.Response = client.get("/swarm/v1/status")
        assert status.json()["run_id"] is None
    assert (play.town.home / "studies" / play.study / "report.md").is_file()


def _assert_as_good_as_quiet(play: Play, undisturbed: Play) -> None:
    play.assert_each_trial_once_and_whole()
    assert play.verdicts() == undisturbed.verdicts() == [("H1", "supported")]
    moved = {detail["trial"] for detail in play.events("trial_continued")}
    whole = {f"{trial.arm}/{trial.seed}" for trial in play.store.trials.all(play.study) if trial.key not in moved}
    finals, quiet = play.finals(), undisturbed.finals()
    assert finals.keys() == quiet.keys()
    assert {name: finals[name] for name in whole} == {name: quiet[name] for name in whole}
    [wall] = [budget for budget in play.store.budgets.all(play.study) if budget.kind == "wall_s"]
    assert wall.reserved == 0
    assert 9 * HOUR_S < wall.spent < 27.5 * HOUR_S < wall.limit  # three nights at most, of the 64 hours that it took
    assert play.store.outbox.state("mlflow", play.study) == (0, None)
    copied = [json.loads(line) for line in play.said("copied.jsonl").splitlines()]
    assert len({seq for seq, _, _ in copied}) == len(copied)
    assert {ref for _, kind, ref in copied if kind == "trial"} == {t.key for t in play.store.trials.all(play.study)}


def _assert_the_journal_explains_it(play: Play, lost: ServerProcess) -> None:
    assert len(play.events("taken_over")) == 1
    paused, continued = play.events("trial_paused"), play.events("trial_continued")
    assert {detail["because"] for detail in paused} == {"its window closed", "interrupted"}
    steps = {(detail["trial"], detail["step"]) for detail in paused}
    assert {(detail["trial"], detail["step"]) for detail in continued} <= steps
    assert all("jason" in detail["error"] for detail in play.events("client_failed"))
    excused = Counter(detail["run"] for detail in play.events("losses_excused"))
    assert set(excused.values()) == {1}, "what is lost after the repair counts"
    [failed] = [detail for detail in play.events("study") if detail["status"] == StudyStatus.FAILED]
    assert "workflow.py" in failed["because"]
    assert any(lost.url in detail["because"] for detail in play.events("attempt_withdrawn"))
    waits = [detail for detail in play.events("study") if detail["status"] == StudyStatus.WAITING]
    assert sum("opens at" in detail["because"] for detail in waits) >= 2
    begun = Counter(detail["trial"] for detail in play.events("trial_begun"))
    ended = Counter(
        detail["trial"]
        for kind in ("attempt_failed", "attempt_withdrawn", "trial_done")
        for detail in play.events(kind)
    )
    assert begun == ended


def test_of_two_orchestrators_one_owns_the_study_and_the_other_says_so_and_takes_over_when_it_dies(
    tmp_path: Path, stack: ExitStack, undisturbed: Play
) -> None:
    servers = [server(stack, tmp_path / name, *LATENCY).url for name in ("a", "b")]
    play = Play(tmp_path / "town", stack, servers, seeds=SEEDS)
    play.plan()
    first = play.begin("sit", play.study)
    play.until("it trains", lambda: play.running(1))
    assert play.begin("sit", play.study, log="second.log").wait(timeout=LIMIT_S) == 1
    said = play.said("second.log")
    assert "LeaseHeld" in said
    assert f"/{first.pid}/" in said
    assert play.worker() == first.pid

    # On the same machine a dead owner is known to be dead.
    play.kill(first)
    second = play.begin("sit", play.study)
    play.until("the second owns it", lambda: play.worker() == second.pid)
    play.until("a trial is done under it", lambda: play.count(TrialStatus.DONE) >= 1 and play.running(1))

    # On another, only the end of its lease says so.
    play.kill(second)
    elsewhere = ("sit", play.study, "--host", "elsewhere")
    assert play.begin(*elsewhere, log="elsewhere.log").wait(timeout=LIMIT_S) == 1
    assert "s more; wait, or stop that process" in play.said("elsewhere.log")
    play.clock.pass_time(61)
    third = play.begin(*elsewhere, log="elsewhere.log")
    assert third.wait(timeout=LIMIT_S) == 0, play.said("elsewhere.log")
    assert len(play.events("taken_over")) == 2
    play.assert_each_trial_once_and_whole()
    assert play.finals() == undisturbed.finals()
    assert play.verdicts() == undisturbed.verdicts()


def test_a_database_that_is_restarted_every_few_seconds_loses_nothing_and_doubles_nothing(
    tmp_path: Path, stack: ExitStack, undisturbed: Play
) -> None:
    database = stack.enter_context(postgres_server())
    servers = [server(stack, tmp_path / name, *LATENCY).url for name in ("a", "b")]
    play = Play(tmp_path / "town", stack, servers, seeds=SEEDS, database=database.url)
    play.plan()
    sitting = play.begin("sit", play.study)
    play.until("it works", lambda: play.running(1))
    restarts = 0
    while sitting.poll() is None:
        database.restart("fast" if restarts % 2 else "immediate")
        restarts += 1
        with suppress(subprocess.TimeoutExpired):
            sitting.wait(timeout=3)
    assert sitting.returncode == 0, play.said()
    assert restarts >= 3
    play.assert_each_trial_once_and_whole()
    assert set(Counter(detail["trial"] for detail in play.events("trial_begun")).values()) == {1}
    assert play.finals() == undisturbed.finals()
    assert play.verdicts() == undisturbed.verdicts()
    assert play.store.outbox.state("mlflow", play.study) == (0, None)
