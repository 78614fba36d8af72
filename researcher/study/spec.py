"""`StudySpec`: everything that can be asked of a study, in one validated document.

It knows names and numbers but not what instruments declare: `researcher.design` checks whether a factor exists.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, WithJsonSchema, model_validator

from foundation.durations import duration_s
from foundation.strict import StrictModel, misfit
from researcher.instruments.instrument import Scalar

N = TypeVar("N", int, float)
DesignName = Literal["compare", "factorial", "sequence", "race", "screen", "balance", "trend"]
Claim = Literal["increase", "decrease", "equal", "none"]
Approval = Literal["never", "plan", "stage"]
CROSSED: tuple[DesignName, ...] = ("factorial", "screen")
"""Designs in which every arm sets several factors to one of two levels. A screen may instead list arms, or levels of one factor."""
_MANY = 1000


class Design(NamedTuple):
    """What a design allows: the numbers of factors and of levels per factor (baseline included), and whether it may have arms,
    looks or a fine stage.
    """

    factors: range = range(1, 2)
    levels: range = range(2, _MANY)
    arms: bool = False
    looks: bool = True
    fine: bool = False


DESIGNS: dict[DesignName, Design] = {
    "compare": Design(arms=True, fine=True),
    "factorial": Design(factors=range(2, 6), levels=range(2, 3)),
    "sequence": Design(factors=range(2, 3), levels=range(2, 5), looks=False),
    "race": Design(levels=range(3, _MANY), arms=True, looks=False, fine=True),
    "screen": Design(factors=range(1, _MANY), levels=range(2, 3), arms=True, looks=False),
    "balance": Design(levels=range(2, 5)),
    "trend": Design(levels=range(3, _MANY)),
}
BASE = "base"
"""Value of `start_from` for the model itself, not weights that a trial has trained."""
MOST_LOOKS, MOST_FINE, MOST_STEPS, LONGEST_QUESTION = 5, 50, 1_000_000, 20_000
MOST, LONGEST_S = 10**15, 10.0**10
"""Largest budgets: a count or an amount of money, and a time in seconds (300 years)."""
_SERVICE = re.compile(r"[A-Z][A-Z0-9_]{0,40}")
_COUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([kKmMbB]?)")
_COUNT_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}


def duration_text(seconds: float) -> str:
    """Format a duration in the largest unit that gives a whole number: `8h`, `90m`, `45s`."""
    for unit, length in (("h", 3600), ("m", 60)):
        if seconds >= length and seconds % length == 0:
            return f"{seconds / length:.0f}{unit}"
    return f"{seconds:.3f}".rstrip("0").rstrip(".") + "s"


def _seconds(given: object) -> object:
    if isinstance(given, str):
        found = duration_s(given.replace(" ", ""))
        if found is None:
            raise ValueError(f"write a time such as 8h, 90m or 1h30m, got {given!r}")
        return found
    return given


def count_text(count: int) -> str:
    """Format a count: `50M`, `500k`, `123`."""
    for unit in ("b", "m", "k"):
        if count and count % _COUNT_UNITS[unit] == 0:
            return f"{count // _COUNT_UNITS[unit]}{unit if unit == 'k' else unit.upper()}"
    return str(count)


def _counted(given: object) -> object:
    if isinstance(given, str):
        found = _COUNT.fullmatch(given.strip())
        if found is None:
            raise ValueError(f"write a number such as 50M or 500k, got {given!r}")
        return round(at_most(MOST)(float(found[1]) * _COUNT_UNITS[found[2].lower()]))
    return given


def at_most(most: float) -> Callable[[N], N]:
    """Return a validator for numbers up to `most`, which does not show in the JSON Schema."""

    def checked(number: N) -> N:
        if number > most:
            raise ValueError(f"is too large: at most {most:,.0f} is allowed")
        return number

    return checked


Duration = Annotated[
    float,
    Field(gt=0),
    AfterValidator(at_most(LONGEST_S)),
    BeforeValidator(_seconds),
    PlainSerializer(duration_text),
    WithJsonSchema({"type": ["string", "number"], "description": "8h, 90m, 1h30m, or a number of seconds"}),
]
Count = Annotated[
    int,
    Field(gt=0),
    AfterValidator(at_most(MOST)),
    BeforeValidator(_counted),
    PlainSerializer(count_text),
    WithJsonSchema({"type": ["string", "integer"], "description": "50M, 500k, or a number"}),
]
Trials = Annotated[int, Field(ge=1), AfterValidator(at_most(MOST))]


def _said(text: str) -> str:
    if not text.strip():
        raise ValueError("write the study's question in words")
    return text.strip()


def _not_lists(given: Any) -> Any:
    if isinstance(given, dict):
        for name, levels in given.items():
            if isinstance(levels, list | tuple):
                shown = ", ".join(map(str, levels))
                raise ValueError(f"give the levels of {name} under `levels`: `{name}: {{levels: [{shown}]}}`")
    return given


def service_names(given: tuple[str, ...]) -> tuple[str, ...]:
    """Check the names in `notify`.

    Raises: ValueError; its text does not quote a bad name, which may be an address that was meant for the environment.
    """
    if any(_SERVICE.fullmatch(name) is None for name in given):
        raise ValueError(
            "give names in capitals, such as SLACK; their addresses are secret and belong in RESEARCHER_NOTIFY_<NAME>"
        )
    return given


class Compared(StrictModel):
    """The levels of one factor. baseline None: the first of several levels; the instrument's default for a single one."""

    baseline: Scalar | None = None
    levels: Annotated[tuple[Scalar, ...], Field(max_length=64)] = ()


