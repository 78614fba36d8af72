"""What a vLLM worker is asked in addition to what it offers: how many tokens each running request has sampled so far.

Loaded by the worker itself (`--worker-extension-cls`); the control process never imports it.
"""

from __future__ import annotations

from typing import Any

from swarm.engine.local import cpu_kernels

cpu_kernels.register()  # this module is loaded once, by the worker, just before it chooses its kernels


class SampledCounts:
    """Mixed into vLLM's worker class; called over `/collective_rpc` while the scheduler is paused."""

    model_runner: Any

    def sampled_counts(self) -> dict[str, int]:
        """Sampled tokens of every request that the worker holds, by vLLM's internal request id."""
        return {name: len(request.output_token_ids) for name, request in self.model_runner.requests.items()}
