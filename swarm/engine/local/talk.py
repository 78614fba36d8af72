"""A conversation with one set of weights, token by token, in this process: to look at a checkpoint, not to serve it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers.decoders import DecodeStream
from transformers import AutoTokenizer
from transformers.utils import logging as transformers_logging

from foundation.ids import derived_seed
from swarm.engine.local.checkpoints import Checkpoint
from swarm.engine.local.trained_model import start_from
from swarm.engine.local.vllm_server import VllmSettings
from swarm.models.folder import ModelFolder


class Talk:
    """Remembers what was said. The template is the one that the model is served with."""

    def __init__(self, model: Any, tokenizer: Any, *, system: str | None, temperature: float, max_tokens: int) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._said = [{"role": "system", "content": system}] if system is not None else []
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
    ) -> Talk:
        """checkpoint None: the hosted model itself. Raises: EngineError."""
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
        """What the model says to this, piece by piece."""
        self._said.append({"role": "user", "content": text})
        ids = self._tokenizer.apply_chat_template(
            self._said, add_generation_prompt=True, return_tensors="pt", return_dict=False
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
        self._said.append({"role": "assistant", "content": "".join(pieces)})

    def _drawn(self, logits_V: torch.Tensor) -> int:
        if self._temperature == 0:
            return int(logits_V.argmax())
        return int(torch.multinomial((logits_V / self._temperature).softmax(-1), 1, generator=self._random))

    def _ends(self) -> set[int]:
        stated = self._model.generation_config.eos_token_id
        ends = set(stated if isinstance(stated, list) else [stated]) | {self._tokenizer.eos_token_id}
        return {int(end) for end in ends if end is not None}