class SeedRange(StrictModel):
    """Seeds of each arm. None: as the instrument has it. first: the seed that counting starts from."""

    min: Annotated[int | None, Field(ge=2, le=10_000)] = None
    max: Annotated[int | None, Field(ge=2, le=10_000)] = None
    first: Annotated[int, Field(ge=0, lt=2**31)] = 0

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.min is not None and self.max is not None and self.max < self.min:
            raise misfit({"max": f"must not be below min ({self.min}), got {self.max}"})
        return self


class SpecBudget(StrictModel):
    """Spending limits. wall: time in which trials run; tokens: of the agents' calls."""

    wall: Duration | None = None
    trials: Trials | None = None
    tokens: Count | None = None


class SpecSchedule(StrictModel):
    """When trials may run. windows: `22:00-07:00`, `sat,sun 00:00-24:00`; none means always. days: the study ends after them."""

    windows: tuple[str, ...] = ()
    days: Annotated[int | None, Field(ge=1, le=3650)] = None


class StudySpec(StrictModel):
    """A study request. What is not set has the instrument's default.

    question: quoted in the report, never parsed. instrument: a name or folder. model: a hub name, known name or
    folder; several make the model a factor. `compare` (or several models) names what differs, or `arms` bundles
    settings by name, the first being the baseline. set: the same in all arms. metric None: the instrument's.
    secondary: reported, never decides. claim: how the treatments' metric moves; `none` tests the better way, and says
    so. margin: smallest effect that matters; None: the metric's. heldout_every: steps between two evaluations on some of
    the held-out tasks while training goes on, for the curves; 0: only before and after; None: the instrument's.
    evaluate_on: other instruments, on whose held-out tasks trained models are scored too: reported, never decides.
    """

    question: Annotated[str, Field(max_length=LONGEST_QUESTION), AfterValidator(_said)]
    instrument: Annotated[str, Field(min_length=1)]
    model: Annotated[str, Field(min_length=1)] | Annotated[tuple[str, ...], Field(min_length=2)] | None = None
    compare: Annotated[dict[str, Compared], BeforeValidator(_not_lists)] = {}
    arms: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.+=-]{0,60}$")], dict[str, Scalar]] = {}
    design: DesignName = "compare"
    set: dict[str, Scalar] = {}
    metric: str | None = None
    secondary: tuple[str, ...] = ()
    claim: Claim = "none"
    margin: Annotated[float | None, Field(gt=0)] = None
    steps: Annotated[int | None, Field(ge=1, le=MOST_STEPS, strict=True)] = None
    heldout_every: Annotated[int, Field(ge=0, strict=True), AfterValidator(at_most(MOST_STEPS))] | None = None
    seeds: SeedRange = SeedRange()
    evaluate_on: tuple[str, ...] = ()
    start_from: Annotated[str, Field(min_length=1)] = BASE
    looks: Annotated[int, Field(ge=1, le=MOST_LOOKS)] = 1
    fine: Annotated[int, Field(ge=0, le=MOST_FINE)] = 0
    budget: SpecBudget = SpecBudget()
    schedule: SpecSchedule = SpecSchedule()
    approve: Approval | None = None
    notify: Annotated[tuple[str, ...], AfterValidator(service_names)] = ()

    @model_validator(mode="after")
    def _fields_fit(self) -> Self:
        problems = _misfits(self)
        if problems:
            raise misfit(problems)
        return self

    @property
    def models(self) -> tuple[str, ...]:
        """Every model that the spec names."""
        return (self.model,) if isinstance(self.model, str) else self.model or ()

    def document(self) -> dict[str, Any]:
        """Return the set fields as plain data, in field order."""
        return self.model_dump(mode="json", exclude_defaults=True)


