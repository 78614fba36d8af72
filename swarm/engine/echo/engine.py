"""The echo engine: serves the same requests as the local engine, in one process and without a model.

With probability p = sigmoid(theta / temperature) the answer is the last word of the last user message, else that word garbled;
only the token where the two differ is random. Training moves theta (`policy`). Every random choice is derived from the run's seed,
the weights version, the prompt and the request's `seed` (or, without one, how often these weights have seen this prompt), so a run
is reproducible whatever its timing.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foundation.clock import Clock, SystemClock
from foundation.ids import derived_seed
from foundation.paths import write_atomically
from swarm.engine.echo import answers
from swarm.engine.echo.answers import Answer, Draft, garbled, last_user_word
from swarm.engine.echo.policy import START_THETA, echo_logprob, improve
from swarm.engine.seam import (
    Dialect,
    EngineDown,
    EngineError,
    EngineHealth,
    EngineInfo,
    RunContext,
    Sampled,
    SampledChoice,
    SampledEvent,
    SampleRequest,
    StepOutcome,
    TrainBatch,
    TrainingRefused,
)
from swarm.protocol.episodes import VersionSpan, WeightsVersion


@dataclass(slots=True)
class _Trained:
    """The trainer's weights, before they are served. `start` is theta at the start of the run."""

    run: RunContext
    step: int = 0
    theta: float = START_THETA
    start: float = START_THETA


@dataclass(slots=True)
class _Served:
    """The weights that answer calls. `asked` counts the requests without a seed, by prompt."""

    version: WeightsVersion = field(default_factory=lambda: WeightsVersion(run_id=""))
    theta: float = START_THETA
    seed: int = 0
    asked: Counter[str] = field(default_factory=Counter)


