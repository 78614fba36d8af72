"""What to train and how: the `RunSpec` of a run, and the rules for changing it during the run.

Every field is validated, used, and refused when misspelt.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, ValidationInfo, field_validator, model_validator

from foundation.strict import misfit
from swarm.protocol.algorithms import ALGORITHMS
from swarm.protocol.algorithms import AlgorithmSpec as AlgorithmSpec
from swarm.protocol.problem import ClientModel
from swarm.protocol.quantities import MOST, Count, NonNegative, NotBoolean, Positive
from swarm.protocol.sampling_mask import LEAST_TEMPERATURE, RestrictedTraining

MixName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
"""Name of a family of tasks; also part of metric names."""
ComputeType = Literal["bfloat16", "float32"]
"""Number type of matrix products."""
AS_STORED = {"as": "stored"}
"""Pydantic context for specs that a server has already accepted, so that a run of an older version can still be read, shown and
stopped."""
_USUAL_POOL = 4096
_PAIR = 2
"""Minimum number of episodes whose rewards can be compared."""
UNCUT: dict[str, tuple[int, ...]] = {"top_p": (1,), "top_k": (0, -1)}
"""Values that do not truncate the distribution."""


EPISODE_LIMIT_S = 3600.0
"""Maximum duration of an episode, in seconds, if neither the claim nor the run sets a limit."""


class OptimizerSpec(ClientModel):
    """The optimizer and its schedule.

    adamw keeps two moments per weight (Loshchilov and Hutter 2019, arXiv 1711.05101). adafactor keeps the second moment of a matrix
    as one row and one column, and no first moment, so it needs almost no memory (Shazeer and Stern 2018, arXiv 1804.04235; torch's
    implementation).
    """

    name: Literal["adamw", "adafactor"] = "adamw"
    learning_rate: NonNegative = 1e-5
    """For adafactor, this is relative to each weight matrix's root mean square, and capped at 1 / sqrt(step)."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup: Annotated[int, Field(ge=0, le=MOST), NotBoolean] = 0
    """Number of linear warm-up steps."""
    weight_decay: NonNegative = 0.0
    max_grad_norm: Positive = 1.0
    minibatches: Count = 1
    epochs: Count = 1


class BatchSpec(ClientModel):
    """How many episodes make one optimizer step."""

    rule: Literal["tasks", "informative_tasks", "episodes"] = "tasks"
    tasks: Count = 8
    """Number of groups per step, for the rules `tasks` and `informative_tasks`."""
    episodes: Count | None = None
    """Number of episodes per step, for the rule `episodes`."""
    max_gen_batches: Count = 10
    """Per step, the rule `informative_tasks` drops at most this many times `tasks` groups whose rewards are all equal. Further such
    groups fill the step; otherwise a model that has mastered its tasks would be sampled forever."""
    group_size: Count = 8
    group_patience_s: Positive = 60.0
    partial_groups: Literal["drop", "train"] = "train"
    """Whether to drop or train on a group whose patience ran out before all its slots were filled."""
    partial_min: Count = Field(default=None, validate_default=True)
    """With `partial_groups: train`, the minimum number of ended episodes that a group needs. Default: 2, or 1 if group_size is 1."""
    max_pool_episodes: Count = Field(default=None, validate_default=True)
    """Maximum number of episodes that may be ended or expected at the same time, not counting journaled batches. Once it is reached,
    no new group is opened. Default: 4096, or the episodes of two steps if that is more."""
    mix: dict[MixName, MixSpec] = {}
    """Task families and their shares of the trained groups. Every claim must name one of the families.

    If empty, groups are used in the order they were opened, and a claim's `mix` is only a label.
    """

    @field_validator("partial_min", mode="before")
    @classmethod
    def _at_most_the_group(cls, given: Any, info: ValidationInfo) -> Any:
        return _least_of(info.data.get("group_size", _PAIR)) if given is None else given

    @field_validator("max_pool_episodes", mode="before")
    @classmethod
    def _at_least_two_steps(cls, given: Any, info: ValidationInfo) -> Any:
        if given is not None:
            return given
        known = info.data
        groups = known.get("tasks", 1) * known.get("group_size", 1)
        step = (known.get("episodes") or 1) if known.get("rule") == "episodes" else groups
        return min(MOST, max(_USUAL_POOL, 2 * step))

    @model_validator(mode="after")
    def _rule_has_its_count(self) -> BatchSpec:
        if self.rule == "episodes" and self.episodes is None:
            raise misfit({"episodes": "rule 'episodes' needs this field, the number of episodes per step"})
        return self

    @property
    def states_partial_min(self) -> bool:
        """Whether `partial_min` differs from its default."""
        return self.partial_min != _least_of(self.group_size)


