"""A checkpoint as a standalone model: export it to a folder, or chat with it in this process.

Knows folders and tensors, but no servers or their state. An exported folder can be loaded without our code.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from tokenizers.decoders import DecodeStream
from torch import Tensor
from transformers import AutoTokenizer
from transformers.utils import logging as transformers_logging

from foundation.ids import derived_seed
from foundation.paths import write_atomically
from swarm.engine.local.adapters import CONFIG_FILE, WEIGHTS_FILE, folder_config, folder_weights, merged
from swarm.engine.local.checkpoints import Checkpoint, wider, write_tensors
from swarm.engine.local.forward import DTYPES
from swarm.engine.machine import compute_type
from swarm.engine.sampling.server import VllmSettings
from swarm.engine.seam import EngineError
from swarm.models.folder import MANIFEST, ModelFolder, write_manifest
from swarm.protocol.runspec import LoraSpec

_COPIED = (".json", ".jinja", ".txt", ".model")
_WEIGHTS = "model.safetensors"


def trained_weights(model: ModelFolder, checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Return the weights as they were served, under the hosted checkpoint's names; adapters are merged into the weights they adapt.

    They have the hosted dtypes, or float32 if the run computed in float32: narrower weights would be a different model from the one
    that was evaluated. Raises: EngineError if the checkpoint began with another model.
    """
    if checkpoint.state.fingerprint != model.fingerprint:
        raise EngineError(
            f"the checkpoint of step {checkpoint.state.step} began with model {checkpoint.state.fingerprint[:12]}, not "
            f"with {model.name} ({model.fingerprint[:12]}); name the model that the run started with"
        )
    hosted = _stored_tensors(model.path)
    parameters = checkpoint.state.spec.parameters
    weights = dict(checkpoint.weights)
    if isinstance(parameters, LoraSpec):
        weights = merged(hosted, weights, parameters)
    if strange := sorted(weights.keys() - hosted.keys()):
        raise EngineError(f"the checkpoint has weights that {model.name} lacks: {strange[:3]}")
    computed = _computed_in(checkpoint)
    return {name: weight.to(wider(hosted[name].dtype, computed)) for name, weight in weights.items()}


def export_model(model: ModelFolder, checkpoint: Checkpoint | None, to: Path) -> ModelFolder:
    """Write a Hugging Face folder atomically. Without a checkpoint, export step 0, the hosted model itself.

    The folder includes the chat template that the model was served with. Raises: EngineError if `to` is not empty, OSError.
    """
    unfinished = _begin(to)
    for file in model.path.iterdir():
        if file.suffix in _COPIED and "safetensors" not in file.name and file.name != MANIFEST and file.is_file():
            shutil.copyfile(file, unfinished / file.name)
    template = VllmSettings(model_dir=model.path, model_name=model.name, log_path=Path()).chat_template
    if template is not None:
        shutil.copyfile(template, unfinished / "chat_template.jinja")
    weights = _stored_tensors(model.path) if checkpoint is None else trained_weights(model, checkpoint)
    write_tensors(unfinished / _WEIGHTS, weights, {name: weight.dtype for name, weight in weights.items()})
    if checkpoint is not None and _computed_in(checkpoint) is torch.float32:
        _declare_float32(unfinished / "config.json")
    return _finish(unfinished, to, model, checkpoint)


def export_adapter(model: ModelFolder, checkpoint: Checkpoint, to: Path) -> ModelFolder:
    """Write only the adapter, as a folder that peft and vLLM load on top of the hosted model.

    Raises: EngineError if the run trained all weights or `to` is not empty; OSError.
    """
    parameters = checkpoint.state.spec.parameters
    if not isinstance(parameters, LoraSpec):
        raise EngineError(f"{checkpoint.state.run_id} trained all weights: it has no adapter; export the whole model")
    unfinished = _begin(to)
    weights = folder_weights(checkpoint.weights)
    write_tensors(unfinished / WEIGHTS_FILE, weights, {name: one.dtype for name, one in weights.items()})
    write_atomically(
        unfinished / CONFIG_FILE, json.dumps(folder_config(parameters, str(model.path)), indent=1).encode()
    )
    return _finish(unfinished, to, model, checkpoint)


def _computed_in(checkpoint: Checkpoint) -> torch.dtype:
    dtype = checkpoint.state.spec.dtype
    if dtype == "auto":
        raise EngineError(f"the checkpoint of step {checkpoint.state.step} does not record its compute dtype")
    return DTYPES[dtype]


def _declare_float32(config: Path) -> None:
    """Set the config's dtype to float32, so that loaders keep the weights' full precision."""
    stated = json.loads(config.read_text(encoding="utf-8"))
    key = "torch_dtype" if "torch_dtype" in stated else "dtype"
    write_atomically(config, json.dumps(stated | {key: "float32"}, indent=2).encode())


