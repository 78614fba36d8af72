"""What to train and how: the `RunSpec` a run is started with, and the rule for changing it while it runs.

Every field is validated, used, and refused when misspelt.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, ValidationInfo, field_validator, model_validator

from foundation.strict import StrictModel, misfit
from swarm.protocol.algorithms import ALGORITHMS
from swarm.protocol.algorithms import AlgorithmSpec as AlgorithmSpec
from swarm.protocol.quantities import MOST, Count, NonNegative, NotBoolean, Positive
from swarm.protocol.sampling_mask import LEAST_TEMPERATURE, RestrictedTraining

MixName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
"""A family of tasks, as it also stands in metrics' names."""
ComputeType = Literal["bfloat16", "float32"]
"""What matrices are multiplied in."""
AS_STORED = {"as": "stored"}
"""Pydantic's context for specs that a server has accepted: what an older version took is read, shown and stopped all the same."""
_USUAL_POOL = 4096
_PAIR = 2
"""The least number of episodes that can be compared."""
UNCUT: dict[str, tuple[int, ...]] = {"top_p": (1,), "top_k": (0, -1)}
"""Values at which a cut of the distribution leaves it whole. What is drawn from less is not trained."""


EPISODE_LIMIT_S = 3600.0
"""Longest episode, if neither the claim nor the run sets a limit."""


class OptimizerSpec(StrictModel):
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


class BatchSpec(StrictModel):
    """When enough has been collected for one optimiser step."""

    rule: Literal["tasks", "informative_tasks", "episodes"] = "tasks"
    tasks: Count = 8
    """Groups per step (rules `tasks` and `informative_tasks`)."""
    episodes: Count | None = None
    """Episodes per step (rule `episodes`)."""
    max_gen_batches: Count = 10
    """With rule `informative_tasks`, so many times `tasks` groups of equal rewards are dropped for one step at the most; after that
    they fill it: what a model has learnt whole would be sampled for ever."""
    group_size: Count = 8
    group_patience_s: Positive = 60.0
    partial_groups: Literal["drop", "train"] = "train"
    """What becomes of a group whose patience ran out with slots missing."""
    partial_min: Count = Field(default=None, validate_default=True)
    """With `train`, the least number of ended episodes that makes a group worth training. Not given: 2, or 1 of groups of one."""
    max_pool_episodes: Count = Field(default=None, validate_default=True)
    """So many episodes may be ended or expected at once, outside journalled batches; then no more groups are opened. Not given:
    4096, or the episodes of two steps where these are more."""
    mix: dict[MixName, MixSpec] = {}
    """Families of tasks and their shares of the groups that enter optimiser steps; claims then name one of them.

    Empty: groups are taken in the order they were opened, and a claim's `mix` is a label alone.
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
        """Whether it is another than what stands there where nothing is said."""
        return self.partial_min != _least_of(self.group_size)


def _least_of(group_size: int) -> int:
    return min(_PAIR, group_size)


class MixSpec(StrictModel):
    """One family of tasks."""

    ratio: Positive
    """Its share, relative to the ratios of the other families."""
    patience_s: Positive = 120.0
    """So long do the families that are ready for a step wait for the next group of this one; then they pass it."""


class SamplingSpec(StrictModel):
    """Defaults for calls that do not state their own."""

    temperature: NonNegative = 1.0
    top_p: Annotated[float, Field(gt=0, le=1), NotBoolean] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=MOST), NotBoolean] = -1
    """-1 or 0: no limit."""
    max_tokens: Count = 256
    thinking: Annotated[bool | None, Field(exclude_if=lambda thinking: thinking is None)] = None
    """Whether models that can think before they answer do so (`enable_thinking` of their chat template). None: as the template has it."""
    train: Annotated[Literal["auto"] | RestrictedTraining, Field(exclude_if=lambda train: train == "auto")] = "auto"
    """What of a call is trained whose tokens were not drawn from the whole vocabulary (grammar, forced tool, top-p, penalties).
    exact: the distribution that was drawn from. policy: the model's own, with truncated importance weights. off: nothing. auto: exact
    where the engine can, else policy; and what stands in the spec that it gives back."""

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
        """Of each default at which no call can be trained: why, and what to do. A run that only evaluates may have it."""
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


class LimitSpec(StrictModel):
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


class CheckpointSpec(StrictModel):
    """Every how many steps the trainer writes a whole checkpoint, and how many are kept."""

    every_steps: Count = 5
    keep: Count = 2


class LoraSpec(StrictModel):
    """Low-rank adapters instead of all weights. Hu et al. 2021 (arXiv 2106.09685)."""

    rank: Annotated[int, Field(ge=1, le=512), NotBoolean] = 16
    alpha_ratio: Annotated[Positive | None, Field(exclude_if=lambda ratio: ratio is None)] = None
    """alpha / rank, held whatever the rank is. None: alpha is held."""
    alpha: Positive = Field(default=None, validate_default=True)
    """What adapters compute is multiplied by alpha / rank. Not given: alpha_ratio * rank, else 32."""
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
        if given not in (None, alpha):  # both stand in a spec that a server gives back
            raise ValueError(
                f"{given} is not alpha_ratio {ratio:g} times rank {rank}; give alpha or alpha_ratio, not both"
            )
        return alpha


class RunSpec(StrictModel):
    """One training run."""

    model: str | None = None
    """Path or name; None: the model that the server hosts."""
    parameters: Literal["full"] | LoraSpec = "full"
    """`lora` for short: adapters as they are by default."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Compute type of the trainer; weights and optimiser state are kept in float32. auto: what the server samples in, and what
    stands in the spec that it gives back."""
    activation_checkpointing: bool = False
    """Keep only each layer's input, and compute the rest once more for the backward pass: less memory, more time."""
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
        """`lora` means its defaults; `{"lora": {"rank": 4}}` is taken for `{"rank": 4}`."""
        if isinstance(given, dict) and set(given) == {"lora"}:
            return given["lora"]
        return LoraSpec() if given == "lora" else given

    @model_validator(mode="before")
    @classmethod
    def _batch_as_its_algorithm_has_it(cls, data: Any) -> Any:
        """Defaults of the algorithm for the batch, where nothing else is said."""
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
        """The spec as a server carries it out that computes in `dtype` where nothing else is asked for."""
        return self.model_copy(update={"dtype": dtype}) if self.dtype == "auto" else self

    def trained_as(self, train: RestrictedTraining) -> RunSpec:
        """The spec as a server carries it out that trains restricted calls like this where nothing else is asked for."""
        if self.sampling.train != "auto":
            return self
        return self.model_copy(update={"sampling": self.sampling.model_copy(update={"train": train})})


TUNABLE: frozenset[str] = frozenset({"algorithm", "optimizer", "batch", "sampling", "limits", "max_staleness"})
"""Top-level fields that a PATCH may change while a run goes on."""


def own_defaults(algorithm: str) -> dict[str, Any]:
    """Of an algorithm by this name, as a partial RunSpec: what it has by default that others have not."""
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
