"""Importing much at once, and what to install where it is not there. Standard library alone."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

_PROJECT = "swarm-researcher"
_OURS = ("foundation", "swarm", "researcher")
_BESIDES = {"vllm": ["local"]}
"""What an extra does not declare, since a lock has to choose its build."""
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
    """Which extra brings the package that is not there; None where none does, as for what a person's own code imports.

    usual: the extra of the program that asks, which is named unless only others declare the package.
    """
    name = (error.name or "").partition(".")[0]
    if not name or name in _OURS or _is_there(name):
        return None
    extras = _declaring(name) or _BESIDES.get(name, [])
    if not extras:
        return None
    extra = usual if usual in extras else extras[0]
    return f"needs {name}, which is not installed: pip install '{_PROJECT}[{extra}]'"


def _is_there(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _declaring(name: str) -> list[str]:
    from importlib.metadata import PackageNotFoundError, requires  # takes longer than all else that `--help` imports

    try:
        declared = [found.groups() for text in requires(_PROJECT) or () if (found := _OF_AN_EXTRA.match(text))]
    except PackageNotFoundError:  # run from a folder
        return []
    return [extra for package, extra in declared if package.replace("-", "_").lower() == name.lower()]
