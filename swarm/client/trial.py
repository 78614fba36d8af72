"""Runs one trial in its own process: `python -m swarm.client.trial BLUEPRINT.json`.

Evaluates on held-out tasks, trains to the run's limit and evaluates again, with interim evaluations if the blueprint asks for them.
The process keeps no state: if it is killed at any moment, the same command continues from the server's state. Progress goes to
standard output as JSON lines.

Exit codes: 0 done, 1 failed (the traceback is on standard error), 2 the blueprint cannot be used.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from pydantic import ValidationError

from foundation import logs
from foundation.clock import Clock, SystemClock
from foundation.commandline import UsageError
from foundation.strict import explain
from swarm.client.client import ROLLOUT_PATIENCE, SwarmClient
from swarm.client.errors import WorkflowFault
from swarm.client.interim import InterimEvaluations, interim_id, spread
from swarm.client.rollouts import RolloutReport
from swarm.client.tasks import Task, TaskStream, each
from swarm.client.team import Partner
from swarm.client.workflow import Workflow, load_workflow
from swarm.protocol.blueprint import Elsewhere, TrialBlueprint
from swarm.protocol.episodes import COUNTED
from swarm.protocol.errors import SwarmError
from swarm.protocol.runspec import RunSpec
from swarm.protocol.status import Phase, PoolStatus, RunReport

SPARE_S = 60.0
"""Extra time, in seconds, beyond the server's own patience that a run may make no progress before the trial fails."""


class TrialFailed(SwarmError):
    """The trial cannot finish."""


def client_id(trial_key: str) -> str:
    """Return the client_id for a trial's episodes. It is the same in every process."""
    return f"trial:{trial_key}"


def elsewhere_id(trial_key: str, instrument: str) -> str:
    """Return the client_id for a trial's episodes on another instrument."""
    return f"{client_id(trial_key)}:on:{instrument}"


