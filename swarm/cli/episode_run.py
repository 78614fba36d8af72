"""Runs one episode of a black-box agent: claims it, runs the agent in confinement, scores the answer, and ends or aborts the episode.

The lease stays in this process's memory. The agent gets the model's address and a key that can only call the model. If the system
supports it (Linux), the agent can reach no file, process or port that would let it end an episode. The scorer runs after the
agent and all its child processes have ended.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shlex
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foundation import strict_json
from foundation.commandline import UsageError
from foundation.confinement import FILES, PORTS, adopt_orphans, filters_calls, hide_memory, landlock_version
from foundation.event_loop import on_stop_signals
from foundation.paths import user_data_dir
from foundation.programs import ProgramEnd, StillRunning, run_program
from swarm.cli.options import option_json, token_of, url_of
from swarm.client import Episode, LeaseLost, NotFound, Patience, ServerUnreachable, SwarmClient, Unauthorized
from swarm.client.agent import fault_of
from swarm.client.agent_room import AgentRoom, clean_environment, files_of, program_of, variables_for_model
from swarm.client.inference_relay import InferenceRelay
from swarm.protocol.episodes import Cause, DropReason, EpisodeReceipt, EpisodeResult, LedgerEntry
from swarm.protocol.errors import InvalidSpec, SwarmError
from swarm.protocol.status import ServerStatus

DONE, NOT_NOW, LEASE_GONE, ATTEMPT_LOST, INTERRUPTED = 0, 4, 5, 6, 130
_EXIT_CODES = {
    Cause.SERVER: NOT_NOW,
    Cause.NETWORK: NOT_NOW,
    Cause.CLIENT: LEASE_GONE,
    Cause.PERSON: INTERRUPTED,
}
_OF_SERVER = frozenset({DropReason.SERVER_RESTARTED, DropReason.RUN_ENDED, DropReason.SUPERSEDED})
_MARGIN_S = 30.0
"""Time added to the limits of agent and scorer, in seconds, so that the result can still reach the server."""


@dataclass(slots=True)
class Attempt:
    """The outcome of the episode.

    `status` is `pooled` (to be trained on), `evaluated`, `dropped` (when it ended), `aborted`, or `lost` (already closed by the server).
    """

    task_id: str
    episode_id: str = ""
    status: str = "aborted"
    reward: float | None = None
    success: bool | None = None
    cause: Cause | None = None
    reason: str = ""
    agent: str = ""
    """How the agent ended, in words."""
    scorer: str = ""
    confined: dict[str, bool] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        return DONE if self.cause is None else _EXIT_CODES.get(self.cause, ATTEMPT_LOST)

    def lose(self, cause: Cause, reason: str) -> None:
        self.cause, self.reason = cause, reason

    def document(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


def run_episode(args: argparse.Namespace) -> int:
    """Play one episode and print its outcome."""
    if not args.task:
        raise UsageError("no task given; add --task ID")
    if not args.agent:
        raise UsageError(
            "no agent given; put its command after --: swarm episode run --task ID --scorer COMMAND -- COMMAND"
        )
    if not args.scorer:
        raise UsageError("no scorer given; add --scorer COMMAND, because an agent must not report its own reward")
    hide_memory()
    adopt_orphans()
    with tempfile.TemporaryDirectory(prefix="agent-", ignore_cleanup_errors=True) as place:
        attempt = asyncio.run(Runner(args, Path(place).resolve()).run())
    print(json.dumps(attempt.document()))
    return attempt.exit_code


class Runner:
    """Runs the episode and holds its lease.

    Raises: UsageError for invalid options, before it claims anything.
    """

    def __init__(self, args: argparse.Namespace, place: Path) -> None:
        self._args = args
        self._place = place
        self._token = token_of(args)
        self._scorer = _words(args.scorer)
        program_of(args.agent, "COMMAND")
        program_of(self._scorer, "--scorer")
        self._kept = clean_environment(os.environ, args.env, token=self._token)
        self._scorer_environ = self._for_scorer(
            clean_environment(os.environ, args.scorer_env, option="--scorer-env", token=self._token)
        )
        self._metadata = {} if args.metadata is None else option_json(args.metadata, "--metadata")
        if not isinstance(self._metadata, dict):
            raise UsageError("--metadata must be a JSON object")
        self._stop = asyncio.Event()

    async def run(self) -> Attempt:
        """Run the episode and return its outcome. Raises: Refusal, ServerUnreachable if nothing can be claimed."""
        args, attempt = self._args, Attempt(task_id=self._args.task)
        status, open_to_all = await self._status()
        self._demand_confinement(open_to_all)
        async with SwarmClient(
            url_of(args),
            self._token,
            client_id=args.client_id or os.environ.get("SWARM_CLIENT_ID") or "swarm-cli",
            client_version=args.client_version,
            patience=Patience(connect_s=_MARGIN_S, later_s=args.wait_s, full_s=_MARGIN_S),
        ) as swarm:
            with on_stop_signals(self._stop.set):
                try:
                    await self._play(swarm, attempt, status, open_to_all)
                except (LeaseLost, NotFound) as error:
                    if not attempt.episode_id:
                        raise
                    attempt.status, attempt.reason, attempt.cause = "lost", str(error), Cause.CLIENT
                except ServerUnreachable as error:
                    if not attempt.episode_id:
                        raise
                    attempt.lose(Cause.NETWORK, str(error))
                await self._settle(swarm, attempt)
        return attempt

    async def _status(self) -> tuple[ServerStatus, bool]:
        """Return the server's status, and whether it accepts requests without a token."""
        once = Patience(connect_s=0.0, later_s=0.0)
        url = url_of(self._args)
        async with SwarmClient(url, patience=once) as anybody:
            try:
                return await anybody.status(), True
            except Unauthorized:
                if self._token is None:
                    raise
        async with SwarmClient(url, self._token, patience=once) as swarm:
            return await swarm.status(), False

    def _demand_confinement(self, open_to_all: bool) -> None:
        """Raise SwarmError if this system cannot prevent the agent from ending episodes itself."""
        if self._args.unconfined:
            return
        version = landlock_version()
        if not filters_calls() or version < FILES:
            raise SwarmError(
                "this system cannot confine an agent (it needs Linux 5.13 or newer with Landlock, on x86_64 or aarch64): run the "
                "agent as another user or in a container without the server's files, and pass --unconfined"
            )
        if open_to_all and version < PORTS:
            raise SwarmError(
                "the server has no token, and this system cannot block ports (Linux 6.7 or newer can): start the server "
                "with SWARM_ADMIN_TOKEN, or pass --unconfined if the agent is allowed to control the server"
            )

    # -- the episode ------------------------------------------------------------------------------------------------------

    async def _play(self, swarm: SwarmClient, attempt: Attempt, status: ServerStatus, open_to_all: bool) -> None:
        args = self._args
        limit_s = None if args.timeout is None else args.timeout + args.scorer_timeout + _MARGIN_S
        episode = swarm.episode(
            task_id=args.task,
            run_id=args.run_id,
            mix=args.mix,
            kind=args.kind,
            idle_limit_s=args.idle_limit_s,
            max_episode_s=limit_s,
            wait_s=args.wait_s,
        )
        if not await self._claimed(episode, attempt):
            return
        async with contextlib.AsyncExitStack() as leaving:
            leaving.push_async_exit(episode)
            try:
                async with InferenceRelay(episode.base_url, episode.api_key) as relay:
                    agent = await self._agent(episode, attempt, relay, status, open_to_all)
                self._judge_agent(attempt, agent, relay, episode)
                if attempt.cause is None:
                    await self._score(episode, attempt, agent)
            except (StillRunning, OSError) as error:
                attempt.lose(Cause.CLIENT, f"the agent cannot be run here: {error}")
            if attempt.cause is not None:
                episode.abort(attempt.reason, cause=attempt.cause)
        if episode.lost.is_set():
            attempt.status = "lost"
        elif episode.receipt is not None:
            _note_receipt(attempt, episode.receipt, episode)

    async def _claimed(self, episode: Episode, attempt: Attempt) -> bool:
        """Claim the episode. Return False if a person stopped the command meanwhile; a granted episode is then given back."""

        claiming = asyncio.ensure_future(episode.__aenter__())
        stopping = asyncio.create_task(self._stop.wait())
        await asyncio.wait({claiming, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if claiming.done():
            claiming.result()
            attempt.episode_id = episode.id
            return True
        claiming.cancel()
        await asyncio.gather(claiming, return_exceptions=True)
        attempt.lose(Cause.PERSON, "stopped before it began")
        return False

    async def _agent(
        self, episode: Episode, attempt: Attempt, relay: InferenceRelay, status: ServerStatus, open_to_all: bool
    ) -> ProgramEnd:
        args, room = self._args, self._room(status)
        room.furnish()
        confined = None
        if not args.unconfined:
            shut = open_to_all or landlock_version() >= PORTS
            confined = room.confinement([relay.port, *args.port] if shut else None)
        attempt.confined = {"files": confined is not None, "ports": confined is not None and confined.ports is not None}
        return await run_program(
            args.agent,
            room.environment(self._kept, variables_for_model(relay.base_url, episode.api_key)),
            given=args.query.encode(),
            limit_s=args.timeout,
            stops=(self._stop, episode.lost),
            confined=confined,
        )

    def _room(self, status: ServerStatus) -> AgentRoom:
        args = self._args
        secret = [user_data_dir(), *args.hide]
        secret += [Path(path) for path in (status.state_dir, args.token_file) if path is not None]
        return AgentRoom(
            command=args.agent,
            place=self._place,
            reads=args.read,
            writes=args.write,
            hidden=secret,
            unread=files_of(self._scorer),
        )

    def _judge_agent(self, attempt: Attempt, agent: ProgramEnd, relay: InferenceRelay, episode: Episode) -> None:
        """Decide whether the agent's answer can be scored. If not, note who is to blame."""

        attempt.agent = agent.how
        failures, confined = [] if self._args.despite else relay.failures, bool(attempt.confined.get("files"))
        if self._stop.is_set():
            attempt.lose(Cause.PERSON, "stopped from outside")
        elif episode.lost.is_set():
            attempt.lose(Cause.CLIENT, "the lease was lost")
        elif (lost := fault_of(agent, failures, self._args.timeout, confined=confined)) is not None:
            attempt.lose(*lost)

    # -- the reward -------------------------------------------------------------------------------------------------------

    async def _score(self, episode: Episode, attempt: Attempt, agent: ProgramEnd) -> None:
        """Run the scorer on the answer and report the reward."""

        scorer = await run_program(
            self._scorer,
            self._scorer_environ,
            given=agent.said,
            limit_s=self._args.scorer_timeout,
            stops=(self._stop, episode.lost),
        )
        attempt.scorer = scorer.how
        said = f"its last output: {scorer.last_words()}"
        if self._stop.is_set():
            attempt.lose(Cause.PERSON, "stopped from outside")
        elif episode.lost.is_set():
            attempt.lose(Cause.CLIENT, "the lease was lost")
        elif scorer.fault:
            attempt.lose(Cause.GRADER, f"the scorer cannot be started: {scorer.fault}")
        elif scorer.timed_out:
            attempt.lose(Cause.GRADER, f"the scorer ran longer than {self._args.scorer_timeout:g} s; {said}")
        elif scorer.said_too_much or scorer.code != 0:
            attempt.lose(Cause.GRADER, f"the scorer {scorer.how}; {said}")
        else:
            try:
                score = score_of(scorer.said)
            except (ValueError, InvalidSpec) as error:
                attempt.lose(Cause.GRADER, f"the scorer printed no reward ({' '.join(str(error).split())}); {said}")
                return
            metadata = {**self._metadata, **score.pop("metadata", {})}
            episode.end(**score, metadata=metadata, despite=self._args.despite)
            attempt.success = score.get("success")

    def _for_scorer(self, environ: dict[str, str]) -> dict[str, str]:
        own = {name: os.environ[name] for name in ("HOME", "TMPDIR") if name in os.environ}
        task = {"SWARM_TASK_ID": self._args.task, "SWARM_QUERY": self._args.query}
        return {**own, **environ, **task, "SWARM_AGENT_HOME": str(self._place / "home")}

    # -- the record -------------------------------------------------------------------------------------------------------

    async def _settle(self, swarm: SwarmClient, attempt: Attempt) -> None:
        """Update the cause of a lost attempt from the server's ledger, if the server can be reached."""

        if attempt.cause is None or not attempt.episode_id:
            return
        try:
            _note_entry(attempt, await swarm.entry(attempt.episode_id))
        except SwarmError as error:
            attempt.reason += f" (its record cannot be read: {error})"


def _note_receipt(attempt: Attempt, receipt: EpisodeReceipt, episode: Episode) -> None:
    """Note that the result is stored, and whether the server immediately dropped the episode."""
    attempt.status, attempt.reward = "evaluated" if episode.claim.kind == "eval" else "pooled", episode.reward
    if receipt.dropped is not None:
        attempt.status = "dropped"
        cause = Cause.SERVER if receipt.dropped is DropReason.TAINTED else Cause.ROLLOUT
        attempt.lose(cause, f"the server dropped it: {receipt.dropped}")


def _note_entry(attempt: Attempt, entry: LedgerEntry) -> None:
    if entry.cause is not None:
        attempt.cause = entry.cause
    elif entry.reason in _OF_SERVER:
        attempt.cause = Cause.SERVER
    if attempt.status == "lost" and entry.reason is not None:
        attempt.reason = (
            f"the server had already closed it: {entry.reason}{f' ({entry.detail})' if entry.detail else ''}"
        )


def score_of(said: bytes) -> dict[str, Any]:
    """Parse the last line of a scorer's output, a number or a JSON object, and return it as arguments for `Episode.end`.

    Raises: ValueError or InvalidSpec if it is not a score.
    """

    lines = [line for line in said.decode(errors="replace").splitlines() if line.strip()]
    if not lines:
        raise ValueError("it printed nothing")
    found = strict_json.loads(lines[-1].encode())
    score: Mapping[str, Any] = found if isinstance(found, dict) else {"reward": found}
    if not {"lease", "idempotency_key", "despite"}.isdisjoint(score):
        raise ValueError("a score may have only reward, success, metrics, agent_rewards and metadata")
    result = EpisodeResult(**score, lease="").model_dump(exclude_unset=True)
    del result["lease"]
    return result


def _words(command: str) -> list[str]:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UsageError(f"--scorer {command!r}: {error}") from error
    if not words:
        raise UsageError("--scorer is empty; give a command")
    return words
