"""Where the clients of a study's trials run (`--clients`): what is wrong with that is said before there is a study."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from foundation.clock import Clock, SystemClock
from foundation.commandline import UsageError
from foundation.ids import RandomIds
from researcher.environments import pins
from researcher.executor.errors import ClusterUnreachable
from researcher.executor.jobs import ClientPlace
from researcher.executor.local_jobs import LocalPlace
from researcher.executor.ray_cluster import ClusterRefused, RayCluster, check_address, check_installed
from researcher.executor.ray_jobs import RayPlace
from researcher.models import Plan
from researcher.planner.instruments import InstrumentFolder

LOCAL, RAY = "local", "ray"
NO_SANDBOX = "code that no person wrote runs in a sandbox, and clients that are Ray jobs have none"
_FORMS = f"{LOCAL}, {RAY} or {RAY}=http://HOST:8265"


def check_clients(given: str) -> None:
    """Raises: UsageError for a word that is none of the forms, or where Ray is not installed."""
    kind, address = _parsed(given)
    if kind == RAY:
        try:
            check_installed()
            check_address(address, os.environ)
        except ClusterRefused as error:
            raise UsageError(str(error)) from error


def check_cluster(
    given: str, plan: Plan, folder: InstrumentFolder, urls: list[str], tell: Callable[[str], None]
) -> None:
    """A cluster that is asked for is there, reaches the servers, and can draw this instrument's tasks.

    Raises: UsageError.
    """
    kind, address = _parsed(given)
    if kind == LOCAL:
        return
    if folder.instrument.generated is not None:
        raise UsageError(f"{folder.instrument.name} was written by an LLM: {NO_SANDBOX}; use --clients {LOCAL}")
    cluster = RayCluster(address, SystemClock(), patience_s=0.0)
    tell(f"drawing a few tasks on the Ray cluster at {cluster.name} ...")
    try:
        asyncio.run(_checked(cluster, plan, folder, urls))
    except (ClusterRefused, ClusterUnreachable) as error:
        raise UsageError(str(error)) from error


async def _checked(cluster: RayCluster, plan: Plan, folder: InstrumentFolder, urls: list[str]) -> None:
    await cluster.check_reach(urls)
    instrument = folder.instrument
    parameters = {**instrument.defaults.task, **plan.task}
    with tempfile.TemporaryDirectory(prefix="researcher-") as place:
        await RayPlace(cluster, pins=_pinned(folder)).rehearse(
            folder.path,
            instrument.workflow,
            parameters,
            plan.heldout_tasks,
            Path(place),
            f"researcher-check-{RandomIds().new('job')}",
        )


async def place_of(
    choices: Mapping[str, Any], folder: InstrumentFolder, clock: Clock, python: str, tell: Callable[[str], None]
) -> ClientPlace:
    """Where this study's clients live. Raises: UsageError, ClusterUnreachable."""
    kind, address = _parsed(str(choices.get("clients", LOCAL)))
    if kind == LOCAL:
        return LocalPlace(clock, python)
    cluster = RayCluster(address, clock, tell=tell)
    try:
        check_address(address, os.environ)
        await cluster.check_reach(choices["servers"])
    except ClusterRefused as error:
        raise UsageError(str(error)) from error
    return RayPlace(cluster, pins=_pinned(folder))


def on_ray(choices: Mapping[str, Any]) -> bool:
    return _parsed(str(choices.get("clients", LOCAL)))[0] == RAY


def _parsed(given: str) -> tuple[str, str | None]:
    kind, _, address = given.partition("=")
    if kind not in (LOCAL, RAY) or (kind == LOCAL and address) or given.endswith("="):
        raise UsageError(f"--clients {given!r} is none of {_FORMS}")
    return kind, address or None


def _pinned(folder: InstrumentFolder) -> list[str]:
    return [f"{name}=={version}" for name, version in pins(folder).items()]
