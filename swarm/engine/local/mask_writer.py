"""Runs in vLLM's worker: writes the candidates for each sampled token, for requests that ask for them.

After grammar, penalties, temperature, min-p, top-k and top-p, tokens that cannot be sampled have log-probability -inf in a tensor
of the sampler. The files have the format of `swarm.engine.sampling.mask_files`. Only the worker loads this module.

Tensor suffixes: R rows (requests), V vocabulary.
"""

from __future__ import annotations

import os
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from swarm.engine.local.mask_rows import encode
from swarm.engine.sampling.mask_files import FLAG, FOLDER_VARIABLE, HEAD


def register() -> None:
    """Make vLLM's sampler keep its distributions and vLLM's model runner write the masks. Call it once per process."""
    folder = Path(os.environ[FOLDER_VARIABLE])
    sample, run = Sampler.sample, GPUModelRunner._sample

    @wraps(sample)
    def keeping(sampler: Any, *given: Any, **named: Any) -> tuple[Tensor, Tensor | None]:
        drawn, logprobs_RV = sample(sampler, *given, **named)
        sampler.drawn_from = logprobs_RV
        return drawn, logprobs_RV

    @wraps(run)
    def writing(runner: Any, *given: Any, **named: Any) -> Any:
        output = run(runner, *given, **named)
        logprobs_RV, runner.sampler.drawn_from = runner.sampler.drawn_from, None
        if logprobs_RV is not None:
            _write(runner, logprobs_RV, folder)
        return output

    Sampler.sample = keeping
    GPUModelRunner._sample = writing


def _write(runner: Any, logprobs_RV: Tensor, folder: Path) -> None:
    names = runner.input_batch.req_ids[: len(logprobs_RV)]
    wanted = [row for row, name in enumerate(names) if _wants(runner.requests[name])]
    if not wanted:
        return
    for row, encoded in zip(wanted, encode(logprobs_RV[wanted] > -torch.inf), strict=True):
        number = len(runner.requests[names[row]].output_token_ids)
        _append(folder / names[row], HEAD.pack(number, len(encoded)) + encoded)


def _wants(request: Any) -> bool:
    params = request.sampling_params
    return params is not None and FLAG in (params.extra_args or {})


def _append(path: Path, record: bytes) -> None:
    """Append a record. If the disk is full, only masks are lost, and the reader notices that they are missing."""
    try:
        with path.open("ab") as file:
            file.write(record)
    except OSError:
        path.unlink(missing_ok=True)