def _misfits(spec: StudySpec) -> dict[str, str]:
    """Return problems by field."""
    takes, problems = DESIGNS[spec.design], dict[str, str]()
    levels = {"model": len(spec.models)} if len(spec.models) > 1 else {}
    for name, factor in spec.compare.items():
        stated = len(factor.levels) + (factor.baseline is not None)
        levels[f"compare.{name}.levels"] = max(stated, 2)  # a single level is compared with the default
    if spec.arms and levels:
        problems["arms"] = (
            "cannot be combined with compare or several models: put each arm's settings, including its model, in arms"
        )
    elif not spec.arms and not levels:
        problems["compare"] = "the spec does not say how the arms differ: give compare, arms or several models"
    elif spec.arms and len(spec.arms) < 2:
        problems["arms"] = "needs at least two arms"
    elif unsuited := _unsuited(spec.design, levels, len(spec.arms)):
        others = [name for name in DESIGNS if not _unsuited(name, levels, len(spec.arms))]
        instead = ", ".join([*others, *([] if spec.arms else ["arms"])])
        problems |= {field: f"{problem}; use {instead}" for field, problem in unsuited.items()}
    for name, factor in spec.compare.items():
        if len(dict.fromkeys(factor.levels)) < len(factor.levels):
            problems[f"compare.{name}.levels"] = "names a level twice"
        elif len(factor.levels) > 1 and factor.baseline in factor.levels:
            problems[f"compare.{name}.levels"] = "names the baseline again"
        elif not factor.levels:
            problems[f"compare.{name}.levels"] = "needs at least one level"
        if name in spec.set:
            problems[f"set.{name}"] = "is already under compare: a factor is either compared or the same in all arms"
    if len(spec.models) > len(set(spec.models)):
        problems["model"] = "names a model twice"
    if spec.looks > 1 and (spec.fine or not takes.looks):
        which = f"a {spec.design}" if not takes.looks else "a study with a fine stage"
        problems["looks"] = f"{which} has no looks; leave them out"
    if spec.fine and (spec.arms or not takes.fine):
        which = "arms that set several factors have" if spec.arms else f"a {spec.design} study has"
        problems["fine"] = f"{which} no fine stage; leave it out"
    if spec.design == "balance" and spec.claim != "none":
        problems["claim"] = "a balance makes no claim: it asks which level is enough; leave the claim out"
    return problems


def _unsuited(design: DesignName, levels: Mapping[str, int], arms: int) -> dict[str, str]:
    """Explain why the design cannot have these arms, by field. `levels` are numbers of levels, by the field that gives them."""
    takes = DESIGNS[design]
    if arms and not takes.arms:
        return {"design": f"{design} needs compare and does not take arms"}
    if 0 < arms < takes.levels.start:
        return {"design": f"{design} takes {_span(takes.levels, 'arm')}, but the spec has {arms}"}
    if levels and len(levels) not in takes.factors:
        return {"design": f"{design} takes {_span(takes.factors, 'factor')}, but the spec compares {len(levels)}"}
    if design == "screen" and len(levels) == 1:  # a screen of one factor takes any number of levels
        return {}
    said = f"{design} takes {_span(takes.levels, 'level')} of a factor, including the baseline"
    return {field: f"{said}, not {count}" for field, count in levels.items() if count not in takes.levels}


def _span(bounds: range, noun: str) -> str:
    """Format a range of counts: `1 factor`, `2 to 5 factors`, `3 or more levels`."""
    least, most = bounds[0], bounds[-1]
    number = f"{least}" if least == most else f"{least} or more" if bounds.stop == _MANY else f"{least} to {most}"
    return f"{number} {noun}{'' if most == 1 else 's'}"
