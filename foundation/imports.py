"""Importing much at once."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Look for no garbage while much is imported: there is none, and looking takes a fifth of the time.

    What is there at the end is never looked at again, in this process and in those that it forks.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
