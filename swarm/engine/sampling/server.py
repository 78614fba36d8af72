"""vLLM's own server as a child: its command line, its environment, and its memory needs.

Reads the model's files; imports neither torch nor vllm. Tests show that its flags give correct tokens: log-probabilities
after temperature, no chunked prefill on the CPU (where a chunked prefill of a seeded request crashes the engine).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from foundation.paths import packages_root, user_cache_dir
from swarm.engine.devices import DeviceName
from swarm.engine.machine import Device, compute_type, thread_settings, yielding_threads
from swarm.engine.memory.host import check
from swarm.engine.memory.model import GIB, ModelShape
from swarm.engine.sampling.mask_files import FOLDER_VARIABLE, mask_folder
from swarm.engine.seam import EngineError
from swarm.engine.training.supervisor import ChildCommand
from swarm.protocol.runspec import ComputeType

CHATML_TOOLS = Path(__file__).resolve().parents[2] / "models" / "chat_template.jinja"
_DEFAULT_MODEL_LEN = 4096
_BLOCK_TOKENS = 32
"""Tokens per block; prompts share whole blocks of computed tokens. vLLM's 128 on the CPU is longer than most shared prompts of a
group."""
_PROCESS_BYTES: dict[Device, int] = {"cpu": int(1.2 * GIB), "cuda": 3 * GIB}
"""Bytes of a Python process with torch and vLLM, before any weights; on a GPU, of two processes with CUDA's libraries."""
_LOADING_BYTES = GIB // 2
"""Bytes of host memory for loading weights to a GPU: they pass through it one tensor at a time."""
_LEAST_KV_BYTES = GIB // 2
_MOST_KV_BYTES: dict[Device, int] = {"cpu": 2 * GIB, "cuda": 16 * GIB}
NO_BLOCKS = "No available memory for the cache blocks"
"""vLLM's message when its share has no memory left for keys and values."""
OUT_OF_MEMORY = (
    "OutOfMemoryError",
    "CUDA out of memory",
    "CUDA error: out of memory",
    NO_BLOCKS,
    "is less than desired GPU memory utilization",
)
"""Messages of torch and vLLM when a GPU's memory is full."""
MOST_SEQS: dict[Device, int] = {"cpu": 64, "cuda": 256}
_CHUNK_TOKENS = 8192
_SPARE_KV_TOKENS = 256
"""Spare tokens for partial blocks and for the block that vLLM reserves; with fewer, vLLM does not boot."""
CPU_NORMS = "swarm_cpu"
"""The worker's name for its CPU norms (cpu_kernels.py). Where they do not apply, vLLM falls back to its own."""
VLLM_SERVER = "vllm.entrypoints.openai.api_server"
FORKING_SERVER = "swarm.engine.local.forking_server"
_READ_BY_IMPORTS = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_CPP_DYNAMIC_THREADS": "1"}
"""Variables that vLLM sets before it spawns a CPU core. We set them earlier, because a forked core has already imported the modules
that read them."""
_IN_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""Executor that runs the model within the engine core. A separate core process would spin while it waits for the worker, and take
one of two CPU cores. The full name is needed, because on the CPU vLLM maps the short form `uni` to two processes."""
_PROMPT_TAILS = {
    "kv_connector": "TailsConnector",
    "kv_connector_module_path": "swarm.engine.local.tails_connector",
    "kv_role": "kv_producer",  # as a consumer vLLM would keep blocks longer, for out-of-order writers
}
_CPU_FLAGS = [
    *(
        "--no-enable-chunked-prefill",
        "--enforce-eager",
        "--distributed-executor-backend",
        _IN_PROCESS,
        "--block-size",
        str(_BLOCK_TOKENS),
    ),
    *("--ir-op-priority", json.dumps({"rms_norm": [CPU_NORMS], "fused_add_rms_norm": [CPU_NORMS]})),
    *("--kv-transfer-config", json.dumps(_PROMPT_TAILS)),
]
"""Flags only for the CPU: a GPU has its own kernels, block sizes and graphs, and its engine core does not compete for CPU cores."""
_GPU_FLAGS = ["--enable-chunked-prefill", "--gpu-memory-utilization", "0.01"]
"""Without the utilization flag, vLLM refuses to start unless nine tenths of the device are free, but the trainer shares the device.
--kv-cache-memory-bytes determines the actual memory."""
_IMPORTS_S = 20.0
_READ_BYTES_PER_S = 0.5 * GIB
_TOOL_PARSERS = (("<tool_call>", "hermes"), ("[TOOL_CALLS]", "mistral"), ("<|python_tag|>", "llama3_json"))


_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Adapter ranks that vLLM supports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedAdapter:
    """An adapter that is served on top of the hosted weights, without merging. `folder` is as peft writes it."""

    folder: Path
    rank: int

    @property
    def room(self) -> int:
        """The rank that the child reserves memory for."""
        return next(rank for rank in _RANKS if rank >= self.rank)


@dataclass(frozen=True, kw_only=True)
class VllmSettings:
    """Settings of a vLLM child. `max_model_len` None: the model's own, at most 4096."""

    model_dir: Path
    model_name: str
    log_path: Path
    index: int = 0
    """Index of the device within its kind, from 0."""
    replicas: int = 1
    """Number of vLLM children that the engine runs. Children on one CPU share its cores."""
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    """Maximum number of sequences sampled together; None: 64 on the CPU, 256 on a GPU."""
    device: Device = "cpu"
    dtype: ComputeType | None = None
    """Compute dtype; None: the fast one on this device."""
    kv_cache_bytes: int | None = None
    """Size of the KV cache in bytes. None: room for every sequence at full length, between 0.5 and 2 GiB (on a GPU up to 16), but
    always enough for one. On a GPU, a plan sets it."""
    sleep_mode: bool = False
    """On a GPU: whether the child can release its memory and allocate it again."""

    @cached_property
    def config(self) -> dict[str, Any]:
        """The model's config.json."""
        return _read_json(self.model_dir / "config.json", required=True)

    @cached_property
    def shape(self) -> ModelShape:
        """The model's shape. Raises: EngineError for weights that are not safetensors."""
        return ModelShape.of(self.model_dir, self.config)

    @cached_property
    def model_len(self) -> int:
        """Maximum tokens of prompt and answer together.

        Raises: EngineError if the model cannot hold max_model_len, or the trainer would compute other probabilities than the sampler.
        """
        longest = int(self.config.get("max_position_embeddings", _DEFAULT_MODEL_LEN))
        _refuse_unlike_rotations(self.model_name, self.config)
        one_rotation = _before_other_rotations(self.config)
        if self.max_model_len is None:
            return min(longest, one_rotation or longest, _DEFAULT_MODEL_LEN)
        if one_rotation is not None and self.max_model_len > one_rotation:
            raise EngineError(
                f"{self.model_name} rotates positions differently in contexts of more than {one_rotation} tokens (LongRoPE): "
                "inference would do so in every call but the trainer only in some, so their log-probabilities would differ; "
                f"serve with --max-model-len {one_rotation}"
            )
        if self.max_model_len > longest:
            raise EngineError(
                f"{self.model_name} holds at most {longest} tokens, but {self.max_model_len} were requested"
            )
        return self.max_model_len

    @property
    def device_name(self) -> DeviceName:
        return DeviceName(self.device, self.index)

    @property
    def child_name(self) -> str:
        """The child's name in logs and errors."""
        return "inference (vLLM)" if self.replicas == 1 else f"inference (vLLM on {self.device_name})"

    @property
    def sequences(self) -> int:
        return self.max_num_seqs or MOST_SEQS[self.device]

    @property
    def batched_tokens(self) -> int:
        """Maximum number of prompt tokens per engine step: whole prompts on the CPU, parts of prompts on a GPU."""
        return max(4096, self.model_len) if self.device == "cpu" else _CHUNK_TOKENS

    @cached_property
    def compute_dtype(self) -> ComputeType:
        return self.dtype or compute_type(self.device)

    @cached_property
    def kv_bytes(self) -> int:
        if self.kv_cache_bytes is not None:
            return self.kv_cache_bytes
        per_token = self.shape.cached(self.compute_dtype)
        wanted = max(self.sequences * self.model_len * per_token, _LEAST_KV_BYTES)
        one_sequence = (self.model_len + _SPARE_KV_TOKENS) * per_token
        return max(min(wanted, _MOST_KV_BYTES[self.device]), one_sequence)

    @cached_property
    def chat_template(self) -> Path | None:
        """Our template if the model's own uses ChatML but does not support tools; None: use the model's own."""
        own = self._own_template()
        if "tools" in own:
            return None
        special = (self.model_dir / "tokenizer.json").read_text(encoding="utf-8")
        return CHATML_TOOLS if '"<|im_start|>"' in special and '"<|im_end|>"' in special else None

    def memory_needed(self) -> int:
        """Return the approximate bytes of host memory: the process, weights (twice while they load) and KV cache.

        On a GPU: only the process, and the weights if they move to host memory during sleep.
        """
        weights = self.shape.served(self.compute_dtype)
        if self.device == "cuda":
            return _PROCESS_BYTES["cuda"] + _LOADING_BYTES + (weights if self.sleep_mode else 0)
        return _PROCESS_BYTES["cpu"] + 2 * weights + self.kv_bytes

    def least_memory(self) -> int:
        """Return the minimum bytes of host memory for booting: weights loaded, almost no requests."""
        if self.device == "cuda":
            return self.memory_needed()
        weights = self.shape.served(self.compute_dtype)
        return _PROCESS_BYTES["cpu"] + weights + min(self.kv_bytes, _LEAST_KV_BYTES)

    def boot_s(self) -> float:
        """Return the estimated seconds until the child serves on an idle machine: imports, then reading the weights."""
        return _IMPORTS_S + self.shape.stored / _READ_BYTES_PER_S

    def check_memory(self) -> None:
        """Check that the machine has enough memory left for this child. Raises: EngineDown."""
        check(self.model_name, self.memory_needed())

    def command(self, socket: Path, adapter: ServedAdapter | None = None) -> ChildCommand:
        """Return the command for a child that serves at `socket`. An adapter, if given, is served under the model's name.

        The child's temporary files, including further sockets, are in the socket's directory and are removed with it.
        """
        name = self.model_name if adapter is None else f"{self.model_name}:hosted"
        module, env = self._program()
        argv = [
            *(sys.executable, "-m", module),
            *("--model", str(self.model_dir), "--served-model-name", name, "--uds", str(socket)),
            *(
                "--dtype",
                self.compute_dtype,
                "--max-model-len",
                str(self.model_len),
                "--max-num-seqs",
                str(self.sequences),
            ),
            *("--kv-cache-memory-bytes", str(self.kv_bytes), "--enable-scale-out"),
            *("--max-num-batched-tokens", str(self.batched_tokens)),
            *("--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"),
            *("--worker-extension-cls", "swarm.engine.local.worker_extension.SampledCounts"),
            *("--disable-uvicorn-access-log", "--uvicorn-log-level", "warning"),
            "--no-log-error-stack",  # otherwise each open call logs the core's death; its cause is logged anyway
        ]
        if self.device == "cpu":
            argv += _CPU_FLAGS
        else:
            argv += _GPU_FLAGS + (["--enable-sleep-mode"] if self.sleep_mode else [])
        if self.chat_template is not None:
            argv += ["--chat-template", str(self.chat_template)]
        if (parser := self.tool_parser) is not None:
            argv += ["--enable-auto-tool-choice", "--tool-call-parser", parser]
        if adapter is not None:
            hosted = {"name": self.model_name, "path": str(adapter.folder)}
            argv += ["--enable-lora", "--max-loras", "1", "--max-cpu-loras", "1"]
            argv += ["--max-lora-rank", str(adapter.room), "--lora-modules", json.dumps(hosted)]
        env["TMPDIR"] = str(socket.parent)
        env[FOLDER_VARIABLE] = str(mask_folder(socket))
        return ChildCommand(name=self.child_name, argv=argv, env=env, log_path=self.log_path)

    def _program(self) -> tuple[str, dict[str, str]]:
        """Return the server module to run, and its environment. If threads are not bound to cores, they may start before the engine
        core, so the server can fork it."""
        env = _compiled_code(os.environ) | child_environment(os.environ, sharing=self._sharing) | REUSE_MEMORY
        env |= self.device_name.environment(os.environ)
        yielding = yielding_threads(os.environ) if self.device == "cpu" else {}
        if yielding and env.get("VLLM_CPU_OMP_THREADS_BIND") == "nobind":
            return FORKING_SERVER, env | yielding | _READ_BY_IMPORTS
        return VLLM_SERVER, env | yielding

    @property
    def _sharing(self) -> int:
        """Number of these children that compute on the same cores."""
        return self.replicas if self.device == "cpu" else 1

    @cached_property
    def tool_parser(self) -> str | None:
        """vLLM's tool-call parser for the template; None if the template does not support tools."""
        template = self._own_template() if self.chat_template is None else self.chat_template.read_text()
        return next((parser for mark, parser in _TOOL_PARSERS if mark in template), None)

    def _own_template(self) -> str:
        file = self.model_dir / "chat_template.jinja"
        if file.exists():
            return file.read_text(encoding="utf-8")
        return str(_read_json(self.model_dir / "tokenizer_config.json").get("chat_template") or "")


