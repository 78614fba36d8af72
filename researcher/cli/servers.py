"""The servers of a study: those given with `--server`, checked before it begins, or those started on this machine."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from foundation.clock import Clock
from foundation.commandline import UsageError
from foundation.gpus import count_gpus, why_no_gpu
from researcher.executor.errors import NoServersLeft
from researcher.executor.local_server import LocalServer
from researcher.executor.servers import ServerPool, lease_holder, one_server, server_token
from researcher.executor.slots import hosted, misfit, serving
from researcher.home import Home
from researcher.models import StudyOptions
from researcher.store.store import Store
from researcher.study.plan import Plan, PlanModel
from swarm.client import Forbidden, NotASwarmServer, Patience, SwarmClient, SwarmError, Unauthorized
from swarm.models import ModelUnavailable, resolve
from swarm.models.catalogue import hosted_name
from swarm.protocol.status import ServerStatus


def check_servers(plan: Plan, urls: list[str], seen: Mapping[str, str] | None = None, *, engine: str = "local") -> None:
    """Check the servers of a plan before its study begins.

    Args:
        seen: weights of the study's earlier trials (`weights_seen`).
        engine: engine of the servers that start here if `urls` is empty.

    Raises: UsageError when there are too few servers for one trial, one refuses our token, two are the same, one is not a swarm
    server, or one hosts another model than the plan trains; also when this machine has too few GPUs.
    """
    urls = list(dict.fromkeys(url.rstrip("/") for url in urls))
    if plan.sources and not urls and not os.environ.get("SWARM_ADMIN_TOKEN"):
        raise UsageError(
            f"arms use your own functions ({', '.join(plan.sources)}), which a server runs only for its admin: set SWARM_ADMIN_TOKEN, "
            "for this command and the server that it starts, to a text of at least 16 characters"
        )
    if not urls and (reason := _too_few_gpus(plan, engine)):
        raise UsageError(reason)
    given, needed = len(urls), 1 + len(plan.roles)
    if 0 < given < needed:
        models = ", ".join(["its own model", *plan.roles])
        raise UsageError(
            f"a trial of {plan.instrument} needs {needed} servers ({models}), but {given} given: repeat --server in "
            "this order; or give none to have them started on this machine"
        )
    statuses = dict(zip(urls, asyncio.run(_statuses(urls)), strict=True))
    if urls:
        _check_different(statuses)
        _check_models(plan, statuses, seen or {})


def _check_different(statuses: dict[str, ServerStatus | None]) -> None:
    by_id: dict[str, str] = {}
    for url, status in statuses.items():
        if status is not None and (first := by_id.setdefault(status.server_id, url)) != url:
            raise UsageError(f"--server: {one_server(first, url)}")


def _check_models(plan: Plan, statuses: Mapping[str, ServerStatus | None], seen: Mapping[str, str]) -> None:
    """Check the servers that answer; others are checked on first use."""
    answers = {url: status for url, status in statuses.items() if status is not None}
    if plan.models:
        _check_each_is_hosted(plan.models, statuses)
    places = [plan.model, *(plan.model_of_role(role) for role in plan.roles)]
    found: dict[str, tuple[str, ServerStatus]] = {}
    for place, url in enumerate(statuses):
        if (status := answers.get(url)) is None:
            continue
        hosted_here = [each for each in plan.models if misfit(each, url, status) is None]
        model = (hosted_here or plan.models)[0] if plan.models else places[place % len(places)]
        problem = misfit(model, url, status, seen.get(model.name))
        if problem is not None:
            raise UsageError(problem)
        first, other = found.setdefault(model.name, (url, status))
        if other.model_fingerprint != status.model_fingerprint:
            raise UsageError(
                f"{first} hosts {hosted(other)} and {url} hosts {hosted(status)}: all trials of {model.name} must start from "
                "the same weights; give servers that host the same ones"
            )


def _check_each_is_hosted(models: Sequence[PlanModel], statuses: Mapping[str, ServerStatus | None]) -> None:
    """Check that every model is hosted.

    Raises: UsageError for a model that no server hosts, unless a server that does not answer may host it.
    """
    answers = [(url, status) for url, status in statuses.items() if status is not None]
    missing = [model for model in models if all(misfit(model, *answer) for answer in answers)]
    if len(missing) <= len(statuses) - len(answers):
        return
    there = [
        f"{url} hosts {hosted(status)}" if status else f"{url} does not answer" for url, status in statuses.items()
    ]
    raise UsageError(
        f"the arms train {' and '.join(model.title for model in models)}, but no given server hosts "
        f"{' or '.join(model.title for model in missing)} ({'; '.join(there)}): start one with {serving(missing[0])}, or give no "
        "--server to let them take turns on this machine"
    )


async def _statuses(urls: list[str]) -> list[ServerStatus | None]:
    return list(await asyncio.gather(*map(_status, urls)))


_ANSWER_S = 3.0
"""Seconds to wait for a server's status."""


def ask_servers(urls: Sequence[str]) -> list[ServerStatus | str]:
    """Return the status of each server, or the reason why it is unknown."""

    async def all_of_them() -> list[ServerStatus | str]:
        return list(await asyncio.gather(*map(_status_or_reason, urls)))

    return asyncio.run(all_of_them())


async def _status_or_reason(url: str) -> ServerStatus | str:
    try:
        async with asyncio.timeout(_ANSWER_S):
            found = await _status(url)
    except TimeoutError:
        return f"no answer within {_ANSWER_S:g} s"
    except UsageError as error:
        return str(error)
    return "nothing answers there" if found is None else found