class EchoEngine:
    """See `swarm.engine.seam.Engine`. `latency_s` is the time to a call's first token, `tokens_per_s` the rate after it (None:
    unlimited)."""

    def __init__(
        self,
        *,
        model: str = "echo",
        max_model_len: int = 32_768,
        latency_s: float = 0.0,
        tokens_per_s: float | None = None,
        clock: Clock | None = None,
    ) -> None:
        if latency_s < 0 or (tokens_per_s is not None and tokens_per_s <= 0):
            raise ValueError(f"latency_s must be >= 0 and tokens_per_s > 0, got {latency_s} and {tokens_per_s}")
        self.info = EngineInfo(
            backend="echo",
            device="cpu",
            model=model,
            fingerprint=hashlib.sha256(f"echo theta={START_THETA}".encode()).hexdigest(),
            max_model_len=max_model_len,
            dtype="float32",
            masks=True,
            own_functions=True,
        )
        self._clock = clock or SystemClock()
        self._latency_s = latency_s
        self._token_s = 0.0 if tokens_per_s is None else 1.0 / tokens_per_s
        self._subscribers: list[Callable[[EngineHealth], None]] = []
        self._ready = False
        self._answers = 0
        self._served = _Served()
        self._trained: _Trained | None = None

    def subscribe(self, on_health: Callable[[EngineHealth], None]) -> None:
        self._subscribers.append(on_health)

    async def boot(self) -> None:
        if not self._ready:
            self._ready = True
            self._tell(EngineHealth(ready=True))

    async def shutdown(self) -> None:
        if self._ready:
            self._ready = False
            self._tell(EngineHealth(ready=False, reason="shut down"))

    def _tell(self, health: EngineHealth) -> None:
        for subscriber in self._subscribers:
            subscriber(health)

    # -- sampling -------------------------------------------------------------------------------------------------

    async def render(self, dialect: Dialect, body: dict[str, Any], *, add_generation_prompt: bool = True) -> list[int]:
        return answers.prompt_ids(dialect, body, open_answer=add_generation_prompt)

    def decode(self, ids: list[int]) -> str:
        return answers.decode(ids)

    async def sample(self, request: SampleRequest) -> Sampled:
        """Answer a request. Raises: RequestRefused (400, OpenAI's error format) if this engine cannot serve it."""
        answer = await self._begin(request)
        choices = [SampledChoice(index=draft.index, finish_reason=draft.finish_reason) for draft in answer.drafts]
        async for draft, position in self._tokens(answer):
            choice, version = choices[draft.index], self._served.version
            choice.sampled_ids.append(draft.ids[position])
            choice.logprobs.append(draft.logprobs[position])
            if request.masks:
                choice.masks.append(draft.mask(position))
            spans = choice.versions
            start = spans.pop().start if spans and spans[-1].version == version else position
            spans.append(VersionSpan(start=start, end=position + 1, version=version))
        return Sampled(prompt_ids=answer.prompt_ids, choices=choices, answer=answer.whole())

    async def stream(self, request: SampleRequest) -> AsyncIterator[SampledEvent]:
        """Answer a request as a stream. Raises: RequestRefused, before the first event."""
        answer = await self._begin(request)
        prompt_ids: list[int] | None = answer.prompt_ids
        async for draft, position in self._tokens(answer):
            choice = SampledChoice(
                index=draft.index,
                sampled_ids=[draft.ids[position]],
                logprobs=[draft.logprobs[position]],
                masks=[draft.mask(position)] if request.masks else [],
                finish_reason=draft.finish_reason if position == len(draft.ids) - 1 else None,
                versions=[VersionSpan(start=0, end=1, version=self._served.version)],
            )
            yield SampledEvent(data=answer.chunk(draft, position), prompt_ids=prompt_ids, choices=[choice])
            prompt_ids = None
        if answer.wants_usage:
            yield SampledEvent(data=answer.usage_chunk())

    async def _begin(self, request: SampleRequest) -> Answer:
        """Check the request, wait for the latency, and sample with the weights that are served by then."""
        if not self._ready:
            raise EngineDown("the echo engine is not booted")
        dialect, body, ids = request.dialect, request.body, request.prompt_ids
        if ids is None:
            ids = await self.render(dialect, body)
        self._answers += 1
        now = int(self._clock.now())
        answer = Answer(dialect, body, ids, self.info.max_model_len, created=now, number=self._answers)
        if self._latency_s:
            await self._clock.sleep(self._latency_s)
        self._draw(answer)
        return answer

    def _draw(self, answer: Answer) -> None:
        served, word, temperature = self._served, last_user_word(answer.prompt_ids), answer.temperature
        prompt_hash = hashlib.sha256(json.dumps(answer.prompt_ids).encode()).hexdigest()[:16]
        seed = answer.seed
        if seed is None:
            served.asked[prompt_hash] += 1
            seed = f"ask {served.asked[prompt_hash]}"
        yes, no = (echo_logprob(served.theta, temperature, echoed=echoed).value for echoed in (True, False))
        for index in range(answer.count):
            at = (served.seed, served.version.branch, served.version.step, prompt_hash, seed, index)
            if random.Random(derived_seed("echo-draw", *at)).random() < math.exp(yes):
                answer.add(word, garbled(word), yes, no, seed=derived_seed(*at))
            else:
                answer.add(garbled(word), word, no, yes, seed=derived_seed(*at))

    async def _tokens(self, answer: Answer) -> AsyncIterator[tuple[Draft, int]]:
        """Yield every token of each choice in turn, at the engine's pace."""
        for draft in answer.drafts:
            for position in range(len(draft.ids)):
                if self._token_s:
                    await self._clock.sleep(self._token_s)
                yield draft, position

    # -- training -------------------------------------------------------------------------------------------------

    async def open_run(self, run: RunContext, *, at_step: int | None = None) -> int:
        self._trained = _opened(run, max(_steps(run.directory), default=0) if at_step is None else at_step)
        for step in _steps(run.directory) if at_step is not None else ():
            path = _checkpoint(run.directory, step)
            if step > self._trained.step and json.loads(path.read_bytes()).get("branch", 0) < run.branch:
                path.unlink()  # checkpoints of older branches after this step no longer belong to the run
        await self.serve(WeightsVersion(run_id=run.run_id, branch=run.branch, step=self._trained.step))
        return self._trained.step

    async def require_checkpoint(self, directory: Path, step: int) -> None:
        _stored(directory, step)

    async def train(self, batch: TrainBatch) -> StepOutcome:
        trained = self._open()
        if batch.step != trained.step + 1:
            raise TrainingRefused(f"the batch is for step {batch.step}, but the weights are at step {trained.step}")
        began = self._clock.monotonic()
        theta, outcome = improve(trained.theta, trained.start, batch)
        trained.theta, trained.step = theta, batch.step
        outcome.metrics["train_s"] = self._clock.monotonic() - began
        return outcome

    async def checkpoint(self, *, best: int | None = None) -> int:
        trained = self._open()
        directory, step = trained.run.directory, trained.step
        if step:
            state = {"step": step, "branch": trained.run.branch, "theta": trained.theta, "start": trained.start}
            write_atomically(_checkpoint(directory, step), json.dumps(state).encode())
            for old in _steps(directory)[: -trained.run.spec.checkpoint.keep]:
                if old != best:
                    _checkpoint(directory, old).unlink()
        return step

    async def serve(self, version: WeightsVersion) -> None:
        trained = self._open()
        self._served = _Served(version=version, theta=trained.theta, seed=trained.run.spec.seed)

    def _open(self) -> _Trained:
        if self._trained is None:
            raise EngineError("no run is open; call open_run first")
        return self._trained


def _opened(run: RunContext, step: int) -> _Trained:
    if step == 0:
        return _Trained(run)
    if step not in (steps := _steps(run.directory)):
        raise EngineError(f"run {run.run_id} has no checkpoint of step {step}; it has steps {steps}")
    theta, start = _stored(run.directory, step)
    return _Trained(run, step=step, theta=theta, start=start)


def _stored(directory: Path, step: int) -> tuple[float, float]:
    """Return theta of a checkpoint, and theta at the start of its run. Raises: EngineError."""
    path = _checkpoint(directory, step)
    try:
        stored = json.loads(path.read_bytes())
        return stored["theta"], stored["start"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EngineError(f"checkpoint {path} cannot be read: {error}") from error


def _checkpoint(directory: Path, step: int) -> Path:
    return directory / f"step-{step:08d}.json"


def _steps(directory: Path) -> list[int]:
    return sorted(int(path.stem.removeprefix("step-")) for path in directory.glob("step-*.json"))
