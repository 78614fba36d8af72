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
"""Pydantic context for specs that a server has accepted before: a run of an older version can still be read, shown and stopped."""
_USUAL_POOL = 4096
_PAIR = 2
"""The least number of episodes that can be compared."""
UNCUT: dict[str, tuple[int, ...]] = {"top_p": (1,), "top_k": (0, -1)}
"""Values that do not truncate the distribution."""


EPISODE_LIMIT_S = 3600.0
"""Longest episode, if neither the claim nor the run sets a limit."""


class OptimizerSpec(ClientModel):
    """The optimiser and its schedule.

    adamw: two moments per weight (Loshchilov and Hutter 2019, arXiv 1711.05101). adafactor: the second moment of a matrix as
    a row and a column, no first moment: almost no memory (Shazeer and Stern 2018, arXiv 1804.04235; torch's).
    """

    name: Literal["adamw", "adafactor"] = "adamw"
    learning_rate: NonNegative = 1e-5
    """adafactor: relative to each weight's own size (its root mean square), and at most 1 / sqrt(step)."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup: Annotated[int, Field(ge=0, le=MOST), NotBoolean] = 0
    """Steps of linear warm-up."""
    weight_decay: NonNegative = 0.0
    max_grad_norm: Positive = 1.0
    minibatches: Count = 1
    epochs: Count = 1


class BatchSpec(ClientModel):
    """When enough has been collected for one optimiser step."""

    rule: Literal["tasks", "informative_tasks", "episodes"] = "tasks"
    tasks: Count = 8
    """Groups per step (rules `tasks` and `informative_tasks`)."""
    episodes: Count | None = None
    """Episodes per step (rule `episodes`)."""
    max_gen_batches: Count = 10
    """Rule `informative_tasks` drops at most this many times `tasks` groups of equal rewards per step. Further ones fill the
    step; otherwise a model that has mastered its tasks would be sampled for ever."""
    group_size: Count = 8
    group_patience_s: Positive = 60.0
    partial_groups: Literal["drop", "train"] = "train"
    """Whether to drop or train a group whose patience ran out before all slots were filled."""
    partial_min: Count = Field(default=None, validate_default=True)
    """With `train`, the least number of ended episodes for training a group. Default: 2, or 1 for groups of one."""
    max_pool_episodes: Count = Field(default=None, validate_default=True)
    """Most episodes that may be ended or expected at once, outside journalled batches; beyond it no group is opened. Default:
    4096, or the episodes of two steps if that is more."""
    mix: dict[MixName, MixSpec] = {}
    """Families of tasks and their shares of the trained groups; every claim names one of the families.

    Empty: groups are taken in the order they were opened, and a claim's `mix` is only a label.
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
            raise misfit({"episodes": "rule 'episodes' needs it, the number of episodes per step"})
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
    """Its share, relative to the ratios of the other families."""
    patience_s: Positive = 120.0
    """How long families that are ready for a step wait for this one's next group before they go ahead without it."""


class SamplingSpec(ClientModel):
    """Defaults for calls that do not state their own."""

    temperature: NonNegative = 1.0
    top_p: Annotated[float, Field(gt=0, le=1), NotBoolean] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=MOST), NotBoolean] = -1
    """-1 or 0: no limit."""
    max_tokens: Count = 256
    thinking: Annotated[bool | None, Field(exclude_if=lambda thinking: thinking is None)] = None
    """Whether models that support thinking think before they answer (`enable_thinking` of the chat template). None: the template's default."""
    train: Annotated[Literal["auto"] | RestrictedTraining, Field(exclude_if=lambda train: train == "auto")] = "auto"
    """How to train calls whose tokens were not drawn from the whole vocabulary (grammar, forced tool, top-p, penalties).
    exact: train the distribution that was sampled. policy: train the model's own, with truncated importance weights. off: do
    not train them. auto: exact if the engine can, else policy; the spec that the server returns states which."""

    @field_validator("temperature")
    @classmethod
    def _drawn_at(cls, temperature: float, info: ValidationInfo) -> float:
        if 0 < temperature < LEAST_TEMPERATURE and info.context != AS_STORED:
            raise ValueError(
                f"vLLM draws at {LEAST_TEMPERATURE:g} where {temperature:g} is asked for, and calls that it draws so are not "
                f"trained; give {LEAST_TEMPERATURE:g} or more, or 0 for a run that only evaluates"
            )
        return temperature

    @property
    def untrained(self) -> list[str]:
        """For each default that prevents all training: why, and what to do. Runs that only evaluate may use such defaults."""
        whole = self.train != "off"
        drawn = {
            "temperature": (self.temperature >= LEAST_TEMPERATURE, "1"),
            "top_p": (whole or self.top_p in UNCUT["top_p"], "1"),
            "top_k": (whole or self.top_k in UNCUT["top_k"], "-1"),
        }
        return [
            f"sampling.{name} is {getattr(self, name):g}: calls that do not state another are not trained; "
            f"set sampling.{name} to {trained}, unless this run only evaluates"
            for name, (trains, trained) in drawn.items()
            if not trains
        ]


