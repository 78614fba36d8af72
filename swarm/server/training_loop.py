"""The loop that drives a server: boot, collect, train, serve, checkpoint, recover. The state machine decides whatever it can."""

from __future__ import annotations

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

T = TypeVar("T")

CRASHES_ALLOWED = 3
"""Number of times that the engine may go down without completing a step before the run fails. It must be less than a supervisor's
limit (`BackOff.failures`), or a step that kills the trainer would stop the whole server."""
FIRST_PAUSE_S = 0.5
STORAGE_PAUSE_S = 2.0
CHECKPOINTS = "checkpoints"
"""Name under which full-disk reports mention checkpoints."""


class TrainingLoop:
    """A server's training loop. `runs_dir` holds one directory per run, for the engine's checkpoints."""

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
        """Drive the server until cancelled. Subscribes to the engine's health and boots the engine; the caller shuts it down."""
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
            self._service.log(refusal.detail)
            await self._clock.sleep(STORAGE_PAUSE_S)

    # -- one duty at a time ------------------------------------------------------------------------------------------

    async def _next(self) -> None:
        """Perform the most urgent duty, or wait for one."""
        # Do not await before the duty begins: the state for which it was chosen could change.
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
        """Bring the engine to the journal's newest step: load the newest checkpoint, and train the later steps of the journal again."""
        self._enter(Phase.UPDATING)
        context = RunContext(run_id=run.run_id, branch=run.row.branch, spec=run.spec, directory=self._directory(run))
        begins = run.row.branch > 0 and run.kept_step == run.row.branched_at
        with self._room_for_checkpoints(context.directory):
            context.directory.mkdir(parents=True, exist_ok=True)
            # The newest checkpoint in the folder may belong to the previous branch, so name the step until this branch has its own.
            at = await self._engine.open_run(context, at_step=run.kept_step if begins else None)
            if at > run.step:
                # The outcome of this checkpoint's step was never stored: use the newest checkpoint that the journal knows.
                at = await self._engine.open_run(context, at_step=run.kept_step)
        if at > run.kept_step:
            best = await self._best(run)
            await self._for_certain(lambda t: steps.checkpointed(t, run.run_id, at, best))
        rows = await self._service.read(lambda reader: reader.steps(run.run_id, at))
        for row in (row for row in rows if row.state == "done"):
            self._service.log(f"training step {row.step} again from the journal")
            await self._engine.train(await self._batch(run, row))
        if any(row.state == "done" for row in rows):
            await self._serve(run, run.step)
        if self._service.state.journalled is not None:
            await self._make(run, self._service.state.journalled)
        self._opened(run)

    async def _restore(self) -> None:
        """Go back to a checkpoint, as requested; the loop then opens the new branch."""
        wish = self._service.state.situation.restoration
        assert wish is not None
        await self._service.settled()  # earlier decisions belong to the old branch
        try:
            # Another run may have replaced this one while the request waited for the engine.
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
        """Check that the checkpoint is readable, before we give up later ones. Codes: not_found{checkpoints}."""
        if not step:
            return
        try:
            await self._engine.require_checkpoint(self._directory(run), step)
        except EngineDown:
            raise
        except EngineError as error:
            others = [0, *(kept for kept in run.row.checkpoints if kept != step)]
            detail = f"run {run.run_id} cannot go back to step {step}: {error}; its other checkpoints: {', '.join(map(str, others))}"
            raise Refusal(ErrorCode.NOT_FOUND, detail, checkpoints=others) from error

    async def _step(self) -> None:
        self._enter(Phase.UPDATING)
        row = await self._service.carry_out(steps.journal)
        run = self._service.state.run
        assert run is not None
        await self._make(run, row)

    async def _make(self, run: Run, row: StepRow) -> None:
        """Train on the journalled batch and serve the new weights; only then record that the step is done."""
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
        """Serve the trainer's weights; if inference is down, serve them as soon as it is back."""
        version = WeightsVersion(run_id=run.run_id, branch=run.row.branch, step=step)
        for attempt in range(CRASHES_ALLOWED):
            try:
                await self._engine.serve(version)
                return
            except TrainerCrashed:
                raise
            except EngineDown as error:
                self._service.log(f"weights of step {step} not served yet: {error}")
                await self._until_ready(attempt)
        await self._engine.serve(version)

    async def _checkpoint(self, run: Run) -> None:
        with self._room_for_checkpoints(self._directory(run)):
            best = await self._best(run)
            step = await self._engine.checkpoint(best=best)
        await self._for_certain(lambda t: steps.checkpointed(t, run.run_id, step, best))

    async def _best(self, run: Run) -> int | None:
        """Return the step of the checkpoint with the best results on held-out tasks so far; None if there are no results."""
        evaluated = await self._service.read(lambda reader: reader.held_out(run.run_id))
        best = best_of(run.row.checkpoints, evaluated)
        return None if best is None else best.step

    async def _stop(self, run: Run) -> None:
        self._enter(Phase.STOPPING)
        if run.step > run.kept_step:
            await self._checkpoint(run)
        await self._service.carry_out(run_lifecycle.stop)

    async def _for_certain(self, command: Command[T]) -> T:
        """Record something that the engine has already done. Retry until the disk has room."""
        while True:
            try:
                return await self._service.carry_out(command)
            except Refusal as refusal:
                if refusal.code is not ErrorCode.STORAGE_FULL:
                    raise
                self._service.log(refusal.detail)
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
        """Note that the engine went down, and wait until it is back. We no longer know the trainer's weights, so the run will be
        reopened from its newest checkpoint."""
        self._service.log(f"the engine went down: {error}")
        self._service.tell(lambda t: health.engine_opened(t, None))
        run = self._service.state.run
        if run is not None and run.run_id != self._crashed_run:
            self._crashed_run, self._crashes = run.run_id, 0
        self._crashes += 1
        if self._crashes > CRASHES_ALLOWED:
            await self._give_up(f"the engine went down {self._crashes} times without completing a step; last: {error}")
            return
        await self._until_ready(self._crashes - 1)

    async def _until_ready(self, attempt: int) -> None:
        """Wait until the engine reports that it is ready. If it is still marked as ready, pause first, longer with each `attempt`."""
        if self._service.state.situation.engine_ready:
            await self._clock.sleep(FIRST_PAUSE_S * 2**attempt)
        while not self._service.state.situation.engine_ready:
            await self._service.wait_for_work(math.inf)

    async def _give_up(self, reason: str) -> None:
        """Fail the run and log the reason."""
        self._crashes = 0
        run = self._service.state.run
        if run is None or run.row.released or run.run_id != self._acting_for:
            self._service.log(f"gave up on {self._acting_for}, which had already been replaced: {reason}")
            return
        await self._for_certain(lambda t: run_lifecycle.fail(t, reason))

    def _heard(self, health: EngineHealth) -> None:
        if self._over:  # the engine is being shut down with the server
            return
        if not health.ready and health.reason is not None:  # the child's supervisor has already logged it
            self._service.log(f"the engine is not ready: {health.reason}", "debug")
        self._service.engine_health(health)

    def _enter(self, phase: Phase) -> None:
        self._service.tell(lambda t: health.enter_phase(t, phase))

    def _opened(self, run: Run) -> None:
        """Note that the engine now serves the weights of the run's newest step."""
        self._service.tell(lambda t: health.engine_opened(t, run.run_id, str(self._directory(run))))

    @contextmanager
    def _room_for_checkpoints(self, directory: Path) -> Iterator[None]:
        """Treat a directory that cannot be written like a full pool: report the problem, and let the loop try again."""
        try:
            yield
        except OSError as error:
            detail = f"cannot write in {directory}: {error.strerror or error}; make room on the disk"
            self._service.tell(lambda t: health.storage(t, CHECKPOINTS, detail))
            raise Refusal(ErrorCode.STORAGE_FULL, detail) from error
        self._service.tell(lambda t: health.storage(t, CHECKPOINTS, None))

    def _directory(self, run: Run) -> Path:
        return self._runs_dir / run.run_id
