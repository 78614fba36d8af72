"""Shapes of common models on the hub: the parts of config.json that determine a model's size.

They make it possible to plan memory for a model that is not on this machine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from swarm.models.folder import ModelFolder

_QWEN3 = {
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
    "tie_word_embeddings": True,
}
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "Qwen/Qwen3-0.6B": _QWEN3 | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28},
    "Qwen/Qwen3-1.7B": _QWEN3 | {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28},
    "Qwen/Qwen3-4B": _QWEN3
    | {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
    "Qwen/Qwen3-8B": _QWEN3
    | {
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
}
"""Size-related config fields by hub name."""
_NO_WORDS = {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}


def known_shape(name: str) -> str | None:
    """Return the model's hub name as spelled in `SHAPES`, or None if its shape is not known."""
    return next((each for each in SHAPES if each.lower() == name.lower()), None)


def outline(known: str, folder: Path) -> ModelFolder:
    """Fill an empty folder with the files that an engine reads before it boots, but without weights or a vocabulary.

    That is enough to plan memory.
    """
    for file, content in (("config.json", SHAPES[known]), ("tokenizer.json", _NO_WORDS)):
        (folder / file).write_text(json.dumps(content), encoding="utf-8")
    return ModelFolder(path=folder, name=known, fingerprint="")
