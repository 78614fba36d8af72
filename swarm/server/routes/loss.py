"""Additional data for readers of traces: which calls are trained on, and the text of each token."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import groupby

from swarm.engine.training.selection import untrained_reason
from swarm.protocol.episodes import DropReason, EpisodeState, EpisodeTrace, RecordedCall
from swarm.protocol.runspec import RunSpec
from swarm.protocol.sampling_mask import RestrictedTraining
from swarm.server.storage.replay import train_call

_BROKEN = "�"
_UNSETTLED = (EpisodeState.RUNNING, EpisodeState.ENDED, EpisodeState.IN_STEP, EpisodeState.TRAINED)


def untrained(trace: EpisodeTrace, spec: RunSpec) -> dict[str, str]:
    """Return why calls are not trained on under the newest config of their run, by call id. Omits calls that are trained on."""
    entry = trace.entry
    if entry.kind == "eval":
        return {call.call_id: DropReason.EVAL.value for call in trace.calls}
    if entry.state not in _UNSETTLED:
        return {call.call_id: entry.reason or entry.state for call in trace.calls}
    reasons = {call.call_id: _why_not(call, spec) for call in trace.calls}
    return {call_id: reason for call_id, reason in reasons.items() if reason}


def restricted(trace: EpisodeTrace, spec: RunSpec) -> dict[str, RestrictedTraining]:
    """Return how to train on each call whose sampling was restricted, by call id. Omits calls that are not trained on."""
    how = "exact" if spec.sampling.train == "auto" else spec.sampling.train
    return {
        call.call_id: how for call in trace.calls if call.sampling.restricted and call.call_id not in trace.untrained
    }


def vocabulary(trace: EpisodeTrace, decode: Callable[[list[int]], str]) -> dict[str, str]:
    """Return the text of each token id, and of each sequence of ids that only together form characters (`EpisodeTrace.vocabulary`)."""
    words: dict[int, str] = {}
    for token in {token for call in trace.calls for token in (*call.prompt_ids, *call.sampled_ids)}:
        words[token] = decode([token])
    known = {str(token): text for token, text in words.items()}
    for ids in [ids for call in trace.calls for ids in (call.prompt_ids, call.sampled_ids)]:
        for run in _broken_runs(ids, words):
            known[",".join(map(str, run))] = decode(run)
    return known


def _broken_runs(ids: Iterable[int], words: dict[int, str]) -> list[list[int]]:
    """Return the runs of two or more adjacent tokens that are not whole characters on their own."""
    runs = [list(run) for broken, run in groupby(ids, lambda token: _BROKEN in words[token]) if broken]
    return [run for run in runs if len(run) > 1]


def _why_not(call: RecordedCall, spec: RunSpec) -> str | None:
    return DropReason.TAINTED if call.failure is not None else untrained_reason(train_call(call), spec)
