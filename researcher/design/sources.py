"""Data files of a question, pinned: their whole path, and their digest, so that a study notices when one is changed.

The only part of planning that looks at files which are not an instrument's.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from researcher.design.question import Question, with_levels
from researcher.instruments.instrument import Factor, Scalar
from researcher.refusals import PlanningRefused

HUB, DIGEST = "hf:", "#sha256="
_SHOWN = 16
"""Hexadecimal digits of the digest."""


def pinned(question: Question, *, here: Path | None = None) -> Question:
    """The question with every data file named for good. here: the folder that paths are relative to, by default this process's.

    Raises: PlanningRefused for a file that is not there.
    """

    def level(factor: Factor, value: Scalar) -> Scalar:
        return _pinned(str(value), here or Path.cwd()) if factor.type == "data" and value else value

    return with_levels(question, level)


def _pinned(source: str, here: Path) -> str:
    if source.startswith(HUB) or DIGEST in source:
        return source
    file = (here / Path(source).expanduser()).resolve()
    try:
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError as error:
        raise PlanningRefused(
            f"the data file {source!r} cannot be read ({error.strerror}; looked for {file}); name it as it lies from here, or whole",
            [source],
        ) from error
    return f"{file}{DIGEST}{digest[:_SHOWN]}"
