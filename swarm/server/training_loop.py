"""The loop that drives a server: boot, collect, train, serve, checkpoint, recover. Decides nothing that the state can decide."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from foundation.clock import Clock
from swarm.engine.seam import (
    Engine,
    EngineDown,
    EngineError,
    EngineHealth,
    RunContext,
    StepOutcome,
    TrainBatch,
    TrainerCrashed,
)
from swarm.protocol.episodes import WeightsVersion
from swarm.protocol.errors import ErrorCode, Refusal
from swarm.protocol.status import Phase
from swarm.server.service import Service
from swarm.server.state import health, run_lifecycle, steps
from swarm.server.state.machine import Command
from swarm.server.state.rows import StepRow
from swarm.server.state.runs import Run, best_of
from swarm.server.state.server_state import Moment
from swarm.server.state.steps import Duty, judge_outcome, next_duty
from swarm.server.storage.replay import past_mix, recorded_batch

_log = logging.getLogger(__name__)
T = TypeVar("T")

CRASHES_ALLOWED = 3
"""So often may the engine go down, without a step made in between, before the run is given up. A supervisor bears more
crashes than end a run (`BackOff.failures`): else a step that kills the trainer would end the whole server."""
FIRST_PAUSE_S = 0.5
STORAGE_PAUSE_S = 2.0
CHECKPOINTS = "checkpoints"
"""What there may be no room for, beside the pool."""


class TrainingLoop:
    """One per server. `runs_dir` holds one directory per run, for the engine's checkpoints."""

    def __init__(self, service: Service, engine: Engine, *, clock: Clock, runs_dir: Path) -> None:
        self._service = service
        self._engine = engine
        self._clock = clock
        self._runs_dir = runs_dir
        self._crashes = 0
        self._crashed_run = ""
        self._acting_for = ""
        self._over = False

    async def run(self) -> None:
        """Drive the server until cancelled. Subscribes to the engine's health and boots it first; leaves its shutdown to the caller."""
        self._engine.subscribe(self._heard)
        try:
            await self._boot()
            while True:
                await self._next_or_mend()
        finally:
            self._over = True

    async def _next_or_mend(self) -> None:
        try:
            await self._next()
        except EngineDown as error:
            await self._engine_went_down(error)
        except EngineError as error:
            await self._give_up(str(error))
        except Refusal as refusal:
            if refusal.code is not ErrorCode.STORAGE_FULL:
                raise
            self._say(refusal.detail)
            await self._clock.sleep(STORAGE_PAUSE_S)

    # -- one thing at a time ------------------------------------------------------------------------------------------

    async def _next(self) -> None:
        """Do the most urgent thing, or wait for one."""
        # No await before the duty is begun: what it was decided on would be out of date.
        now = Moment(self._clock.now(), self._clock.monotonic())
        found = next_duty(self._service.state, now)
        run = self._service.state.run
        self._acting_for = run.run_id if run is not None else ""
        if run is None or found.duty is Duty.WAIT:
            self._enter(self._resting_phase())
            await self._service.wait_for_work(found.until)
            return
        match found.duty:
            case Duty.RESTORE:
                await self._restore()
            case Duty.OPEN:
                await self._open(run)
            case Duty.SERVE:
                await self._serve(run, run.step)
                self._opened(run)
            case Duty.STEP:
                await self._step()
            case Duty.CHECKPOINT:
                await self._checkpoint(run)
            case Duty.COMPLETE:
                await self._service.carry_out(run_lifecycle.complete)
            case Duty.STOP:
                await self._stop(run)

    def _resting_phase(self) -> Phase:
        run = self._service.state.run
        if run is None or run.row.released:
            return Phase.IDLE
        if run.row.stop_requested_at is not None:
            return Phase.DRAINING
        return Phase.ROLLING if run.row.status == "running" else Phase.IDLE

    async def _open(self, run: Run) -> None:
        """Make the engine stand where the journal stands: newest checkpoint, then the journalled steps after it, once more."""
        self._enter(Phase.UPDATING)
        context = RunContext(run_id=run.run_id, branch=run.row.branch, spec=run.spec, directory=self._directory(run))
        begins = run.row.branch > 0 and run.kept_step == run.row.branched_at
        with self._room_for_checkpoints(context.directory):
            context.directory.mkdir(parents=True, exist_ok=True)
            # What lies newest in the folder may still be of the branch before: name the checkpoint until this one has its own.
            at = await self._engine.open_run(context, at_step=run.kept_step if begins else None)
            if at > run.step:
                # A checkpoint of a step whose outcome was never stored: take the newest that the journal knows.
                at = await self._engine.open_run(context, at_step=run.kept_step)
        if at > run.kept_step:
            best = await self._best(run)
            await self._for_certain(lambda t: steps.checkpointed(t, run.run_id, at, best))
        rows = await self._service.read(lambda reader: reader.steps(run.run_id, at))
        for row in (row for row in rows if row.state == "done"):
            self._say(f"step {row.step} is made again from its journal")
            await self._engine.train(await self._batch(run, row))
        if any(row.state == "done" for row in rows):
            await self._serve(run, run.step)
        if self._service.state.journalled is not None:
            await self._make(run, self._service.state.journalled)
        self._opened(run)

    async def _restore(self) -> None:
        """Go back to a checkpoint, as an operator wished; what is opened next is the new branch."""
        wish = self._service.state.situation.restoration
        assert wish is not None
        await self._service.settled()  # what is decided already is part of the past
        try:
            # Another run may have taken the place of this one while the wish waited for the engine.
            run = run_lifecycle.restorable(self._service.state, wish)
            specs = dict(run.specs)
            await self._require_checkpoint(run, wish.step)
            mix = await self._service.read(lambda reader: past_mix(reader, wish.run_id, specs, wish.step))
            ended = await self._service.ended_evals(wish.run_id, wish.step)
            await self._service.carry_out(lambda t: run_lifecycle.restore(t, wish, mix, ended))
        except Refusal as refusal:
            if refusal.code is ErrorCode.STORAGE_FULL:
                raise
            self._service.restored(refusal)
        else:
            self._service.restored()

    async def _require_checkpoint(self, run: Run, step: int) -> None:
        """Later checkpoints are given up only for one that can be read. Codes: not_found{checkpoints}."""
        if not step:
            return
        try:
            await self._engine.require_checkpoint(self._directory(run), step)
        except EngineDown:
            raise
        except EngineError as error:
            others = [0, *(kept for kept in run.row.checkpoints if kept != step)]
            detail = (
                f"run {run.run_id} cannot go back to step {step}: {error}; there are {', '.join(map(str, others))} too"
            )
            raise Refusal(ErrorCode.NOT_FOUND, detail, checkpoints=others) from error

    async def _step(self) -> None:
        self._enter(Phase.UPDATING)
        row = await self._service.carry_out(steps.journal)
        run = self._service.state.run
        assert run is not None
        await self._make(run, row)

    async def _make(self, run: Run, row: StepRow) -> None:
        """Train the journalled batch, serve what comes out, and only then write down that it is done."""
        batch = await self._batch(run, row)
        began = self._clock.monotonic()
        outcome = await self._engine.train(batch)
        trained = self._clock.monotonic()
        judge_outcome(self._service.state.journalled, outcome)
        await self._serve(run, row.step)
        train_s, sync_s = trained - began, self._clock.monotonic() - trained
        await self._record(outcome, train_s=train_s, sync_s=sync_s)
        self._crashes = 0

    async def _record(self, outcome: StepOutcome, *, train_s: float, sync_s: float) -> None:
        await self._for_certain(lambda t: steps.record(t, outcome, train_s=train_s, sync_s=sync_s))

    async def _batch(self, run: Run, row: StepRow) -> TrainBatch:
        specs = dict(run.specs)
        return await self._service.read(lambda reader: recorded_batch(reader, row, specs))

    async def _serve(self, run: Run, step: int) -> None:
        """Serve the trainer's weights; when inference is down, as soon as it is back."""
        version = WeightsVersion(run_id=run.run_id, branch=run.row.branch, step=step)
        for attempt in range(CRASHES_ALLOWED):
            try:
                await self._engine.serve(version)
                return
            except TrainerCrashed:
                raise
            except EngineDown as error:
                self._say(f"weights of step {step} not served yet: {error}")
                await self._until_ready(attempt)
        await self._engine.serve(version)

    async def _checkpoint(self, run: Run) -> None:
        with self._room_for_checkpoints(self._directory(run)):
            best = await self._best(run)
            step = await self._engine.checkpoint(best=best)
        await self._for_certain(lambda t: steps.checkpointed(t, run.run_id, step, best))

    async def _best(self, run: Run) -> int | None:
        """The step of the checkpoint that does best on the held-out tasks so far."""
        evaluated = await self._service.read(lambda reader: reader.held_out(run.run_id))
        best = best_of(run.row.checkpoints, evaluated)
        return None if best is None else best.step

    async def _stop(self, run: Run) -> None:
        self._enter(Phase.STOPPING)
        if run.step > run.kept_step:
            await self._checkpoint(run)
        await self._service.carry_out(run_lifecycle.stop)

    async def _for_certain(self, command: Command[T]) -> T:
        """Write down what the engine has done already: when the disk is full, again and again until there is room."""
        while True:
            try:
                return await self._service.carry_out(command)
            except Refusal as refusal:
                if refusal.code is not ErrorCode.STORAGE_FULL:
                    raise
                self._say(refusal.detail)
                await self._clock.sleep(STORAGE_PAUSE_S)

    # -- when things go wrong -------------------------------------------------------------------------------------------

    async def _boot(self) -> None:
        self._enter(Phase.BOOTING)
        try:
            await self._engine.boot()
        except EngineDown as error:
            if self._service.state.situation.engine_failed is None:
                self._heard(EngineHealth(ready=False, failed_for_good=True, reason=str(error)))
            return
        if not self._service.state.situation.engine_ready:
            self._heard(EngineHealth(ready=True))

    async def _engine_went_down(self, error: EngineDown) -> None:
        """What the trainer holds is unknown now: the run is opened again, from its newest checkpoint, when the engine is back."""
        self._say(f"the engine went down: {error}")
        self._service.tell(lambda t: health.engine_opened(t, None))
        run = self._service.state.run
        if run is not None and run.run_id != self._crashed_run:
            self._crashed_run, self._crashes = run.run_id, 0
        self._crashes += 1
        if self._crashes > CRASHES_ALLOWED:
            await self._give_up(f"the engine went down {self._crashes} times without making a step; last: {error}")
            return
        await self._until_ready(self._crashes - 1)

    async def _until_ready(self, attempt: int) -> None:
        """Return when the engine says that it is ready, or, when it never said otherwise, after a pause that grows."""
        if self._service.state.situation.engine_ready:
            await self._clock.sleep(FIRST_PAUSE_S * 2**attempt)
        while not self._service.state.situation.engine_ready:
            await self._service.wait_for_work(math.inf)

    async def _give_up(self, reason: str) -> None:
        """Fail the run, with the reason, where people look for it."""
        self._crashes = 0
        run = self._service.state.run
        if run is None or run.row.released or run.run_id != self._acting_for:
            self._say(f"gave up on {self._acting_for}, which was replaced already: {reason}")
            return
        await self._for_certain(lambda t: run_lifecycle.fail(t, reason))

    def _heard(self, health: EngineHealth) -> None:
        if self._over:  # the engine is being shut down with the server
            return
        if not health.ready:
            self._say(f"the engine is not ready: {health.reason or 'booting'}")
        self._service.engine_health(health)

    def _enter(self, phase: Phase) -> None:
        self._service.tell(lambda t: health.enter_phase(t, phase))

    def _opened(self, run: Run) -> None:
        """The engine serves the run's newest step."""
        self._service.tell(lambda t: health.engine_opened(t, run.run_id, str(self._directory(run))))

    def _say(self, line: str) -> None:
        _log.warning("%s", line)
        self._service.log(line)

    @contextmanager
    def _room_for_checkpoints(self, directory: Path) -> Iterator[None]:
        """A directory that cannot be written is refused like a full pool: tried again until there is room."""
        try:
            yield
        except OSError as error:
            detail = f"cannot write in {directory}: {error.strerror or error}; make room on the disk"
            self._service.tell(lambda t: health.storage(t, CHECKPOINTS, detail))
            raise Refusal(ErrorCode.STORAGE_FULL, detail) from error
        self._service.tell(lambda t: health.storage(t, CHECKPOINTS, None))

    def _directory(self, run: Run) -> Path:
        return self._runs_dir / run.run_id