async def _status(url: str) -> ServerStatus | None:
    """Return the server's status; None if it does not answer now, because the study waits for it later."""
    async with SwarmClient(url, server_token(os.environ), patience=Patience(connect_s=0.0, later_s=0.0)) as swarm:
        try:
            return await swarm.status()
        except (Unauthorized, Forbidden) as refusal:
            raise UsageError(f"{url}: {refusal}") from refusal
        except NotASwarmServer as error:
            raise UsageError(f"{url}: {error}") from error
        except SwarmError:
            return None


def starting(plan: Plan) -> str:
    """Say what the study waits for when it starts."""
    if plan.models:
        return f"the swarm servers that take turns on this machine ({', '.join(each.name for each in plan.models)})"
    if not plan.roles:
        return "the swarm server that starts on this machine"
    return f"{1 + len(plan.roles)} swarm servers that start on this machine, one after another"


def pool_of(
    home: Home,
    store: Store,
    study_id: str,
    plan: Plan,
    options: StudyOptions,
    clock: Clock,
    tell: Callable[[str], None] = lambda _: None,
) -> ServerPool:
    """Return a pool of the given servers. Without any, one server starts here for each model that a trial trains; if arms
    differ in their model, these servers take turns."""
    return ServerPool(
        store,
        lease_holder(study_id),
        urls=options.servers,
        local=_local_servers(home, study_id, plan, options),
        roles=tuple(plan.roles),
        by_turns=bool(plan.models) and not options.servers,
        models=len(plan.hosted),
        at_most=options.max_parallel,
        keep_runs=options.keep_models,
        clock=clock,
        tell=tell,
    )


async def have_models(
    plan: Plan, options: StudyOptions, tell: Callable[[str], object], *, arm: str | None = None
) -> None:
    """Fetch the models that our servers will host, before any of them starts.

    `arm`: fetch only this arm's model. `tell` receives progress lines.

    Raises: ModelUnavailable, also for a folder that changed since planning.
    """
    if options.servers or options.engine == "echo":
        return
    progress, teller = logging.getLogger("swarm.models"), _Teller(tell)
    progress.addHandler(teller)
    progress.setLevel(logging.INFO)
    progress.propagate = (
        False  # the handlers of the root logger, which ask for no level, would print each line once more
    )
    try:
        hosted = plan.hosted if arm is None else (plan.model_of(arm),)
        for model in dict.fromkeys([*hosted, *map(plan.model_of_role, plan.roles)]):
            await asyncio.to_thread(_have, model)
    finally:
        progress.removeHandler(teller)
        progress.setLevel(logging.NOTSET)
        progress.propagate = True


def _have(model: PlanModel) -> None:
    elsewhere = "or give a --server that hosts the planned weights"
    if model.path is not None and not Path(model.path).is_dir():
        raise ModelUnavailable(
            f"the plan trains {model.title} from the folder {model.path}, which is not on this machine; copy it there, {elsewhere}"
        )
    found = resolve(model.source)
    if model.fingerprint not in (None, found.fingerprint):
        raise ModelUnavailable(
            f"{model.path} holds different weights ({found.fingerprint[:12]}) than when the study was planned ({model.title}); "
            f"restore the planned weights, {elsewhere}, or start a new study"
        )


class _Teller(logging.Handler):
    def __init__(self, tell: Callable[[str], object]) -> None:
        super().__init__(logging.INFO)
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        self._tell(record.getMessage())


def _too_few_gpus(plan: Plan, engine: str) -> str | None:
    """Say why this machine's GPUs are too few for the servers of one trial; None if they suffice or the servers run on the CPU."""
    needed = 1 + len(plan.roles)
    if needed == 1 or not _on_gpus(engine) or (there := count_gpus(os.environ)) >= needed:
        return None
    return (
        f"a trial of {plan.instrument} needs {needed} servers at the same time ({', '.join(['its own model', *plan.roles])}); "
        f"each takes a whole GPU, but only {there} can be used here: use a machine with {needed} GPUs, or start the servers by hand and "
        "give them with --server, in this order. Small models with small steps can share a GPU with `swarm serve --kv-cache-gib N`, "
        "and --device cpu needs no GPU"
    )


def _on_gpus(engine: str) -> bool:
    """True if a server that starts here computes on a GPU."""
    return engine == "local" and why_no_gpu(os.environ) is None


def _local_servers(home: Home, study_id: str, plan: Plan, options: StudyOptions) -> list[LocalServer]:
    """List the servers to start here; none if servers were given.

    Each server is limited to the plan's context length, because it reserves memory for that at start. Several servers that run at
    the same time each get their own GPU.

    Raises: NoServersLeft if there are too few GPUs.
    """
    if options.servers:
        return []
    if reason := _too_few_gpus(plan, options.engine):
        raise NoServersLeft(f"{reason}. Then `researcher resume {study_id}` continues the study")
    engine, longest = options.engine, plan.run.get("max_model_len")
    arguments = ("--max-model-len", str(longest)) if longest else ()
    if plan.sources:
        arguments = (*arguments, "--allow-algorithms")
    if plan.models:
        models = {f"server-{hosted_name(each.name)}": each for each in plan.models}
    else:
        models = {"server": plan.model, **{f"server-{role}": plan.model_of_role(role) for role in plan.roles}}
    apart = bool(plan.roles) and _on_gpus(engine)
    return [
        LocalServer(
            model=model.name if engine == "echo" else model.source,
            folder=home.studies / study_id / name,
            engine=engine,
            arguments=(*arguments, *(_on_gpu(index) if apart else ())),
        )
        for index, (name, model) in enumerate(models.items())
    ]


def _on_gpu(index: int) -> tuple[str, ...]:
    """Return the arguments for a server that computes only on this GPU."""
    return "--trainer-device", f"cuda:{index}", "--inference-devices", f"cuda:{index}"
