"""Divides one card between inference and the trainer, before anything starts.

What runs will train is not known yet, so there is a plan for all weights and one for adapters. The card is divided for all
weights if that fits, else for adapters; then runs that train all weights are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from swarm.engine.memory.host import trainer_host_memory
from swarm.engine.memory.model import GIB, ModelShape
from swarm.engine.memory.training import TrainerMemory, Training
from swarm.engine.seam import EngineError
from swarm.protocol.runspec import ComputeType, LoraSpec

INFERENCE_OVERHEAD = int(3.4 * GIB)
"""Bytes that vLLM takes besides weights and KV cache, even asleep: CUDA, graphs, one chunk of prompts. Measured on an H200 with
0.6B."""
TRAINER_OVERHEAD = GIB
"""Bytes that CUDA itself, its libraries' working memory and kernels take in the trainer."""
_SPARE_SHARE = 0.03
"""Share of the card that plans leave free, for fragmentation."""
_MOST_SEQUENCES = 256
_LEAST_SEQUENCES = 8
"""Minimum number of sequences sampled together: with fewer, sampling is too slow to be worth it."""
_SHORT = 4
"""Most calls are assumed to be no longer than the maximum length divided by this; the number of sequences and the minimum KV cache
depend on it."""
_KV_SHARE = 4
_LEAST_KV, _USUAL_KV = GIB // 2, 16 * GIB
MOST_TOKENS = 32_768
"""Maximum number of tokens in a micro-batch; larger ones gain nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What an operator asks for; None leaves it to the plan.

    model_len: maximum tokens of prompt and answer together.
    sleep: whether inference sleeps during a step.
    offload: whether to keep moments and initial weights in host memory.
    utilization: share of the card for inference, including its weights, as vLLM counts it.
    apart: whether the trainer has its own card of the same size.
    memory: bytes of host memory left after inference's processes; None: assume that there is enough.
    """

    model_len: int
    dtype: ComputeType
    sleep: bool | None = None
    offload: bool | None = None
    sequences: int | None = None
    kv_bytes: int | None = None
    utilization: float | None = None
    apart: bool = False
    memory: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CardPlan:
    """One division of a card.

    card: its bytes.
    turns: whether inference sleeps during a step.
    apart: whether the trainer has its own card.
    sequences: how many are sampled together.
    kv: bytes of KV cache.
    tokens: how many the trainer computes together.
    trainer_room: bytes that the trainer may use during a step, including its CUDA context.
    """

    card: int
    shape: ModelShape
    training: Training
    turns: bool
    apart: bool
    served: int
    kv: int
    sequences: int
    tokens: int
    trainer_room: int

    @property
    def memory(self) -> TrainerMemory:
        """Memory of the plan's trainer."""
        return TrainerMemory(self.shape, self.training)

    @property
    def between_steps(self) -> int:
        """Bytes that the trainer holds between steps."""
        return self.memory.resting if self.turns else self.memory.standing

    @property
    def sampling(self) -> int:
        """Bytes in use on inference's card while calls are sampled and nothing is trained."""
        inference = INFERENCE_OVERHEAD + self.served + self.kv
        if self.apart:
            return inference
        return inference + TRAINER_OVERHEAD + self.between_steps

    @property
    def at_peak(self) -> int:
        """Bytes in use on the trainer's card at the peak of a step."""
        return self.beside_trainer + TRAINER_OVERHEAD + self.memory.standing + self.memory.peak(self.tokens)

    @property
    def most(self) -> int:
        """Maximum bytes in use on a card at any time."""
        return max(self.sampling, self.at_peak)

    @property
    def beside_trainer(self) -> int:
        """Bytes that inference holds on the trainer's card during a step."""
        if self.apart:
            return 0
        return INFERENCE_OVERHEAD + (0 if self.turns else self.served + self.kv)

    @property
    def waiting(self) -> int:
        """Bytes kept in host memory instead of on the card, at least temporarily."""
        asleep = self.served if self.turns else 0
        first = self.shape.stored if self.training.offload else 0
        return asleep + first + (self.memory.moments if self.turns or self.training.offload else 0)

    @property
    def host(self) -> int:
        """Bytes of host memory in addition to inference's processes."""
        return trainer_host_memory(self.memory, turns=self.turns).standing + (self.served if self.turns else 0)

    def __str__(self) -> str:
        how = (
            "a GPU for each side" if self.apart else "inference sleeps during a step" if self.turns else "side by side"
        )
        parts = {
            "CUDA and graphs": INFERENCE_OVERHEAD + TRAINER_OVERHEAD,
            "weights served": self.served,
            "keys and values": self.kv,
            "trainer, between steps": self.between_steps,
            "trainer, at the peak of a step": self.memory.standing + self.memory.peak(self.tokens),
            "maximum in use": self.most,
        }
        if self.waiting:
            parts["kept in host memory"] = self.waiting
        head = f"{self.training.what}: {how}, {self.sequences} sequences, {self.tokens:,} tokens trained together"
        return "\n".join([head, *(f"  {name:32}{_gib(size):>10}" for name, size in parts.items())])


