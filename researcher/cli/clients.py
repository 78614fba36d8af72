"""Checks where clients run (`--clients`) before a study is recorded."""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from foundation.clock import Clock, SystemClock
from foundation.commandline import UsageError
from foundation.ids import RandomIds
from foundation.paths import visible_files
from researcher.environments import pins
from researcher.executor.errors import ClusterUnreachable
from researcher.executor.jobs import ClientPlace, LocalPlace
from researcher.executor.ray_cluster import ClusterRefused, RayCluster, check_address, check_installed
from researcher.executor.ray_jobs import RayPlace
from researcher.instruments.catalogue import InstrumentFolder
from researcher.models import StudyOptions
from researcher.repair.writing import NEW
from researcher.study.plan import Plan

LOCAL, RAY = "local", "ray"
NO_SANDBOX = "Ray jobs have no sandbox, and code written by an LLM must run in one"
_FORMS = f"{LOCAL}, {RAY} or {RAY}=http://HOST:8265"


def check_clients(given: str, instrument: str | None = None) -> None:
    """Check the form of `--clients`.

    Raises: UsageError for an unknown form, if Ray is not installed, or for an instrument that an LLM would write.
    """
    kind, address = _parsed(given)
    if kind == RAY:
        if instrument == NEW:
            raise UsageError(f"--instrument {NEW} needs a sandbox: {NO_SANDBOX}; use --clients {LOCAL}")
        try:
            check_installed()
            check_address(address, os.environ)
        except ClusterRefused as error:
            raise UsageError(str(error)) from error


def check_cluster(
    given: str, plan: Plan, folder: InstrumentFolder, urls: list[str], tell: Callable[[str], None]
) -> None:
    """Check that the given cluster exists, reaches the servers, and can draw this instrument's tasks.

    Raises: UsageError.
    """
    kind, address = _parsed(given)
    if kind == LOCAL:
        return
    if folder.instrument.generated is not None:
        raise UsageError(f"{folder.instrument.name} was written by an LLM: {NO_SANDBOX}; use --clients {LOCAL}")
    if plan.transfers:
        raise UsageError(
            f"evaluate_on: a Ray job only gets one instrument's code; use --clients {LOCAL}, or leave evaluate_on out"
        )
    cluster = RayCluster(address, SystemClock(), patience_s=0.0)
    tell(f"drawing a few tasks on the Ray cluster at {cluster.name} ...")
    try:
        asyncio.run(_checked(cluster, plan, folder, urls))
    except (ClusterRefused, ClusterUnreachable) as error:
        raise UsageError(str(error)) from error


async def _checked(cluster: RayCluster, plan: Plan, folder: InstrumentFolder, urls: list[str]) -> None:
    await cluster.check_reach(urls)
    asked = {
        "parameters": [{**folder.instrument.defaults.task, **plan.task}],
        "heldout": plan.heldout_upto,
        "skipped": plan.heldout_from,
        "thorough": False,
        "modules": _imported(folder.path),
    }
    name = f"researcher-check-{RandomIds().new('job')}"
    with tempfile.TemporaryDirectory(prefix="researcher-") as place:
        await RayPlace(cluster, pins=_pinned(folder)).rehearse(
            folder.path, folder.instrument.workflow, asked, Path(place), name
        )


def _imported(folder: Path) -> list[str]:
    """List the installed packages that the instrument's files import anywhere; every node needs them too."""
    names: set[str] = set()
    for _, file in visible_files(folder):
        if file.suffix != ".py":
            continue
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.Import):
                names |= {each.name.partition(".")[0] for each in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                names.add(node.module.partition(".")[0])
    foreign = names - sys.stdlib_module_names - {"swarm", "foundation"}
    return sorted(name for name in foreign if importlib.util.find_spec(name) is not None)


async def place_of(
    options: StudyOptions, folder: InstrumentFolder, clock: Clock, python: str, tell: Callable[[str], None]
) -> ClientPlace:
    """Return the place where this study's clients run: this machine or a Ray cluster. Raises: UsageError, ClusterUnreachable."""
    kind, address = _parsed(options.clients)
    if kind == LOCAL:
        return LocalPlace(clock, python)
    cluster = RayCluster(address, clock, tell=tell)
    try:
        check_address(address, os.environ)
        await cluster.check_reach(options.servers)
    except ClusterRefused as error:
        raise UsageError(str(error)) from error
    return RayPlace(cluster, pins=_pinned(folder))


def on_ray(options: StudyOptions) -> bool:
    return _parsed(options.clients)[0] == RAY


def _parsed(given: str) -> tuple[str, str | None]:
    kind, _, address = given.partition("=")
    if kind not in (LOCAL, RAY) or (kind == LOCAL and address) or given.endswith("="):
        raise UsageError(f"--clients {given!r} is not one of {_FORMS}")
    return kind, address or None


def _pinned(folder: InstrumentFolder) -> list[str]:
    return [f"{name}=={version}" for name, version in pins(folder).items()]