VLLM_ANYWHERE = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the other runner, GPUs' default, does not keep the tokens sampled so far
    "HF_HUB_OFFLINE": "1",
}
"""vLLM's environment on every machine."""
REUSE_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
"""Makes malloc keep freed memory: returning and reallocating it doubles the time of a training step. Weights also load faster."""


def _compiled_code(environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables with which vLLM caches the code that it compiles for this machine; compiling it anew would add seconds to the
    first call.

    They disable precompiled headers, which torch keeps among the temporary files and would rebuild for each child.
    """
    try:
        folder = user_cache_dir() / "inductor"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # no room for it, or no home
        return {}
    if not os.access(folder, os.W_OK):
        return {}
    return {"TORCHINDUCTOR_CACHE_DIR": str(folder), "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0"}


def child_environment(environ: Mapping[str, str], *, sharing: int = 1) -> dict[str, str]:
    """Return the child's environment: ours without keys and tokens, offline, with threads set for this machine.

    `sharing` is the number of such children that share the cores.
    """
    secret = ("KEY", "TOKEN", "SECRET", "PASSWORD")
    env = {name: value for name, value in environ.items() if not name.upper().endswith(secret)}
    paths = [str(packages_root()), *filter(None, [env.get("PYTHONPATH")])]
    return (
        thread_settings(env, sharing=sharing)
        | VLLM_ANYWHERE
        | {"PYTHONPATH": os.pathsep.join(paths), "VLLM_SERVER_DEV_MODE": "1"}
    )


def _refuse_unlike_rotations(name: str, config: Mapping[str, Any]) -> None:
    """Refuse a model whose dynamic RoPE the trainer and inference would compute differently.

    With RoPE type `dynamic`, neither changes positions up to the model's length, unless the config has fields that only vLLM reads.
    Raises: EngineError for a model with such a field.
    """
    rotation = config.get("rope_parameters") or config.get("rope_scaling") or {}
    for each in (rotation, *(value for value in rotation.values() if isinstance(value, dict))):
        read_by_one = sorted({"alpha", "max_trained_positions"} & each.keys())
        if "dynamic" in (each.get("rope_type"), each.get("type")) and read_by_one:
            raise EngineError(
                f"{name} rotates positions dynamically by {' and '.join(read_by_one)}, which inference reads but the trainer "
                "does not: their log-probabilities would differ; serve another model"
            )


def _before_other_rotations(config: Mapping[str, Any]) -> int | None:
    """Return the longest context, in tokens, in which a model with LongRoPE uses its short factors; None if it has one set of factors.

    vLLM chooses by the longest context that is served, transformers by the longest row of each forward pass.
    """
    rotation = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not {"short_factor", "long_factor"} <= rotation.keys():
        return None
    own = rotation.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    return None if own is None else int(own)


def _read_json(file: Path, *, required: bool = False) -> dict[str, Any]:
    try:
        found = json.loads(file.read_bytes())
    except FileNotFoundError as error:
        if required:
            raise EngineError(f"{file} is missing: {file.parent} is not a model checkpoint") from error
        return {}
    except ValueError as error:
        raise EngineError(f"{file} is not JSON ({error}); fetch or copy the model again") from error
    if not isinstance(found, dict):
        raise EngineError(f"{file} is not a JSON object")
    return found