@dataclass(frozen=True, slots=True, kw_only=True)
class Plans:
    """What fits on a card. `whole` is the plan for training all weights, `adapters` that for LoRA of rank 16; None if it does not
    fit."""

    name: str
    card: int
    shape: ModelShape
    wishes: Wishes
    whole: CardPlan | None
    adapters: CardPlan | None

    @property
    def chosen(self) -> CardPlan:
        """The plan to use. Raises: EngineError if none fits; the message says what would fit."""
        found = self.whole or self.adapters
        if found is None:
            raise EngineError(
                f"{self.name} does not fit on this GPU of {_gib(self.card)}: {self._needed(LORA)}; {self.advice(LORA)}"
            )
        return found

    def why_not_whole(self) -> str:
        """Return why runs that train all weights are refused, and what to do instead; empty if they fit."""
        if self.whole is not None:
            return ""
        return (
            f"training all weights of {self.name} does not fit on this GPU of {_gib(self.card)}: {self._needed(None)}; train adapters "
            f'(parameters = {{"rank": 16}}), or {self.advice(None)}'
        )

    def _needed(self, lora: LoraSpec | None) -> str:
        divisions = [*_divisions(self.card, self.shape, self.wishes, lora)]
        least = min(divisions, key=lambda plan: plan.most)
        said = f"it needs at least {_gib(least.most)} ({least.training.what})"
        fits_offloaded = [plan.host for plan in divisions if plan.most <= usable(self.card)]
        if fits_offloaded and self.wishes.memory is not None:
            said += (
                f", and {_gib(min(fits_offloaded))} of host memory, of which {_gib(self.wishes.memory)} are available"
            )
        return said

    def advice(self, lora: LoraSpec | None) -> str:
        """Return advice on how to make these weights fit."""
        shorter = self.wishes.model_len // 2
        options = []
        if self.wishes.sleep is False:
            options.append("leave out --no-enable-sleep-mode")
        if self.wishes.offload is False and self._would_fit(lora, offload=None):
            options.append("leave out --no-offload")
        if self.wishes.kv_bytes is not None or self.wishes.utilization is not None:
            options.append("leave out --kv-cache-gib and --gpu-memory-utilization")
        if shorter >= 512 and self._would_fit(lora, model_len=shorter):
            options.append(f"serve with --max-model-len {shorter}")
        if self._would_fit(lora, memory=None):
            options.append("end other programs or give the machine more memory")
        options.append("choose a smaller model, a larger GPU, or several (--engine verl)")
        return ", ".join(options)

    def _would_fit(self, lora: LoraSpec | None, **changes: Any) -> bool:
        wishes = replace(self.wishes, **changes)
        return any(_fits(plan, wishes) for plan in _divisions(self.card, self.shape, wishes, lora))

    def __str__(self) -> str:
        model_len, dtype = self.wishes.model_len, self.wishes.dtype
        lines = [f"{self.name} on a GPU of {_gib(self.card)}, calls of up to {model_len:,} tokens, {dtype}"]
        for what, plan in (("all weights", self.whole), ("adapters", self.adapters)):
            lines.append(str(plan) if plan else f"{what}: do not fit")
        return "\n".join(lines)


LORA = LoraSpec()
"""The adapters that a plan assumes; other ranks need a little more or less."""


def planned(name: str, card: int, shape: ModelShape, wishes: Wishes) -> Plans:
    """Divide a card.

    `card` is the total memory in bytes, not the free memory. The result depends only on the card, the model and the wishes, which
    include host memory.
    """
    made = {
        lora: next((plan for plan in _divisions(card, shape, wishes, lora) if _fits(plan, wishes)), None)
        for lora in (None, LORA)
    }
    return Plans(
        name=name,
        card=card,
        shape=shape,
        wishes=wishes,
        whole=_filled(made[None], wishes),
        adapters=_filled(made[LORA], wishes),
    )


