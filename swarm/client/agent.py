"""Run a black-box agent in an episode that this process holds: `await run_agent(episode, ["sh", "agent.sh"], folder)`.

The agent is any program that reads OPENAI_BASE_URL and OPENAI_API_KEY, or their Anthropic equivalents. It gets a clean environment,
its own home, a working directory, and an address that only forwards calls to the model. It can reach neither the lease nor this
process. `swarm episode run` does the same from a shell.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from foundation.commandline import UsageError
from foundation.confinement import PORTS, filters_calls, landlock_version
from foundation.paths import user_data_dir
from foundation.programs import Confinement, ProgramEnd, StillRunning, run_apart
from swarm.client.agent_room import AgentRoom, clean_environment, variables_for_model
from swarm.client.episode import Episode
from swarm.client.errors import AgentFailed, AgentTooSlow, ServerUnreachable, WorkflowFault
from swarm.client.inference_relay import InferenceRelay
from swarm.protocol.episodes import Cause

_ROOM = (
    "(a confined agent may read the system, its program, its working directory and the paths you allow it to read; it may write to "
    "its home and the paths you allow it to write; an interpreter or a virtual environment in your home must be allowed explicitly)"
)


async def run_agent(
    episode: Episode,
    command: Sequence[str],
    folder: Path,
    *,
    query: str = "",
    reads: Sequence[Path] = (),
    hidden: Sequence[Path] = (),
    variables: Mapping[str, str] | None = None,
    limit_s: float | None = None,
) -> ProgramEnd:
    """Run an agent in `folder`, which it may change, and wait until it exits. `episode.sampling` applies to each of its calls.

    Args:
        query: the agent's standard input.
        reads: paths that the agent may read in addition to the system, its program and the paths in the command.
        hidden: paths that the agent may never read.
        variables: environment variables to set in addition to the four that name the model.
        limit_s: time limit; None means no limit.
    Raises: AgentFailed if the exit code is not 0, AgentTooSlow after `limit_s`, ServerUnreachable if a call did not reach the server,
        WorkflowFault if the program does not exist or this system cannot confine it.
    """
    _require_confinement()
    with tempfile.TemporaryDirectory(prefix="agent-", ignore_cleanup_errors=True) as place:
        async with InferenceRelay(episode.base_url, episode.api_key, sampling=episode.sampling) as relay:
            model = variables_for_model(relay.base_url, episode.api_key)
            try:
                room = _room(command, place, folder, reads=reads, writes=[folder], hidden=hidden)
                environ = room.environment(clean_environment(os.environ), model) | dict(variables or {})
                confined = room.confinement([relay.port])
                end = await run_apart(
                    command, environ, given=query.encode(), limit_s=limit_s, confined=confined, folder=folder
                )
            except (UsageError, OSError) as error:
                raise WorkflowFault(f"the agent cannot be run: {error}") from error
            except StillRunning as error:
                raise AgentFailed(str(error)) from error
        if (lost := fault_of(end, relay.failures, limit_s)) is not None:
            raise _error_of(*lost, episode)
    return end


async def run_confined(
    command: Sequence[str],
    folder: Path,
    *,
    given: bytes = b"",
    reads: Sequence[Path] = (),
    hidden: Sequence[Path] = (),
    limit_s: float,
) -> ProgramEnd:
    """Run a program, such as a code grader, that may read the system, itself and `folder`, but may not write or use the network.

    If the program fails, this raises nothing; check the returned `ProgramEnd`.

    Args:
        given: the program's standard input.
        reads: more paths that the program may read.
        hidden: paths that the program may not read, even within `reads`.
        limit_s: time limit.
    Raises: WorkflowFault if the program does not exist or this system cannot confine it.
    """
    _require_confinement()
    with tempfile.TemporaryDirectory(prefix="grader-", ignore_cleanup_errors=True) as place:
        try:
            room = _room(command, place, folder, reads=reads, hidden=hidden)
            environ, open_to = room.environment(clean_environment(os.environ), {}), room.confinement([])
            readable = Confinement(reads=open_to.reads, lists=open_to.lists, writes=[Path("/dev/null")], ports=[])
            end = await run_apart(command, environ, given=given, limit_s=limit_s, confined=readable, folder=folder)
        except (UsageError, OSError, StillRunning) as error:
            raise WorkflowFault(f"the program cannot be run: {error}") from error
    if end.fault:
        raise WorkflowFault(f"the program cannot be started: {end.fault}")
    return end


def _room(
    command: Sequence[str],
    place: str,
    folder: Path,
    *,
    reads: Sequence[Path],
    writes: Sequence[Path] = (),
    hidden: Sequence[Path] = (),
) -> AgentRoom:
    room = AgentRoom(
        command=command,
        place=Path(place).resolve(),
        reads=reads,
        writes=writes,
        hidden=[user_data_dir(), *hidden],
        folder=folder,
    )
    room.furnish()
    return room


def fault_of(
    end: ProgramEnd, failures: Sequence[str], limit_s: float | None, *, confined: bool = True
) -> tuple[Cause, str] | None:
    """Return who is to blame for an agent's failure and a message that describes it; None if the agent's work can be scored.

    `end` says how the agent ended; `failures` lists its calls that did not reach the server.
    """
    # Put the hint before the agent's output: displays with room for one line show the last line.
    hint = f"\n{_ROOM}\n" if confined else " "
    if end.fault:
        return Cause.ROLLOUT, f"the agent cannot be started:{hint}{end.fault}"
    if failures:
        return Cause.NETWORK, f"{len(failures)} calls did not reach the server: {failures[0]}; the agent {end.how}"
    if end.timed_out:
        return Cause.LIMIT, f"the agent ran longer than {limit_s:g} s; its last output: {end.last_words()}"
    if end.said_too_much:
        return Cause.ROLLOUT, "the agent printed more than 64 MiB"
    if end.code != 0:
        return Cause.ROLLOUT, f"the agent {end.how};{hint}its last output: {end.last_words()}"
    return None


def _error_of(cause: Cause, words: str, episode: Episode) -> Exception:
    if cause is Cause.NETWORK:
        return ServerUnreachable(words, episode.base_url)
    return AgentTooSlow(words) if cause is Cause.LIMIT else AgentFailed(words)


def _require_confinement() -> None:
    """Raise WorkflowFault if this system cannot confine programs."""
    if not filters_calls() or landlock_version() < PORTS:
        raise WorkflowFault(
            "this system cannot confine an agent (it needs Linux 6.7 or newer with Landlock, on x86_64 or aarch64): run the client "
            "on a system that can, or run the agent in a container with `swarm episode run --unconfined`"
        )