class LimitSpec(ClientModel):
    """Where a run ends. `None` is no limit.

    wall_s and tokens are budgets: branches that a restore left behind count, for they were paid for.
    """

    steps: Count | None = None
    wall_s: Positive | None = None
    tokens: Count | None = None
    """Sampled tokens over the whole run."""
    drain_limit_s: Positive = 120.0
    max_episode_s: Annotated[Positive, Field(exclude_if=lambda seconds: seconds == EPISODE_LIMIT_S)] = EPISODE_LIMIT_S
    """Longest episode, train or eval, if its claim sets no limit of its own."""


class CheckpointSpec(ClientModel):
    """Every how many steps the trainer writes a whole checkpoint, and how many are kept."""

    every_steps: Count = 5
    keep: Count = 2


class LoraSpec(ClientModel):
    """Low-rank adapters instead of all weights. Hu et al. 2021 (arXiv 2106.09685)."""

    rank: Annotated[int, Field(ge=1, le=512), NotBoolean] = 16
    alpha_ratio: Annotated[Positive | None, Field(exclude_if=lambda ratio: ratio is None)] = None
    """alpha / rank, kept when the rank changes. None: alpha is kept."""
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
    """Path or name; None: the model that the server hosts."""
    parameters: Literal["full", "lora"] | LoraSpec = "full"
    """`lora` is short for adapters with default settings, and is read as those."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Compute type of the trainer; weights and optimiser state stay in float32. auto: the type that the server samples in,
    which the returned spec states."""
    activation_checkpointing: bool = False
    """Keep only each layer's input and recompute the rest for the backward pass: less memory, more time."""
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
        """Read `lora` as adapters with defaults, and `{"lora": {"rank": 4}}` as `{"rank": 4}`."""
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
        """The spec with dtype `auto` replaced by the server's compute type."""
        return self.model_copy(update={"dtype": dtype}) if self.dtype == "auto" else self

    def trained_as(self, train: RestrictedTraining) -> RunSpec:
        """The spec with sampling.train `auto` replaced by the server's choice."""
        if self.sampling.train != "auto":
            return self
        return self.model_copy(update={"sampling": self.sampling.model_copy(update={"train": train})})


TUNABLE: frozenset[str] = frozenset({"algorithm", "optimizer", "batch", "sampling", "limits", "max_staleness"})
"""Top-level fields that a PATCH may change during a run."""


def own_defaults(algorithm: str) -> dict[str, Any]:
    """The algorithm's own defaults, where they differ from those of other algorithms, as a partial RunSpec."""
    if algorithm not in ALGORITHMS:
        return {}
    own = ALGORITHMS[algorithm]
    return {"algorithm": dict(own.defaults)} | ({"batch": dict(own.batch)} if own.batch else {})


def merge_patch(target: Any, patch: Any) -> Any:
    """RFC 7396: objects merge, null deletes, everything else replaces."""
    if not isinstance(patch, dict):
        return patch
    merged = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = merge_patch(merged.get(key), value)
    return merged
