"""Reads a journalled step from the pool, in the trainer's form. Its first training also starts from what this module reads, so that the
trainer always sees exactly the stored data.

Omits calls that failed because of the server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from swarm.engine.seam import TrainBatch, TrainCall, TrainEpisode, TrainGroup, TrainingRefused
from swarm.protocol.episodes import RecordedCall
from swarm.protocol.runspec import RunSpec
from swarm.protocol.sampling_mask import LogitChanges
from swarm.server.state.batching import balance_after
from swarm.server.state.rows import EpisodeRow, MixRow, PlannedGroup, StepRow
from swarm.server.storage.reader import Reader


def past_mix(reader: Reader, run_id: str, specs: Mapping[int, RunSpec], step: int) -> MixRow:
    """Compute the run's mix as it was at `step`, from its journal."""
    labels = reader.mixes(run_id)
    balance = MixRow()
    for row in reader.steps(run_id, 0):
        if row.step <= step:
            mix = specs[row.config_version].batch.mix
            balance = balance_after(balance, mix, [labels[group.group_id] for group in row.groups])
    return balance


def recorded_batch(reader: Reader, row: StepRow, specs: Mapping[int, RunSpec]) -> TrainBatch:
    """Return the step's batch, with the config recorded in the journal.

    Raises: TrainingRefused if an episode's calls are missing.
    """
    return TrainBatch(
        step=row.step,
        spec=specs[row.config_version],
        groups=[_group(group, episodes, row.step) for group, episodes in reader.batch(row)],
    )


def _group(
    group: PlannedGroup, episodes: Sequence[tuple[EpisodeRow, list[RecordedCall] | None]], step: int
) -> TrainGroup:
    return TrainGroup(
        group_id=group.group_id,
        task_id=group.task_id,
        episodes=[_episode(row, calls, step) for row, calls in episodes],
    )


def _episode(row: EpisodeRow, calls: list[RecordedCall] | None, step: int) -> TrainEpisode:
    if not calls or row.reward is None:
        raise TrainingRefused(f"step {step} cannot be trained: the calls of episode {row.episode_id} are gone")
    return TrainEpisode(
        episode_id=row.episode_id,
        reward=row.reward,
        agent_rewards=row.agent_rewards,
        calls=[train_call(call) for call in sorted(calls, key=lambda call: call.index) if call.failure is None],
    )


def train_call(call: RecordedCall) -> TrainCall:
    """Convert a recorded call to the trainer's form."""
    return TrainCall(
        call_id=call.call_id,
        agent=call.agent,
        prompt_ids=call.prompt_ids,
        sampled_ids=call.sampled_ids,
        logprobs=call.logprobs,
        temperature=call.sampling.temperature,
        versions=call.versions,
        truncated=call.finish_reason == "length" or not call.complete,
        reproducible=call.sampling.reproducible,
        mask=call.mask,
        changes=None if call.mask is None else LogitChanges.of(call.request),
    )
