"""The algorithm of a run: its fields, their defaults, and which algorithm uses which field (docs/reference/algorithms.md).

A field that the chosen algorithm does not use is refused, so that no setting is silently ignored.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field, SerializerFunctionWrapHandler, model_serializer, model_validator
from pydantic_core import PydanticCustomError

from foundation.nearest import nearest
from foundation.strict import misfit
from swarm.protocol.problem import ClientModel
from swarm.protocol.quantities import Count, NonNegative, NotBoolean, Positive

Share = Annotated[float, Field(ge=0, le=1), NotBoolean]


@dataclass(frozen=True, slots=True)
class Registered:
    """What a spec needs to know about an algorithm: which fields of `SOME_USE` it uses, and which defaults it overrides."""

    uses: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    compares: Literal["group", "batch"] = "group"
    """Whether an episode's reward is compared with those of its group or of the whole batch."""
    lacks: tuple[str, ...] = ()
    """Fields that all other algorithms use, but this one does not."""
    batch: Mapping[str, Any] = field(default_factory=dict)
    """Defaults for the run's `batch`."""


_PPO = ("advantage_norm", "gamma", "gae_lambda", "value_learning_rate", "value_coef", "value_clip")
ALGORITHMS: Mapping[str, Registered] = {
    "grpo": Registered(("advantage_norm",)),
    "dr_grpo": Registered(defaults={"loss_agg": "constant"}),
    "rloo": Registered(defaults={"loss_agg": "token"}),
    "reinforce_pp": Registered(("baseline", "gamma"), {"loss_agg": "token", "kl_in": "reward"}, compares="batch"),
    "ppo": Registered(_PPO, {"loss_agg": "token", "kl_in": "reward"}, compares="batch"),
    "dapo": Registered(
        ("advantage_norm", "overlong_buffer", "overlong_penalty"),
        {"loss_agg": "token", "clip_high": 0.28},
        batch={"rule": "informative_tasks"},
    ),
    "gspo": Registered(("advantage_norm",), {"loss_agg": "call", "clip_low": 3e-4, "clip_high": 4e-4}),
    "cispo": Registered(("advantage_norm",), {"loss_agg": "token", "clip_low": 1.0, "clip_high": 4.0}),
    "icepop": Registered(
        ("advantage_norm",), {"importance_correction": "masked", "importance_floor": 0.5, "importance_limit": 5.0}
    ),
    "sapo": Registered(("advantage_norm", "tau_positive", "tau_negative"), lacks=("clip_low", "clip_high")),
}
"""Algorithms by name. Each is implemented in the file of that name in `swarm/engine/algorithms/`."""
if TYPE_CHECKING:
    AlgorithmName = str
else:
    AlgorithmName = Literal[tuple(ALGORITHMS)]
CORRECTIONS: Mapping[str, tuple[str, ...]] = {
    "none": (),
    "truncated": (),
    "truncated_call": (),
    "masked": ("importance_floor",),
    "masked_call": ("importance_floor",),
}
"""Importance corrections and the fields that only some of them use (`swarm/engine/algorithms/corrections.py`)."""
if TYPE_CHECKING:
    CorrectionName = str
else:
    CorrectionName = Literal[tuple(CORRECTIONS)]
_OWN_ADVANTAGE = Registered(compares="batch")
"""The entry for a user's own function. It allows groups with a single episode."""
_REFERENCE = re.compile(r"([A-Za-z0-9_][A-Za-z0-9_.-]{0,99}\.py):([A-Za-z_][A-Za-z0-9_]{0,99})")
MOST_SOURCE = 100_000
"""Maximum size of a source file with users' own functions, in characters."""


def registered(name: str) -> Registered:
    """Return the entry for the algorithm with this name, which is built in or a user's own function."""
    return ALGORITHMS.get(name, _OWN_ADVANTAGE)


def own_function(text: object) -> tuple[str, str] | None:
    """Return the file and the function name if the text has the form `FILE.py:NAME`, else None. FILE must not contain a path."""
    found = _REFERENCE.fullmatch(text) if isinstance(text, str) else None
    return (found[1], found[2]) if found else None


