"""Samples a few of a trial's episodes, call by call, so that people see what is behind the numbers.

The sample is bounded and contains no secrets. A trial never fails because of it. The choice depends only on the ledger's order.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

from foundation.logs import redact
from researcher.models import SampledCall, SampledEpisode
from swarm.client import SwarmClient
from swarm.client.interim import is_interim
from swarm.protocol.episodes import EpisodeTrace, LedgerEntry, RecordedCall
from swarm.protocol.errors import SwarmError

TRAIN, EVAL, INTERIM = 4, 2, 2
"""Sample sizes: episodes from training, episodes from each evaluation, and interim evaluations to take episodes from."""
MOST_CALLS = 16
"""Maximum number of calls kept of one episode, from its beginning and its end."""
MOST_CHARACTERS = 6000
"""Maximum number of characters of one request or answer, as JSON."""
_LONGEST_TEXT = 1500
_MOST_ITEMS = 24
_DEEPEST = 8


async def sample(swarm: SwarmClient, entries: Sequence[LedgerEntry]) -> tuple[SampledEpisode, ...]:
    """Fetch the chosen episodes, oldest first. Leave out those that the server no longer has."""
    taken = []
    for entry in chosen(entries):
        try:
            trace = await swarm.trace(entry.episode_id)
        except SwarmError as error:  # of any kind: the trial itself is complete
            logging.getLogger(__name__).info("episode %s is not in the sample: %s", entry.episode_id, error)
            continue
        taken.append(_episode(trace))
    return tuple(taken)


def chosen(entries: Sequence[LedgerEntry]) -> list[LedgerEntry]:
    """Choose episodes spread evenly over training, and over the tasks of the evaluations before and after it.

    All arms show the same tasks. If there are interim evaluations, the newest is included; all evaluations then show the same
    tasks, so that people can see how answers change.
    """
    played = [entry for entry in entries if entry.reward is not None and entry.calls]
    train = sorted((entry for entry in played if entry.kind == "train"), key=_in_training)
    evaluated = [entry for entry in played if entry.kind == "eval"]
    interim = [entry for entry in evaluated if is_interim(entry.client_id)]
    tasks = {entry.task_id for entry in interim} or {entry.task_id for entry in evaluated}
    around = [entry for entry in evaluated if entry.task_id in tasks and not is_interim(entry.client_id)]
    steps = sorted({entry.claimed_step for entry in around})
    evaluations = [
        *([entry for entry in around if entry.claimed_step == step] for step in dict.fromkeys(steps[:1] + steps[-1:])),
        *([entry for entry in interim if entry.claimed_step == step] for step in _newest(interim)),
    ]
    found = [*_spread(train, TRAIN), *(entry for each in evaluations for entry in _spread(_one_a_task(each), EVAL))]
    return sorted(found, key=lambda entry: (entry.claimed_at, entry.episode_id))


def _newest(interim: Sequence[LedgerEntry]) -> list[int]:
    """Return the steps of the interim evaluations to take episodes from: the newest one, and one halfway to it."""
    steps = sorted({entry.claimed_step for entry in interim})
    return sorted({steps[(len(steps) - 1) * place // INTERIM] for place in range(1, INTERIM + 1)}) if steps else []


def _in_training(entry: LedgerEntry) -> tuple[int, str, int, str]:
    """Return a sort key without times, so that two arms on one seed show the same tasks, whichever answered sooner."""
    return entry.claimed_step, entry.task_id, entry.slot or 0, entry.episode_id


def _one_a_task(entries: Sequence[LedgerEntry]) -> list[LedgerEntry]:
    """Return the first episode of each task, sorted by task name."""
    first: dict[str, LedgerEntry] = {}
    for entry in sorted(entries, key=lambda entry: (entry.claimed_at, entry.episode_id)):
        first.setdefault(entry.task_id, entry)
    return [first[task] for task in sorted(first)]


def _spread(entries: Sequence[LedgerEntry], most: int) -> list[LedgerEntry]:
    if len(entries) <= most:
        return list(entries)
    return [entries[round(place * (len(entries) - 1) / (most - 1))] for place in range(most)]


def _episode(trace: EpisodeTrace) -> SampledEpisode:
    entry, calls = trace.entry, trace.calls
    half = MOST_CALLS // 2
    kept = calls if len(calls) <= MOST_CALLS else [*calls[:half], *calls[-half:]]
    return SampledEpisode(
        id=entry.episode_id,
        kind=entry.kind,
        task_id=bounded_text(entry.task_id),
        step=entry.claimed_step,
        fate=entry.reason.value if entry.reason else entry.state.value,
        reward=entry.reward,
        agent_rewards=entry.agent_rewards,
        success=entry.success,
        prompt_tokens=entry.prompt_tokens,
        sampled_tokens=entry.sampled_tokens,
        claimed_at=entry.claimed_at,
        ended_at=entry.ended_at,
        calls=len(calls),
        sampled=tuple(_call(call) for call in kept),
    )


def _call(call: RecordedCall) -> SampledCall:
    return SampledCall(
        index=call.index,
        agent=None if call.agent is None else bounded_text(call.agent),
        request=bounded(call.request),
        answer=bounded(call.answer),
        prompt_tokens=len(call.prompt_ids),
        sampled_tokens=len(call.sampled_ids),
        mean_logprob=sum(call.logprobs) / len(call.logprobs) if call.logprobs else None,
        temperature=call.sampling.temperature,
        step=call.versions[0].version.step if call.versions else None,
        finish_reason=call.finish_reason,
        complete=call.complete,
        fork_cause=call.fork_cause,
        started_at=call.started_at,
        latency_s=call.latency_s,
    )


def bounded(value: Any) -> Any:
    """Cut a JSON value to at most `MOST_CHARACTERS`, and remove secrets and characters that a database refuses."""
    cut = _cut(value, 0)
    text = json.dumps(cut, ensure_ascii=False)
    return cut if len(text) <= MOST_CHARACTERS else {"cut": text[: MOST_CHARACTERS // 2]}


def _cut(value: Any, depth: int) -> Any:
    if isinstance(value, str):
        return bounded_text(value)
    if isinstance(value, dict | list) and depth >= _DEEPEST:
        return "…"
    if isinstance(value, dict):
        return {bounded_text(str(name)): _cut(each, depth + 1) for name, each in list(value.items())[:_MOST_ITEMS]}
    if isinstance(value, list):
        half = _MOST_ITEMS // 2
        kept = value if len(value) <= _MOST_ITEMS else [*value[:half], "…", *value[-half:]]
        return [_cut(each, depth + 1) for each in kept]
    return value


def bounded_text(text: str) -> str:
    clean = redact(text).encode("utf-8", "replace").decode().replace("\x00", "�")
    return clean if len(clean) <= _LONGEST_TEXT else f"{clean[:_LONGEST_TEXT]} …"
