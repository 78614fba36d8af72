"""Speed-ups for vLLM's CPU backend; no effect on other devices.

vLLM has compiled RMS norms, but its models use plain torch ones, which take a tenth of the decoding time of a model with thirty
layers. Its sampler generates noise for the whole vocabulary, which takes a seventh of the decoding time. vLLM's worker imports
this module before it creates its sampler and sets its priorities (`--ir-op-priority`).
"""

import torch
from torch import Tensor, nn
from vllm import ir
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm.platforms import current_platform
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler, apply_top_k_top_p

from swarm.engine.local.draw import draw, noises
from swarm.engine.sampling.server import CPU_NORMS


def _plain(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    """Return whether the compiled norm supports these arguments: contiguous rows, normalised over the whole last dimension, with a
    weight of their dtype."""
    return variance_size is None and weight is not None and weight.dtype == x.dtype and x.is_contiguous()


def _plain_sum(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    return _plain(x, weight, epsilon, variance_size) and x_residual.is_contiguous() and x_residual.dtype == x.dtype


def _sample(
    sampler: TopKTopPSampler,
    logits: Tensor,
    generators: dict[int, torch.Generator],
    k: Tensor | None,
    p: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Sample tokens in place of `TopKTopPSampler.forward_cpu`; also return what logprobs_mode asks for. `generators` maps each seeded
    row to its generator."""
    logits = apply_top_k_top_p(logits, k, p)
    logprobs = logits.log_softmax(dim=-1, dtype=torch.float32)
    rows, size = logprobs.shape
    noise = torch.empty(rows, noises(size), dtype=torch.float64).exponential_()
    for row, generator in generators.items():
        noise[row].exponential_(generator=generator)
    processed = {"processed_logprobs": logprobs, "processed_logits": logits}
    return draw(logprobs, noise), processed.get(sampler.logprobs_mode)


def register() -> None:
    """Offer the compiled norms to vLLM as CPU_NORMS, and make its sampler use `draw`. Call it once per process."""
    here = current_platform.is_cpu()
    if here:
        current_platform.import_kernels()
        TopKTopPSampler.forward_cpu = _sample

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


def pack_output_layer(model: nn.Module) -> None:
    """Repack the CPU kernels' copy of the output layer from its current weight; other devices keep no copy.

    If the input and output embeddings are tied, vLLM's reload updates the tensor but not this packed copy. Without this call, tokens
    would always be sampled with the initial output layer.
    """
    for layer in model.modules():
        if isinstance(layer, ParallelLMHead) and isinstance(layer.quant_method, UnquantizedEmbeddingMethod):
            layer.quant_method.process_weights_after_loading(layer)