def _written_so(text: str) -> str:
    if own_function(text) is None:
        raise PydanticCustomError("own_function", "Input should be a function of your own, as FILE.py:NAME")
    return text


OwnFunction = Annotated[str, AfterValidator(_written_so)]
OWN_FIELDS = ("name", "loss", "importance_correction")
"""Fields that may name a user's own function, for the advantage, the loss and the importance correction respectively."""
SOME_USE = frozenset(name for each in ALGORITHMS.values() for name in each.uses)
"""Fields that only some algorithms use. All other fields are used by every algorithm, except for those in `Registered.lacks`."""


class AlgorithmSpec(ClientModel):
    """How rewards become a loss. Each algorithm's sources and equations are documented with it in `swarm.engine.algorithms`."""

    name: AlgorithmName | OwnFunction = "grpo"
    """With FILE.py:NAME, that function computes the advantage, and everything else works as in grpo."""
    loss: Annotated[Literal["algorithm"] | OwnFunction, Field(exclude_if=lambda loss: loss == "algorithm")] = (
        "algorithm"
    )
    """The per-token loss: the algorithm's own, or a user's function."""
    clip_low: Annotated[float, Field(gt=0, le=1), NotBoolean] = 0.2
    """Ratios below 1 - clip_low are clipped; 1 means no lower bound."""
    clip_high: Positive = 0.2
    kl: NonNegative = 0.0
    """Weight of the KL penalty toward the run's initial weights."""
    kl_in: Literal["loss", "reward"] = "loss"
    """loss: the k3 estimator is added to the loss. reward: the k1 estimator is subtracted from the rewards, token by token."""
    entropy: NonNegative = 0.0
    loss_agg: Literal["token", "call", "timeline", "episode", "constant"] = "episode"
    """token: mean over all trained tokens. call, timeline, episode: mean within each, then mean over all of them. A timeline consists
    of the calls of an episode that continue one another. constant: sum within each episode divided by loss_length, then mean over
    episodes."""
    loss_length: Count = 256
    """Number of tokens that `loss_agg: constant` divides by. Set it to sampling.max_tokens to keep the loss's usual scale."""
    advantage_norm: Literal["std", "none"] = "std"
    """std: scale advantages to unit standard deviation within their group or, for ppo, within the batch."""
    baseline: Literal["none", "group"] = "none"
    """group: subtract the group's mean reward before normalizing over the batch."""
    gamma: Annotated[float, Field(gt=0, le=1), NotBoolean] = 1.0
    """Discount factor per token."""
    gae_lambda: Share = 1.0
    value_learning_rate: Positive = 5e-3
    """Learning rate of the critic, constant over the run."""
    value_coef: NonNegative = 0.0
    """Weight of the critic's loss in the gradient of the policy's body. With 0, the critic reads the body but does not train it."""
    value_clip: Positive = 0.5
    """A value prediction that moves further than this from its value before the step gets no gradient."""
    overlong_buffer: Share = 0.2
    """Share of sampling.max_tokens, just below the limit, over which the penalty rises linearly from 0 to overlong_penalty; 0: no penalty."""
    overlong_penalty: NonNegative = 1.0
    """How much reward an answer of length sampling.max_tokens loses."""
    tau_positive: Positive = 1.0
    """How fast the gradient fades as the ratio moves away from 1, for tokens with a positive advantage."""
    tau_negative: Positive = 1.05
    """How fast the gradient fades as the ratio moves away from 1, for all other tokens."""
    importance_correction: CorrectionName | OwnFunction = "none"
    """Corrects for rollouts sampled in another precision or by older weights. truncated: weight each token by
    min(p_trainer / p_rollout, importance_limit). masked: weight it by the ratio, or by 0 if the ratio is above importance_limit or
    below importance_floor. truncated_call, masked_call: the same with the product of the ratios over the whole call."""
    importance_limit: Positive = 2.0
    importance_floor: NonNegative = 0.0
    train_truncated: bool = True
    """Whether to train on calls that max_tokens cut off."""
    sources: Annotated[dict[str, str], Field(exclude_if=lambda sources: not sources)] = {}
    """Source texts of the files named in name, loss and importance_correction. The server executes them."""

    @property
    def own_functions(self) -> dict[str, tuple[str, str]]:
        """The file and name of each of the user's own functions, by the field that names it."""
        found = {field: own_function(getattr(self, field)) for field in OWN_FIELDS}
        return {field: function for field, function in found.items() if function is not None}

    @property
    def compares_groups(self) -> bool:
        """Whether an episode's advantage depends on the other episodes of its group."""
        return registered(self.name).compares == "group" or self.baseline == "group"

    @model_validator(mode="before")
    @classmethod
    def _with_its_defaults(cls, data: Any) -> Any:
        """Fill in the algorithm's defaults. Raises: `misfit` for fields that only other algorithms or corrections use."""
        name = data.get("name", "grpo") if isinstance(data, dict) else None
        if not isinstance(name, str) or not (name in ALGORITHMS or own_function(name)):
            return data
        filled = {**registered(name).defaults, **data}
        correction = filled.get("importance_correction", "none")
        foreign = {
            field: f"{user} does not use {field}, a field of {', '.join(others)}: leave it out"
            for field in data
            for user, others in _strangers(field, name, correction)
        }
        if foreign:
            raise misfit(foreign)
        return {field: value for field, value in filled.items() if not _strangers(field, name, correction)}

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> AlgorithmSpec:
        if self.importance_floor > self.importance_limit:
            raise misfit({"importance_floor": f"must not exceed importance_limit, {self.importance_limit:g}; lower it"})
        return self

    @model_validator(mode="after")
    def _has_its_sources(self) -> AlgorithmSpec:
        own = self.own_functions
        problems = {field: problem for field, (file, name) in own.items() if (problem := self._unfit(file, name))}
        for file in self.sources.keys() - {file for file, _ in own.values()}:
            problems["sources"] = f"no field refers to {file!r}: leave it out"
        if problems:
            raise misfit(problems)
        return self

    def _unfit(self, file: str, name: str) -> str | None:
        """Return why the sources do not define this function, or None if they do."""
        if file not in self.sources:
            return (
                f"the text of {file} is missing from sources; `swarm run start` and `swarm.client.with_sources` add it if they find "
                "a file with this name"
            )
        return source_problem(self.sources[file], file, name)

    @model_serializer(mode="wrap")
    def _its_fields(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = handler(self)
        return {
            field: value
            for field, value in fields.items()
            if not _strangers(field, self.name, self.importance_correction)
        }


def _strangers(field: str, name: str, correction: object) -> list[tuple[str, list[str]]]:
    """If the algorithm or the importance correction does not use the field, return its name and the names of those that do."""
    found = []
    if not _is_used(field, name):
        found.append((name, [other for other in ALGORITHMS if _is_used(field, other)]))
    of_correction = [other for other, uses in CORRECTIONS.items() if field in uses]
    if of_correction and correction in CORRECTIONS and correction not in of_correction:
        found.append((f"importance_correction {correction}", of_correction))
    return found


def _is_used(field: str, name: str) -> bool:
    own = registered(name)
    return field not in own.lacks and (field not in SOME_USE or field in own.uses)


@lru_cache(maxsize=64)
def source_problem(text: str, file: str, name: str) -> str | None:
    """Return why `text` cannot be the source of the function `name`, or None if it can. Executes nothing."""
    if len(text) > MOST_SOURCE:
        return f"{file} has {len(text):,} characters; at most {MOST_SOURCE:,} are allowed"
    try:
        parsed = ast.parse(text, file)
    except SyntaxError as error:
        return f"{file}, line {error.lineno}: {error.msg}"
    except (ValueError, RecursionError, MemoryError) as error:  # null characters, or brackets nested too deeply
        return f"{file} is not valid Python: {error or type(error).__name__}"
    functions = [each.name for each in parsed.body if isinstance(each, ast.FunctionDef)]
    if name in functions:
        return None
    guess = nearest(name, functions)
    hint = f"did you mean {guess!r}?" if guess else f"it has {', '.join(functions) or 'none'}"
    return f"{file} has no function {name!r} at its top level ({hint})"
