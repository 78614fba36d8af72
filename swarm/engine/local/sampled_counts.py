"""Runs in vLLM's worker: counts the sampled tokens of each request, also of choices that finished before others of their call.

vLLM's model runner forgets a finished request before its next step, but without streaming the answer is sent once every choice has
finished. Until then, a change of weights must still know that the finished choices were sampled before it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import wraps
from typing import Any

from swarm.engine.sampling.request_ids import CHOICES, own_id


class FinishedChoices:
    """Final counts of finished choices, kept until all choices of their call have finished."""

    def __init__(self) -> None:
        self._calls: dict[str, dict[str, int]] = {}

    @property
    def counts(self) -> dict[str, int]:
        """Number of sampled tokens by vLLM's internal request id."""
        return {name: count for counts in self._calls.values() for name, count in counts.items()}

    def add(self, requests: Mapping[str, Any], finished: Collection[str]) -> None:
        """Note these finished requests, which the runner still has among its `requests`."""
        for name in finished:
            if (request := requests.get(name)) is None or (choices := _choices(request)) < 2:
                continue
            call = own_id(name)[1]
            counts = self._calls.setdefault(call, {})
            counts[name] = len(request.output_token_ids)
            if len(counts) == choices:
                del self._calls[call]
        for name in finished:
            if name not in requests:  # cancelled before it began, so its whole call is cancelled
                self._calls.pop(own_id(name)[1], None)


def _choices(request: Any) -> int:
    """Return how many choices the request's call has."""
    params = request.sampling_params
    return 1 if params is None else (params.extra_args or {}).get(CHOICES, 1)


def register() -> None:
    """Make vLLM's model runner note finished choices. Call it once per process."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    update = GPUModelRunner._update_states

    @wraps(update)
    def noting(runner: Any, scheduled: Any) -> Any:
        _finished(runner).add(runner.requests, scheduled.finished_req_ids)
        return update(runner, scheduled)

    GPUModelRunner._update_states = noting


def sampled_counts(runner: Any) -> dict[str, int]:
    """Return how many tokens each request has sampled, by vLLM's internal request id: those in the runner, and finished choices of
    unfinished calls."""
    running = {name: len(request.output_token_ids) for name, request in runner.requests.items()}
    return _finished(runner).counts | running


def _finished(runner: Any) -> FinishedChoices:
    kept: FinishedChoices = vars(runner).setdefault("finished_choices", FinishedChoices())
    return kept
