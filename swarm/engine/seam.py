"""The interface of all engines (echo, local, verl): token ids in, token ids and logprobs out; a batch in, metrics out.

One contract suite (`tests/contracts/engine_contract.py`) runs against each implementation. Imports neither torch nor vllm.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, Literal, Protocol

from swarm.protocol.episodes import VersionSpan, WeightsVersion
from swarm.protocol.errors import SwarmError
from swarm.protocol.runspec import ComputeType, RunSpec
from swarm.protocol.sampling_mask import LogitChanges, SamplingMask

Dialect = Literal["chat.completions", "completions"]
"""Dialects that engines implement. The gateway translates all others into chat completions."""


class EngineError(SwarmError):
    """Base class of errors that engines raise."""


class RequestRefused(EngineError):
    """The engine will not answer this request (too long, unknown parameter). `body` is in the dialect's own format."""

    def __init__(self, status: int, body: dict[str, Any]) -> None:
        super().__init__(str(body))
        self.status = status
        self.body = body


class EngineDown(EngineError):
    """A child process is unavailable (booting or crashed). It is being restarted, or has failed for good."""


class RequestFailed(EngineDown):
    """The engine answered a request with an internal error. It may be crashing, or may have failed only on this request."""


class EngineHung(EngineDown):
    """A child did not answer within its time limit."""


class TrainerCrashed(EngineDown):
    """The trainer died. `open_run` restores the newest complete checkpoint; the caller replays journalled steps."""


class TrainingRefused(EngineError):
    """The batch or the outcome is invalid: tokens without provenance, non-finite loss, weights that did not change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """The hosted model. `fingerprint` is the SHA-256 over the checkpoint's weight files.

    dtype: compute dtype of sampling, and of training if the spec says `auto`.
    masks: whether the engine reports the candidates for each sampled token and can train with them.
    own_functions: whether it trains with users' functions.
    default_seeds: whether a call without a seed gets one from its run (a GPU samples seeded calls one after another).
    folder: the model's folder, if it has one; no answer of the server contains it.
    layers: names of the linear layers that adapters can be put on; empty: unknown.
    """

    backend: str
    device: str
    model: str
    fingerprint: str
    max_model_len: int
    dtype: ComputeType
    masks: bool = False
    own_functions: bool = False
    default_seeds: bool = True
    folder: Path | None = None
    layers: frozenset[str] = frozenset()

    def is_named(self, model: str) -> bool:
        """Return whether `model`, a name or a path on this machine, is the hosted model."""
        if model in (self.model, PurePath(self.model).name):
            return True
        try:
            return self.folder is not None and Path(model).expanduser().samefile(self.folder)
        except (OSError, ValueError, RuntimeError):  # the path does not exist, is invalid, or names an unknown user
            return False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaHealth:
    """Health of one sampling process, which crashes and restarts independently. Fields as in `EngineHealth`."""

    device: str
    ready: bool
    failed_for_good: bool = False
    reason: str | None = None
    failures: int = 0
    hung_since: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHealth:
    """Sent to subscribers on every change. An engine with several replicas is ready while any of them is."""

    ready: bool
    booting: bool = False
    failed_for_good: bool = False
    reason: str | None = None
    failures: int = 0
    inference_ready: bool | None = None
    """Whether the engine samples, for engines that can sample while the trainer is down; None: same as `ready`."""
    hung_since: float | None = None
    """Unix time of the last sign of life of a hung child. Reset when the child is ready again."""
    replicas: tuple[ReplicaHealth, ...] = ()
    """Health of each replica, for engines whose replicas crash independently."""

    @property
    def samplers(self) -> tuple[ReplicaHealth, ...]:
        """The sampling units: the replicas, or the engine as a whole."""
        whole = ReplicaHealth(
            device="", ready=self.samples, reason=self.reason, failures=self.failures, hung_since=self.hung_since
        )
        return self.replicas or (whole,)

    @property
    def samples(self) -> bool:
        """True if the engine answers requests now."""
        return self.ready if self.inference_ready is None else self.inference_ready


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """One LLM request. `body` is the dialect's request with the run's sampling defaults filled in.

    prompt_ids: sample from exactly these ids, whatever the messages render to; None: render the template. A body of `completions` has
        one prompt, text or ids.
    masks: report the candidates for each sampled token, if the engine can.
    """

    dialect: Dialect
    body: dict[str, Any]
    prompt_ids: list[int] | None = None
    masks: bool = False


@dataclass(slots=True, kw_only=True)
class SampledChoice:
    """One choice: sampled ids (including those cut off at a stop string), and the log-probability of each after temperature.

    `masks` has for each id the row of its candidates (`swarm.protocol.sampling_mask`); empty if unknown.
    """

    index: int = 0
    sampled_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    masks: list[bytes] = field(default_factory=list)
    finish_reason: str | None = None
    versions: list[VersionSpan] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Sampled:
    """A complete answer. `answer` is the dialect's response for the client."""

    prompt_ids: list[int]
    choices: list[SampledChoice]
    answer: dict[str, Any]


