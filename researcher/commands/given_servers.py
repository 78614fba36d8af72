"""The servers that a person gives with `--server`, before a study begins on them: enough for a trial, and ours to use."""

from __future__ import annotations

import asyncio
import os

from foundation.commandline import UsageError
from researcher.executor.servers import one_server, server_token
from researcher.study.plan import Plan
from swarm.client import Forbidden, NotASwarmServer, Patience, SwarmClient, SwarmError, Unauthorized
from swarm.models.catalogue import hosted_name, known_names
from swarm.protocol.status import ServerStatus


def check_servers(plan: Plan, urls: list[str]) -> None:
    """Raises: UsageError when servers are given and too few for one trial, when one refuses our token, when two are the same
    or one is none, or when none hosts the model of an arm."""
    urls = list(dict.fromkeys(url.rstrip("/") for url in urls))
    given, needed = len(urls), 1 + len(plan.roles)
    if 0 < given < needed:
        models = ", ".join(["its own model", *plan.roles])
        raise UsageError(
            f"a trial of {plan.instrument} takes {needed} servers at once ({models}), {given} given: repeat --server, in "
            "this order; or give none, and they are started on this machine"
        )
    statuses = dict(zip(urls, asyncio.run(_statuses(urls)), strict=True))
    if urls:
        _check_different(statuses)
        _check_models(plan, statuses)


def _check_different(statuses: dict[str, ServerStatus | None]) -> None:
    by_id: dict[str, str] = {}
    for url, status in statuses.items():
        if status is not None and (first := by_id.setdefault(status.server_id, url)) != url:
            raise UsageError(f"--server: {one_server(first, url)}")


def _check_models(plan: Plan, statuses: dict[str, ServerStatus | None]) -> None:
    hosted = {url: hosted_name(status.model) for url, status in statuses.items() if status is not None}
    there = [f"{url} hosts {model}" for url, model in hosted.items()]
    there += [f"{url} does not answer" for url, status in statuses.items() if status is None]
    if plan.models:
        missing = [model.name for model in plan.models if hosted_name(model.name) not in hosted.values()]
        if missing:
            raise UsageError(
                f"the arms train {' and '.join(model.name for model in plan.models)}, and no server given hosts "
                f"{' or '.join(missing)} ({'; '.join(there)}): start one with `swarm serve --model {missing[0]}`, or give "
                "no --server, and they take turns on this machine"
            )
    elif not plan.roles:
        known, wanted = set(known_names()), hosted_name(plan.model.name)
        if wanted in known and set(hosted.values()) & (known - {wanted}):
            raise UsageError(
                f"the plan trains {wanted} ({'; '.join(there)}): give servers that host it, or name the other model in the topic"
            )


async def _statuses(urls: list[str]) -> list[ServerStatus | None]:
    return list(await asyncio.gather(*map(_status, urls)))


async def _status(url: str) -> ServerStatus | None:
    """None of one that is away: it is waited for later, where nothing hangs on what it hosts."""
    async with SwarmClient(url, server_token(os.environ), patience=Patience(connect_s=0.0, later_s=0.0)) as swarm:
        try:
            return await swarm.status()
        except (Unauthorized, Forbidden) as refusal:
            raise UsageError(f"{url}: {refusal}") from refusal
        except NotASwarmServer as error:
            raise UsageError(f"{url}: {error}") from error
        except SwarmError:
            return None
