"""verl's own configuration, made from our settings. Other values keep the defaults of verl's `ppo_trainer` file."""

from __future__ import annotations

import importlib.util
from typing import Any

from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from verl.plugin.platform import get_platform

from swarm.engine.sampling.server import MOST_SEQS
from swarm.engine.verl.room import BUCKET_BYTES
from swarm.engine.verl.settings import VerlSettings
from swarm.protocol.runspec import LoraSpec

_NARROW = {"bfloat16": "bf16", "float32": "fp32"}


def verl_config(settings: VerlSettings) -> Any:
    """Return the complete verl configuration, for its workers and replicas."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer")
    OmegaConf.set_struct(config, False)
    part = config.actor_rollout_ref
    part.model = OmegaConf.merge(part.model, _model(settings))
    part.actor = OmegaConf.merge(part.actor, _actor(settings))
    part.rollout = OmegaConf.merge(part.rollout, _rollout(settings))
    config.trainer = OmegaConf.merge(
        config.trainer, {"n_gpus_per_node": settings.ranks_per_node, "nnodes": settings.nodes}
    )
    OmegaConf.resolve(config)
    return config


def on_cpu() -> bool:
    """Return whether verl's platform, which its plugin hook chooses, computes on the CPU."""
    return bool(get_platform().device_name == "cpu")


def packed(settings: VerlSettings) -> bool:
    """Return whether rows are packed one after another in a rank's memory, instead of side by side with padding.

    Flash attention packs them. It is used if it is installed and the dtype is bfloat16, the only one of our dtypes that it supports.
    """
    return settings.dtype == "bfloat16" and importlib.util.find_spec("flash_attn") is not None


def configured_adapters(model: Any) -> LoraSpec | None:
    """Return the adapters in verl's configuration of a model; None: all weights are trained."""
    if not model.lora_rank:
        return None
    return LoraSpec(rank=model.lora_rank, alpha=model.lora["alpha"], targets=tuple(model.target_modules))


def _lora(adapters: LoraSpec | None) -> dict[str, Any]:
    """Return verl's adapter settings. Its `lora_alpha` is a whole number, so the exact alpha is stored beside it and the ranks apply
    that."""
    if adapters is None:
        return {}
    return {
        "lora_rank": adapters.rank,
        "lora_alpha": round(adapters.alpha),
        "lora": {"alpha": adapters.alpha},
        "target_modules": list(adapters.targets),
    }


def _model(settings: VerlSettings) -> dict[str, Any]:
    flash = packed(settings)
    return _lora(settings.adapters) | {
        "path": str(settings.model_dir),
        "use_remove_padding": flash,
        "enable_gradient_checkpointing": not on_cpu(),
        "use_fused_kernels": settings.fused_kernels is not None,
        "fused_kernel_options": {"impl_backend": settings.fused_kernels or "torch"},
        "override_config": {"attn_implementation": "flash_attention_2" if flash else "sdpa"},
    }


def _engine(settings: VerlSettings) -> dict[str, Any]:
    """Return verl's FSDP settings. Entropies are computed again for the backward pass, because most runs only measure them."""
    narrow = _NARROW[settings.dtype]
    return {
        "strategy": "fsdp2",
        "model_dtype": "fp32",
        "use_torch_compile": not on_cpu(),
        "param_offload": "parameters" in settings.offload,
        "optimizer_offload": "optimizer" in settings.offload,
        "entropy_checkpointing": True,
        "entropy_from_logits_with_chunking": True,
        "mixed_precision": {"param_dtype": narrow, "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
    }


def _actor(settings: VerlSettings) -> dict[str, Any]:
    """Return verl's actor settings. The learning rate here is never used, because each step sets its own."""
    return {
        "strategy": "fsdp2",
        "fsdp_config": _engine(settings),
        "use_torch_compile": not on_cpu(),
        "use_dynamic_bsz": True,
        "ppo_max_token_len_per_gpu": settings.tokens_per_rank,
        "ppo_mini_batch_size": settings.ranks,
        "optim": {"lr": 0.0, "weight_decay": 0.0, "total_training_steps": 1},
        "checkpoint": {
            "save_contents": ["model", "optimizer", "extra"],
            "load_contents": ["model", "optimizer", "extra"],
            "save_lora_only": True,
        },
    }


def _rollout(settings: VerlSettings) -> dict[str, Any]:
    """Return verl's rollout settings. `free_cache_engine` is off because we, not verl, decide when replicas sleep."""
    return {
        "name": "vllm",
        "n_gpus_per_node": settings.ranks_per_node,
        "dtype": settings.dtype,
        "tensor_model_parallel_size": settings.tensor_parallel,
        "gpu_memory_utilization": settings.sampling_memory,
        "free_cache_engine": False,
        "enable_sleep_mode": settings.sleep and not on_cpu(),
        "enforce_eager": on_cpu(),
        "load_format": "auto",
        "max_model_len": settings.max_model_len,
        "prompt_length": settings.max_model_len,
        "response_length": settings.max_model_len,
        "max_num_seqs": settings.max_num_seqs or MOST_SEQS["cpu" if on_cpu() else "cuda"],
        "max_num_batched_tokens": max(4096, settings.max_model_len),
        "enable_chunked_prefill": not on_cpu(),
        "logprobs_mode": "processed_logprobs",
        "log_prob_use_dynamic_bsz": True,
        "log_prob_max_token_len_per_gpu": settings.tokens_per_rank,
        "skip_tokenizer_init": False,
        "checkpoint_engine": {"backend": "naive", "update_weights_bucket_megabytes": BUCKET_BYTES >> 20},
        "engine_kwargs": {"vllm": _vllm(settings)},
    }


def _vllm(settings: VerlSettings) -> dict[str, Any]:
    """Return flags of vLLM's own server, besides those that verl sets."""
    return {
        "served_model_name": settings.model_name,
        "generation_config": "vllm",
        "enable_scale_out": True,
        "kv_cache_memory_bytes": settings.kv_cache_bytes,
        "chat_template": None if settings.chat_template is None else str(settings.chat_template),
        "enable_auto_tool_choice": True if settings.tool_parser is not None else None,
        "tool_call_parser": settings.tool_parser,
    }
