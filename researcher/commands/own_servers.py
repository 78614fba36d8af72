"""The servers of a study as a pool, and the models that those started on this machine will host."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from foundation.clock import Clock
from researcher.commands.home import Home
from researcher.executor.local_server import LocalServer
from researcher.executor.servers import ServerPool
from researcher.store.store import Store
from researcher.study.plan import Plan, PlanModel
from swarm.models import ModelUnavailable, resolve
from swarm.models.catalogue import hosted_name


def starting(plan: Plan) -> str:
    """What is waited for, in words."""
    if plan.models:
        return f"the swarm servers that take turns on this machine ({', '.join(each.name for each in plan.models)})"
    if not plan.roles:
        return "the swarm server that starts on this machine"
    return f"{1 + len(plan.roles)} swarm servers that start on this machine, one after the other"


def pool_of(
    home: Home,
    store: Store,
    study_id: str,
    plan: Plan,
    choices: dict[str, Any],
    clock: Clock,
    tell: Callable[[str], None] = lambda _: None,
) -> ServerPool:
    """The servers that were given, else one to start here for each model that a trial trains; where arms differ by their
    model, these take turns."""
    return ServerPool(
        store,
        f"study {study_id}",
        urls=choices["servers"],
        local=_local_servers(home, study_id, plan, choices),
        roles=tuple(plan.roles),
        by_turns=bool(plan.models) and not choices["servers"],
        models=len(plan.hosted),
        at_most=choices.get("max_parallel"),
        keep_runs=bool(choices.get("keep_models")),
        clock=clock,
        tell=tell,
    )


async def have_models(
    plan: Plan, choices: dict[str, Any], tell: Callable[[str], None] = lambda _: None, *, arm: str | None = None
) -> None:
    """What servers that start here will host, in the cache of models: fetched or made before any of them starts.

    arm: the only one whose trials run; None: all. tell: told how it goes, where that takes time. Raises: ModelUnavailable, also for a folder that changed since it was planned.
    """
    if choices["servers"] or choices.get("engine", "local") == "echo":
        return
    progress, teller = logging.getLogger("swarm.models"), _Teller(tell)
    progress.addHandler(teller)
    progress.setLevel(logging.INFO)
    try:
        hosted = plan.hosted if arm is None else (plan.model_of(arm),)
        for model in dict.fromkeys([*hosted, *map(plan.model_of_role, plan.roles)]):
            await asyncio.to_thread(_have, model)
    finally:
        progress.removeHandler(teller)
        progress.setLevel(logging.NOTSET)


def _have(model: PlanModel) -> None:
    elsewhere = "or give a --server that hosts these weights"
    if model.path is not None and not Path(model.path).is_dir():
        raise ModelUnavailable(
            f"the plan trains {model.title} from the folder {model.path}, which is not on this machine; put it there, {elsewhere}"
        )
    found = resolve(model.source)
    if model.fingerprint not in (None, found.fingerprint):
        raise ModelUnavailable(
            f"{model.path} holds other weights ({found.fingerprint[:12]}) than when the study was planned ({model.title}); put "
            f"those back, {elsewhere}, or start a new study"
        )


class _Teller(logging.Handler):
    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__(logging.INFO)
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        self._tell(record.getMessage())


def _local_servers(home: Home, study_id: str, plan: Plan, choices: dict[str, Any]) -> list[LocalServer]:
    """None where servers were given. No longer contexts than the plan asks for: the memory for them is taken when a server
    starts."""
    if choices["servers"]:
        return []
    engine, longest = choices.get("engine", "local"), plan.run.get("max_model_len")
    arguments = ("--max-model-len", str(longest)) if longest else ()
    if plan.models:
        models = {f"server-{hosted_name(each.name)}": each for each in plan.models}
    else:
        models = {"server": plan.model, **{f"server-{role}": plan.model_of_role(role) for role in plan.roles}}
    return [
        LocalServer(
            model=model.name if engine == "echo" else model.source,
            folder=home.studies / study_id / name,
            engine=engine,
            arguments=arguments,
        )
        for name, model in models.items()
    ]
