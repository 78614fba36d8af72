"""What the LLM may say: a choice among what instruments declare. Everything else is refused, with the reason for it to read.

Nothing that an LLM writes goes into a plan but names and levels that were found among the declared ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field

from foundation.strict import StrictModel
from researcher.design.reading import Crossed, Reading
from researcher.instruments.catalogue import InstrumentFolder, level_problem
from researcher.instruments.instrument import Direction, Factor, Instrument, Metric, Scalar
from researcher.planner.matching import with_steps

MOST_LEVELS, MOST_CROSSED = 16, 5
_LARGEST = 1e12


class ChosenFactor(StrictModel):
    name: str
    baseline: Scalar
    treatments: Annotated[tuple[Scalar, ...], Field(min_length=1, max_length=MOST_LEVELS)]


class ChosenSetting(StrictModel):
    name: str
    level: Scalar


class PlanChoice(StrictModel):
    """The LLM's answer. direction None: the topic claims none. settings: other factors, the same for all arms."""

    instrument: str
    factors: Annotated[tuple[ChosenFactor, ...], Field(min_length=1, max_length=MOST_CROSSED)]
    metric: str
    direction: Direction | None
    settings: tuple[ChosenSetting, ...] = ()


class ChoiceWrong(ValueError):
    """The choice is none that can be planned; the text is what the LLM is told."""


def schema(folders: Sequence[InstrumentFolder]) -> dict[str, Any]:
    """The JSON schema of a choice, with the names that exist."""
    instruments = [with_steps(folder.instrument) for folder in folders]
    factors = sorted({factor.name for each in instruments for factor in each.factors})
    metrics = sorted({metric.name for each in instruments for metric in each.metrics})
    level = {"anyOf": [{"type": "number"}, {"type": "boolean"}, {"type": "string"}]}
    name = {"type": "string", "enum": factors}
    factor = _object(name=name, baseline=level, treatments={"type": "array", "items": level})
    setting = _object(name=name, level=level)
    return _object(
        instrument={"type": "string", "enum": sorted(each.name for each in instruments)},
        factors={"type": "array", "items": factor},
        metric={"type": "string", "enum": metrics},
        direction={"anyOf": [{"type": "string", "enum": ["increase", "decrease"]}, {"type": "null"}]},
        settings={"type": "array", "items": setting},
    )


def reading_of(choice: PlanChoice, folders: Sequence[InstrumentFolder]) -> tuple[InstrumentFolder, Reading]:
    """The choice in the instrument's terms.

    Raises: ChoiceWrong with every problem that was found.
    """
    folder = next((each for each in folders if each.instrument.name == choice.instrument), None)
    if folder is None:
        known = ", ".join(each.instrument.name for each in folders)
        raise ChoiceWrong(f"instrument {choice.instrument!r} does not exist; there are: {known}")
    instrument = with_steps(folder.instrument)
    problems: list[str] = []
    metric = next((each for each in instrument.metrics if each.name == choice.metric), None)
    if metric is None:
        names = ", ".join(each.name for each in instrument.metrics)
        problems.append(f"metric {choice.metric!r} is none of {instrument.name}'s: {names}")
    named = [each.name for each in choice.factors] + [each.name for each in choice.settings]
    problems += [f"factor {name!r} is named {count} times" for name, count in Counter(named).items() if count > 1]
    varied = [_varied(instrument, each, problems) for each in choice.factors]
    settings = [
        (factor, _level(factor, each.level, problems))
        for each in choice.settings
        if (factor := _factor(instrument, each.name, problems)) is not None
    ]
    if len(choice.factors) > 1:
        problems += [
            f"{each.name}: several factors are crossed at two levels each, give one treatment and not {len(each.treatments)}"
            for each in choice.factors
            if len(each.treatments) != 1
        ]
    if problems or metric is None:
        raise ChoiceWrong("; ".join(problems))
    return folder, _reading(choice, [each for each in varied if each is not None], metric, settings)


def _reading(
    choice: PlanChoice,
    varied: Sequence[tuple[Factor, Scalar, list[Scalar]]],
    metric: Metric,
    settings: Sequence[tuple[Factor, Scalar]],
) -> Reading:
    first, baseline, treatments = varied[0]
    notes = []
    if choice.direction is None:
        better = "more" if metric.direction == "increase" else "less"
        notes.append(
            f"The topic claims no direction: tested as {better} {metric.name}; the other way reads as refuted."
        )
    several = len(varied) > 1
    return Reading(
        factor=first,
        levels=() if several else (baseline, *treatments),
        pairs=() if several else tuple((number, 0) for number in range(1, len(treatments) + 1)),
        crossed=tuple(Crossed(factor=factor, levels=(low, high[0])) for factor, low, high in varied) if several else (),
        metric=metric,
        direction=choice.direction or metric.direction,
        direction_assumed=choice.direction is None,
        settings=tuple(settings),
        assumptions=tuple(notes),
    )


def _varied(
    instrument: Instrument, chosen: ChosenFactor, problems: list[str]
) -> tuple[Factor, Scalar, list[Scalar]] | None:
    factor = _factor(instrument, chosen.name, problems)
    if factor is None:
        return None
    baseline = _level(factor, chosen.baseline, problems)
    treatments = [_level(factor, level, problems) for level in chosen.treatments]
    if len({baseline, *treatments}) != 1 + len(treatments):
        problems.append(f"{factor.name}: baseline and treatments must all differ, got {[baseline, *treatments]}")
    return factor, baseline, treatments


def _factor(instrument: Instrument, name: str, problems: list[str]) -> Factor | None:
    for factor in instrument.factors:
        if factor.name == name:
            return factor
    problems.append(
        f"factor {name!r} is none of {instrument.name}'s: {', '.join(each.name for each in instrument.factors)}"
    )
    return None


def _level(factor: Factor, level: Scalar, problems: list[str]) -> Scalar:
    """The level in the factor's own type; what is wrong with it is added to `problems`."""
    number = isinstance(level, int | float) and not isinstance(level, bool)
    if isinstance(level, int | float) and not -_LARGEST <= level <= _LARGEST:
        problems.append(f"{factor.name}: a level has to be a finite number, and no larger than {_LARGEST:g}")
    elif factor.type == "bool" and not isinstance(level, bool):
        problems.append(f"{factor.name} is true or false, not {level!r}")
    elif factor.type == "choice" and not any(type(level) is type(each) and level == each for each in factor.choices):
        problems.append(f"{factor.name} is one of {', '.join(map(str, factor.choices))}, not {level!r}")
    elif factor.type in ("int", "float") and not number:
        problems.append(f"{factor.name} takes numbers, not {level!r}")
    elif problem := level_problem(factor, level):
        problems.append(problem)
    elif factor.type == "int":
        return int(level)
    elif factor.type == "float":
        return float(level)
    return level


def _object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
