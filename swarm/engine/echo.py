"""A whole engine without torch or vllm, for trying things: it repeats the last word it was told, and learns to.

With probability p = sigmoid(theta / temperature) the answer is the last word of the last user message, else that word
garbled; only the token where the two differ is random. Training moves theta (echo_policy.py). Every draw comes from the
run's seed, the weights version, the prompt and the request's `seed` (or, without one, how often this prompt was asked
before under these weights), so that a run is reproducible whatever its timing.
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
from swarm.engine import echo_tokens
from swarm.engine.echo_answer import ChatAnswer, Draft, refused
from swarm.engine.echo_policy import START_THETA, echo_logprob, garbled, improve
from swarm.engine.echo_text import TextAnswer
from swarm.engine.echo_tokens import IM_END
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

_CHECKPOINTS = "step-*.json"


@dataclass(slots=True)
class _Training:
    """The trainer's side: weights that are not served yet, and where they stand."""

    run: RunContext
    step: int = 0
    theta: float = START_THETA
    start: float = START_THETA


@dataclass(slots=True)
class _Served:
    """The weights that calls see."""

    version: WeightsVersion = field(default_factory=lambda: WeightsVersion(run_id=""))
    theta: float = START_THETA
    seed: int = 0
    asked: Counter[str] = field(default_factory=Counter)


class EchoEngine:
    """See the module. latency_s delays the first token of a call; tokens_per_s paces those after it (None: at once)."""

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
        fingerprint = hashlib.sha256(f"echo theta={START_THETA}".encode()).hexdigest()
        self._info = EngineInfo(
            backend="echo",
            device="cpu",
            model=model,
            fingerprint=fingerprint,
            max_model_len=max_model_len,
            dtype="float32",
        )
        self._clock = clock or SystemClock()
        self._latency_s = latency_s
        self._token_s = 0.0 if tokens_per_s is None else 1.0 / tokens_per_s
        self._subscribers: list[Callable[[EngineHealth], None]] = []
        self._ready = False
        self._answers = 0
        self._served = _Served()
        self._training: _Training | None = None

    @property
    def info(self) -> EngineInfo:
        return self._info

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

    # -- tokens ---------------------------------------------------------------------------------------------------

    async def render(self, dialect: Dialect, body: dict[str, Any], *, add_generation_prompt: bool = True) -> list[int]:
        if dialect == "completions":
            return _text_ids(body.get("prompt"))
        messages = body.get("messages")
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise refused("messages must be a list of objects")
        if other := echo_tokens.other_than_text(messages):
            raise refused(f"the echo engine reads text alone; leave out content parts of type {', '.join(other)}")
        return echo_tokens.render_chat(messages, body.get("tools") or [], open_answer=add_generation_prompt)

    def decode(self, ids: list[int]) -> str:
        return echo_tokens.decode(ids)

    # -- sampling -------------------------------------------------------------------------------------------------

    async def sample(self, request: SampleRequest) -> Sampled:
        """Raises: RequestRefused (400, OpenAI's error format) for a request that this engine cannot serve."""
        prompt_ids, answer = await self._begin(request)
        choices = [SampledChoice(index=draft.index) for draft in answer.drafts]
        async for draft, position in self._tokens(answer):
            _append(choices[draft.index], draft, position, self._served.version)
        for choice, draft in zip(choices, answer.drafts, strict=True):
            choice.finish_reason = draft.finish_reason
        return Sampled(prompt_ids=prompt_ids, choices=choices, answer=answer.whole())

    async def stream(self, request: SampleRequest) -> AsyncIterator[SampledEvent]:
        """Raises: RequestRefused, before the first event."""
        prompt_ids, answer = await self._begin(request)
        for index, data in enumerate(answer.openings()):
            yield SampledEvent(data=data, prompt_ids=prompt_ids if index == 0 else None)
        async for draft, position in self._tokens(answer):
            choice = SampledChoice(index=draft.index)
            _append(choice, draft, position, self._served.version, offset=position)
            if position == len(draft.ids) - 1:
                choice.finish_reason = draft.finish_reason
            first, *rest = answer.chunks(draft, position)
            yield SampledEvent(data=first, choices=[choice])
            for data in rest:
                yield SampledEvent(data=data)
        if answer.wants_usage:
            yield SampledEvent(data=answer.usage_chunk())

    async def _begin(self, request: SampleRequest) -> tuple[list[int], ChatAnswer]:
        """Check the request, wait out the latency, and draw with the weights that are served then."""
        if not self._ready:
            raise EngineDown("the echo engine is not booted")
        prompt_ids = request.prompt_ids
        if prompt_ids is None:
            prompt_ids = await self.render(request.dialect, request.body)
        made = TextAnswer if request.dialect == "completions" else ChatAnswer
        self._answers += 1
        answer = made(
            request.body,
            prompt_ids,
            self._info.max_model_len,
            created=int(self._clock.now()),
            number=self._answers,
        )
        if self._latency_s:
            await self._clock.sleep(self._latency_s)
        self._draw(answer)
        return prompt_ids, answer

    def _draw(self, answer: ChatAnswer) -> None:
        served = self._served
        word = echo_tokens.last_user_word(answer.prompt_ids)
        prompt_hash = hashlib.sha256(json.dumps(answer.prompt_ids).encode()).hexdigest()[:16]
        seed = answer.seed
        if seed is None:
            served.asked[prompt_hash] += 1
            seed = f"ask {served.asked[prompt_hash]}"
        temperature = answer.temperature
        chance = math.exp(echo_logprob(served.theta, temperature, echoed=True))
        version = served.version
        for index in range(answer.count):
            at = (served.seed, version.branch, version.step, prompt_hash, seed, index)
            echoed = random.Random(derived_seed("echo-draw", *at)).random() < chance
            logprob = echo_logprob(served.theta, temperature, echoed=echoed)
            other = echo_logprob(served.theta, temperature, echoed=not echoed)
            texts = (word, garbled(word)) if echoed else (garbled(word), word)
            answer.add(texts[0], texts[1], logprob, other, call_seed=derived_seed(*at))

    async def _tokens(self, answer: ChatAnswer) -> AsyncIterator[tuple[Draft, int]]:
        """Every token of every choice in turn, at the engine's pace."""
        for draft in answer.drafts:
            for position in range(len(draft.ids)):
                if self._token_s:
                    await self._clock.sleep(self._token_s)
                yield draft, position

    # -- training -------------------------------------------------------------------------------------------------

    async def open_run(self, run: RunContext, *, at_step: int | None = None) -> int:
        training = _Training(run)
        steps = _checkpoint_steps(run.directory)
        step = (max(steps) if steps else 0) if at_step is None else at_step
        if step:
            if step not in steps:
                raise EngineError(f"run {run.run_id} has no checkpoint of step {step}; there are {sorted(steps)}")
            theta, start = _stored(run.directory, step)
            training = _Training(run, step=step, theta=theta, start=start)
        if at_step is not None:
            _forget_other_future(run, at_step)
        self._training = training
        await self.serve(WeightsVersion(run_id=run.run_id, branch=run.branch, step=step))
        return step

    async def require_checkpoint(self, directory: Path, step: int) -> None:
        _stored(directory, step)

    async def train(self, batch: TrainBatch) -> StepOutcome:
        training = self._open()
        if batch.step != training.step + 1:
            raise TrainingRefused(f"batch of step {batch.step}, but the weights stand at step {training.step}")
        began = self._clock.monotonic()
        theta, outcome = improve(training.theta, training.start, batch)
        training.theta, training.step = theta, batch.step
        outcome.metrics["train_s"] = self._clock.monotonic() - began
        return outcome

    async def checkpoint(self, *, best: int | None = None) -> int:
        training = self._open()
        state = {"step": training.step, "branch": training.run.branch, "theta": training.theta, "start": training.start}
        if training.step:
            write_atomically(_checkpoint_path(training.run.directory, training.step), json.dumps(state).encode())
            for old in _checkpoint_steps(training.run.directory)[: -training.run.spec.checkpoint.keep]:
                if old != best:
                    _checkpoint_path(training.run.directory, old).unlink()
        return training.step

    async def serve(self, version: WeightsVersion) -> None:
        training = self._open()
        self._served = _Served(version=version, theta=training.theta, seed=training.run.spec.seed)

    def _open(self) -> _Training:
        if self._training is None:
            raise EngineError("no run is open; call open_run first")
        return self._training

    def _tell(self, health: EngineHealth) -> None:
        for subscriber in self._subscribers:
            subscriber(health)