def _least_of(group_size: int) -> int:
    return min(_PAIR, group_size)


class MixSpec(ClientModel):
    """One family of tasks."""

    ratio: Positive
    """The family's share, relative to the ratios of the other families."""
    patience_s: Positive = 120.0
    """How long the other families wait for this family's next group, in seconds, before steps proceed without it."""


class SamplingSpec(ClientModel):
    """Sampling parameters for calls that do not set their own."""

    temperature: NonNegative = 1.0
    top_p: Annotated[float, Field(gt=0, le=1), NotBoolean] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=MOST), NotBoolean] = -1
    """Sample only from this many of the likeliest tokens; -1 or 0 means no limit."""
    max_tokens: Count = 256
    thinking: Annotated[bool | None, Field(exclude_if=lambda thinking: thinking is None)] = None
    """Whether models that support it think before answering (`enable_thinking` of the chat template). None: the template's default."""
    train: Annotated[Literal["auto"] | RestrictedTraining, Field(exclude_if=lambda train: train == "auto")] = "auto"
    """How to train on calls whose tokens were not sampled from the whole vocabulary (grammar, forced tool, top-p, penalties).
    exact: train the distribution that was sampled from. policy: train the model's own distribution, with truncated importance weights.
    off: do not train on these calls. auto: exact if the engine supports it, else policy; the spec returned by the server says which."""

    @field_validator("temperature")
    @classmethod
    def _drawn_at(cls, temperature: float, info: ValidationInfo) -> float:
        if 0 < temperature < LEAST_TEMPERATURE and info.context != AS_STORED:
            raise ValueError(
                f"vLLM would sample at {LEAST_TEMPERATURE:g} instead of {temperature:g}, and such calls could not be trained on; "
                f"use {LEAST_TEMPERATURE:g} or more, or 0 for a run that only evaluates"
            )
        return temperature

    @property
    def untrained(self) -> list[str]:
        """For each default that prevents training, a message that says why and what to do. Runs that only evaluate may ignore these."""
        whole = self.train != "off"
        drawn = {
            "temperature": (self.temperature >= LEAST_TEMPERATURE, "1"),
            "top_p": (whole or self.top_p in UNCUT["top_p"], "1"),
            "top_k": (whole or self.top_k in UNCUT["top_k"], "-1"),
        }
        return [
            f"sampling.{name} is {getattr(self, name):g}: calls that do not override it are not trained on; "
            f"set sampling.{name} to {trained}, unless this run only evaluates"
            for name, (trains, trained) in drawn.items()
            if not trains
        ]


class LimitSpec(ClientModel):
    """When a run ends. `None` means no limit.

    `wall_s` and `tokens` are budgets: they include branches that a restore has abandoned, because those were paid for too.
    """

    steps: Count | None = None
    wall_s: Positive | None = None
    tokens: Count | None = None
    """Maximum number of sampled tokens over the whole run."""
    drain_limit_s: Positive = 120.0
    max_episode_s: Annotated[Positive, Field(exclude_if=lambda seconds: seconds == EPISODE_LIMIT_S)] = EPISODE_LIMIT_S
    """Maximum duration of a training or evaluation episode, in seconds, if its claim sets no limit."""


class CheckpointSpec(ClientModel):
    """How often the trainer writes a full checkpoint, in steps, and how many checkpoints to keep."""

    every_steps: Count = 5
    keep: Count = 2


class LoraSpec(ClientModel):
    """Trains low-rank adapters instead of all weights (Hu et al. 2021, arXiv 2106.09685)."""

    rank: Annotated[int, Field(ge=1, le=512), NotBoolean] = 16
    alpha_ratio: Annotated[Positive | None, Field(exclude_if=lambda ratio: ratio is None)] = None
    """Ratio alpha / rank, which stays fixed if the rank changes. None: alpha stays fixed instead."""
    alpha: Positive = Field(default=None, validate_default=True)
    """Adapter outputs are multiplied by alpha / rank. Default: alpha_ratio * rank if given, else 32."""
    targets: Annotated[tuple[str, ...], Field(min_length=1)] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )

    @field_validator("alpha", mode="before")
    @classmethod
    def _alpha_holds_the_ratio(cls, given: Any, info: ValidationInfo) -> Any:
        ratio, rank = info.data.get("alpha_ratio"), info.data.get("rank")
        if ratio is None or rank is None:
            return 32.0 if given is None else given
        alpha = ratio * rank
        if given not in (None, alpha):  # a spec that a server returns has both
            raise ValueError(
                f"{given} is not alpha_ratio {ratio:g} times rank {rank}; give alpha or alpha_ratio, not both"
            )
        return alpha


