"""Models that refuse what they do not know, and say what was probably meant."""

from __future__ import annotations

import difflib
import re
import typing
from collections.abc import Iterable

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

_SHORT = 40
"""Letters of a value that is shown again."""
_NO_OBJECT = ("model_type", "model_attributes_type", "dict_type")
_QUOTED = re.compile(r"'([^']*)'")


class StrictModel(BaseModel):
    """Base of every spec that a person writes: unknown fields are refused, values are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class FieldError(BaseModel):
    """One bad field: where it is (`optimizer.learning_rte`), what is wrong, and the nearest known name if any."""

    field: str
    problem: str
    nearest: str | None = None

    def __str__(self) -> str:
        hint = f" (did you mean {self.nearest!r}?)" if self.nearest else ""
        return f"{self.field}: {self.problem}{hint}"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name closest to `name`, or None when nothing is close."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return found[0] if found else None


def explain(error: ValidationError, model: type[BaseModel]) -> list[FieldError]:
    """Turn pydantic's error into one `FieldError` per bad field, with nearest names for misspelt ones."""
    return [_explain_one(item, model) for item in error.errors(include_url=False)]


def _explain_one(item: ErrorDetails, model: type[BaseModel]) -> FieldError:
    loc, given = item["loc"], item["input"]
    field = ".".join(str(part) for part in loc) or "(whole)"
    if item["type"] in ("literal_error", "enum") and isinstance(given, str):
        return FieldError(field=field, problem=_plain(item), nearest=nearest(given, _QUOTED.findall(item["msg"])))
    if item["type"] != "extra_forbidden":
        return FieldError(field=field, problem=_plain(item))
    owner = _model_at(model, loc[:-1])
    guess = nearest(str(loc[-1]), owner.model_fields) if owner else None
    parent = ".".join(str(part) for part in loc[:-1])
    return FieldError(
        field=field,
        problem="unknown field",
        nearest=f"{parent}.{guess}" if guess and parent else guess,
    )


def _plain(item: ErrorDetails) -> str:
    """pydantic's words as ours, with what was given where it is short."""
    message, given = item["msg"], item["input"]
    if (own := message.removeprefix("Value error, ")) != message:
        return own
    words = "should be an object" if item["type"] in _NO_OBJECT else message.replace("Input should", "should")
    short = isinstance(given, str | int | float | bool | None) and len(repr(given)) <= _SHORT
    return f"{words}, got {given!r}" if short and words != message and ", got " not in words else words


def _model_at(model: type[BaseModel], loc: tuple[int | str, ...]) -> type[BaseModel] | None:
    """The model that stands at `loc` inside `model`; None where the path leaves the models."""
    current: type[BaseModel] | None = model
    for part in loc:
        if current is None:
            return None
        if isinstance(part, str) and part in current.model_fields:
            current = _model_in(current.model_fields[part].annotation)
    return current


def _model_in(annotation: object) -> type[BaseModel] | None:
    """The first model inside a type such as `Model | None`, `dict[str, Model]` or `list[Model]`."""
    if isinstance(annotation, type) and typing.get_origin(annotation) is None:
        return annotation if issubclass(annotation, BaseModel) else None
    for part in typing.get_args(annotation):
        found = _model_in(part)
        if found is not None:
            return found
    return None
