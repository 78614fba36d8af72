"""Rows of a JSON lines file, or of a data set on Hugging Face's hub: read, checked, and named by their line where they are wrong.

A source is written as one text:
    path/to/file.jsonl                          a file, one JSON object per line
    path/to/file.jsonl#sha256=0123456789abcdef  the same, and refused when it is not that file any more
    hf:owner/name, hf:owner/name@revision       a data set, read by the package `datasets`
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from swarm.client import SwarmError

HUB = "hf:"
DIGEST = "#sha256="


class BadSource(SwarmError):
    """The data cannot be used; the text says where and why."""


@dataclass(frozen=True, slots=True)
class Row:
    """A question and what is expected for it. where: `train.jsonl, line 3`."""

    question: str
    expected: str
    where: str


@dataclass(frozen=True, slots=True)
class Columns:
    question: str
    answer: str


def rows(
    source: str, columns: Columns, problem: Callable[[str], str | None], *, subset: str = "", split: str = "train"
) -> list[Row]:
    """Every row, in its order.

    problem: why an expected answer is unusable, if it is. subset, split: of a data set on the hub.
    Raises: BadSource, with the line where one line is wrong.
    """
    if not source:
        raise BadSource("no data set is named: give a JSON lines file, or hf:owner/name")
    hub = source.startswith(HUB)
    records = _of_hub(source.removeprefix(HUB), subset, split) if hub else _of_file(source)
    found = [_row(record, where, columns, problem) for where, record in records]
    if not found:
        raise BadSource(f"{source.partition(DIGEST)[0]} holds no rows")
    return found


def _of_file(source: str) -> Iterable[tuple[str, Mapping[str, Any]]]:
    name, _, digest = source.partition(DIGEST)
    file = Path(name)
    try:
        content = file.read_bytes()
    except OSError as error:
        raise BadSource(f"the data file {name} cannot be read: {error.strerror}") from error
    if not hashlib.sha256(content).hexdigest().startswith(digest):
        raise BadSource(f"{name} was changed since the plan was made; put the old file back, or start a new study")
    for number, line in enumerate(content.splitlines(), start=1):
        where = f"{file.name}, line {number}"
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except UnicodeDecodeError as error:
            raise BadSource(f"{where}: is not text in UTF-8") from error
        except json.JSONDecodeError as error:
            raise BadSource(f"{where}: is not JSON ({error.msg} at column {error.colno})") from error
        except ValueError as error:  # Python's own bound on the digits of an integer
            raise BadSource(f"{where}: holds a number that is too long") from error
        except RecursionError as error:
            raise BadSource(f"{where}: nests too deep") from error
        if not isinstance(record, dict):
            raise BadSource(f'{where}: must be a JSON object such as {{"question": ..., "answer": ...}}')
        yield where, record


def _of_hub(source: str, subset: str, split: str) -> Iterable[tuple[str, Mapping[str, Any]]]:
    if importlib.util.find_spec("datasets") is None:
        pins = Path(__file__).with_name("hub.txt")
        raise BadSource(
            f"{HUB}{source} is read by the package datasets, which is not installed here: pip install --no-deps -r {pins}"
        )
    import datasets

    name, _, revision = source.partition("@")
    try:
        loaded = datasets.load_dataset(name, subset or None, split=split, revision=revision or None)
    except (OSError, ValueError) as error:  # no such data set, subset or split; or no way to the hub
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise BadSource(f"{HUB}{source} (split {split}) cannot be loaded: {first}") from error
    for number, record in enumerate(loaded, start=1):
        yield f"{name} {split}, row {number}", record


def _row(record: Mapping[str, Any], where: str, columns: Columns, problem: Callable[[str], str | None]) -> Row:
    question = _text(record, columns.question, where)
    expected = _text(record, columns.answer, where)
    if not question.strip():
        raise BadSource(f"{where}: {columns.question!r} is empty")
    wrong = problem(expected)
    if wrong is not None:
        raise BadSource(f"{where}: {columns.answer!r} {wrong}")
    return Row(question.strip(), expected, where)


def _text(record: Mapping[str, Any], column: str, where: str) -> str:
    if column not in record:
        near = difflib.get_close_matches(column, list(record), n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"it has: {', '.join(record) or 'none'}"
        raise BadSource(f"{where}: there is no column {column!r}; {hint}")
    value = record[column]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise BadSource(f"{where}: {column!r} must be text or a number, not {type(value).__name__}")
    if isinstance(value, float) and not math.isfinite(value):
        raise BadSource(f"{where}: {column!r} must be a finite number, not {value}")
    try:
        text = format(Decimal(str(value)), "f") if isinstance(value, float) else str(value)
        text.encode()
    except UnicodeEncodeError as error:
        raise BadSource(f"{where}: {column!r} holds half a character (a lone surrogate), which is no text") from error
    except ValueError as error:
        raise BadSource(f"{where}: {column!r} holds a number that is too long") from error
    return text
