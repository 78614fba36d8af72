"""Real vLLM: what is recorded of restricted calls is what the trainer computes. `bench.restricted_sampling` does so at length."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.restricted_sampling import KINDS, gaps, sampled
from swarm.engine.local.forward import Policy
from swarm.engine.local.inference import VllmInference
from tests.vllm_fixture import LoopThread

CHECKED = ("top_p", "penalties", "json_schema", "all_at_once")


@pytest.mark.campaign
def test_the_trainer_computes_what_was_drawn_from_as_nearly_as_of_plain_calls(
    vllm: VllmInference, vllm_loop: LoopThread, smollm2: Path
) -> None:
    policy = Policy.load(smollm2)
    policy.use_dtype(vllm.settings.compute_dtype)

    def far(kind: str) -> float:
        """The 95th percentile of the difference."""
        calls = vllm_loop.run(sampled(vllm, KINDS[kind], tokens=300, max_tokens=20))
        return float(gaps(policy, calls).double().quantile(0.95))

    plain = far("plain")
    assert {kind: value for kind in CHECKED if (value := far(kind)) > 1.5 * plain} == {}
