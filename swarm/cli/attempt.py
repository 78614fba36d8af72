"""`swarm try module:rollout --task QUERY`: plays one evaluation episode and shows its trace, reward and traceback. Trains nothing."""

from __future__ import annotations

import argparse
import asyncio
import json
import traceback
from dataclasses import dataclass

from foundation.streams import read_or_not
from swarm.cli.options import task_of, token_of, url_of
from swarm.cli.trace import trace_text
from swarm.client import Episode, Outcome, Patience, Rollout, SwarmClient, Task, WorkflowFault
from swarm.client.errors import NoReward
from swarm.client.rollouts import end_with
from swarm.client.tasks import own_traceback, rolled_out
from swarm.client.wire import sendable
from swarm.client.workflow import load_rollout
from swarm.protocol.episodes import EpisodeTrace


@dataclass(slots=True)
class _Attempt:
    """The outcome of one try. `failure` is the traceback, or says why there is no result."""

    reward: float | None = None
    failure: str | None = None
    raised: str | None = None
    """The traceback of an error that the rollout raised after it had ended its episode."""
    trace: EpisodeTrace | None = None


def try_rollout(args: argparse.Namespace) -> int:
    """Try a rollout. Returns exit code 0 if it got a reward that counts, else 1."""
    task = task_of(args)
    try:
        rollout = load_rollout(args.rollout)
    except WorkflowFault:
        raise
    except Exception:  # noqa: BLE001 - users want to see the traceback of their own module
        attempt = _Attempt(failure=traceback.format_exc())
    else:
        attempt = asyncio.run(_try(args, rollout, task))
    with read_or_not():
        if args.json:
            trace = None if attempt.trace is None else attempt.trace.model_dump(mode="json")
            print(
                json.dumps(
                    {"reward": attempt.reward, "failure": attempt.failure, "raised": attempt.raised, "trace": trace}
                )
            )
        else:
            if attempt.trace is not None:
                print(trace_text(attempt.trace))
            if attempt.raised is not None:
                print(
                    f"\n{attempt.raised}the rollout raised this error after it had ended the episode; the result still counts"
                )
            print(f"\n{_end(attempt)}")
    return 1 if attempt.failure else 0


def _end(attempt: _Attempt) -> str:
    """Return the closing text. If the trace already shows the traceback, include only its last line."""
    if attempt.failure is None:
        return f"reward {attempt.reward:g}"
    shown = attempt.trace is not None and attempt.trace.entry.detail
    return attempt.failure.strip().splitlines()[-1] if shown else attempt.failure


def _end_with(episode: Episode, outcome: Outcome | float | None, attempt: _Attempt) -> None:
    try:
        end_with(episode, outcome)
    except (TypeError, NoReward) as error:  # show only the message: the traceback would contain only our own frames
        attempt.failure = sendable(str(error))
        episode.abort(attempt.failure, cause=episode.blame(error))
    else:
        attempt.reward = episode.reward


async def _try(args: argparse.Namespace, rollout: Rollout, task: Task) -> _Attempt:
    sampling = {} if args.temperature is None else {"temperature": args.temperature}
    attempt = _Attempt()
    patience = Patience(connect_s=0.0, later_s=60.0)
    async with SwarmClient(url_of(args), token_of(args), client_id="swarm-try", patience=patience) as swarm:
        async with swarm.episode(task_id=task.id, kind="eval", sampling=sampling) as episode:
            try:
                outcome = await rolled_out(rollout, episode, task)
                if episode.aborted:
                    attempt.failure = "the rollout aborted its episode"
                else:
                    _end_with(episode, outcome, attempt)
            except Exception as error:  # noqa: BLE001 - the command shows any error of the rollout
                if episode.receipt is None:
                    attempt.failure = sendable(own_traceback(error))
                    episode.abort(attempt.failure, cause=episode.blame(error))
                else:
                    attempt.raised = sendable(own_traceback(error))
                    attempt.reward = episode.reward
        if episode.receipt is not None and episode.receipt.dropped is not None:
            attempt.reward = None
            attempt.failure = attempt.failure or f"the episode does not count: {episode.receipt.dropped}"
        attempt.trace = await swarm.trace(episode.id, text=True)
    return attempt
