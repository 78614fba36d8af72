"""Reads options that several commands share: a server, a task, a document. Tokens come from the environment or a file."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tomllib
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from foundation import strict_json
from foundation.commandline import UsageError
from foundation.nearest import nearest
from foundation.strict import explain
from swarm.cli.parser import DEFAULT_URL
from swarm.client import NotASwarmServer, Patience, Task
from swarm.client.sync import SwarmClient
from swarm.client.wire import checked_token, checked_url
from swarm.protocol.errors import ErrorCode

Choice = TypeVar("Choice", bound=StrEnum)
Model = TypeVar("Model", bound=BaseModel)
_TASK_FIELDS = {"id", "query", "metadata"}

# -- a server -------------------------------------------------------------------------------------------------------------


def url_of(args: argparse.Namespace) -> str:
    """Return the server's URL. Raises: UsageError if it is not a valid URL."""
    return checked(args.url or os.environ.get("SWARM_URL") or DEFAULT_URL)


def checked(url: str) -> str:
    """Return the URL without a trailing slash. Raises: UsageError if it is not a valid URL."""
    try:
        return checked_url(url)
    except NotASwarmServer as error:
        raise UsageError(str(error)) from error


def token_of(args: argparse.Namespace) -> str | None:
    """Return the token, if there is one. Raises: UsageError if the token file cannot be read or the token is malformed."""
    if args.token_file is None:
        token, place = os.environ.get("SWARM_TOKEN") or None, "SWARM_TOKEN"
    else:
        place = f"the token file {args.token_file}"
        try:
            token = Path(args.token_file).read_text(encoding="utf-8", errors="replace").strip()
        except OSError as error:
            raise UsageError(f"cannot read {place}: {error.strerror}") from error
    try:
        return checked_token(token)
    except ValueError as error:
        raise UsageError(f"{place}: {error}") from error


def connect(
    args: argparse.Namespace,
    *,
    client_id: str | None = None,
    client_version: str = "0",
    connect_s: float = 0.0,
    later_s: float = 0.0,
) -> SwarmClient:
    """Return a client that, by default, fails immediately if the server does not answer.

    Args:
        args: the options that name the server and its token.
        client_id: see `swarm.client.SwarmClient`.
        client_version: see `swarm.client.SwarmClient`.
        connect_s: how long to retry while nothing answers, for example because the server is restarting.
        later_s: how long to retry while the server says to try later.
    """
    patience = Patience(connect_s=connect_s, later_s=later_s)
    return SwarmClient(
        url_of(args), token_of(args), client_id=client_id, client_version=client_version, patience=patience
    )


# -- a task ---------------------------------------------------------------------------------------------------------------


def task_of(args: argparse.Namespace) -> Task:
    """Return the task that the options name. Raises: UsageError."""
    document: dict[str, Any] = {"id": args.default_task_id, "query": "", "metadata": {}, **_task_document(args.task)}
    if args.task_id is not None:
        document["id"] = args.task_id
    if args.metadata is not None:
        document["metadata"] = option_json(args.metadata, "--metadata")
    unknown = sorted(set(document) - _TASK_FIELDS)
    if unknown or not isinstance(document["metadata"], dict):
        meant = [guess for name in unknown if (guess := nearest(name, _TASK_FIELDS))]
        found = f", not {unknown[0]}" if unknown else ""
        raise UsageError(f"a task may have only id, query and metadata (an object){found}", meant)
    if not str(document["id"]):
        raise UsageError("the task's id is empty; give one, or omit --task-id")
    return Task(id=str(document["id"]), query=str(document["query"]), metadata=document["metadata"])


def _task_document(text: str) -> dict[str, Any]:
    if text.startswith("@"):
        return read_document(text[1:])
    if not text.lstrip().startswith("{"):
        return {"query": text}
    document = option_json(text, "--task looks like a task {id, query, metadata}, but")
    if not isinstance(document, dict) or "query" not in document:
        raise UsageError('--task is JSON but has no `query`; if your prompt is JSON, wrap it: {"query": "..."}')
    return document


# -- a document -----------------------------------------------------------------------------------------------------------


def read_document(source: str | None) -> dict[str, Any]:
    """Read an object from a `.json` or `.toml` file, or as JSON from standard input (`-`). If `source` is None, return an empty one.

    Raises: UsageError.
    """
    if source is None:
        return {}
    text = _text(source)
    try:
        document = tomllib.loads(text) if source.endswith(".toml") else strict_json.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{source} is not TOML: {error}") from error
    except ValueError as error:  # also for numbers with thousands of digits, or too deep nesting
        raise UsageError(f"{_name(source)} is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise UsageError(f"{_name(source)} must contain an object")
    return document


def option_json(text: str, what: str) -> Any:
    """Parse JSON from a command-line argument. Raises: UsageError, whose message starts with `what`."""
    try:
        return strict_json.loads_plain(text)
    except ValueError as error:  # also for integers of more than 64 bits, or too deep nesting
        raise UsageError(f"{what} is not JSON that a server accepts: {error}") from error


def assign(document: dict[str, Any], assignments: list[str]) -> dict[str, Any]:
    """Set each `path=value`, such as `optimizer.learning_rate=4e-5`, in `document` and return it. Values that are not JSON are text.

    Raises: UsageError.
    """
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        parts = path.split(".")
        if not equals or not all(parts):
            raise UsageError(f"--set {assignment!r}: write PATH=VALUE, as in optimizer.learning_rate=4e-5")
        place = document
        for part in parts[:-1]:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                raise UsageError(f"--set {assignment!r}: {part!r} is not a section")
        place[parts[-1]] = _value(text)
    return document


def valid(model: type[Model], document: dict[str, Any], assignments: Sequence[str] = ()) -> Model:
    """Validate `document` as a `model`. `assignments` are the `--set` arguments that were applied to it.

    Raises: UsageError that names each bad field and the nearest known name, and says how to quote text that `--set` read as JSON.
    """
    try:
        return model.model_validate(document)
    except ValidationError as error:
        given = {path: text for path, _, text in (assignment.partition("=") for assignment in assignments)}
        texts = {".".join(map(str, item["loc"])) for item in error.errors() if item["type"] == "string_type"}
        meant = {path: text for path, text in given.items() if path in texts}
        faults = explain(error, model)
        words = "; ".join(f"{fault}{_as_text(fault.field, meant)}" for fault in faults)
        near = [fault.nearest for fault in faults if fault.nearest]
        raise UsageError(words, near, code=ErrorCode.INVALID_SPEC) from error


def _as_text(path: str, given: Mapping[str, str]) -> str:
    """Return a hint on how to quote a `--set` value that was read as JSON although the field is text, or an empty string."""
    if path not in given:
        return ""
    return f"; write {shlex.quote(f'{path}={json.dumps(given[path])}')}"


def choice(kind: type[Choice], option: str, text: str | None) -> Choice | None:
    """Return the member of `kind` called `text`, or None if `text` is None. Raises: UsageError that suggests the nearest name."""
    if text is None:
        return None
    known = [str(member) for member in kind]
    if text not in known:
        guess = nearest(text, known)
        hint = f"did you mean {guess}?" if guess else f"one of {', '.join(known)}"
        raise UsageError(f"{option} {text!r} is unknown ({hint})", [guess] if guess else [])
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
