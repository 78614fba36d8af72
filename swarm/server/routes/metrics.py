"""`/metrics` for Prometheus: the status and the newest step, read on each request. This module counts nothing itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import get_args

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from swarm.protocol.episodes import CallFailure, Cause
from swarm.protocol.status import Phase, ServerStatus, StepMetrics
from swarm.server.routes.operations import Operation
from swarm.server.service import Service

_REASONS: tuple[str, ...] = get_args(CallFailure.model_fields["reason"].annotation)


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsRoutes:
    """The metrics endpoint of one service."""

    service: Service

    @Operation("GET", "/metrics", "Prometheus' text format", media_type="text/plain")
    async def metrics(self, request: Request) -> Response:
        status = await self.service.status()
        newest: list[StepMetrics] = []
        if status.run_id is not None and status.step:
            newest = (await self.service.report(status.run_id, since_step=status.step - 1)).steps[-1:]
        registry = CollectorRegistry(auto_describe=False)
        lost = await self.service.lost(status.run_id) if status.run_id is not None else {}
        registry.register(_Snapshot(status, newest, lost, self.service.failed_calls))
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)


class _Snapshot(Collector):
    """One snapshot of the server as Prometheus metric families."""

    def __init__(
        self,
        status: ServerStatus,
        newest: list[StepMetrics],
        lost: Mapping[Cause, int],
        failed_calls: Mapping[str, int],
    ) -> None:
        self._status = status
        self._newest = newest
        self._lost = lost
        self._failed_calls = failed_calls

    def collect(self) -> Iterator[Metric]:
        status, pool = self._status, self._status.pool
        phase = GaugeMetricFamily("swarm_phase", "1 for the phase the server is in", labels=["phase"])
        for each in Phase:
            phase.add_metric([each.value], float(each is status.phase))
        yield phase
        yield _gauge("swarm_step", "Optimiser steps of the current run", status.step)
        yield _gauge("swarm_episodes_running", "Episodes under a lease", pool.running)
        yield _gauge("swarm_episodes_ended", "Ended episodes that wait in the pool", pool.ended)
        yield _gauge("swarm_groups_open", "Groups with slots to fill", pool.groups_open)
        yield _gauge("swarm_groups_ready", "Groups ready for the next step", pool.groups_ready)
        yield _gauge("swarm_groups_needed", "Groups that one step needs", pool.groups_needed)
        yield _gauge("swarm_tokens_per_second", "Sampled tokens per second", status.engine.tokens_per_s)
        yield _gauge(
            "swarm_engine_failures", "Consecutive crashes of the engine's child processes", status.engine.failures
        )
        lost = CounterMetricFamily(
            "swarm_attempts_lost", "Lost episodes of the current run, by who lost them", labels=["cause"]
        )
        for cause, episodes in self._lost.items():
            lost.add_metric([cause.value], episodes)
        yield lost
        failed = CounterMetricFamily(
            "swarm_failed_calls", "Calls that failed because of the server since it started", labels=["reason"]
        )
        for reason in _REASONS:
            failed.add_metric([reason], float(self._failed_calls.get(reason, 0)))
        yield failed
        by_step = GaugeMetricFamily(
            "swarm_step_metric", "Metrics of the newest step, see docs/reference/metrics.md", labels=["name"]
        )
        for step in self._newest:
            for name, value in step.values.items():
                by_step.add_metric([name], value)
        yield by_step


def _gauge(name: str, meaning: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, meaning, value=float(value))
