"""Sampled episodes as MLflow traces: the episode is the root span, with one span per call.

Ids are derived from study, trial and episode, so sending an episode twice still leaves one trace. MLflow is imported on first use.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from typing import Any

from researcher.models import SampledCall, SampledEpisode, TrialRecord

_PREVIEW = 250


def send_episodes(
    tracking_uri: str, experiment_id: str, run_id: str, trial: TrialRecord, episodes: Sequence[SampledEpisode]
) -> None:
    """Write one trace per episode, linked to the trial's run. Write none if MLflow cannot store spans (versions before 3.4)."""
    from mlflow.entities.span import Span
    from mlflow.tracing.client import TracingClient

    client = TracingClient(tracking_uri)
    for episode in episodes:
        trace_id = trace_id_of(trial, episode)
        spans = [Span.from_dict(fields) for fields in _spans(trace_id, trial, episode)]
        try:
            client.log_spans(experiment_id, spans)
        except NotImplementedError as error:
            logging.getLogger(__name__).warning("%s cannot store traces: %s", tracking_uri, error)
            return
        client.start_trace(_info(trace_id, experiment_id, run_id, trial, episode))


def trace_id_of(trial: TrialRecord, episode: SampledEpisode) -> str:
    return f"tr-{_digest(trial.study_id, trial.key, episode.id)[:32]}"


def _info(trace_id: str, experiment_id: str, run_id: str, trial: TrialRecord, episode: SampledEpisode) -> Any:
    from mlflow.entities.trace_info import TraceInfo
    from mlflow.entities.trace_location import TraceLocation
    from mlflow.entities.trace_state import TraceState
    from mlflow.tracing.constant import (
        TRACE_SCHEMA_VERSION,
        TRACE_SCHEMA_VERSION_KEY,
        TokenUsageKey,
        TraceMetadataKey,
        TraceTagKey,
    )

    tokens = _tokens(episode.prompt_tokens, episode.sampled_tokens, TokenUsageKey)
    return TraceInfo(
        trace_id=trace_id,
        trace_location=TraceLocation.from_experiment_id(experiment_id),
        request_time=int(episode.claimed_at * 1000),
        execution_duration=_milliseconds(episode),
        state=TraceState.OK if episode.reward is not None else TraceState.ERROR,
        client_request_id=episode.id,
        request_preview=f"{episode.kind} {episode.task_id}"[:_PREVIEW],
        response_preview="no reward" if episode.reward is None else f"reward {episode.reward:g}",
        trace_metadata={
            TRACE_SCHEMA_VERSION_KEY: str(TRACE_SCHEMA_VERSION),
            TraceMetadataKey.SOURCE_RUN: run_id,
            TraceMetadataKey.TOKEN_USAGE: json.dumps(tokens),
        },
        tags={
            TraceTagKey.TRACE_NAME: f"{episode.kind} episode, weights of step {episode.step}",
            **_tags(trial, episode),
        },
    )


def _tags(trial: TrialRecord, episode: SampledEpisode) -> dict[str, str]:
    tags = {"swarm.trial": trial.key, "swarm.arm": trial.arm, "swarm.seed": str(trial.seed), "swarm.kind": episode.kind}
    tags |= {"swarm.task": episode.task_id, "swarm.step": str(episode.step), "swarm.fate": episode.fate}
    if episode.reward is not None:
        tags["swarm.reward"] = f"{episode.reward:g}"
    return {name: value[:_PREVIEW] for name, value in tags.items()}


def _spans(trace_id: str, trial: TrialRecord, episode: SampledEpisode) -> Iterator[dict[str, Any]]:
    """Yield the root span, then one span per call, in MLflow's format."""
    from mlflow.entities.span import SpanType
    from mlflow.tracing.constant import SpanAttributeKey as Key

    root = _digest(trace_id, "root")[:16]
    facts = {"task": episode.task_id, "kind": episode.kind, "arm": trial.arm, "seed": trial.seed}
    outcome = {"reward": episode.reward, "success": episode.success, "agent_rewards": episode.agent_rewards}
    told = {
        "swarm.reward": episode.reward,
        "swarm.fate": episode.fate,
        "swarm.calls": episode.calls,
        "swarm.calls_left_out": episode.calls - len(episode.sampled),
    }
    attributes = {Key.SPAN_TYPE: SpanType.AGENT, Key.INPUTS: facts, Key.OUTPUTS: outcome, **told}
    began, ended = (
        _nanoseconds(episode.claimed_at),
        _nanoseconds(episode.claimed_at) + 1_000_000 * _milliseconds(episode),
    )
    yield _span(
        trace_id, root, None, "episode", (began, max(ended, began + 1)), attributes, ok=episode.reward is not None
    )
    for call in episode.sampled:
        start = _nanoseconds(call.started_at)
        yield _span(
            trace_id,
            _digest(trace_id, str(call.index))[:16],
            root,
            call.agent or "agent",
            (start, start + max(1, _nanoseconds(call.latency_s))),
            _call_attributes(call),
            ok=call.complete,
        )


def _call_attributes(call: SampledCall) -> dict[str, Any]:
    from mlflow.entities.span import SpanType
    from mlflow.tracing.constant import SpanAttributeKey, TokenUsageKey

    return {
        SpanAttributeKey.SPAN_TYPE: SpanType.CHAT_MODEL,
        SpanAttributeKey.INPUTS: call.request,
        SpanAttributeKey.OUTPUTS: call.answer,
        SpanAttributeKey.CHAT_USAGE: _tokens(call.prompt_tokens, call.sampled_tokens, TokenUsageKey),
        "swarm.finish_reason": call.finish_reason,
        "swarm.temperature": call.temperature,
        "swarm.weights_step": call.step,
        "swarm.mean_logprob": call.mean_logprob,
        "swarm.fork_cause": call.fork_cause,
    }


def _span(
    trace_id: str,
    span_id: str,
    parent: str | None,
    name: str,
    times: tuple[int, int],
    attributes: dict[str, Any],
    *,
    ok: bool,
) -> dict[str, Any]:
    from mlflow.tracing.constant import SpanAttributeKey

    told = {SpanAttributeKey.REQUEST_ID: trace_id, **attributes}
    return {
        "trace_id": trace_id,
        "span_id": span_id,
        "parent_span_id": parent,
        "name": name,
        "start_time_unix_nano": times[0],
        "end_time_unix_nano": times[1],
        "events": [],
        "status": {"code": "STATUS_CODE_OK" if ok else "STATUS_CODE_ERROR", "message": ""},
        "attributes": {key: json.dumps(value) for key, value in told.items() if value is not None},
    }


def _tokens(prompt: int, sampled: int, key: Any) -> dict[str, int]:
    return {key.INPUT_TOKENS: prompt, key.OUTPUT_TOKENS: sampled, key.TOTAL_TOKENS: prompt + sampled}


def _milliseconds(episode: SampledEpisode) -> int:
    return max(0, int(((episode.ended_at or episode.claimed_at) - episode.claimed_at) * 1000))


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1_000_000_000)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\x1f".join(parts).encode()).hexdigest()
