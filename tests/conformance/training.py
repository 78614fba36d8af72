"""What is trained of a framework's calls at its own settings: a group of two episodes, and the optimiser step that it makes."""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from swarm.client.sync import SwarmClient
from swarm.protocol.episodes import POLICY_MODEL, EpisodeTrace
from swarm.protocol.runspec import BatchSpec, OptimizerSpec, RunSpec, SamplingSpec
from swarm.protocol.status import Phase
from tests.conformance import environments
from tests.conformance.frameworks import Framework
from tests.conformance.judgement import Outcome
from tests.conformance.rehearsal import run_script

LEAST_SHARE = 0.95
MISMATCH_LIMIT = 0.08
"""Of two implementations in bfloat16 (`tests/swarm/engine/local/test_engine.py`); float32 stays below 0.0001."""
REWARDS = (1.0, 0.0)
STEP_LIMIT_S = 600.0


def spec_of(optimizer: OptimizerSpec | None = None) -> RunSpec:
    """A run that makes a step of each framework."""
    return RunSpec(
        seed=1,
        batch=BatchSpec(tasks=1, group_size=len(REWARDS)),
        sampling=SamplingSpec(temperature=1.0, max_tokens=256),
        optimizer=optimizer or OptimizerSpec(),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What became of one framework's group."""

    framework: str
    version: str
    calls: int
    drawn: int
    """Tokens that were sampled at a temperature above 0."""
    trained: int
    """Tokens in the step's loss."""
    forced: int
    mismatch: float | None
    """Mean difference between recorded and recomputed log-probabilities; None: no step was made."""
    untrained: dict[str, int]
    """Calls that carry no loss, by reason."""
    outcomes: list[Outcome]

    @property
    def share(self) -> float:
        return self.trained / self.drawn if self.drawn else 0.0

    @property
    def faults(self) -> list[str]:
        """A script may fail at this temperature: its episode ends with a reward all the same."""
        if self.mismatch is None:
            return [f"no step was made: {[outcome.error for outcome in self.outcomes]}"]
        if self.mismatch > MISMATCH_LIMIT:
            return [f"log-probabilities differ by {self.mismatch:.3f} in the mean, {MISMATCH_LIMIT} at most expected"]
        return []


def train_on(framework: Framework, swarm: SwarmClient, run_id: str, *, python: Path | None = None) -> Trained:
    """Play the group, and wait for its step. python: an interpreter that has the framework already.

    Raises: NotInstalled; SwarmError when the server grants no episode.
    """
    interpreter = python or environments.python_of(framework)
    before = swarm.run(run_id).step

    def play(reward: float) -> tuple[Outcome, str, bool]:
        with swarm.episode(task_id=f"training-{framework.name}", run_id=run_id) as episode:
            outcome = run_script(framework, interpreter, episode.base_url, episode.api_key, POLICY_MODEL)
            receipt = episode.end(reward=reward, success=outcome.succeeded)
        return outcome, episode.id, receipt is not None and receipt.dropped is None

    with ThreadPoolExecutor(max_workers=len(REWARDS)) as group:
        played = list(group.map(play, REWARDS))
    pooled = all(counts for _, _, counts in played)
    metrics = step_after(swarm, run_id, before) if pooled else {}
    traces = [swarm.trace(episode_id) for _, episode_id, _ in played]
    return Trained(
        framework=framework.name,
        version=environments.version_of(framework),
        calls=sum(len(trace.calls) for trace in traces),
        drawn=sum(map(_drawn, traces)),
        trained=int(metrics.get("tokens_trained", 0)),
        forced=int(metrics.get("tokens_forced", 0)),
        mismatch=metrics.get("logprob_mismatch_mean"),
        untrained=dict(Counter(reason for trace in traces for reason in trace.untrained.values())),
        outcomes=[outcome for outcome, _, _ in played],
    )


def share_of(all_trained: list[Trained]) -> float:
    """Of the tokens that all frameworks drew, those that were trained."""
    return sum(each.trained for each in all_trained) / max(1, sum(each.drawn for each in all_trained))


def _drawn(trace: EpisodeTrace) -> int:
    return sum(len(call.sampled_ids) for call in trace.calls if call.sampling.temperature > 0)


def step_after(swarm: SwarmClient, run_id: str, before: int) -> dict[str, float]:
    """The metrics of the next step, once its weights are served; empty if it takes longer than the limit."""
    until = time.monotonic() + STEP_LIMIT_S
    for status in swarm.statuses():
        if status.step > before and status.phase == Phase.ROLLING:
            (step,) = swarm.run(run_id, since_step=before).steps
            return step.values
        if status.phase in (Phase.IDLE, Phase.FAILED) or time.monotonic() > until:
            break
    return {}
