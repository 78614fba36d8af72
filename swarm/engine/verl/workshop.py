"""What the driver works on: a cluster, and the run that is open on it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from foundation.clock import Clock
from foundation.ids import derived_seed
from swarm.engine.local.checkpoints import TrainerState, forget_other_future, put_back, random_state
from swarm.engine.local.wire import OpenRun
from swarm.engine.local.workshop import RunClosed
from swarm.engine.seam import EngineError, StepOutcome, TrainBatch, TrainingRefused
from swarm.engine.verl import checkpoints
from swarm.engine.verl.cluster import Cluster
from swarm.engine.verl.learner import Learner
from swarm.engine.verl.token_loss import refuse_unknown_terms
from swarm.protocol.runspec import RunSpec


@dataclass(slots=True)
class _OpenRun:
    run_id: str
    branch: int
    spec: RunSpec
    directory: Path
    step: int


class Workshop:
    """fingerprint: of the hosted model; a checkpoint that began with other weights is refused."""

    def __init__(self, cluster: Cluster, fingerprint: str, clock: Clock, *, pad_token: int) -> None:
        self._cluster = cluster
        self._learner = Learner(cluster, clock, pad_token=pad_token)
        self._fingerprint = fingerprint
        self._run: _OpenRun | None = None
        self._start_is_served = True

    def open_run(self, wanted: OpenRun) -> int:
        """See `Engine.open_run`; serves nothing."""
        self._run = None
        self._refuse_what_is_not_here(wanted.spec)
        wanted.directory.mkdir(parents=True, exist_ok=True)
        put_back(wanted.directory)
        ranks = self._cluster.settings.ranks
        if wanted.at_step is None:
            found = checkpoints.newest(wanted.directory, ranks)
        else:
            found = checkpoints.verified(wanted.directory, wanted.at_step, ranks) if wanted.at_step else None
        self._cluster.all_ranks("to_start", derived_seed(wanted.spec.seed, "trainer"))
        if found is not None:
            self._restore(wanted.directory, found)
        if wanted.at_step is not None:  # and this checkpoint could be gone on from
            forget_other_future(wanted.directory, wanted.branch, wanted.at_step)
        step = found.step if found is not None else 0
        self._learner.half_way = False
        self._run = _OpenRun(wanted.run_id, wanted.branch, wanted.spec, wanted.directory, step)
        return step

    def train(self, batch: TrainBatch) -> StepOutcome:
        """See `Engine.train`."""
        run = self._open()
        if batch.step != run.step + 1:
            raise TrainingRefused(f"a batch of step {batch.step}, but the weights stand at step {run.step}")
        self._refuse_what_is_not_here(batch.spec)
        try:
            outcome = self._learner.learn(batch)
        except TrainingRefused:
            if self._learner.half_way:
                self._run = None
            raise
        run.step, run.spec = batch.step, batch.spec
        return outcome

    def checkpoint(self, best: int | None = None) -> int:
        """See `Engine.checkpoint`. Step 0 is the hosted model itself and is not written. Raises: OSError."""
        run = self._open()
        if run.step:
            state = TrainerState(
                run_id=run.run_id,
                branch=run.branch,
                step=run.step,
                fingerprint=self._fingerprint,
                spec=run.spec,
                random_state=random_state(),
            )
            ranks, keep = self._cluster.settings.ranks, run.spec.checkpoint.keep
            checkpoints.write(run.directory, state, self._cluster.save_checkpoint, ranks=ranks, keep=keep, best=best)
        return run.step

    def publish(self, step: int) -> dict[str, int]:
        """Freeze sampling and bring the weights into the replicas; what each request had sampled until then.

        Raises: EngineError when the weights stand at another step.
        """
        run = self._open()
        if step != run.step:
            raise EngineError(f"weights of step {step} are to be served, but the trainer stands at step {run.step}")
        counts = self._cluster.freeze()
        if step or not self._start_is_served:
            self._cluster.send_weights(step)
        self._start_is_served = step == 0
        return counts

    def resume(self) -> None:
        """Sampling goes on."""
        self._cluster.go_on()

    def _restore(self, directory: Path, found: TrainerState) -> None:
        if found.fingerprint != self._fingerprint:
            raise EngineError(
                f"the checkpoint of step {found.step} began with model {found.fingerprint[:12]}, but "
                f"{self._fingerprint[:12]} is hosted; serve the model that the run was started with"
            )
        folder = checkpoints.folder(directory, found.step)
        try:
            self._cluster.load_checkpoint(folder)
        except OSError as error:  # the driver could read it just now
            raise EngineError(
                f"a rank cannot read its part of {folder}: {error}; the state directory must lie on a file system that "
                "every node of the Ray cluster mounts under the same path"
            ) from error

    def _refuse_what_is_not_here(self, spec: RunSpec) -> None:
        if spec.parameters != "full":
            raise EngineError("the verl engine trains all parameters: set parameters to 'full'")
        if spec.optimizer.name != "adamw":
            raise EngineError("the verl engine steps with AdamW alone: set optimizer.name to 'adamw'")
        refuse_unknown_terms(spec.algorithm)
        dtype = self._cluster.settings.dtype
        if spec.dtype != dtype:
            raise EngineError(
                f"this server computes in {dtype}, fixed at its start: set dtype to '{dtype}', or serve with "
                f"--dtype {spec.dtype}"
            )

    def _open(self) -> _OpenRun:
        if self._run is None:
            raise RunClosed("no run is open in the trainer; open it (again)")
        return self._run
