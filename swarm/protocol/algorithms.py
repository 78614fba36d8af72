"""The algorithm of a run: its fields, what each is by default, and which algorithm uses which (docs/reference/algorithms.md).

A field that the chosen algorithm does not use is refused, so that nothing that a person sets is without effect.
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
from foundation.strict import StrictModel, misfit
from swarm.protocol.quantities import Count, NonNegative, NotBoolean, Positive

Share = Annotated[float, Field(ge=0, le=1), NotBoolean]


@dataclass(frozen=True, slots=True)
class Registered:
    """What a spec knows of an algorithm: which fields of `SOME_USE` it uses, and which of its defaults differ from the fields'."""

    uses: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    compares: Literal["group", "batch"] = "group"
    """Whom an episode's reward is compared with."""
    lacks: tuple[str, ...] = ()
    """Fields that all others use."""
    batch: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of the run's `batch`."""


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
"""By name. Each stands in the file of its name in `swarm/engine/algorithms/`."""
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
"""Importance corrections, and which fields each uses beside those that all use (`swarm/engine/algorithms/corrections.py`)."""
if TYPE_CHECKING:
    CorrectionName = str
else:
    CorrectionName = Literal[tuple(CORRECTIONS)]
_OWN_ADVANTAGE = Registered(compares="batch")
"""Of a function of a user's own: no group has to have two episodes."""
_REFERENCE = re.compile(r"([A-Za-z0-9_][A-Za-z0-9_.-]{0,99}\.py):([A-Za-z_][A-Za-z0-9_]{0,99})")
MOST_SOURCE = 100_000
"""Characters of a text with functions of a user's own."""


def registered(name: str) -> Registered:
    """What is known of an algorithm by this name, built in or a function of a user's own."""
    return ALGORITHMS.get(name, _OWN_ADVANTAGE)


def own_function(text: object) -> tuple[str, str] | None:
    """File and name of `FILE.py:NAME`, where the text is written so. A path is none: in a spec the file has its bare name."""
    found = _REFERENCE.fullmatch(text) if isinstance(text, str) else None
    return (found[1], found[2]) if found else None


def _written_so(text: str) -> str:
    if own_function(text) is None:
        raise PydanticCustomError("own_function", "Input should be a function of your own, as FILE.py:NAME")
    return text


OwnFunction = Annotated[str, AfterValidator(_written_so)]
OWN_FIELDS = ("name", "loss", "importance_correction")
"""Fields of an algorithm that may name a function of a user's own: for its advantage, its loss, its importance correction."""
SOME_USE = frozenset(name for each in ALGORITHMS.values() for name in each.uses)
"""Fields that only some algorithms use; all use the others."""