class RunSpec(ClientModel):
    """One training run."""

    model: str | None = None
    """Path or name of the model. None means the model that the server hosts."""
    parameters: Literal["full", "lora"] | LoraSpec = "full"
    """`lora` is short for adapters with default settings."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Compute type of the trainer; weights and optimizer state stay in float32. auto: the type in which the server samples; the spec
    that the server returns says which."""
    activation_checkpointing: bool = False
    """Keep only each layer's input and recompute the rest in the backward pass, which needs less memory but more time."""
    max_model_len: Count | None = None
    seed: Annotated[int, Field(ge=0, lt=2**31), NotBoolean] = 0
    algorithm: AlgorithmSpec = AlgorithmSpec()
    optimizer: OptimizerSpec = OptimizerSpec()
    batch: BatchSpec = BatchSpec()
    sampling: SamplingSpec = SamplingSpec()
    max_staleness: Annotated[int, Field(ge=0, le=MOST), NotBoolean] = 1
    limits: LimitSpec = LimitSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    labels: dict[str, str] = {}

    @field_validator("parameters", mode="before")
    @classmethod
    def _adapters_by_name(cls, given: Any) -> Any:
        """Interpret `lora` as adapters with default settings, and `{"lora": {"rank": 4}}` as `{"rank": 4}`."""
        if isinstance(given, dict) and set(given) == {"lora"}:
            return given["lora"]
        return LoraSpec() if given == "lora" else given

    @model_validator(mode="before")
    @classmethod
    def _batch_as_its_algorithm_has_it(cls, data: Any) -> Any:
        """Fill unset fields of the batch with the algorithm's defaults."""
        if not isinstance(data, dict):
            return data
        algorithm, batch = data.get("algorithm"), data.get("batch", {})
        name = algorithm.get("name") if isinstance(algorithm, dict) else getattr(algorithm, "name", None)
        own = ALGORITHMS[name].batch if isinstance(name, str) and name in ALGORITHMS else {}
        return {**data, "batch": {**own, **batch}} if own and isinstance(batch, dict) else data

    @model_validator(mode="after")
    def _groups_can_be_compared(self) -> RunSpec:
        problems: dict[str, str] = {}
        size, least = self.batch.group_size, self.batch.partial_min
        if self.algorithm.compares_groups and size < 2:
            problems["batch.group_size"] = (
                f"{self.algorithm.name} compares episodes of one group: must be at least 2, got {size}"
            )
        if least > size:
            problems["batch.partial_min"] = f"must not exceed batch.group_size, which is {size}; got {least}"
        if problems:
            raise misfit(problems)
        return self

    def computed_in(self, dtype: ComputeType) -> RunSpec:
        """Return the spec with dtype `auto` replaced by the server's compute type."""
        return self.model_copy(update={"dtype": dtype}) if self.dtype == "auto" else self

    def trained_as(self, train: RestrictedTraining) -> RunSpec:
        """Return the spec with sampling.train `auto` replaced by the server's choice."""
        if self.sampling.train != "auto":
            return self
        return self.model_copy(update={"sampling": self.sampling.model_copy(update={"train": train})})


TUNABLE: frozenset[str] = frozenset({"algorithm", "optimizer", "batch", "sampling", "limits", "max_staleness"})
"""Top-level fields that a PATCH may change during a run."""


def own_defaults(algorithm: str) -> dict[str, Any]:
    """Return, as a partial RunSpec, those defaults of an algorithm that differ from the usual ones."""
    if algorithm not in ALGORITHMS:
        return {}
    own = ALGORITHMS[algorithm]
    return {"algorithm": dict(own.defaults)} | ({"batch": dict(own.batch)} if own.batch else {})


def merge_patch(target: Any, patch: Any) -> Any:
    """Apply an RFC 7396 merge patch: objects merge, null deletes, and anything else replaces."""
    if not isinstance(patch, dict):
        return patch
    merged = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = merge_patch(merged.get(key), value)
    return merged
