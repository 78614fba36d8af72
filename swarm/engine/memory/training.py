"""Estimates the memory of a training step, in bytes, from the model's shape and the trained weights.

Counts as torch's allocator does: memory held between passes, and memory that a pass keeps for the backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass

from swarm.engine.memory.model import WIDTH, ModelShape
from swarm.protocol.runspec import ComputeType, LoraSpec

_WHOLE = WIDTH["float32"]
_MOMENTS = 2 * _WHOLE
"""Bytes of AdamW's moments per trained parameter."""
CHUNK_LOGITS = 32_000_000
"""Maximum number of logits held at a time, in the compute dtype: 64 MB in bfloat16."""
GPU_LOGITS = 4 * CHUNK_LOGITS
"""CHUNK_LOGITS for a GPU, which processes a whole chunk together."""
BLOCK_LOGITS = 3_200_000
"""Maximum number of logits processed in float32 at a time on the CPU, so that intermediate results stay in the cache."""
CHUNK_GRADIENT = 2_000_000
"""Number of entries of the output weight's gradient to compute and add at a time, so that products stay in the CPU's cache; on a GPU,
CHUNK_LOGITS. Working in parts avoids a second tensor of the gradient's size."""
OPTIMIZED_TOGETHER = 64_000_000
"""Number of parameters that the optimizer steps together on a GPU; meanwhile it also holds their old values and offloaded moments."""
_KEY_COPIES = 2
"""Assumed copies of each key and value on a GPU, where blocks with many readers are duplicated; the worst case is four."""
_MASK_WIDTH = 2
"""Bytes per query and key of the CPU's attention mask."""
FEWEST_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A run's training settings that affect memory.

    lora: None: all weights are trained.
    context: tokens of its longest calls.
    offload: keep moments and initial weights in host memory, and copy them to the device when they are read.
    """

    dtype: ComputeType
    lora: LoraSpec | None = None
    checkpointing: bool = False
    offload: bool = False
    on_gpu: bool = False
    context: int = 0

    @property
    def what(self) -> str:
        """What is trained, as text."""
        name = "all weights" if self.lora is None else f"adapters of rank {self.lora.rank}"
        offloaded = ", offloaded" if self.offload else ""
        twice = ", activations computed twice" if self.checkpointing else ""
        return name + offloaded + twice


@dataclass(frozen=True, slots=True)
class TrainerMemory:
    """The memory that one model's trainer needs, in bytes."""

    shape: ModelShape
    training: Training

    # -- held between passes ------------------------------------------------------------------------------------------

    @property
    def start(self) -> int:
        """The hosted weights as stored: runs begin with them, and the KL is measured against them."""
        return 0 if self.training.offload else self.shape.stored

    @property
    def weights(self) -> int:
        """Weights used for computation, except hosted weights used as they are; also adapters and their initial values."""
        if self.training.lora is None:
            return _WHOLE * self.shape.parameters
        matrices = self.shape.matrices + self.shape.embeddings
        hosted_themselves = self.shape.stored_as == self.training.dtype and not self.training.offload
        frozen = 0 if hosted_themselves else matrices * self._width
        return frozen + _WHOLE * self.shape.vectors + 2 * _WHOLE * self.trained

    @property
    def step(self) -> int:
        """Memory that the first step allocates and later ones reuse: gradients, moments, and copies in the compute dtype."""
        moments = 0 if self.training.offload else self.moments
        return _WHOLE * self.trained + moments + self._copies

    @property
    def moments(self) -> int:
        """The optimizer's moments."""
        return _MOMENTS * self.trained

    @property
    def standing(self) -> int:
        """Memory held between passes, independent of the batch."""
        return self.start + self.weights + self.step

    @property
    def resting(self) -> int:
        """Memory held between steps if moments, gradients and copies leave the device."""
        return self.start + self.weights

    @property
    def trained(self) -> int:
        """Number of trained parameters."""
        lora = self.training.lora
        return self.shape.parameters if lora is None else self.shape.adapted(lora.rank, lora.targets)

    @property
    def _copies(self) -> int:
        if self.training.dtype == "float32":
            return 0
        return self._width * (self.shape.matrices + self.shape.table if self.training.lora is None else self.trained)

    @property
    def _width(self) -> int:
        return WIDTH[self.training.dtype]

    # -- used by a pass -------------------------------------------------------------------------------------------------

    def kept(self, tokens: int) -> int:
        """Return the activations kept for the backward pass of this many tokens, computed together."""
        return tokens * self.token

    @property
    def token(self) -> int:
        """Activations kept for the backward pass of one token."""
        shape, layer = self.shape, self._layer
        inputs = shape.layers * shape.hidden * _WHOLE
        layers = inputs + layer if self.training.checkpointing else shape.layers * layer
        mask = 0 if self.training.on_gpu else _MASK_WIDTH * self.training.context
        return layers + 2 * _WHOLE * shape.hidden + mask

    @property
    def _layer(self) -> int:
        """Activations of one token in one layer: the inputs of norms, attention and the gated product."""
        shape, lora = self.shape, self.training.lora
        read_whole = 2 * shape.hidden  # the residual stream, by both norms
        if lora is None:
            read = 2 * shape.hidden + shape.query + shape.inner  # by the matrices
        elif self.training.dtype == "float32":  # by the adapters, which share their inputs
            read = 2 * shape.hidden + shape.query + shape.inner + lora.rank * len(lora.targets)
        else:
            read = shape.read_by(lora.targets) + lora.rank * len(lora.targets)
        attention = shape.query + 2 * shape.key
        if self.training.on_gpu:
            attention = 2 * shape.query + 2 * _KEY_COPIES * shape.key
        by_heads = shape.query + shape.key if shape.head_norms else 0
        gated = 3 * shape.inner
        return _WHOLE * read_whole + self._width * (read + attention + by_heads + gated)

    def peak(self, tokens: int, heads: int | None = None) -> int:
        """Return the peak memory, in addition to `standing`, of a step that computes this many tokens together.

        `heads` is the number of positions at which a token was sampled; None: all of them.
        """
        heads = tokens if heads is None else heads
        # The activations of one layer, only in the backward pass.
        recomputed = tokens * self._layer if self.training.checkpointing else 0
        forward = self.kept(tokens) - recomputed + self._logits(heads) + self._rows
        backward = self.kept(tokens) + tokens * self._way_back + self._width * self.shape.hidden * self.shape.inner
        return max(forward, backward, self._update, self._first_weights(tokens, heads))

    @property
    def _way_back(self) -> int:
        """Gradients of one token in the backward pass through one layer."""
        return 3 * self._width * self.shape.inner + 2 * _WHOLE * self.shape.hidden

    @property
    def _rows(self) -> int:
        """Memory for the rows of the output weight's gradient that are computed together and then added to it."""
        rows = CHUNK_LOGITS if self.training.on_gpu else CHUNK_GRADIENT
        return self._width * min(self.shape.table, rows) if self.training.lora is None else 0

    def _logits(self, heads: int) -> int:
        """Return the memory of passes over the vocabulary: logits, their float32 intermediates, and the hidden states."""
        gpu, words = self.training.on_gpu, self.shape.vocabulary
        chunk, block = (GPU_LOGITS, GPU_LOGITS) if gpu else (CHUNK_LOGITS, BLOCK_LOGITS)
        at_once = min(heads, max(1, chunk // words))
        logits = self._width * words * at_once * (2 if heads > at_once else 1)
        seen = words * min(heads, max(1, block // words)) * _WHOLE
        whole = seen if self.training.dtype == "float32" else 2 * seen
        return logits + whole + heads * self.shape.hidden * (_WHOLE + 2 * self._width)

    @property
    def _update(self) -> int:
        """Memory of the optimizer's update: old values of one part of the weights at a time, and its offloaded moments."""
        largest = max(self.shape.table, self.shape.hidden * self.shape.inner)
        together = OPTIMIZED_TOGETHER if self.training.on_gpu else largest
        if self.training.offload:  # AdamW steps larger weights by rows
            return (_WHOLE + _MOMENTS) * min(self.trained, together)
        return _WHOLE * min(self.trained, max(largest, together))

    def _first_weights(self, tokens: int, heads: int) -> int:
        """Return the memory for the KL. Offloaded or narrower initial weights are loaded one layer at a time, the output embedding
        last."""
        training, shape = self.training, self.shape
        if training.lora is not None or (shape.stored_as == training.dtype and not training.offload):
            return 0
        number = _WHOLE if training.dtype == "float32" else shape.stored // max(1, shape.parameters)
        layer = number * shape.matrices // shape.layers if training.offload or training.dtype == "float32" else 0
        return max(layer + tokens * self._way_back, self._width * shape.table + self._logits(heads))

    def tokens_within(self, room: int, most: int) -> int:
        """Return how many tokens fit into this room in addition to `standing`, in steps of 256; at least 256, at most `most`."""
        fit = FEWEST_TOKENS
        while fit + FEWEST_TOKENS <= most and self.peak(fit + FEWEST_TOKENS) <= room:
            fit += FEWEST_TOKENS
        return fit
