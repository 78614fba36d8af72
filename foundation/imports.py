"""Faster imports of large packages, and advice on missing ones. Imports only the standard library."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

_PROJECT = "swarm-researcher"
_OURS = ("foundation", "swarm", "researcher")
_BESIDES = {"vllm": ["local"]}
"""Extras for packages that no extra declares, because a lock file chooses their build."""
_OF_AN_EXTRA = re.compile(r"""([\w.-]+).*\bextra == ["'](\w+)["']""")


@contextmanager
def uncollected() -> Iterator[None]:
    """Pause the garbage collector during large imports, where it would take a fifth of the time.

    Objects that exist at the end of the block are never collected, in this process or its forks.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def advice(error: ModuleNotFoundError, usual: str) -> str | None:
    """Return which extra to install for a missing package; None if no extra has it, as with the user's own modules.

    Prefer the extra `usual` if it declares the package; otherwise return the first extra that does.
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
    from importlib.metadata import PackageNotFoundError, requires  # slower than everything else that `--help` imports

    try:
        declared = [found.groups() for text in requires(_PROJECT) or () if (found := _OF_AN_EXTRA.match(text))]
    except PackageNotFoundError:  # run from a checkout, not installed
        return []
    return [extra for package, extra in declared if package.replace("-", "_").lower() == name.lower()]
