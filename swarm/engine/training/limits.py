"""How long a request to a child may take: three times its expected time on this machine, and at least 30 s.

The estimate comes from earlier requests of the same kind. For the first one, it is the amount of computation divided by the speed of a
slow laptop in float32 (two cores, no AVX-512). Reads only headers and configuration; imports neither torch nor vllm.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from foundation.clock import Clock
from foundation.event_loop import within
from swarm.engine.memory.model import parameters, weight_bytes
from swarm.engine.seam import TrainBatch
from swarm.engine.tree import merged_tokens
from swarm.protocol.runspec import RunSpec

LEAST_LIMIT_S = 30.0
FACTOR = 3.0
_KEPT = 8
"""Number of recent durations to remember per kind; the slowest of them counts."""
GRACE_S = 1.0
"""Extra seconds after a limit, because this process itself may have been suspended: an answer that arrives in this time counts."""
_TRAINED_PER_S = {"cpu": 40e9, "cuda": 4e12}
"""Floating-point operations per second of a training step."""
_SAMPLED_PER_S = {"cpu": 120e9, "cuda": 20e12}
"""Floating-point operations per second of a pass over prompts."""
_STEP_OPERATIONS = 8
"""Operations per parameter and token: log-probabilities before the step, then forward and backward."""
_PASS_OPERATIONS = 2
_FIXED_TOKENS = 512
"""Fixed cost of a weight update, as the number of tokens that cost as much."""
_MOST_SEEN = 8192
"""Assumed maximum number of tokens that one token attends to, unless a single call is longer."""
_DISK_BYTES_PER_S = 50e6
"""Bytes per second that a slow disk writes while we hash them, or reads."""
_MEMORY_BYTES_PER_S = 100e6
"""Bytes per second that are converted, hashed and written to memory."""
_KEPT_BYTES = 12
"""Bytes per parameter in a checkpoint: the weight and two moments in float32."""
_WEIGHT_BYTES = 4
_CHECKPOINTS = "step-*"
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a request asks for.

    kind: requests of the same kind have comparable durations.
    amount: size of the work, above 0, in any unit.
    prior_s: estimate while no request of its kind has been answered.
    least_s: lower bound of the estimate, however fast earlier requests were.
    """

    kind: str
    prior_s: float
    amount: float = 1.0
    least_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Silence:
    """A child that was found hung. `since` is the Unix time of its last sign of life."""

    reason: str
    since: float


class Unanswered(Exception):
    """A request was not answered within its limit."""

    def __init__(self, limit_s: float) -> None:
        super().__init__(f"no answer within the limit of {limit_s:.0f} s")
        self.limit_s = limit_s


class Expected:
    """Expected durations of each kind of request. A hang doubles the limit of its kind until a request of that kind is answered
    again."""

    def __init__(self) -> None:
        self._rates: dict[str, deque[float]] = {}
        """By kind: seconds per unit of work."""
        self._hangs: Counter[str] = Counter()
        """By kind: consecutive hangs."""

    def expected_s(self, work: Work) -> float:
        rates = self._rates.get(work.kind)
        return max(work.least_s, max(rates) * work.amount if rates else work.prior_s)

    def limit_s(self, work: Work) -> float:
        """Return how long to wait for an answer, in seconds."""
        return max(LEAST_LIMIT_S, FACTOR * self.expected_s(work)) * float(2 ** self._hangs[work.kind])

    def took(self, work: Work, seconds: float) -> None:
        """Note how long a finished request took."""
        self._rates.setdefault(work.kind, deque(maxlen=_KEPT)).append(seconds / work.amount)
        del self._hangs[work.kind]

    def hung(self, work: Work) -> None:
        """Note a request that was not answered within its limit."""
        self._hangs[work.kind] += 1

    async def answer(
        self, clock: Clock, work: Work, asked: asyncio.Future[Result], *, done: Callable[[Result], bool]
    ) -> Result:
        """Wait for the answer within the limit of this work.

        `done` returns whether an answer means that the work was done; durations of refusals are not recorded.
        Raises: Unanswered, with `asked` cancelled; what `asked` raises.
        """
        limit_s, began = self.limit_s(work), clock.monotonic()
        try:
            answer = await answered(clock, limit_s, asked)
        except Unanswered:
            self.hung(work)
            raise
        if done(answer):
            self.took(work, clock.monotonic() - began)
        return answer


async def answered(clock: Clock, limit_s: float, asked: asyncio.Future[Result]) -> Result:
    """Return the answer if it comes within `limit_s`. Raises: Unanswered, with `asked` cancelled; what `asked` raises."""
    try:
        for seconds in (limit_s, GRACE_S):
            if await within(clock, seconds, asyncio.shield(asked)):
                return asked.result()
    finally:
        if not asked.done():
            asked.cancel()
    raise Unanswered(limit_s)


