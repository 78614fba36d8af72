"""Models that refuse unknown fields and suggest the nearest known name."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from foundation.nearest import nearest

Loc = tuple[int | str, ...]
_SHORT = 40
"""Maximum length of a value that an error repeats, in characters."""
_MISFIT = "misfit"
_IN_WORDS = {
    "missing": "is missing",
    "extra_forbidden": "unknown field",
    "tuple_type": "should be a list",
    **dict.fromkeys(("model_type", "model_attributes_type", "dict_type"), "should be an object"),
}
_SAID_WITH_VALUE = (_MISFIT, "value_error", "extra_forbidden", "missing")


class StrictModel(BaseModel):
    """Base class of every spec that a person writes: it refuses unknown fields, and its values are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class FieldError(BaseModel):
    """One bad field: where it is (`optimizer.learning_rte`), what is wrong, and the nearest known name, if any."""

    field: str
    problem: str
    nearest: str | None = None

    def __str__(self) -> str:
        hint = f" (did you mean {self.nearest!r}?)" if self.nearest else ""
        return f"{self.field}: {self.problem}{hint}"


def misfit(problems: Mapping[str, str]) -> PydanticCustomError:
    """Return the error for a model's validator to raise when fields contradict each other. `explain` reports each field.

    `problems` maps each field's path within that model (`batch.group_size`) to what is wrong with it.
    """
    words = "; ".join(f"{field}: {problem}" for field, problem in problems.items())
    return PydanticCustomError(_MISFIT, "{words}", {"words": words, "problems": dict(problems)})


def explain(error: ValidationError, model: type[BaseModel]) -> list[FieldError]:
    """Turn pydantic's error into one `FieldError` per bad field, with nearest names for misspelt ones.

    A value that fits none of several allowed types gets one of two kinds of report: an object gets the errors of its fields;
    anything else gets the list of allowed types.
    """
    items = [each for item in error.errors(include_url=False) for each in _one_field_each(item)]
    faults = [_Fault.of(item, model) for item in items]
    found: list[FieldError] = []
    seen: set[Loc] = set()
    for fault in faults:
        if fault.choice is None:
            found.append(fault.explained())
            continue
        if fault.choice in seen:
            continue
        seen.add(fault.choice)
        together = [other for other in faults if other.choice == fault.choice]
        meant = [other for other in together if other.loc != fault.choice or other.item["type"] == "value_error"]
        found += [other.explained() for other in meant] if meant else [_any_of(together)]
    return list({str(each): each for each in found}.values())


@dataclass(frozen=True, slots=True)
class _Fault:
    """One of pydantic's errors, resolved against the model.

    Args:
        item: the error as pydantic reports it.
        loc: path of the field, without the type names that pydantic adds.
        choice: path of the innermost value that allows several types; None if there is no such value.
        owner: the model that has, or should have, the last field of `loc`; None if that is not in a model.
        annotation: the type that the value should have.
    """

    item: ErrorDetails
    loc: Loc
    choice: Loc | None
    owner: type[BaseModel] | None
    annotation: object

    @classmethod
    def of(cls, item: ErrorDetails, model: type[BaseModel]) -> _Fault:
        annotation: object = model
        loc: Loc = ()
        choice: Loc | None = None
        owner: type[BaseModel] | None = None
        for part in item["loc"]:
            branches = _branches(annotation)
            if len(branches) > 1:
                choice = loc
                annotation = next((each for each in branches if _name(each) == part), None)
                continue
            loc = (*loc, part)
            (here,) = branches or [None]
            owner = here if _is_model(here) else None
            annotation = _inside(here, part)
        return cls(item, loc, choice, owner, annotation)

    @property
    def field(self) -> str:
        return ".".join(map(str, self.loc)) or "(whole)"

    @property
    def problem(self) -> str:
        """What is wrong, in our words."""
        kind = self.item["type"]
        if kind == "value_error":
            return str(self.item["ctx"]["error"])
        if kind == "too_long":
            return f"takes at most {self.item['ctx']['max_length']} entries, not {self.item['ctx']['actual_length']}"
        return _IN_WORDS.get(kind) or self.item["msg"].removeprefix("Input ")

    @property
    def given(self) -> str:
        """The given value, as a suffix to the problem; empty if a validator wrote the message or the value is long."""
        value = self.item["input"]
        short = isinstance(value, str | int | float | bool | None) and len(repr(value)) <= _SHORT
        return f", got {value!r}" if short and self.item["type"] not in _SAID_WITH_VALUE else ""

    @property
    def nearest(self) -> str | None:
        """The nearest field of the same model, or the nearest allowed value; None if nothing is close."""
        if self.item["type"] == "extra_forbidden":
            guess = nearest(str(self.loc[-1]), self.owner.model_fields) if self.owner else None
            return ".".join([*map(str, self.loc[:-1]), guess]) if guess else None
        known = [value for branch in _branches(self.annotation) for value in _values(branch)]
        given = self.item["input"]
        return nearest(given, known) if isinstance(given, str) and known else None

    def explained(self) -> FieldError:
        return FieldError(field=self.field, problem=self.problem + self.given, nearest=self.nearest)


def _one_field_each(item: ErrorDetails) -> list[ErrorDetails]:
    """Split a `misfit` error into one error per field, as if pydantic had reported each."""
    if item["type"] != _MISFIT:
        return [item]
    problems: dict[str, str] = item["ctx"]["problems"]
    return [
        ErrorDetails(type=_MISFIT, loc=(*item["loc"], *field.split(".")), msg=problem, input=None)
        for field, problem in problems.items()
    ]


def _any_of(faults: Sequence[_Fault]) -> FieldError:
    """Return the error for a value that has none of its allowed types."""
    first, *others = dict.fromkeys(fault.problem for fault in faults)
    could = " or ".join([first, *(other.removeprefix("should be ") for other in others)])
    guess = next((fault.nearest for fault in faults if fault.nearest), None)
    return FieldError(field=faults[0].field, problem=could + faults[0].given, nearest=guess)


def _values(annotation: object) -> list[str]:
    """Return the strings that a literal or an enumeration allows."""
    if typing.get_origin(annotation) is typing.Literal:
        return [value for value in typing.get_args(annotation) if isinstance(value, str)]
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return [each.value for each in annotation if isinstance(each.value, str)]
    return []


def _branches(annotation: object) -> list[object]:
    """Return the types that a value may have, except None."""
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return _branches(typing.get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        return [each for part in typing.get_args(annotation) for each in _branches(part)]
    return [] if annotation in (None, type(None)) else [annotation]


def _name(annotation: object) -> str:
    """Return pydantic's name for a member type of a union."""
    if typing.get_origin(annotation) is typing.Literal:
        return f"literal[{','.join(repr(value) for value in typing.get_args(annotation))}]"
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)


def _is_model(annotation: object) -> typing.TypeGuard[type[BaseModel]]:
    return isinstance(annotation, type) and not typing.get_origin(annotation) and issubclass(annotation, BaseModel)


def _inside(annotation: object, part: int | str) -> object:
    """Return the type of the value under this field name, key or index."""
    if _is_model(annotation):
        return annotation.model_fields[part].annotation if part in annotation.model_fields else None
    inner = typing.get_args(annotation)
    return inner[-1 if isinstance(part, str) else 0] if inner else None
