"""The open run in the driver, on its cluster of ranks."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

from foundation.clock import Clock
from foundation.ids import derived_seed
from swarm.engine.seam import EngineError, StepOutcome, TrainBatch
from swarm.engine.training.channel import Command, Failure, OpenRun, Publish, Reply, Request, Resume, Train
from swarm.engine.training.checkpoints import Checkpoint, TrainerState, folder_of, ranks_of
from swarm.engine.training.session import TrainingSession
from swarm.engine.training.targets import adapters_shape
from swarm.engine.verl import checkpoints
from swarm.engine.verl.cluster import Cluster, OutOfMemory
from swarm.engine.verl.learner import Learner
from swarm.engine.verl.room import less_memory
from swarm.engine.verl.token_loss import refuse_unknown_terms
from swarm.protocol.runspec import LoraSpec, RunSpec


class VerlSession(TrainingSession[Checkpoint]):
    """A session whose weights and moments are split over the ranks."""

    def __init__(self, cluster: Cluster, fingerprint: str, clock: Clock, *, pad_token: int) -> None:
        super().__init__(Learner(cluster, clock, pad_token=pad_token), fingerprint)
        self._cluster = cluster
        self._start_is_served = cluster.settings.adapters is None

    def answer(self, request: Request) -> Reply:
        try:
            return super().answer(request)
        except OutOfMemory as error:
            command, advice = request.command, less_memory(self._cluster.settings)
            what = f"step {command.batch.step}" if isinstance(command, Train) else command.command
            text = f"{what} ran out of memory: {advice}. {error}"
            return Reply(number=request.number, failure=Failure(kind="unusable", text=text))

    def carry_out(self, command: Command) -> Reply:
        match command:
            case Publish():
                counts, digest = self.publish(command.step)
                return Reply(step=command.step, counts=counts, checksum=digest)
            case Resume():
                self._cluster.go_on()
                return Reply()
        return super().carry_out(command)

    def train(self, batch: TrainBatch) -> StepOutcome:
        """See `Engine.train`. If the settings say so, the replicas sleep during the step."""
        with self._cluster.replicas_asleep() if self._cluster.settings.sleep else nullcontext():
            return super().train(batch)

    def publish(self, step: int) -> tuple[dict[str, int], str | None]:
        """Freeze sampling and load the weights into the replicas.

        Returns what each request had sampled until then, and the digest of the weights, which is None if the replicas already had them.
        Raises: EngineError if the weights are at another step.
        """
        self._open()
        if step != self._step:
            raise EngineError(f"cannot serve the weights of step {step}: the trainer is at step {self._step}")
        counts, digest = self._cluster.freeze(), None
        if step or not self._start_is_served:
            digest = self._cluster.send_weights(step)
        self._start_is_served = step == 0
        return counts, digest

    def _require_supported(self, spec: RunSpec) -> None:
        if adapters_shape(spec.parameters) != adapters_shape(self._cluster.settings.adapters):
            raise EngineError(f"these ranks were not started for parameters = {spec.parameters!r}; open the run again")
        if spec.optimizer.name != "adamw":
            raise EngineError("the verl engine supports only AdamW: set optimizer.name to 'adamw'")
        refuse_unknown_terms(spec.algorithm)
        dtype = self._cluster.settings.dtype
        if spec.dtype != dtype:
            raise EngineError(
                f"this server computes in {dtype}, fixed at its start: set dtype to '{dtype}', or serve with "
                f"--dtype {spec.dtype}"
            )

    def _read(self, directory: Path, step: int) -> Checkpoint:
        return checkpoints.read(directory, step)

    def _reset(self, spec: RunSpec, seed: int) -> None:
        alpha = spec.parameters.alpha if isinstance(spec.parameters, LoraSpec) else None
        self._cluster.all_ranks("to_start", seed, derived_seed(spec.seed, "adapters"), alpha)

    def _restore(self, found: Checkpoint, wanted: OpenRun) -> None:
        folder, cluster = folder_of(wanted.directory, found.state.step), self._cluster
        own = ranks_of(wanted.directory, found.state.step) == cluster.settings.ranks
        try:
            (cluster.load_checkpoint if own else cluster.take_over)(folder)
        except OSError as error:  # the driver has just read it
            raise EngineError(
                f"a rank cannot read its part of {folder}: {error}; the state directory must be on a file system that "
                "every node of the Ray cluster mounts under the same path"
            ) from error

    def _write(self, directory: Path, state: TrainerState, best: int | None) -> None:
        checkpoints.write(
            directory,
            state,
            self._cluster.save_checkpoint,
            ranks=self._cluster.settings.ranks,
            keep=state.spec.checkpoint.keep,
            best=best,
        )
