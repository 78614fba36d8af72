"""Documents that people give on the command line: JSON or TOML from a file or standard input, and `--set path=value`."""

from __future__ import annotations

import json
import shlex
import sys
import tomllib
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from foundation import strict_json
from foundation.commandline import UsageError

Choice = TypeVar("Choice", bound=StrEnum)

if TYPE_CHECKING:
    from pydantic import BaseModel

    Model = TypeVar("Model", bound=BaseModel)


def read_document(source: str | None) -> dict[str, Any]:
    """The object in a `.json` or `.toml` file, or on standard input (`-`); empty for None. Raises: UsageError."""
    if source is None:
        return {}
    text = _text(source)
    try:
        document = tomllib.loads(text) if source.endswith(".toml") else strict_json.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{source} is not TOML: {error}") from error
    except ValueError as error:  # also a number of thousands of digits, lists in lists in lists
        raise UsageError(f"{_name(source)} is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise UsageError(f"{_name(source)} must hold an object")
    return document


def option_json(text: str, what: str) -> Any:
    """JSON that stands on the command line itself. what: begins the sentence where it is none. Raises: UsageError."""
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False)  # Python reads NaN and Infinity, which are not JSON
    except (ValueError, RecursionError) as error:  # also a number of thousands of digits, lists in lists in lists
        raise UsageError(f"{what} is not JSON: {error}") from error
    return value


def assign(document: dict[str, Any], assignments: list[str]) -> dict[str, Any]:
    """`document` with each `path=value` set: `optimizer.learning_rate=4e-5`. Values are JSON, else text."""
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        parts = path.split(".")
        if not equals or not all(parts):
            raise UsageError(f"--set {assignment!r}: write path=value, as in optimizer.learning_rate=4e-5")
        place = document
        for part in parts[:-1]:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                raise UsageError(f"--set {assignment!r}: {part!r} is no section")
        place[parts[-1]] = _value(text)
    return document


def valid(model: type[Model], document: dict[str, Any], assignments: Sequence[str] = ()) -> Model:
    """`document` as `model`. assignments: those of `--set` that went into it.

    Raises: UsageError naming each bad field, the nearest known name, and how `--set` writes a text that looks like JSON.
    """
    from pydantic import ValidationError

    from foundation.strict import explain

    try:
        return model.model_validate(document)
    except ValidationError as error:
        given = {path: text for path, _, text in (assignment.partition("=") for assignment in assignments)}
        texts = {".".join(map(str, item["loc"])) for item in error.errors() if item["type"] == "string_type"}
        meant = {path: text for path, text in given.items() if path in texts}
        raise UsageError(
            "; ".join(f"{fault}{_as_text(fault.field, meant)}" for fault in explain(error, model))
        ) from error


def _as_text(path: str, given: Mapping[str, str]) -> str:
    """How `--set` writes a value that was read as JSON where a text belongs."""
    if path not in given:
        return ""
    return f"; write {shlex.quote(f'{path}={json.dumps(given[path])}')}"


def choice(kind: type[Choice], option: str, text: str | None) -> Choice | None:
    """`text` as a member of `kind`; None for None. Raises: UsageError with the nearest name."""
    if text is None:
        return None
    from foundation.nearest import nearest

    known = [str(member) for member in kind]
    if text not in known:
        guess = nearest(text, known)
        hint = f"did you mean {guess}?" if guess else f"one of {', '.join(known)}"
        raise UsageError(f"{option} {text!r} is unknown ({hint})")
    return kind(text)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _text(source: str) -> str:
    try:
        return sys.stdin.read() if source == "-" else Path(source).read_text()
    except OSError as error:
        raise UsageError(f"cannot read {source}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{_name(source)} is not text: {error.reason}") from error


def _name(source: str) -> str:
    return "standard input" if source == "-" else source
