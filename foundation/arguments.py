"""Types for argparse options. Imports only the standard library, to keep `--help` fast."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable


def number(text: str) -> float:
    """Parse a number. Raises: ArgumentTypeError."""
    try:
        return float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r}") from error


def seconds(text: str) -> float:
    """Parse a positive number of seconds. Raises: ArgumentTypeError."""
    found = number(text)
    if not 0 < found < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of seconds above 0, got {text!r}")
    return found


def whole(first: int, last: int | None = None) -> Callable[[str], int]:
    """Return an argparse type for integers from `first` to `last`, inclusive. Without `last` there is no upper bound."""
    wanted = f"a whole number, at least {first}" if last is None else f"a whole number from {first} to {last}"

    def read(text: str) -> int:
        fits = text.isascii() and text.isdecimal() and first <= int(text) and (last is None or int(text) <= last)
        if not fits:
            raise argparse.ArgumentTypeError(f"must be {wanted}; got {text!r}")
        return int(text)

    return read


count = whole(1)
port = whole(0, 65_535)


def said(text: str) -> str:
    """Parse text that must not be empty. Raises: ArgumentTypeError."""
    if not text.strip():
        raise argparse.ArgumentTypeError("must not be empty")
    return text
