"""Reads users' own functions for an algorithm, so that a run's spec can include their source.

Users name a function by its file (`path/to/mine.py:advantage`) or by an entry point of an installed package in the group
`swarm.algorithms`. Files are not executed, but finding an entry point imports its parent packages.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from swarm.protocol.algorithms import ALGORITHMS, CORRECTIONS, OWN_FIELDS, own_function, source_problem
from swarm.protocol.errors import SwarmError

GROUP = "swarm.algorithms"
"""Entry point group of installed packages. Each entry has the form NAME = "package.module:function"."""
_FILE = re.compile(r"(.+\.py):([A-Za-z_][A-Za-z0-9_]*)")
_DIGITS = 8
_BUILT_IN = frozenset((*ALGORITHMS, *CORRECTIONS, "algorithm"))


class SourceFault(SwarmError):
    """A function cannot be read. The message says what to do."""


@dataclass(frozen=True, slots=True)
class OwnSource:
    """A function in the form that a spec uses.

    `text` is the whole source file. `reference` is FILE-DIGEST.py:NAME, where DIGEST is the start of the text's SHA-256; it lets
    arms, findings and records tell an edited file from the original.
    """

    reference: str
    text: str

    @property
    def file(self) -> str:
        return self.reference.partition(":")[0]


def names_file(given: str) -> bool:
    """True if `given` names a function in a file, as `FILE.py:NAME`."""
    return given not in _BUILT_IN and _FILE.fullmatch(given) is not None


def read_function(given: str, folder: Path = Path()) -> OwnSource | None:
    """Read the function that `given` names. Return None if `given` names neither a file nor an entry point.

    Relative paths are resolved against `folder`. Raises: SourceFault if the file does not exist or has no such function.
    """
    if given in _BUILT_IN:
        return None
    if (named := _FILE.fullmatch(given)) is not None:
        return _read(folder / Path(named[1]).expanduser(), named[2], given)
    found = next(iter(entry_points(group=GROUP, name=given)), None)
    return None if found is None else _read(_file_of(found), found.attr, f"entry point {given}")


def with_sources(algorithm: Mapping[str, Any], folder: Path = Path()) -> dict[str, Any]:
    """Return the fields of an algorithm plus the source of each function they name, as `AlgorithmSpec` expects them.

    Relative paths are resolved against `folder`. Raises: SourceFault.
    """
    sources = algorithm.get("sources", {})
    if not isinstance(sources, Mapping):
        return dict(algorithm)
    given = {field: algorithm[field] for field in OWN_FIELDS if isinstance(algorithm.get(field), str)}
    read = {
        field: source
        for field, text in given.items()
        if not _is_there(text, sources) and (source := read_function(text, folder)) is not None
    }
    if not read:
        return dict(algorithm)
    fields = {field: source.reference for field, source in read.items()}
    return {**algorithm, **fields, "sources": {**sources, **{source.file: source.text for source in read.values()}}}


def _is_there(text: str, sources: Mapping[str, Any]) -> bool:
    own = own_function(text)
    return own is not None and own[0] in sources


def _read(path: Path, name: str, given: str) -> OwnSource:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise SourceFault(
            f"{given}: cannot read {path}: {error.strerror}; check the path, or give an absolute one"
        ) from error
    except UnicodeDecodeError as error:
        raise SourceFault(f"{given}: {path} is not UTF-8 text") from error
    digest = hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]
    reference = f"{path.stem}-{digest}.py:{name}"
    if own_function(reference) is None:
        raise SourceFault(
            f"{given}: a file name may contain only letters, digits, '_', '-' and '.', at most 100 of them; rename the file"
        )
    if (problem := source_problem(text, path.name, name)) is not None:
        raise SourceFault(f"{given}: {problem}")
    return OwnSource(reference, text)


def _file_of(found: EntryPoint) -> Path:
    """Return the file of an entry point's module. Imports the module's parent packages."""
    try:
        spec = find_spec(found.module)
    except ImportError:
        spec = None
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise SourceFault(
            f"entry point {found.name}: cannot find the Python file of {found.module}; reinstall its package"
        )
    return Path(spec.origin)