def _begin(to: Path) -> Path:
    """Make an empty folder next to `to`, to be renamed when complete. Raises: EngineError, OSError."""
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise EngineError(f"{to} already exists; choose a new folder")
    unfinished = to.with_name(f".{to.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    return unfinished


def _finish(unfinished: Path, to: Path, model: ModelFolder, checkpoint: Checkpoint | None) -> ModelFolder:
    """Record the model's origin in the folder, and rename it to its final name."""
    source = f"{model.name}@{model.fingerprint[:12]}"
    if checkpoint is not None:
        source += f", {checkpoint.state.run_id}@{checkpoint.state.step}"
    manifest = write_manifest(unfinished, name=to.name, source=source)
    os.replace(unfinished, to)
    return ModelFolder(path=to, name=manifest.name, fingerprint=manifest.fingerprint)


def _stored_tensors(path: Path) -> Mapping[str, Tensor]:
    """Return every tensor of a folder's safetensors files."""
    found: dict[str, Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  (not a dictionary)
                found[name] = opened.get_tensor(name)
    if not found:
        raise EngineError(f"{path} holds no safetensors weights")
    return found


def start_from(model: ModelFolder, checkpoint: Checkpoint | None) -> torch.nn.Module:
    """Load the model with a checkpoint's weights, or the hosted model itself without a checkpoint."""
    from transformers import AutoModelForCausalLM

    here = DTYPES[compute_type("cpu")]
    dtype = here if checkpoint is None else wider(here, _computed_in(checkpoint))
    made = AutoModelForCausalLM.from_pretrained(model.path, dtype=dtype, local_files_only=True)
    if checkpoint is not None:
        weights = dict(made.named_parameters())
        with torch.no_grad():
            for name, trained in trained_weights(model, checkpoint).items():
                if name in weights:
                    weights[name].copy_(trained)
    loaded: torch.nn.Module = made.train(False)
    return loaded


class Chat:
    """A conversation with one set of weights, token by token. It uses the chat template that the model is served with."""

    def __init__(self, model: Any, tokenizer: Any, *, system: str | None, temperature: float, max_tokens: int) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._messages = [{"role": "system", "content": system}] if system is not None else []
        self._temperature = temperature
        self._max_tokens = max_tokens
        self._random = torch.Generator()

    @classmethod
    def with_checkpoint(
        cls,
        model: ModelFolder,
        checkpoint: Checkpoint | None,
        *,
        system: str | None,
        temperature: float,
        max_tokens: int,
        seed: int,
    ) -> Chat:
        """Start a conversation with a checkpoint's weights, or with the hosted model itself without a checkpoint. Raises:
        EngineError."""
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        tokenizer = AutoTokenizer.from_pretrained(model.path, local_files_only=True)
        served = VllmSettings(model_dir=model.path, model_name=model.name, log_path=Path())
        if served.chat_template is not None:
            tokenizer.chat_template = served.chat_template.read_text(encoding="utf-8")
        made = cls(
            start_from(model, checkpoint), tokenizer, system=system, temperature=temperature, max_tokens=max_tokens
        )
        made._random.manual_seed(derived_seed(seed, "talk"))
        return made

    @torch.inference_mode()
    def answer(self, text: str) -> Iterator[str]:
        """Yield the model's answer to this text, piece by piece."""
        self._messages.append({"role": "user", "content": text})
        ids = self._tokenizer.apply_chat_template(
            self._messages, add_generation_prompt=True, return_tensors="pt", return_dict=False
        )
        decoding, pieces, cache = DecodeStream(skip_special_tokens=True), [], None
        ends = self._ends()
        for _ in range(self._max_tokens):
            output = self._model(input_ids=ids, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            token = self._drawn(output.logits[0, -1].float())
            if token in ends:
                break
            piece = decoding.step(self._tokenizer.backend_tokenizer, token)
            if piece:
                pieces.append(piece)
                yield piece
            ids = torch.tensor([[token]])
        self._messages.append({"role": "assistant", "content": "".join(pieces)})

    def _drawn(self, logits_V: torch.Tensor) -> int:
        if self._temperature == 0:
            return int(logits_V.argmax())
        return int(torch.multinomial((logits_V / self._temperature).softmax(-1), 1, generator=self._random))

    def _ends(self) -> set[int]:
        stated = self._model.generation_config.eos_token_id
        ends = set(stated if isinstance(stated, list) else [stated]) | {self._tokenizer.eos_token_id}
        return {int(end) for end in ends if end is not None}