@dataclass(slots=True, kw_only=True)
class SampledEvent:
    """One event of a stream. `data` is what the client sees (None: nothing); ids and log-probabilities are the new ones.

    Version spans cover the choice's new tokens; positions count from 0 at the event's first token.
    """

    data: dict[str, Any] | None
    prompt_ids: list[int] | None = None
    choices: list[SampledChoice] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainCall:
    """A call for the trainer: the origin and the sampled log-probability of each token.

    `reproducible` is True if it was sampled from softmax(logits / temperature). If not, `mask` has the tokens that could be sampled and
    `changes` says how the request changed the logits; both are None if unknown.
    """

    call_id: str
    agent: str | None
    prompt_ids: list[int]
    sampled_ids: list[int]
    logprobs: list[float]
    temperature: float
    versions: list[VersionSpan]
    truncated: bool = False
    reproducible: bool = True
    mask: SamplingMask | None = None
    changes: LogitChanges | None = None

    @property
    def off_policy(self) -> bool:
        """True if the call was sampled from a distribution that the trainer cannot recompute."""
        return not self.reproducible and self.mask is None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainEpisode:
    episode_id: str
    reward: float
    agent_rewards: dict[str, float] | None
    calls: list[TrainCall]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainGroup:
    group_id: str
    task_id: str
    episodes: list[TrainEpisode]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """Everything that one optimizer step needs. It is journalled before the step, so that the step can be replayed exactly."""

    step: int
    """Number of the step that trains this batch; the first is 1."""
    spec: RunSpec
    groups: list[TrainGroup]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """What one step did. `untrained` has the episodes whose tokens had no part in the loss, each with the ledger's reason.

    metrics: see docs/reference/metrics.md; all finite.
    """

    step: int
    metrics: dict[str, float]
    untrained: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """A run as the engine sees it. `directory` has its checkpoints, and no other files of the engine."""

    run_id: str
    branch: int
    spec: RunSpec
    directory: Path


class Engine(Protocol):
    """One hosted model: inference and training. Call all coroutines from one event loop."""

    @property
    def info(self) -> EngineInfo: ...

    def subscribe(self, on_health: Callable[[EngineHealth], None]) -> None:
        """Call `on_health` on every change of health. The engine itself restarts crashed children with back-off."""

    async def boot(self) -> None:
        """Start the children and wait until both serve. Does nothing if called again. Raises: EngineDown with the reason."""

    async def shutdown(self) -> None:
        """Stop the children and remove what they left in memory."""

    # -- tokens ---------------------------------------------------------------------------------------------------

    async def render(self, dialect: Dialect, body: dict[str, Any], *, add_generation_prompt: bool = True) -> list[int]:
        """Return the token ids of a request's messages and tools, rendered with the model's template; for `completions`, those of its
        text."""

    def decode(self, ids: list[int]) -> str:
        """Return the text of the ids, including special tokens."""

    # -- sampling -------------------------------------------------------------------------------------------------

    async def sample(self, request: SampleRequest) -> Sampled: ...

    def stream(self, request: SampleRequest) -> AsyncIterator[SampledEvent]:
        """Yield tokens as they are sampled. Closing the iterator stops sampling."""

    # -- training -------------------------------------------------------------------------------------------------

    async def open_run(self, run: RunContext, *, at_step: int | None = None) -> int:
        """Make this run's weights the current ones, and serve them; return their step.

        `at_step` None: use the newest complete checkpoint in `run.directory`, else the hosted model itself (step 0). A step that is
            named may
        start a new branch; then later checkpoints of older branches are removed. Resets in place, without rebooting a child.
        """

    async def require_checkpoint(self, directory: Path, step: int) -> None:
        """Check this step's checkpoint without changing anything. Raises: EngineError if it is missing or damaged, as `open_run`
        would."""

    async def train(self, batch: TrainBatch) -> StepOutcome:
        """Make one optimizer step. The new weights are not served until `serve`. Raises: TrainerCrashed, TrainingRefused."""

    async def checkpoint(self, *, best: int | None = None) -> int:
        """Write weights, optimizer, random state and step atomically; return the step.

        Then remove all but the newest `keep` checkpoints (from the spec), but never that of step `best`.
        """

    async def serve(self, version: WeightsVersion) -> None:
        """Serve the trainer's current weights under this version; calls in flight continue across the change."""