# -- estimates ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ModelWork:
    """Estimates for one model on a number of equal devices.

    `start_s` is the extra time of a process's first step (loading libraries, compiling kernels, connecting ranks), and of any later
    step that compiles something.
    """

    model_dir: Path
    device: str = "cpu"
    devices: int = 1
    start_s: float = 10.0

    @property
    def parameters(self) -> int:
        return self._size[0]

    def train(self, batch: TrainBatch, *, first: bool) -> Work:
        """Estimate one optimizer step. `first` says whether it is the first of its process."""
        spec = batch.spec.optimizer
        calls = [call for group in batch.groups for one in group.episodes for call in one.calls]
        tokens = merged_tokens(calls)
        longest = max((len(call.prompt_ids) + len(call.sampled_ids) for call in calls), default=0)
        seen = min(tokens, max(_MOST_SEEN, longest))
        amount = spec.epochs * (tokens * self._compared(seen) + _FIXED_TOKENS * spec.minibatches)
        computed_s = _STEP_OPERATIONS * self.parameters * amount / (_TRAINED_PER_S[self.device] * self.devices)
        kind = f"{'first ' if first else ''}train{_of(batch.spec)}"
        least_s = 0.0 if self.device == "cpu" else self.start_s
        return Work(kind=kind, amount=amount, prior_s=self.start_s + computed_s, least_s=least_s)

    def open_run(self, spec: RunSpec, directory: Path, at_step: int | None) -> Work:
        """Estimate loading the hosted weights or a checkpoint."""
        if at_step == 0 or not any(directory.glob(_CHECKPOINTS)):
            return self._stored("reset", spec, _WEIGHT_BYTES, _MEMORY_BYTES_PER_S)
        return self._stored("restore", spec, _KEPT_BYTES, _DISK_BYTES_PER_S)

    def checkpoint(self, spec: RunSpec) -> Work:
        return self._stored("checkpoint", spec, _KEPT_BYTES, _DISK_BYTES_PER_S)

    def export(self, spec: RunSpec) -> Work:
        """Estimate exporting weights to inference."""
        return self._stored("export", spec, _WEIGHT_BYTES, _MEMORY_BYTES_PER_S)

    def fingerprint(self, spec: RunSpec) -> Work:
        return self._moved("fingerprint", spec, _WEIGHT_BYTES, _MEMORY_BYTES_PER_S)

    def boot_s(self, imports_s: float) -> float:
        """Return the maximum seconds until a child with this model is ready. `imports_s` is the time before it reads weights."""
        return imports_s + self._size[1] / _DISK_BYTES_PER_S

    def silence_s(self, batched_tokens: int) -> float:
        """Return how many seconds an inference engine may be silent: `FACTOR` times the estimate for a full batch of prompt tokens, but
        at least `LEAST_LIMIT_S`."""
        amount = batched_tokens * self._compared(batched_tokens)
        computed_s = _PASS_OPERATIONS * self.parameters * amount / _SAMPLED_PER_S[self.device]
        return max(LEAST_LIMIT_S, FACTOR * computed_s)

    def _stored(self, kind: str, spec: RunSpec, per_parameter: int, per_s: float) -> Work:
        """Estimate file access. The page cache may make one access fast, but the next may still wait for a slow disk."""
        moved = self._moved(kind, spec, per_parameter, per_s)
        return replace(moved, least_s=moved.amount / _DISK_BYTES_PER_S)

    def _moved(self, kind: str, spec: RunSpec, per_parameter: int, per_s: float) -> Work:
        size = per_parameter * self.parameters
        return Work(kind=f"{kind}{_of(spec)}", amount=max(1, size), prior_s=self.start_s + size / per_s)

    def _compared(self, seen: int) -> float:
        """Return the cost of a token that attends to this many others, as a multiple of the cost of a token that attends to none."""
        return 1 + seen / (6 * self._hidden)

    @cached_property
    def _size(self) -> tuple[int, int]:
        """Number of parameters, and stored bytes."""
        return parameters(self.model_dir), weight_bytes(self.model_dir)

    @cached_property
    def _hidden(self) -> int:
        config = json.loads((self.model_dir / "config.json").read_bytes())
        return int(config.get("hidden_size") or (config.get("text_config") or {}).get("hidden_size") or 4096)


def _of(spec: RunSpec) -> str:
    """Return the part of a kind that depends on the run: different adapters or optimizers have different sizes."""
    trained = "all weights" if spec.parameters == "full" else "adapters"
    return f" ({trained}, {spec.optimizer.name})"
