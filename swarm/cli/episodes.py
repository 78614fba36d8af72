"""`swarm episode run|claim|end|abort|renew|resolve`: episodes for any agent, with JSON in and out.

Leases and API keys are secrets: they are passed in files, on standard input or in the environment, never as arguments.
Scripts branch on the exit code: 0 done, 1 failed, 2 bad usage, 3 the run is over, 4 try again later, 5 the lease is lost.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
from typing import Any

from foundation.commandline import UsageError
from swarm.cli.options import choice, connect, option_json, read_document, valid
from swarm.client import LeaseLost, OverLimit, ServerUnreachable, TryLater
from swarm.client.agent_room import variables_for_model
from swarm.protocol.episodes import Cause, EpisodeClaim, EpisodeGrant, EpisodeResult
from swarm.protocol.errors import SwarmError
from swarm.protocol.teams import EpisodeResolution

FAILED, RUN_OVER, NOT_NOW, LEASE_GONE = 1, 3, 4, 5


def claim_episode(args: argparse.Namespace) -> int:
    """Claim an episode and print the grant."""
    given = {
        "task_id": args.task,
        "run_id": args.run_id,
        "kind": args.kind,
        "mix": args.mix,
        "client_id": args.client_id,
        "client_version": args.client_version,
        "idle_limit_s": args.idle_limit_s,
        "max_episode_s": args.max_episode_s,
        "wait_s": args.wait_s,
    }
    document = {**read_document(args.claim), **{key: value for key, value in given.items() if value is not None}}
    if document.get("task_id") in (None, ""):
        raise UsageError("no task given; add --task ID")
    document.setdefault("client_id", os.environ.get("SWARM_CLIENT_ID") or "swarm-cli")
    wish = valid(EpisodeClaim, {"run_id": "", **document})
    with connect(args, later_s=wish.wait_s) as swarm:
        if "run_id" not in document:
            wish = wish.model_copy(update={"run_id": swarm.current_run_id()})
        grant = swarm.claim(wish)
        print(_exports(grant) if args.export else grant.model_dump_json())
    return 0


def end_episode(args: argparse.Namespace) -> int:
    """End an episode with a result."""
    episode_id, document = _held(args)
    result: dict[str, Any] = {key: value for key, value in document.items() if key in EpisodeResult.model_fields}
    if args.reward is not None:
        result["reward"] = args.reward
    if args.success is not None:
        result["success"] = args.success == "true"
    if "reward" not in result:
        raise UsageError("no reward given; add --reward R")
    for field, option, texts in (
        ("metrics", "--metric", args.metric),
        ("agent_rewards", "--agent-reward", args.agent_reward),
    ):
        if texts:
            result[field] = {**_section(result, field), **_numbers(option, texts)}
    if result.get("metrics") is None:
        result.pop("metrics", None)
    if args.despite is not None:
        result["despite"] = args.despite
    if args.metadata is not None:
        result["metadata"] = _object("--metadata", args.metadata)
    with connect(args, later_s=30.0) as swarm:
        receipt = swarm.end(episode_id, valid(EpisodeResult, result))
        print(receipt.model_dump_json())
    return 0


def abort_episode(args: argparse.Namespace) -> int:
    """Abort an episode."""
    cause = choice(Cause, "--cause", args.cause)
    episode_id, document = _held(args)
    with connect(args) as swarm:
        print(swarm.abort(episode_id, document["lease"], args.reason, cause).model_dump_json())
    return 0


def resolve_episode(args: argparse.Namespace) -> int:
    """Settle a prepared episode as an operator, in place of the decider."""
    resolution = valid(EpisodeResolution, {"outcome": args.outcome, "reason": args.reason})
    with connect(args) as swarm:
        print(swarm.resolve(args.episode, resolution).model_dump_json())
    return 0


def renew_episode(args: argparse.Namespace) -> int:
    """Extend a lease by its idle limit."""
    episode_id, document = _held(args)
    with connect(args) as swarm:
        expires_at = swarm.renew(episode_id, document["lease"])
        print(json.dumps({"episode_id": episode_id, "expires_at": expires_at}))
    return 0


def exit_code(error: SwarmError) -> int:
    """Return the exit code for an error, so that scripts can branch on it."""
    if isinstance(error, OverLimit):
        return RUN_OVER
    if isinstance(error, TryLater | ServerUnreachable):
        return NOT_NOW
    return LEASE_GONE if isinstance(error, LeaseLost) else FAILED


def _held(args: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """Return the episode's id and a document that contains its lease. Raises: UsageError."""
    document = read_document(args.grant)
    episode_id = document.get("episode_id") or os.environ.get("SWARM_EPISODE")
    document["lease"] = document.get("lease") or os.environ.get("SWARM_LEASE")
    if not isinstance(document["lease"], str) or not episode_id:
        raise UsageError(
            "no episode given; give a file with the output of `swarm episode claim`, or set SWARM_EPISODE and SWARM_LEASE"
        )
    return str(episode_id), document


def _section(document: dict[str, Any], field: str) -> dict[str, Any]:
    """Return the object under `field` in the document, or an empty one. Raises: UsageError if it is not an object."""
    found = document.get(field)
    if found is not None and not isinstance(found, dict):
        raise UsageError(f"{field} must be an object, got {found!r}")
    return found or {}


def _numbers(option: str, texts: list[str]) -> dict[str, float]:
    found = {}
    for text in texts:
        name, _, value = text.rpartition("=")
        try:
            found[name] = float(value)
        except ValueError:
            name = ""
        if not name:
            raise UsageError(f"{option} {text!r}: write NAME=NUMBER")
    return found


def _object(option: str, text: str) -> dict[str, Any]:
    document = option_json(text, option)
    if not isinstance(document, dict):
        raise UsageError(f"{option} must be a JSON object")
    return document


def _exports(grant: EpisodeGrant) -> str:
    """Return shell lines that export the model's address and key, so that agents inherit them. The lease is set but not exported."""
    exported = variables_for_model(grant.base_url, grant.api_key)
    kept = {"SWARM_EPISODE": grant.episode_id, "SWARM_LEASE": grant.lease}
    lines = [f"export {name}={shlex.quote(value)}" for name, value in exported.items()]
    lines.append(f"unset {' '.join(kept)}")  # otherwise an already exported variable would stay exported
    return "\n".join([*lines, *(f"{name}={shlex.quote(value)}" for name, value in kept.items())])
