"""A served model's output layer after its weights were replaced. Imported by vLLM's workers alone."""

from __future__ import annotations

from torch import nn
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod


def pack_again(model: nn.Module) -> None:
    """Make what CPU kernels keep of the output layer from its present weight; elsewhere nothing is kept.

    Where input and output embedding are one tensor, vLLM's reload brings that up to date, and not the copy that its CPU
    kernels packed of it for the output layer: tokens would be drawn by the output layer of the first weights for ever.
    """
    for layer in model.modules():
        if isinstance(layer, ParallelLMHead) and isinstance(layer.quant_method, UnquantizedEmbeddingMethod):
            layer.quant_method.process_weights_after_loading(layer)