def _append(choice: SampledChoice, draft: Draft, position: int, version: WeightsVersion, *, offset: int = 0) -> None:
    """Add one token of the draft, stamped with the weights that are served now. Spans count from `offset` on."""
    choice.sampled_ids.append(draft.ids[position])
    choice.logprobs.append(draft.logprobs[position])
    start = position - offset
    if choice.versions and choice.versions[-1].version == version:
        start = choice.versions.pop().start
    choice.versions.append(VersionSpan(start=start, end=position - offset + 1, version=version))


def _text_ids(prompt: Any) -> list[int]:
    if isinstance(prompt, str):
        return echo_tokens.encode(prompt)
    if not isinstance(prompt, list) or not all(isinstance(token, int) and 0 <= token <= IM_END for token in prompt):
        raise refused(f"prompt must be text, or ids from 0 to {IM_END}")
    return list(prompt)


def _forget_other_future(run: RunContext, step: int) -> None:
    """The run goes on from `step` on this branch: what older branches made after it does not count any more."""
    for later in _checkpoint_steps(run.directory):
        path = _checkpoint_path(run.directory, later)
        if later > step and json.loads(path.read_bytes()).get("branch", 0) < run.branch:
            path.unlink()


def _stored(directory: Path, step: int) -> tuple[float, float]:
    """Theta of a checkpoint, and what the run began with. Raises: EngineError."""
    path = _checkpoint_path(directory, step)
    try:
        stored = json.loads(path.read_bytes())
        return stored["theta"], stored["start"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EngineError(f"checkpoint {path} cannot be read: {error}") from error


def _checkpoint_path(directory: Path, step: int) -> Path:
    return directory / f"step-{step:08d}.json"


def _checkpoint_steps(directory: Path) -> list[int]:
    return sorted(int(path.stem.removeprefix("step-")) for path in directory.glob(_CHECKPOINTS))
