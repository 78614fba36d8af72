"""A model's size, from its config.json and the headers of its weight files."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from swarm.engine.seam import EngineError
from swarm.protocol.runspec import ComputeType

GIB = 1 << 30
WIDTH: dict[ComputeType, int] = {"bfloat16": 2, "float32": 4}
"""Bytes per number."""
_HEADER_LIMIT = 100 << 20
_DTYPES: dict[str, ComputeType] = {"BF16": "bfloat16", "F32": "float32"}
"""Compute dtypes by their names in safetensors' headers."""
_HEAD_NORMS = {"qwen3", "gemma3", "gemma3_text", "olmo2"}
"""Model types that normalise the queries and keys of each head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder with gated layers.

    query, key: width of all query heads together, and of all key heads together.
    parameters: number of parameters.
    stored: bytes of its weight files.
    stored_as: dtype of its largest weight; None if nothing is computed in that dtype, such as float16.
    """

    layers: int
    hidden: int
    inner: int
    heads: int
    query: int
    key: int
    vocabulary: int
    tied: bool
    head_norms: bool
    parameters: int
    stored: int
    stored_as: ComputeType | None

    @classmethod
    def of(cls, model_dir: Path, config: Mapping[str, Any]) -> ModelShape:
        """Return the shape of a model from its config.json and weight files; without weight files, the shape is `described`.

        Raises: EngineError for weights that are not safetensors.
        """
        described, headers = cls.described(config), _headers(model_dir)
        if not headers:
            return described
        largest = max(headers.values(), key=_numbers)
        return replace(
            described,
            parameters=sum(map(_numbers, headers.values())),
            stored=weight_bytes(model_dir),
            stored_as=_DTYPES.get(largest["dtype"]),
        )

    @classmethod
    def described(cls, config: Mapping[str, Any]) -> ModelShape:
        """Return the shape without weight files, assuming that the model is stored in bfloat16."""
        text = config.get("text_config") or config
        hidden = int(text.get("hidden_size", 4096))
        heads = int(text.get("num_attention_heads") or 32)
        key_heads = int(text.get("num_key_value_heads") or heads)
        width = int(text.get("head_dim") or hidden // heads)
        shape = cls(
            layers=int(text.get("num_hidden_layers", 32)),
            hidden=hidden,
            inner=int(text.get("intermediate_size") or 4 * hidden),
            heads=heads,
            query=heads * width,
            key=key_heads * width,
            vocabulary=int(text.get("vocab_size", 32_000)),
            tied=bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))),
            head_norms=text.get("model_type") in _HEAD_NORMS,
            parameters=0,
            stored=0,
            stored_as="bfloat16",
        )
        count = shape.matrices + shape.embeddings + shape.vectors
        return replace(shape, parameters=count, stored=WIDTH["bfloat16"] * count)

    @property
    def matrices(self) -> int:
        """Number of parameters in the layers' matrices."""
        return self.layers * self.hidden * (2 * self.query + 2 * self.key + 3 * self.inner)

    @property
    def table(self) -> int:
        """Number of parameters in one embedding."""
        return self.vocabulary * self.hidden

    @property
    def embeddings(self) -> int:
        """Number of parameters in the input and output embeddings, counted once if they are tied."""
        return self.table if self.tied else 2 * self.table

    @property
    def vectors(self) -> int:
        """Number of parameters in the norms."""
        of_heads = 2 * self.query // self.heads if self.head_norms else 0
        return self.layers * (2 * self.hidden + of_heads) + self.hidden

    def adapted(self, rank: int, targets: Sequence[str]) -> int:
        """Return the number of parameters in adapters of this rank at these layers."""
        ends = self._ends()
        return self.layers * rank * sum(sum(ends[target]) for target in targets if target in ends)

    def _ends(self) -> dict[str, tuple[int, int]]:
        """Return the input and output width of each matrix of a layer."""
        return {
            "q_proj": (self.hidden, self.query),
            "k_proj": (self.hidden, self.key),
            "v_proj": (self.hidden, self.key),
            "o_proj": (self.query, self.hidden),
            "gate_proj": (self.hidden, self.inner),
            "up_proj": (self.hidden, self.inner),
            "down_proj": (self.inner, self.hidden),
        }

    def read_by(self, targets: Sequence[str]) -> int:
        """Return how many input values these matrices of one layer read per token."""
        ends = self._ends()
        return sum(ends[target][0] for target in targets if target in ends)

    def served(self, dtype: ComputeType) -> int:
        """Return the bytes of the weights in inference: as stored, but in float32 if that is the compute dtype."""
        return max(self.stored, WIDTH[dtype] * self.parameters) if dtype == "float32" else self.stored

    def cached(self, dtype: ComputeType) -> int:
        """Return the bytes of the keys and values of one token."""
        return 2 * self.layers * self.key * WIDTH[dtype]


def weight_bytes(model_dir: Path) -> int:
    """Return the bytes of the weights as stored."""
    return sum(file.stat().st_size for file in model_dir.glob("*.safetensors"))


def parameters(model_dir: Path) -> int:
    """Return the number of parameters. Raises: EngineError."""
    return sum(map(_numbers, _headers(model_dir).values()))


def stored_shapes(model_dir: Path) -> dict[str, list[int]]:
    """Return the shape of each stored tensor, by name. Raises: EngineError."""
    return {name: header["shape"] for name, header in _headers(model_dir).items()}


def _headers(model_dir: Path) -> dict[str, dict[str, Any]]:
    """Return the header of each stored tensor, by name. Raises: EngineError."""
    found = [_headers_in(file) for file in sorted(model_dir.glob("*.safetensors"))]
    return {name: header for headers in found for name, header in headers.items()}


def _headers_in(file: Path) -> dict[str, dict[str, Any]]:
    with file.open("rb") as stream:
        start = stream.read(8)
        size = struct.unpack("<Q", start)[0] if len(start) == 8 else _HEADER_LIMIT + 1
        if size > _HEADER_LIMIT:
            raise EngineError(f"{file} is not a safetensors file")
        headers: dict[str, dict[str, Any]] = json.loads(stream.read(size))
    headers.pop("__metadata__", None)
    return headers


def _numbers(header: Mapping[str, Any]) -> int:
    return math.prod(header["shape"])