class Trial:
    """Carries out one blueprint on its server."""

    def __init__(
        self,
        blueprint: TrialBlueprint,
        swarm: SwarmClient,
        workflow: Workflow,
        out: TextIO,
        partners: Mapping[str, Partner] | None = None,
        interim: SwarmClient | None = None,
        further: Sequence[Callable[[], Awaitable[None]]] = (),
    ) -> None:
        """Set up the trial.

        Args:
            blueprint: what to evaluate and train.
            swarm: the client for the trial's server.
            workflow: the instrument's functions.
            out: receives progress as JSON lines.
            partners: the trial's other models, by role.
            interim: the client for interim evaluations, if the blueprint has any.
            further: called in order after the evaluation that follows training.
        """
        self._further = further
        self._blueprint = blueprint
        self._interim = interim
        self._swarm = swarm
        self._partners = dict(partners or {})
        self._workflow = workflow
        self._out = out

    async def carry_out(self) -> None:
        """Run the trial, or continue it from the server's state. Raises: TrialFailed, RolloutsFailing, Refusal, ServerUnreachable."""
        run = await self._swarm.run(self._blueprint.run_id)
        if run.step == 0 and run.status == "running":
            await self._evaluate("before", run)
        else:
            await self._require_evaluation_before()
        if run.status == "running":
            run = await self._train(run)
        if run.status != "complete":
            raise TrialFailed(f"run {run.run_id} is {run.status} at step {run.step}: {run.reason or 'no reason given'}")
        await self._evaluate("after", run)
        for evaluate in self._further:
            await evaluate()
        self._say("done", step=run.step)

    async def carry_out_elsewhere(self, instrument: str) -> None:
        """Play held-out tasks of another instrument after training. This object's blueprint and workflow must be that instrument's.

        Raises the same errors as `carry_out`.
        """
        await self._evaluate("after", await self._swarm.run(self._blueprint.run_id), on=instrument)

    async def _evaluate(self, when: str, run: RunReport, *, on: str | None = None) -> None:
        """Run one evaluation. `on` names another instrument that the tasks belong to; None means the trial's own."""
        heldout = self._blueprint.heldout
        tasks = await self._heldout_tasks()
        self._say(when, step=run.step, tasks=len(tasks), episodes=len(tasks) * heldout.episodes, on=on)
        report = await self._swarm.run_tasks(
            tasks,
            self._workflow.rollout,
            kind="eval",
            episodes_per_task=heldout.episodes,
            sampling={"temperature": heldout.temperature},
            progress=False,
            **self._shared(),
        )
        missing = len(tasks) * heldout.episodes - report.ended - report.resumed
        if missing > report.given_up or not report.ended + report.resumed:
            of = "" if on is None else f" of {on}"
            raise TrialFailed(f"{missing} held-out episodes{of} {when} training are missing (run at step {run.step})")
        self._say(f"{when}_ended", step=run.step, report=report, on=on)

    async def _with_interim(self, tasks: TaskStream, run: RunReport) -> TaskStream:
        """Return the stream of training tasks, which pauses for interim evaluations if the trial has any."""
        heldout, swarm = self._blueprint.heldout, self._interim
        if heldout.interim is None or swarm is None:
            return tasks

        async def play(tasks: Sequence[Task]) -> RolloutReport:
            return await swarm.run_tasks(
                tasks,
                self._workflow.rollout,
                kind="eval",
                episodes_per_task=1,
                sampling={"temperature": heldout.temperature},
                progress=False,
                **self._shared(),
            )

        evaluations = InterimEvaluations(
            swarm,
            run.run_id,
            spread(await self._heldout_tasks(), heldout.interim.tasks),
            play,
            lambda step, report: self._say("interim_ended", step=step, report=report),
            every=heldout.interim.every,
            last=run.spec.limits.steps,
        )
        return evaluations.between(tasks)

    async def _train(self, run: RunReport) -> RunReport:
        blueprint = self._blueprint
        self._say("train", step=run.step, limits=run.spec.limits.model_dump(exclude_none=True))
        tasks = self._workflow.tasks("train", blueprint.seed, None, **blueprint.parameters)
        report = await self._swarm.run_tasks(
            await self._with_interim(tasks, run),
            self._workflow.rollout,
            kind="train",
            episodes_per_task=blueprint.group_size,
            progress=False,
            **self._shared(),
        )
        if not report.run_over:
            raise TrialFailed(
                "the training tasks ran out before the run reached its limit; make tasks('train', ...) endless"
            )
        run = await _settled(self._swarm, run.run_id)
        for partner in self._partners.values():
            await _settled(partner.swarm, partner.run_id)
        self._say("train_ended", step=run.step, report=report)
        return run

    async def _require_evaluation_before(self) -> None:
        """Raise TrialFailed if the evaluation at step 0 is missing: it can no longer be made, because those weights are gone."""
        of_each, run_id, me = self._blueprint.heldout.episodes, self._blueprint.run_id, self._swarm.client_id
        missing = {task.id: of_each for task in await self._heldout_tasks()}
        wanted = sum(missing.values())
        for progress in await self._swarm.tasks(run_id=run_id, client_id=me):
            if progress.kind == "eval" and progress.step == 0 and progress.task_id in missing:
                missing[progress.task_id] -= progress.ended
        if all(left == of_each for left in missing.values()) or not await self._set_aside(
            [task_id for task_id, left in missing.items() if left > 0]
        ):
            raise TrialFailed(
                f"{sum(missing.values())} of {wanted} held-out episodes before training are missing and the run has moved on; "
                f"start the trial again with a new run"
            )

    async def _set_aside(self, task_ids: Sequence[str]) -> bool:
        """True if all of these held-out tasks were tried and set aside, so that their missing episodes will never come."""
        for task_id in task_ids:
            found = await self._swarm.summary(
                run_id=self._blueprint.run_id, client_id=self._swarm.client_id, task_id=task_id, kind="eval"
            )
            if not found.causes.keys() & COUNTED:
                return False
        return True

    async def _heldout_tasks(self) -> list[Task]:
        blueprint = self._blueprint
        heldout = blueprint.heldout
        tasks = self._workflow.tasks("heldout", blueprint.seed, heldout.upto, **blueprint.parameters)
        return [task async for task in each(tasks)][heldout.first :]

    def _shared(self) -> dict[str, Any]:
        blueprint = self._blueprint
        return {
            "run_id": blueprint.run_id,
            "concurrency": blueprint.concurrency,
            "retries": blueprint.retries,
            "idle_limit_s": blueprint.idle_limit_s,
        }

    def _say(self, event: str, *, report: RolloutReport | None = None, **fields: object) -> None:
        said = {name: value for name, value in fields.items() if value is not None}
        line = {"trial": self._blueprint.trial_key, "event": event, **said, **(asdict(report) if report else {})}
        self._out.write(json.dumps(line) + "\n")
        self._out.flush()


async def _settled(swarm: SwarmClient, run_id: str) -> RunReport:
    """Wait until the run is over and its last weights are served. The trial plays no more episodes meanwhile.

    Raises: TrialFailed if the run has no time limit and is waiting for episodes that nobody plays.
    """
    run, status = await swarm.run(run_id), await swarm.status()
    seen, since = None, swarm.clock.monotonic()
    while run.status == "running":
        stands = (run.step, status.phase, status.pool.model_dump(exclude={"by_mix"}))
        playing = status.pool.running + status.pool.prepared
        idle = status.phase is Phase.ROLLING and not playing and status.trouble is None
        if stands != seen or not idle or run.spec.limits.wall_s is not None:
            seen, since = stands, swarm.clock.monotonic()
        if swarm.clock.monotonic() - since > _patience_s(run.spec):
            raise TrialFailed(_what_lacks(swarm.url, run, status.pool))
        status = await swarm.status(since=status.revision)
        run = await swarm.run(run_id, since_step=run.step)
    return run


def _patience_s(spec: RunSpec) -> float:
    """Return how long to wait for progress, in seconds.

    This is how long a server may wait for the rest of a group or family before it makes a step without it, plus a margin.
    """
    return spec.batch.group_patience_s + max((mix.patience_s for mix in spec.batch.mix.values()), default=0.0) + SPARE_S


