"""vLLM's compiled RMS norms for its CPU backend, which has them but offers its models the ones in plain torch.

A model of thirty layers spends a tenth of its decoding in those. Imported by vLLM's worker before it sets its priorities
(`--ir-op-priority`); where kernels of another device are used, these count as unsupported and change nothing.
"""

import torch
from torch import Tensor
from vllm import ir
from vllm.platforms import current_platform

from swarm.engine.local.vllm_server import CPU_NORMS


def _plain(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    """Whether the compiled norm computes this: over the whole of the last dimension, rows one behind the other."""
    return variance_size is None and weight is not None and weight.dtype == x.dtype and x.is_contiguous()


def _plain_sum(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    return _plain(x, weight, epsilon, variance_size) and x_residual.is_contiguous() and x_residual.dtype == x.dtype


def register() -> None:
    """Offer the compiled norms to vLLM under CPU_NORMS. Once per process."""
    here = current_platform.is_cpu()
    if here:
        current_platform.import_kernels()

    @ir.ops.rms_norm.register_impl(CPU_NORMS, supports_args=_plain, supported=here)  # type: ignore[untyped-decorator]
    def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
        result = torch.empty_like(x)
        torch.ops._C.rms_norm(result, x, weight, epsilon)
        return result

    @ir.ops.fused_add_rms_norm.register_impl(  # type: ignore[untyped-decorator]
        CPU_NORMS, supports_args=_plain_sum, supported=here, inplace=True
    )
    def fused_add_rms_norm(
        x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
    ) -> tuple[Tensor, Tensor]:
        torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
        return x, x_residual
