"""`CampaignGoal`: everything a person can ask of a campaign, in one validated document; and `Aim`, its meaning on one instrument."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator

from foundation.strict import StrictModel, misfit
from researcher.design.question import InstrumentNames
from researcher.instruments.instrument import Direction, Factor, Instrument, Scalar
from researcher.instruments.levels import as_level, level_problem
from researcher.refusals import Refusals, SpecRefused, refused_in
from researcher.study.spec import (
    LONGEST_QUESTION,
    MOST,
    MOST_STEPS,
    Count,
    Duration,
    SpecSchedule,
    Trials,
    at_most,
    service_names,
)

MOST_LEVELS = 9
_TRAINING, _PARAMETERS = "run.", "run.parameters"
"""Prefixes of factor targets. `run.` covers all training settings; `run.parameters` covers only LoRA versus full fine-tuning, and
the adapters' shape."""


class Objective(StrictModel):
    """What should improve. Fields that are None take each instrument's own value. `margin` is the smallest effect that matters, in
    the metric's unit."""

    metric: str | None = None
    direction: Direction | None = None
    margin: Annotated[float | None, Field(gt=0)] = None


class CampaignBudget(StrictModel):
    """Spending limits for all studies together. None means no limit. `money` is for LLM calls, in the currency of their prices."""

    wall: Duration | None = None
    trials: Trials | None = None
    tokens: Count | None = None
    llm_tokens: Count | None = None
    money: Annotated[float, Field(gt=0), AfterValidator(at_most(MOST))] | None = None


def _said(text: str) -> str:
    if not text.strip():
        raise ValueError("say in words what the campaign should find out")
    return text.strip()


def _by_name(given: Any) -> Any:
    """Turn a list of factor names into factors without levels; code will choose their levels."""
    if not isinstance(given, list | tuple):
        return given
    if any(not isinstance(name, str) for name in given):
        raise ValueError("a list can only name factors; to choose levels, write `{kl: [0.1], temperature: []}`")
    return dict.fromkeys(given, ())


_ByLevels = dict[str, Annotated[tuple[Scalar, ...], Field(max_length=64)]]
_Factors = Annotated[_ByLevels, BeforeValidator(_by_name, json_schema_input_type=_ByLevels | tuple[str, ...])]


