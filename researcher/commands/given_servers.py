"""The servers that a person gives with `--server`, before a study begins on them: enough for a trial, and ours to use."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence

from foundation.commandline import UsageError
from researcher.executor.servers import one_server, server_token
from researcher.executor.weights import hosted, misfit, serving
from researcher.study.plan import Plan, PlanModel
from swarm.client import Forbidden, NotASwarmServer, Patience, SwarmClient, SwarmError, Unauthorized
from swarm.protocol.status import ServerStatus


def check_servers(plan: Plan, urls: list[str], seen: Mapping[str, str] | None = None) -> None:
    """seen: the weights that the study's trials had so far (`weights_seen`).

    Raises: UsageError when servers are given and too few for one trial, when one refuses our token, when two are the same
    or one is none, or when one hosts another model than the plan trains.
    """
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
        _check_models(plan, statuses, seen or {})


def _check_different(statuses: dict[str, ServerStatus | None]) -> None:
    by_id: dict[str, str] = {}
    for url, status in statuses.items():
        if status is not None and (first := by_id.setdefault(status.server_id, url)) != url:
            raise UsageError(f"--server: {one_server(first, url)}")


def _check_models(plan: Plan, statuses: Mapping[str, ServerStatus | None], seen: Mapping[str, str]) -> None:
    """Of the servers that answer; the others are checked when they are first used."""
    answers = {url: status for url, status in statuses.items() if status is not None}
    if plan.models:
        _check_each_is_hosted(plan.models, statuses)
    places = [plan.model, *(plan.model_of_role(role) for role in plan.roles)]
    found: dict[str, tuple[str, ServerStatus]] = {}
    for place, url in enumerate(statuses):
        if (status := answers.get(url)) is None:
            continue
        model = _of_those(plan.models, url, status) if plan.models else places[place % len(places)]
        problem = misfit(model, url, status, seen.get(model.name))
        if problem is not None:
            raise UsageError(problem)
        first, other = found.setdefault(model.name, (url, status))
        if other.model_fingerprint != status.model_fingerprint:
            raise UsageError(
                f"{first} hosts {hosted(other)} and {url} hosts {hosted(status)}: all trials of {model.name} have to begin with "
                "the same weights; give servers that host the same"
            )


def _of_those(models: Sequence[PlanModel], url: str, status: ServerStatus) -> PlanModel:
    """The one that is hosted there, else the first, which then is missed there."""
    return next((model for model in models if misfit(model, url, status) is None), models[0])


def _check_each_is_hosted(models: Sequence[PlanModel], statuses: Mapping[str, ServerStatus | None]) -> None:
    """Raises: UsageError when there is a model that neither a server hosts nor one of those that do not answer may host."""
    answers = [(url, status) for url, status in statuses.items() if status is not None]
    missing = [model for model in models if all(misfit(model, *answer) for answer in answers)]
    if len(missing) <= len(statuses) - len(answers):
        return
    there = [
        f"{url} hosts {hosted(status)}" if status else f"{url} does not answer" for url, status in statuses.items()
    ]
    raise UsageError(
        f"the arms train {' and '.join(model.title for model in models)}, and no server given hosts "
        f"{' or '.join(model.title for model in missing)} ({'; '.join(there)}): start one with {serving(missing[0])}, or give no --server, "
        "and they take turns on this machine"
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
