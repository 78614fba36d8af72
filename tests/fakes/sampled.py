"""A sampled episode with two calls, for tests of records and their copies."""

from __future__ import annotations

from typing import Any

from researcher.models import SampledCall, SampledEpisode


def an_episode(id: str = "ep-1", *, prompt: str = "2 + 2 = ?", **changes: Any) -> SampledEpisode:
    calls = tuple(
        SampledCall(
            index=index,
            agent=("solver", None)[index],
            request={"messages": [{"role": "user", "content": prompt}]},
            answer={"role": "assistant", "content": "4"},
            prompt_tokens=7,
            sampled_tokens=2 + index,
            mean_logprob=-0.5,
            temperature=1.0,
            step=3,
            finish_reason="stop",
            complete=True,
            fork_cause=None,
            started_at=100.5 + index,
            latency_s=0.25,
        )
        for index in range(2)
    )
    fields: dict[str, Any] = {
        "id": id,
        "kind": "train",
        "task_id": "t-1",
        "step": 3,
        "fate": "trained",
        "reward": 1.0,
        "agent_rewards": None,
        "success": True,
        "prompt_tokens": 14,
        "sampled_tokens": 5,
        "claimed_at": 100.0,
        "ended_at": 102.0,
        "calls": 2,
        "sampled": calls,
    }
    return SampledEpisode(**{**fields, **changes})