class CampaignGoal(StrictModel):
    """What a person asks of a campaign.

    Attributes:
        goal: the brief. It is quoted in decisions and in the report, and never parsed.
        instruments: each study runs on one of them, by default the first.
        model: the model to train. None means the instrument's.
        factors: what may be changed, by name, each with the levels to try; code chooses them if a factor has none. Only these levels
            can be confirmed. By default, every training factor of the instrument that does not change what is measured.
        set: levels that are the same in all studies.
        approve: when to wait for a person's approval: never, before the first study (`campaign`), before each study, or before
            each confirmation.
    """

    goal: Annotated[str, Field(max_length=LONGEST_QUESTION), AfterValidator(_said)]
    instruments: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1)]
    model: Annotated[str, Field(min_length=1)] | None = None
    objective: Objective = Objective()
    factors: _Factors = {}
    set: dict[str, Scalar] = {}
    steps: Annotated[int, Field(ge=1, strict=True), AfterValidator(at_most(MOST_STEPS))] | None = None
    strategist: Literal["auto", "llm", "builtin"] = "auto"
    budget: CampaignBudget = CampaignBudget()
    schedule: SpecSchedule = SpecSchedule()
    approve: Literal["never", "campaign", "study", "confirm"] = "never"
    notify: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _fields_fit(self) -> Self:
        both = {
            f"set.{name}": "is among the factors: it is either varied or the same in all studies"
            for name in self.factors
            if name in self.set
        }
        if self.budget.wall is None and self.budget.trials is None:
            both["budget"] = "give wall or trials: a campaign without either would never end"
        if len(set(self.instruments)) < len(self.instruments):
            both["instruments"] = "names one of them twice: leave it out"
        if both:
            raise misfit(both)
        return self

    def document(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults, as plain data in field order."""
        return self.model_dump(mode="json", exclude_defaults=True)


def goal_in(fields: Mapping[str, Any]) -> CampaignGoal:
    """Validate a goal. Raises: SpecRefused, naming every wrong field."""
    try:
        goal = CampaignGoal.model_validate(fields)
    except ValidationError as error:
        Refusals(refused_in(error, CampaignGoal)).raise_any()
        raise AssertionError("pydantic refused the goal but named no field") from error
    try:
        service_names(goal.notify)  # here and not in the model, which must read the goals of earlier campaigns
    except ValueError as error:
        raise SpecRefused("notify", str(error)) from error
    return goal


def check_limits(limits: Mapping[str, float]) -> None:
    """Check amended limits of a budget, by name. Raises: SpecRefused, naming every wrong limit."""
    try:
        CampaignBudget.model_validate(dict(limits))
    except ValidationError as error:
        Refusals(refused_in(error, CampaignBudget)).raise_any()


class Aim(StrictModel):
    """A goal in the terms of one instrument: metric, margin, and the levels of each factor. Hashed as part of a decision's input."""

    instrument: str
    model: str | None
    metric: str
    direction: Direction
    margin: float
    sigma: float | None
    factors: tuple[AimFactor, ...]
    settings: dict[str, Scalar] = {}
    """Factor levels that are the same in all studies."""
    steps: int | None = None
    """Optimizer steps of a trial. None means the instrument's default, unless a study sets them."""
    generated: bool = False
    """Whether an LLM wrote the instrument. Its rewards then support no claim."""

    def factor(self, name: str) -> AimFactor:
        return next(factor for factor in self.factors if factor.name == name)

    @property
    def free(self) -> tuple[AimFactor, ...]:
        """The factors that may still be varied."""
        return tuple(factor for factor in self.factors if not factor.left_alone)

    def leaving(self, names: Collection[str]) -> Aim:
        """Return a copy in which exactly these factors are left alone."""
        factors = [factor.model_copy(update={"left_alone": factor.name in names}) for factor in self.factors]
        return self.model_copy(update={"factors": tuple(factors)})

    @property
    def sign(self) -> int:
        """1 if more of the metric is better, else -1."""
        return 1 if self.direction == "increase" else -1


class AimFactor(StrictModel):
    """A factor that a campaign may vary.

    Attributes:
        levels: the levels to try, in order, including `default`.
        ordered: whether the levels are numbers, so that they have an order.
        left_alone: whether a person wants the factor to stay as it is.
    """

    name: str
    default: Scalar
    levels: tuple[Scalar, ...]
    ordered: bool
    left_alone: Annotated[bool, Field(exclude_if=lambda alone: not alone)] = False

    @property
    def place(self) -> int:
        """Index of the default among the levels."""
        return self.levels.index(self.default)


Aim.model_rebuild()


def aim_of(goal: CampaignGoal, instrument: Instrument) -> Aim:
    """Translate the goal into the terms of one instrument. Raises: SpecRefused, naming every wrong field."""
    refusals, metric, factors = Refusals(), None, list[AimFactor]()
    known = InstrumentNames(instrument)
    with refusals.kept():
        metric = known.metric(goal.objective.metric or instrument.defaults.metric, "objective.metric")
    usual = _usual(goal, instrument, on_training=metric is not None and metric.on_training)
    for name, levels in (goal.factors or {factor.name: () for factor in usual}).items():
        with refusals.kept():
            factors.append(_factor(known.factor(name, "factors"), levels))
    known.settings(goal.set, "set", refusals)
    refusals.raise_any()
    assert metric is not None
    if not factors:
        raise SpecRefused("factors", f"{instrument.name} declares no training factor that can be varied: name some")
    return Aim(
        instrument=instrument.name,
        model=goal.model,
        metric=metric.name,
        direction=goal.objective.direction or metric.direction,
        margin=goal.objective.margin or metric.margin,
        sigma=metric.sigma,
        factors=tuple(factors),
        settings=goal.set,
        steps=goal.steps,
        generated=instrument.generated is not None,
    )


def aims_of(goal: CampaignGoal, instruments: Sequence[Instrument]) -> tuple[Aim, ...]:
    """Translate the goal into the terms of each instrument. Raises: SpecRefused, naming every wrong field and its instrument."""
    refusals, aims = Refusals(), list[Aim]()
    for instrument in instruments:
        try:
            aims.append(aim_of(goal, instrument))
        except SpecRefused as refused:
            refusals.found += [refused] if len(instruments) == 1 else _named(refused, instrument.name)
    refusals.raise_any()
    _check_together(goal, aims)
    return tuple(aims)


def aim_beside(goal: CampaignGoal, aims: Sequence[Aim], instrument: Instrument) -> Aim:
    """Translate the goal into the terms of a further instrument. `aims` are those on the campaign's other instruments.

    Raises: SpecRefused.
    """
    aim = aim_of(goal, instrument)
    _check_together(goal, [*aims, aim])
    return aim


def _check_together(goal: CampaignGoal, aims: Sequence[Aim]) -> None:
    """Check that no two instruments share a name, and that the goal's margin or direction fits all their metrics.

    Raises: SpecRefused.
    """
    names = [aim.instrument for aim in aims]
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise SpecRefused("instruments", f"two of them are called {twice[0]}: rename one in its declaration", twice)
    _check_one_metric(goal.objective, aims)


def _named(refused: SpecRefused, instrument: str) -> list[SpecRefused]:
    """Prefix each problem with the instrument that has it."""
    return [
        SpecRefused(field, said if instrument in said else f"on {instrument}: {said}", refused.nearest)
        for field, said in refused.problems
    ]


def _check_one_metric(objective: Objective, aims: Sequence[Aim]) -> None:
    """Raise SpecRefused if a margin or a direction is given although the instruments have different metrics."""
    if len({aim.metric for aim in aims}) < 2:
        return
    given = [name for name in ("direction", "margin") if getattr(objective, name) is not None]
    if given:
        own = ", ".join(f"{aim.metric} of {aim.instrument}" for aim in aims)
        said = f"applies to one metric, but the instruments have {own}: set objective.metric, or leave this out"
        raise SpecRefused(f"objective.{given[0]}", said, [aim.metric for aim in aims])


def _usual(goal: CampaignGoal, instrument: Instrument, *, on_training: bool) -> list[Factor]:
    """Return the training factors that have an effect without other factors and are not set by the goal.

    If the objective is measured `on_training` episodes, leave out sampling factors, because they would change the measurement.
    """
    return [
        factor
        for factor in instrument.factors
        if factor.target.startswith(_TRAINING)
        and not factor.target.startswith(_PARAMETERS)
        and not (factor.needs or factor.needs_any or factor.share)
        and factor.type not in ("text", "data")
        and factor.name not in goal.set
        and not (on_training and factor.samples)
        and len(ladder(factor)) > 1
    ]


def _factor(factor: Factor, given: tuple[Scalar, ...]) -> AimFactor:
    name, levels = factor.name, list[Scalar]()
    for each in given or ladder(factor):
        level = as_level(factor, each)
        if (problem := level_problem(factor, level)) is not None:
            raise SpecRefused(f"factors.{name}", problem, [name])
        levels.append(level)
    default = as_level(factor, factor.default)
    ordered = factor.type in ("int", "float")
    levels = list(dict.fromkeys([*([] if default in levels else [default]), *levels]))
    if ordered:
        levels.sort(key=float)
    if len(levels) < 2 or len(levels) > MOST_LEVELS:
        said = f"a factor takes 2 to {MOST_LEVELS} levels, including the default {default}, but this has {len(levels)}"
        raise SpecRefused(f"factors.{name}", said, [name])
    return AimFactor(name=name, default=default, levels=tuple(levels), ordered=ordered)


def ladder(factor: Factor) -> tuple[Scalar, ...]:
    """Return the levels to try if a goal names none. They include the default."""
    default = factor.default
    if factor.type == "bool":
        return (False, True)
    if factor.type == "choice":
        return tuple(dict.fromkeys((default, *factor.choices)))[:MOST_LEVELS]
    if factor.type not in ("int", "float") or isinstance(default, str):
        return (default,)
    base = float(default)
    if base == 0.0:
        on = float(factor.on) if isinstance(factor.on, int | float) else 0.0
        wanted = [0.0, on / 3, on, on * 3] if on else [0.0]
    elif factor.type == "int" or factor.scale == "log":
        wanted = [base * ratio for ratio in ((0.25, 0.5, 1, 2, 4) if factor.type == "int" else (0.25, 1, 4, 16))]
    else:
        wanted = [base * ratio for ratio in (0.5, 0.75, 1, 1.25, 1.5)]
    low, high = factor.low, factor.high
    fits = [each for each in wanted if (low is None or each >= low) and (high is None or each <= high)]
    shaped: list[Scalar] = [round(each) if factor.type == "int" else float(f"{each:.3g}") for each in fits]
    return tuple(dict.fromkeys(shaped))


def default_levels(aim: Aim) -> dict[str, Scalar]:
    """Return the default level of every factor."""
    return {factor.name: factor.default for factor in aim.factors}


def changed(aim: Aim, levels: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Return the levels that differ from the defaults, as an arm states them."""
    own = default_levels(aim)
    return {name: level for name, level in levels.items() if name not in own or level != own[name]}
