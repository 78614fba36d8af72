"""`StudySpec`: everything that can be asked of a study, in one validated document.

It knows names and numbers, and nothing of what instruments declare: whether a factor exists is for `researcher.design`.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, WithJsonSchema, model_validator

from foundation.durations import duration_s
from foundation.strict import StrictModel, misfit
from researcher.instruments.instrument import Scalar

DesignName = Literal["compare", "factorial", "sequence", "race", "screen", "balance", "trend"]
Claim = Literal["increase", "decrease", "equal", "none"]
Approval = Literal["never", "plan", "stage"]
CROSSED: tuple[DesignName, ...] = ("factorial", "screen")
"""Designs whose arms set each of several factors to one of two levels. A screen may also have arms, or levels of one factor."""
BASE = "base"
"""`start_from`: the model itself, not weights that a trial has trained."""
MOST_LOOKS, MOST_FINE, LONGEST_QUESTION = 5, 50, 20_000
_SERVICE = re.compile(r"[A-Z][A-Z0-9_]{0,40}")
_COUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([kKmMbB]?)")
_COUNT_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}


def duration_text(seconds: float) -> str:
    """`8h`, `90m`, `45s`: the largest unit that gives a whole number."""
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
    """`50M`, `500k`, `123`."""
    for unit in ("b", "m", "k"):
        if count and count % _COUNT_UNITS[unit] == 0:
            return f"{count // _COUNT_UNITS[unit]}{unit if unit == 'k' else unit.upper()}"
    return str(count)


def _counted(given: object) -> object:
    if isinstance(given, str):
        found = _COUNT.fullmatch(given.strip())
        if found is None:
            raise ValueError(f"write a number such as 50M or 500k, got {given!r}")
        return round(float(found[1]) * _COUNT_UNITS[found[2].lower()])
    return given


Duration = Annotated[
    float,
    Field(gt=0),
    BeforeValidator(_seconds),
    PlainSerializer(duration_text),
    WithJsonSchema({"type": ["string", "number"], "description": "8h, 90m, 1h30m, or a number of seconds"}),
]
Count = Annotated[
    int,
    Field(gt=0),
    BeforeValidator(_counted),
    PlainSerializer(count_text),
    WithJsonSchema({"type": ["string", "integer"], "description": "50M, 500k, or a number"}),
]


def _said(text: str) -> str:
    if not text.strip():
        raise ValueError("say in words what the study asks")
    return text.strip()


def _not_lists(given: Any) -> Any:
    if isinstance(given, dict):
        for name, levels in given.items():
            if isinstance(levels, list | tuple):
                shown = ", ".join(map(str, levels))
                raise ValueError(f"{name} needs its levels by name: `{name}: {{levels: [{shown}]}}`")
    return given


def _service_names(given: tuple[str, ...]) -> tuple[str, ...]:
    """Without quoting a bad one, which may be an address that was meant for the environment."""
    if any(_SERVICE.fullmatch(name) is None for name in given):
        raise ValueError(
            "give names in capitals such as SLACK; the address of each is a secret and belongs in RESEARCHER_NOTIFY_<NAME>"
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
    trials: Annotated[int | None, Field(ge=1)] = None
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
    steps: Annotated[int | None, Field(ge=1, le=1_000_000, strict=True)] = None
    heldout_every: Annotated[int | None, Field(ge=0, strict=True)] = None
    seeds: SeedRange = SeedRange()
    evaluate_on: tuple[str, ...] = ()
    start_from: Annotated[str, Field(min_length=1)] = BASE
    looks: Annotated[int, Field(ge=1, le=MOST_LOOKS)] = 1
    fine: Annotated[int, Field(ge=0, le=MOST_FINE)] = 0
    budget: SpecBudget = SpecBudget()
    schedule: SpecSchedule = SpecSchedule()
    approve: Approval | None = None
    notify: Annotated[tuple[str, ...], AfterValidator(_service_names)] = ()

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
        """The set fields as plain data, in field order."""
        return self.model_dump(mode="json", exclude_defaults=True)


def _misfits(spec: StudySpec) -> dict[str, str]:
    """Problems by field."""
    problems: dict[str, str] = {}
    factors = len(spec.compare) + (len(spec.models) > 1)
    if spec.arms and factors:
        problems["arms"] = (
            "cannot stand beside compare or several models: write each arm's settings, its model too, in arms"
        )
    elif not spec.arms and not factors:
        problems["compare"] = "nothing says what differs between the arms: give compare, arms or several models"
    elif spec.arms and len(spec.arms) < 2:
        problems["arms"] = "needs at least two arms"
    for name, factor in spec.compare.items():
        sides = len(factor.levels) + (factor.baseline is not None)
        if len(dict.fromkeys(factor.levels)) < len(factor.levels):
            problems[f"compare.{name}.levels"] = "names a level twice"
        elif len(factor.levels) > 1 and factor.baseline in factor.levels:
            problems[f"compare.{name}.levels"] = "names the baseline again"
        elif not factor.levels:
            problems[f"compare.{name}.levels"] = "needs at least one level"
        elif spec.design in CROSSED and factors > 1 and sides > 2:
            said = f"{spec.design} takes two levels of each factor, the baseline's included"
            problems[f"compare.{name}.levels"] = said
        if name in spec.set:
            problems[f"set.{name}"] = "is under compare already: a factor is either compared or the same in all arms"
    if spec.arms and spec.design not in ("compare", "race", "screen"):
        problems["design"] = f"{spec.design} needs compare; arms can be compared, raced or screened"
    elif not spec.arms and (takes := _factors_taken(spec.design, factors)):
        problems["design"] = f"{spec.design} takes {takes}"
    if len(spec.models) > len(set(spec.models)):
        problems["model"] = "names a model twice"
    return problems


def _factors_taken(design: DesignName, given: int) -> str:
    """How many factors the design takes, if not this many."""
    if design == "sequence" and given != 2:
        return f"two factors, one after the other, and the spec compares {given}"
    if design == "factorial" and given < 2:
        return f"two factors or more, and the spec compares {given}"
    if design not in ("sequence", *CROSSED) and given > 1:
        return f"one factor, and the spec compares {given}: use factorial, sequence, screen, or arms"
    return ""