def _divisions(card: int, shape: ModelShape, wishes: Wishes, lora: LoraSpec | None) -> Iterator[CardPlan]:
    """Yield minimal plans, fastest first: prefer trained state on the card, then sampling during training, then kept activations."""
    offloads = (False, True) if wishes.offload is None else (wishes.offload,)
    turns = (False, True) if wishes.sleep is None else (wishes.sleep,)
    served = shape.served(wishes.dtype)
    kv = _kv_asked(card, served, wishes)
    for offload, takes_turns, checkpointing in product(offloads, turns, (False, True)):
        training = Training(
            dtype=wishes.dtype,
            lora=lora,
            checkpointing=checkpointing,
            offload=offload,
            on_gpu=True,
            context=wishes.model_len,
        )
        yield CardPlan(
            card=card,
            shape=shape,
            training=training,
            turns=takes_turns,
            apart=wishes.apart,
            served=served,
            kv=_least_kv(shape, wishes) if kv is None else kv,
            sequences=wishes.sequences or _LEAST_SEQUENCES,
            tokens=wishes.model_len,
            trainer_room=0,
        )


def _fits(plan: CardPlan, wishes: Wishes) -> bool:
    """Return whether the plan fits on the card, and its offloaded part into host memory."""
    if plan.training.offload and wishes.memory is not None and plan.host > wishes.memory:
        return False
    return plan.most <= usable(plan.card)


def usable(card: int) -> int:
    """Return the bytes of a card that plans may use."""
    return int(card * (1 - _SPARE_SHARE))


def _filled(plan: CardPlan | None, wishes: Wishes) -> CardPlan | None:
    """Return the plan with the remaining memory given to the KV cache, as far as useful, and to the trainer's micro-batches."""
    if plan is None:
        return None
    memory, room = plan.memory, usable(plan.card)
    if _kv_asked(plan.card, plan.served, wishes) is None:
        useful = _kv_wanted(plan, wishes)
        free = room - plan.sampling
        if not (plan.turns or plan.apart):
            free = min(free, (room - plan.at_peak) // 2)  # the other half is for larger micro-batches
        plan = replace(plan, kv=max(plan.kv, min(useful, plan.kv + free)))
    if wishes.sequences is None:
        short = max(1, wishes.model_len // _SHORT) * plan.shape.cached(wishes.dtype)
        plan = replace(plan, sequences=min(_MOST_SEQUENCES, max(_LEAST_SEQUENCES, plan.kv // short)))
    trainer_room = room - plan.beside_trainer
    tokens = max(plan.tokens, memory.tokens_within(trainer_room - TRAINER_OVERHEAD - memory.standing, MOST_TOKENS))
    return replace(plan, tokens=tokens, trainer_room=trainer_room)


def _kv_asked(card: int, served: int, wishes: Wishes) -> int | None:
    """Return the KV cache size that the operator asked for, or None. Raises: EngineError if the weights alone exceed the given
    share."""
    if wishes.kv_bytes is not None:
        return wishes.kv_bytes
    if wishes.utilization is None:
        return None
    left = int(card * wishes.utilization) - served - INFERENCE_OVERHEAD
    if left <= 0:
        raise EngineError(
            f"--gpu-memory-utilization {wishes.utilization:g} gives inference {_gib(int(card * wishes.utilization))} of this card, but "
            f"its weights and graphs already need {_gib(served + INFERENCE_OVERHEAD)}: give it more, or leave the option out"
        )
    return left


def _least_kv(shape: ModelShape, wishes: Wishes) -> int:
    return max(
        _LEAST_KV, (wishes.sequences or _LEAST_SEQUENCES) * wishes.model_len * shape.cached(wishes.dtype) // _SHORT
    )


def _kv_wanted(plan: CardPlan, wishes: Wishes) -> int:
    """Return the useful KV cache in bytes: every sequence at full length, but at most `_USUAL_KV` or a quarter of the card, whichever
    is larger, so that the trainer keeps enough."""
    every = (wishes.sequences or _MOST_SEQUENCES) * wishes.model_len * plan.shape.cached(wishes.dtype)
    return min(every, max(_USUAL_KV, plan.card // _KV_SHARE))


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
