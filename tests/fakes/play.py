"""A town that a test plays in: its researchers' processes, its servers, and the clock that the test moves."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from bench.serving import ServerProcess
from researcher.models import TrialStatus
from researcher.store.store import Store
from tests.fakes.town import REPEAT, Town
from tests.fakes.town_clock import TownClock

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
    """A town with one study, and the processes that a test has begun in it. owned: id of what its worker owns."""

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
        self.study = self.owned = ""
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

    def plan(self, part: str = "plan") -> None:
        planning = self.begin(part, log="plan.log")
        assert planning.wait(timeout=LIMIT_S) == 0, self.said("plan.log")
        self.store = Store.open(self.town.database, clock=self.clock)
        self._stack.callback(self.store.close)
        self.owned = self.said("plan.log").split()[-1]
        self.study = self.owned if part == "plan" else ""

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
        """The process that owns the study, or the campaign."""
        lease = self.store.leases.holder(self.owned)
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
        if self.owned:
            self.store.close()
        for file in self.town.home.glob("studies/*/trials/**/pid"):  # clients that outlived their researcher
            with suppress(ProcessLookupError, ValueError):
                os.killpg(int(file.read_text()), signal.SIGKILL)


def server(stack: ExitStack, folder: Path, *arguments: str) -> ServerProcess:
    made = ServerProcess(folder, *arguments)
    stack.callback(lambda: made.process.poll() is None and made.stop())
    return made
