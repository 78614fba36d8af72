"""What options of the command line hold, for argparse's `type`. Standard library alone: a program's help waits for it."""

from __future__ import annotations

import argparse


def number(text: str) -> float:
    """Raises: ArgumentTypeError."""
    try:
        return float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r}") from error


def count(text: str) -> int:
    """From 1. Raises: ArgumentTypeError."""
    if not _is_whole(text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number, at least 1; got {text!r}")
    return int(text)


def port(text: str) -> int:
    """Raises: ArgumentTypeError."""
    if not (0 <= number(text) <= 65_535 and _is_whole(text)):
        raise argparse.ArgumentTypeError(f"a port is a whole number from 0 to 65535, got {text!r}")
    return int(text)


def _is_whole(text: str) -> bool:
    return text.isascii() and text.isdecimal()
