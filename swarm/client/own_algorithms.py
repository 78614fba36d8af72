"""Reads users' own functions for an algorithm, so that the run's spec can contain their source.

A function is named by a file (`path/to/mine.py:advantage`), or by an entry point of an installed package in the group `swarm.algorithms`.
Files are not executed; to find an entry point, its parent packages are imported.
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
"""Entry points of installed packages: NAME = "package.module:function"."""
_FILE = re.compile(r"(.+\.py):([A-Za-z_][A-Za-z0-9_]*)")
_DIGITS = 8
_BUILT_IN = frozenset((*ALGORITHMS, *CORRECTIONS, "algorithm"))


class SourceFault(SwarmError):
    """A function cannot be read. The text says what to do."""


@dataclass(frozen=True, slots=True)
class OwnSource:
    """A function in the form of a spec. text: the whole file. reference: FILE-DIGEST.py:NAME, where the digest is the start of the text's
    SHA-256, so that arms, findings and records tell an edited file from the original."""

    reference: str
    text: str

    @property
    def file(self) -> str:
        return self.reference.partition(":")[0]


def names_file(given: str) -> bool:
    """Whether `given` names a function in a file, `FILE.py:NAME`."""
    return given not in _BUILT_IN and _FILE.fullmatch(given) is not None


def read_function(given: str, folder: Path = Path()) -> OwnSource | None:
    """The function that `given` names; None if it is neither a file nor an entry point. folder: base of relative paths.

    Raises: SourceFault if there is no such file, or no such function in it.
    """
    if given in _BUILT_IN:
        return None
    if (named := _FILE.fullmatch(given)) is not None:
        return _read(folder / Path(named[1]).expanduser(), named[2], given)
    found = next(iter(entry_points(group=GROUP, name=given)), None)
    return None if found is None else _read(_file_of(found), found.attr, f"entry point {given}")


def with_sources(algorithm: Mapping[str, Any], folder: Path = Path()) -> dict[str, Any]:
    """The fields of an algorithm with the source of the functions that they name, in the form of `AlgorithmSpec`.

    Raises: SourceFault.
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
            f"{given}: cannot read {path}: {error.strerror}; give its path from here, or its full path"
        ) from error
    except UnicodeDecodeError as error:
        raise SourceFault(f"{given}: {path} is not text in UTF-8") from error
    digest = hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]
    reference = f"{path.stem}-{digest}.py:{name}"
    if own_function(reference) is None:
        raise SourceFault(f"{given}: name the file with letters, digits, '_', '-' and '.' alone, 100 of them at most")
    if (problem := source_problem(text, path.name, name)) is not None:
        raise SourceFault(f"{given}: {problem}")
    return OwnSource(reference, text)


def _file_of(found: EntryPoint) -> Path:
    """The file of an entry point's module. Imports its parent packages."""
    try:
        spec = find_spec(found.module)
    except ImportError:
        spec = None
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise SourceFault(f"entry point {found.name}: {found.module} is not a file of Python; install its package anew")
    return Path(spec.origin)