def _what_lacks(url: str, run: RunReport, pool: PoolStatus) -> str:
    limit = run.spec.limits.steps
    return (
        f"run {run.run_id} at {url} is at step {run.step}{f' of {limit}' if limit else ''} with {pool.groups_ready} of the "
        f"{pool.groups_needed} groups of its next step, and nobody plays for it any longer: another run of the trial is over, "
        f"and tasks are played by all models or by none. Models that are trained together need equal limits and batches; "
        f"`swarm ledger --summary --url {url}` shows which episodes were dropped"
    )


@asynccontextmanager
async def _partners_of(
    blueprint: TrialBlueprint, workflow: Workflow, token: str | None, clock: Clock
) -> AsyncIterator[dict[str, Partner]]:
    """Connect to the trial's other models, pass them to the workflow's `meet`, and yield them by role.

    Raises: WorkflowFault if there are partners but the workflow has no `meet`.
    """
    if blueprint.partners and workflow.meet is None:
        roles = ", ".join(blueprint.partners)
        raise WorkflowFault(
            f"{blueprint.workflow} must define a function 'meet', because the trial has partners: {roles}"
        )
    async with AsyncExitStack() as stack:
        partners = {}
        for role, run in blueprint.partners.items():
            swarm = SwarmClient(
                run.server_url,
                token,
                client_id=client_id(blueprint.trial_key),
                client_version=blueprint.code_version,
                patience=ROLLOUT_PATIENCE,
                clock=clock,
            )
            partners[role] = Partner(await stack.enter_async_context(swarm), run.run_id)
        if workflow.meet is not None:
            workflow.meet(partners)
        yield partners


async def run_blueprint(
    blueprint: TrialBlueprint, *, token: str | None, out: TextIO, clock: Clock | None = None
) -> None:
    """Carry out a trial, or continue it. Raises WorkflowFault and the errors of `Trial.carry_out`."""
    workflow = load_workflow(Path(blueprint.instrument_dir), blueprint.workflow)
    clock, me = clock or SystemClock(), client_id(blueprint.trial_key)
    url, version = blueprint.server_url, blueprint.code_version
    try:
        async with (
            _partners_of(blueprint, workflow, token, clock) as partners,
            SwarmClient(url, token, client_id=me, client_version=version, clock=clock) as swarm,
            SwarmClient(url, token, client_id=interim_id(me), client_version=version, clock=clock) as interim,
        ):
            further = [partial(_elsewhere, blueprint, each, token, out, clock) for each in blueprint.elsewhere]
            await Trial(blueprint, swarm, workflow, out, partners, interim, further).carry_out()
    finally:
        if workflow.close is not None:
            await workflow.close()


async def _elsewhere(
    blueprint: TrialBlueprint, elsewhere: Elsewhere, token: str | None, out: TextIO, clock: Clock
) -> None:
    """Play held-out tasks of another instrument with the trained model. Raises the same errors as `run_blueprint`."""
    workflow = load_workflow(Path(elsewhere.instrument_dir), elsewhere.workflow)
    fields = {name: getattr(elsewhere, name) for name in ("instrument_dir", "workflow", "parameters", "heldout")}
    there = blueprint.model_copy(update={**fields, "code_version": elsewhere.code_version, "elsewhere": ()})
    me, version = elsewhere_id(blueprint.trial_key, elsewhere.instrument), elsewhere.code_version
    try:
        async with SwarmClient(blueprint.server_url, token, client_id=me, client_version=version, clock=clock) as swarm:
            await Trial(there, swarm, workflow, out).carry_out_elsewhere(elsewhere.instrument)
    finally:
        if workflow.close is not None:
            await workflow.close()


async def _until_told_to_stop(blueprint: TrialBlueprint, token: str | None) -> None:
    task = asyncio.current_task()
    if task is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    await run_blueprint(blueprint, token=token, out=sys.stdout)


def main(arguments: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> int:
    """Run the program: read the blueprint, carry it out, and return an exit code."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    env = os.environ if environ is None else environ
    if len(given) != 1:
        sys.stderr.write("usage: python -m swarm.client.trial BLUEPRINT.json\n")
        return 2
    try:
        blueprint = TrialBlueprint.model_validate_json(Path(given[0]).read_bytes())
    except OSError as error:
        sys.stderr.write(f"cannot read the blueprint {given[0]}: {error.strerror}\n")
        return 2
    except ValidationError as error:
        faults = "; ".join(str(fault) for fault in explain(error, TrialBlueprint))
        sys.stderr.write(f"the blueprint {given[0]} is invalid: {faults}\n")
        return 2
    try:
        logs.configure(logs.level_of(env))
    except UsageError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    try:
        asyncio.run(_until_told_to_stop(blueprint, env.get("SWARM_TOKEN") or None))
    except asyncio.CancelledError:
        sys.stderr.write("stopped by SIGTERM; run the same command again to continue\n")
        return 1
    except KeyboardInterrupt:
        return 130
    except (Exception, SystemExit):  # noqa: BLE001 - last resort: the executor needs the traceback of any error
        sys.stderr.write(logs.redact(traceback.format_exc()))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
