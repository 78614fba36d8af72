"""`swarm try module:rollout --task QUERY`: one evaluation episode, with its trace, reward and traceback. Trains nothing."""

from __future__ import annotations

import argparse
import json
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING

from foundation.streams import read_or_not
from swarm.cli import connection, tasks

if TYPE_CHECKING:
    from swarm.client import Rollout, Task
    from swarm.protocol.episodes import EpisodeTrace


@dataclass(slots=True)
class _Attempt:
    """What one try showed. failure: the traceback, or why the result was refused."""

    reward: float | None = None
    failure: str | None = None
    trace: EpisodeTrace | None = None


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The `try` command."""
    parser = subparsers.add_parser("try", help="run a rollout once, without training")
    parser.add_argument("rollout", metavar="MODULE:FUNCTION", help="or path/to/file.py:function")
    tasks.add_options(parser, required=True, default_id="try")
    parser.add_argument("--temperature", type=float, help="in the episode's `sampling` (default: the run's own)")
    connection.add_options(parser)
    parser.set_defaults(run=try_rollout)


def try_rollout(args: argparse.Namespace) -> int:
    """Exit code 0 when the rollout came to a reward that counts, 1 when it did not."""
    import asyncio

    from swarm.cli.trace import trace_text
    from swarm.client.errors import WorkflowFault
    from swarm.client.workflow import load_rollout

    task = tasks.task_of(args)
    try:
        rollout = load_rollout(args.rollout)
    except WorkflowFault:
        raise
    except Exception:  # noqa: BLE001 - the module is the person's own; its traceback is what they asked to see
        attempt = _Attempt(failure=traceback.format_exc())
    else:
        attempt = asyncio.run(_try(args, rollout, task))
    with read_or_not():
        if args.json:
            trace = None if attempt.trace is None else attempt.trace.model_dump(mode="json")
            print(json.dumps({"reward": attempt.reward, "failure": attempt.failure, "trace": trace}))
        else:
            if attempt.trace is not None:
                print(trace_text(attempt.trace))
            print(f"\n{_end(attempt)}")
    return 1 if attempt.failure else 0


def _end(attempt: _Attempt) -> str:
    """The last that is said: where the trace shows the traceback, its last line."""
    if attempt.failure is None:
        return f"reward {attempt.reward:g}"
    shown = attempt.trace is not None and attempt.trace.entry.detail
    return attempt.failure.strip().splitlines()[-1] if shown else attempt.failure


async def _try(args: argparse.Namespace, rollout: Rollout, task: Task) -> _Attempt:
    from swarm.client import Patience, SwarmClient
    from swarm.client.rollouts import end_with
    from swarm.client.tasks import rolled_out
    from swarm.client.wire import sendable

    sampling = {} if args.temperature is None else {"temperature": args.temperature}
    attempt = _Attempt()
    patience = Patience(connect_s=0.0, later_s=60.0)
    async with SwarmClient(
        connection.url_of(args), connection.token_of(args), client_id="swarm-try", patience=patience
    ) as swarm:
        async with swarm.episode(task_id=task.id, kind="eval", sampling=sampling) as episode:
            try:
                outcome = await rolled_out(rollout, episode, task)
                if episode.aborted:
                    attempt.failure = "the rollout aborted its episode"
                else:
                    end_with(episode, outcome)
                    attempt.reward = episode.reward
            except Exception as error:  # noqa: BLE001 - whatever the rollout raised is what the command shows
                attempt.failure = sendable(traceback.format_exc())
                if episode.receipt is None:
                    episode.abort(attempt.failure, cause=episode.blame(error))
        if episode.receipt is not None and episode.receipt.dropped is not None:
            attempt.reward = None
            attempt.failure = attempt.failure or f"the episode does not count: {episode.receipt.dropped}"
        attempt.trace = await swarm.trace(episode.id, text=True)
    return attempt
