"""Importing much at once, and what to install where it is not there. Standard library alone."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, requires

_PROJECT = "swarm-researcher"
_OURS = ("foundation", "swarm", "researcher")
_OF_AN_EXTRA = re.compile(r"""([\w.-]+).*\bextra == ["'](\w+)["']""")


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


def advice(error: ModuleNotFoundError, usual: str) -> str | None:
    """Which extra brings the package that is not there; None where it is no package of others.

    usual: the extra of the program that asks, which is named unless only others declare the package.
    """
    name = (error.name or "").partition(".")[0]
    if not name or name in _OURS:
        return None
    extras = _declaring(name)
    extra = usual if usual in extras or not extras else extras[0]
    return f"needs {name}, which is not installed: pip install '{_PROJECT}[{extra}]'"


def _declaring(name: str) -> list[str]:
    try:
        declared = [found.groups() for text in requires(_PROJECT) or () if (found := _OF_AN_EXTRA.match(text))]
    except PackageNotFoundError:  # run from a folder
        return []
    return [extra for package, extra in declared if package.replace("-", "_").lower() == name.lower()]
