"""A swarm server without a model. A run ends as soon as a client is started, with random rewards drawn by the bench.

It implements the protocol with the protocol's own models behind an httpx transport, so the researcher's executor, client library
and records are the real ones. `SimulatedClients` replaces the place where clients run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from foundation.clock import ManualClock
from researcher.executor.jobs import Ending, Order, Started
from swarm.client.trial import client_id
from swarm.protocol.episodes import DropReason, EpisodeState, LedgerEntry, LedgerPage, TaskProgress
from swarm.protocol.errors import ErrorCode, Refusal
from swarm.protocol.problem import Problem
from swarm.protocol.runspec import RunSpec
from swarm.protocol.status import (
    EngineStatus,
    Phase,
    PoolStatus,
    RunCreated,
    RunReport,
    RunRequest,
    ServerStatus,
    StepMetrics,
)

URL = "http://simulated"
Reward = Callable[[str, int], float]
"""A trial's reward by arm and seed."""


class SimulatedServer:
    """One server. `run_client` does the work of the current run's client at once."""

    def __init__(self, reward: Reward, clock: ManualClock, *, step_s: float) -> None:
        self.reward = reward
        self.clock = clock
        self._step_s = step_s
        self._runs: dict[str, RunReport] = {}
        self._by_key: dict[str, str] = {}
        self._current: str | None = None
        self._revision = 0

    def transport(self) -> httpx.AsyncBaseTransport:
        return httpx.MockTransport(self._serve)

    def run_client(self) -> None:
        """Evaluate, train and evaluate in the current run; advances the clock by the time that this takes."""
        if self._current is None:
            raise RuntimeError("a client was started, but the server has no run")
        report = self._runs[self._current]
        value = self.reward(report.spec.labels["arm"], report.spec.seed)
        steps = []
        for step in range(1, (report.spec.limits.steps or 1) + 1):
            self.clock.advance(self._step_s)
            steps.append(StepMetrics(step=step, at=self.clock.now(), config_version=1, values=_healthy(value)))
        done = {"steps": steps, "step": len(steps), "status": "complete", "ended_at": self.clock.now()}
        self._change(report.model_copy(update=done))

    async def _serve(self, request: httpx.Request) -> httpx.Response:
        try:
            body = json.loads(request.content) if request.content else None
            answer = self._answer(request.method, request.url.path.removeprefix("/swarm/v1"), body, request.url.params)
        except Refusal as refusal:
            problem = Problem.of(refusal)
            media = {"content-type": "application/problem+json"}
            return httpx.Response(problem.status, json=problem.model_dump(), headers=media)
        return httpx.Response(200, content=answer, headers={"content-type": "application/json"})

    def _answer(self, method: str, path: str, body: Any, query: httpx.QueryParams) -> str:
        if path == "/status":
            return self._status().model_dump_json()
        if path == "/runs":
            return RunCreated(run_id=self._start(RunRequest.model_validate(body))).model_dump_json()
        if path == "/ledger":
            return LedgerPage(entries=self._ledger(query["run_id"])).model_dump_json()
        if path == "/tasks":
            ended = [TaskProgress(task_id="train", kind="train", step=None, ended=self._report(query["run_id"]).step)]
            return json.dumps([one.model_dump(mode="json") for one in ended])
        report = self._report(path.removeprefix("/runs/").partition(":")[0])
        if path.endswith(":stop"):
            self._current = None
            self._revision += 1
        elif method != "GET":
            raise Refusal(ErrorCode.NOT_FOUND, f"the simulated server has no {method} {path}")
        return report.model_dump_json()

    def _status(self) -> ServerStatus:
        report = None if self._current is None else self._runs[self._current]
        return ServerStatus(
            server_id="simulated",
            revision=self._revision,
            phase=Phase.IDLE if report is None else Phase.ROLLING,
            run_id=self._current,
            step=0 if report is None else report.step,
            model="simulated",
            pool=PoolStatus(),
            engine=EngineStatus(backend="simulated", device="none", warm=True),
        )

    def _start(self, asked: RunRequest) -> str:
        key = asked.idempotency_key or f"run {len(self._runs)}"
        if key not in self._by_key:
            if self._current is not None:
                raise Refusal(ErrorCode.SERVER_BUSY, "another run holds the server", run_id=self._current)
            self._by_key[key] = f"run-{len(self._runs) + 1}"
            self._change(self._begun(self._by_key[key], asked.spec))
        return self._by_key[key]

    def _begun(self, run_id: str, spec: RunSpec) -> RunReport:
        return RunReport(
            run_id=run_id,
            branch=0,
            spec=spec,
            status="running",
            phase=Phase.ROLLING,
            step=0,
            config_version=1,
            changes=[],
            steps=[],
            started_at=self.clock.now(),
        )

    def _change(self, report: RunReport) -> None:
        self._runs[report.run_id] = report
        self._current = report.run_id
        self._revision += 1

    def _report(self, run_id: str) -> RunReport:
        if run_id not in self._runs:
            raise Refusal(ErrorCode.NOT_FOUND, f"no run {run_id}")
        return self._runs[run_id]

    def _ledger(self, run_id: str) -> list[LedgerEntry]:
        report = self._report(run_id)
        value = report.steps[-1].values["reward_mean"] if report.steps else 0.0
        rows = [("train", "train-1", 0, 0.0), ("eval", "heldout-1", 0, 0.0), ("eval", "heldout-1", report.step, value)]
        return [
            LedgerEntry(
                episode_id=f"{run_id}-{number}",
                run_id=run_id,
                kind="train" if kind == "train" else "eval",
                task_id=task,
                mix=None,
                client_id=client_id(report.spec.labels["trial"]),
                client_version="0",
                config_version=1,
                group_id=None,
                slot=None,
                state=EpisodeState.TRAINED if kind == "train" else EpisodeState.DROPPED,
                reason=None if kind == "train" else DropReason.EVAL,
                claimed_step=step,
                reward=reward,
                claimed_at=report.started_at,
            )
            for number, (kind, task, step, reward) in enumerate(rows)
        ]


class SimulatedClients:
    """Replaces the place where clients run."""

    def __init__(self, server: SimulatedServer) -> None:
        self._server = server

    def job(self, folder: Path, name: str) -> SimulatedJob:
        return SimulatedJob(folder, self._server)


class SimulatedJob:
    """A client that finishes its work when it is started."""

    def __init__(self, folder: Path, server: SimulatedServer) -> None:
        self.folder = folder
        self._server = server

    async def start(self, order: Order) -> Started:
        self._server.run_client()
        return Started(name="simulated", pid=os.getpid(), began=0.0)

    async def alive(self) -> bool:
        return False

    async def ended(self) -> None:
        return

    async def end(self, grace_s: float) -> None:
        return

    async def ending(self) -> Ending:
        return Ending(exit_code=0)

    def said(self, length: int = 2000) -> str:
        return ""

    def as_here(self, text: str, code: Path) -> str:
        return text


def _healthy(value: float) -> dict[str, float]:
    """Metrics of a step that triggers no sentinel."""
    return {
        "reward_mean": value,
        "reward_std": 0.3,
        "weights_change": 1e-4,
        "entropy": 1.0,
        "kl_to_start": 0.01,
        "zero_variance_share": 0.2,
        "sampled_tokens_mean": 10.0,
        "episodes": 8.0,
        "step_s": 1.0,
    }
