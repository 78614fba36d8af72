"""Data files of a reading, pinned: their whole path, and their digest, so that a study notices when one is changed.

The only part of planning that looks at files which are not an instrument's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from researcher.design.reading import Reading
from researcher.instruments.instrument import Factor, Scalar
from researcher.planner.written import HUB
from researcher.refusals import PlanningRefused

DIGEST = "#sha256="
_SHOWN = 16
"""Hexadecimal digits of the digest."""


def pinned(reading: Reading, *, here: Path | None = None) -> Reading:
    """The reading with every data file named for good. here: the folder that paths are relative to, by default this process's.

    Raises: PlanningRefused for a file that is not there.
    """

    def level(factor: Factor, value: Scalar) -> Scalar:
        return _pinned(str(value), here or Path.cwd()) if factor.type == "data" and value else value

    return _with_levels(reading, level)


def _with_levels(reading: Reading, level: Callable[[Factor, Scalar], Scalar]) -> Reading:
    return reading.model_copy(
        update={
            "levels": tuple(level(reading.factor, each) for each in reading.levels),
            "settings": tuple((factor, level(factor, each)) for factor, each in reading.settings),
            "crossed": tuple(
                each.model_copy(update={"levels": tuple(level(each.factor, one) for one in each.levels)})
                for each in reading.crossed
            ),
            "following": reading.following
            and reading.following.model_copy(
                update={
                    "levels": tuple(level(reading.following.factor, one) for one in reading.following.levels),
                    "meanwhile": level(reading.following.factor, reading.following.meanwhile),
                }
            ),
        }
    )


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