class AlgorithmSpec(StrictModel):
    """How rewards become a loss. Sources and equations stand with each algorithm, in `swarm.engine.algorithms`."""

    name: AlgorithmName | OwnFunction = "grpo"
    """FILE.py:NAME: the advantage is that function's, and the rest is as with grpo."""
    loss: Annotated[Literal["algorithm"] | OwnFunction, Field(exclude_if=lambda loss: loss == "algorithm")] = (
        "algorithm"
    )
    """What a token costs: as the algorithm has it, or a function of one's own."""
    clip_low: Annotated[float, Field(gt=0, le=1), NotBoolean] = 0.2
    """Ratios below 1 - clip_low are clipped; 1 is no bound."""
    clip_high: Positive = 0.2
    kl: NonNegative = 0.0
    """Weight of the KL penalty to the run's first weights."""
    kl_in: Literal["loss", "reward"] = "loss"
    """loss: the k3 estimator is added to the loss. reward: the k1 estimator is taken from the rewards, token by token."""
    entropy: NonNegative = 0.0
    loss_agg: Literal["token", "call", "timeline", "episode", "constant"] = "episode"
    """token: mean over all trained tokens. call / timeline / episode: mean inside each, then mean over them. A timeline is the
    calls of an episode that continue one another. constant: sum inside each episode divided by loss_length, then mean over
    episodes."""
    loss_length: Count = 256
    """Tokens that `loss_agg: constant` divides by; sampling.max_tokens keeps the loss's size."""
    advantage_norm: Literal["std", "none"] = "std"
    """std: advantages have unit standard deviation, in their group, or for ppo in the batch."""
    baseline: Literal["none", "group"] = "none"
    """group: the mean reward of the group is taken off before the batch is normalised."""
    gamma: Annotated[float, Field(gt=0, le=1), NotBoolean] = 1.0
    """Discount per token."""
    gae_lambda: Share = 1.0
    value_learning_rate: Positive = 5e-3
    """Of the critic, in all steps the same."""
    value_coef: NonNegative = 0.0
    """Weight of the critic's loss in the gradient of the policy's body; 0: the critic reads the body and leaves it alone."""
    value_clip: Positive = 0.5
    """A value further than this from what it was before the step gets no gradient."""
    overlong_buffer: Share = 0.2
    """The last share of sampling.max_tokens, in which an answer loses reward with each token; 0: none."""
    overlong_penalty: NonNegative = 1.0
    """What an answer of sampling.max_tokens loses."""
    tau_positive: Positive = 1.0
    """How fast the gradient fades out where the ratio leaves 1, of tokens with an advantage above 0."""
    tau_negative: Positive = 1.05
    """The same of the others."""
    importance_correction: CorrectionName | OwnFunction = "none"
    """For rollouts sampled in another precision or by older weights. truncated: weight tokens by
    min(p_trainer / p_rollout, importance_limit). masked: by that ratio, and by 0 where it is above importance_limit or below
    importance_floor. truncated_call, masked_call: by the product of these ratios over the call, likewise."""
    importance_limit: Positive = 2.0
    importance_floor: NonNegative = 0.0
    train_truncated: bool = True
    """Whether calls cut off by max_tokens are trained."""
    sources: Annotated[dict[str, str], Field(exclude_if=lambda sources: not sources)] = {}
    """The texts of the files that name, loss and importance_correction mean. The server executes them."""

    @property
    def own_functions(self) -> dict[str, tuple[str, str]]:
        """File and name of each function of a user's own, by the field that names it."""
        found = {field: own_function(getattr(self, field)) for field in OWN_FIELDS}
        return {field: function for field, function in found.items() if function is not None}

    @property
    def compares_groups(self) -> bool:
        """Whether an episode's advantage depends on the others of its group."""
        return registered(self.name).compares == "group" or self.baseline == "group"

    @model_validator(mode="before")
    @classmethod
    def _with_its_defaults(cls, data: Any) -> Any:
        """Raises: misfit for fields of other algorithms and corrections."""
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
            problems["sources"] = f"no field means {file!r}: leave it out"
        if problems:
            raise misfit(problems)
        return self

    def _unfit(self, file: str, name: str) -> str | None:
        """Why there is no such function in the sources."""
        if file not in self.sources:
            return (
                f"the text of {file} is missing from sources: `swarm run start` reads a file that it finds under this name, "
                "and so does with_sources of swarm.client"
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
    """Who does not use the field, the algorithm or the correction, each with those that do; empty where it is used."""
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
    """Why a text cannot be the source of a function, in words; None when it can. Nothing of it is executed."""
    if len(text) > MOST_SOURCE:
        return f"{file} has {len(text):,} characters, and {MOST_SOURCE:,} are taken at most"
    try:
        parsed = ast.parse(text, file)
    except SyntaxError as error:
        return f"{file}, line {error.lineno}: {error.msg}"
    except (ValueError, RecursionError, MemoryError) as error:  # null characters; brackets in brackets in brackets
        return f"{file} is no Python: {error or type(error).__name__}"
    functions = [each.name for each in parsed.body if isinstance(each, ast.FunctionDef)]
    if name in functions:
        return None
    guess = nearest(name, functions)
    hint = f"did you mean {guess!r}?" if guess else f"it has {', '.join(functions) or 'none'}"
    return f"{file} has no function {name!r} at its top level ({hint})"
