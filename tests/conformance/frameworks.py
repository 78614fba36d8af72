"""The frameworks that are tried, as `frameworks.toml` declares them: what to install, what their scripts do, which forks
they may cause.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path

from pydantic import TypeAdapter

from foundation.nearest import nearest
from foundation.strict import StrictModel

HERE = Path(__file__).resolve().parent
_TABLE = HERE / "frameworks.toml"


class Framework(StrictModel):
    """One framework and its script."""

    name: str
    """Also the folder with its script and its pinned requirements."""
    wanted: tuple[str, ...] = ()
    """What `--resolve` asks pip for; the first names the version that the table shows. Empty: no environment of its own."""
    script: str = "agent.py"
    exercised: str
    """What its script does, for the table."""
    forced: str
    """How the model is brought to call the tool, by the framework's public settings."""
    timelines: int | None
    """Token paths in the trace, forks aside: one for each conversation, and for each further choice of n. None: any number."""
    calls: int = 2
    """The least number of recorded choices."""
    forks: dict[str, int] = {}
    """Most forks by cause; causes that are not named are not allowed."""
    why: str = ""
    """Why the forks are the framework's."""

    @property
    def folder(self) -> Path:
        return HERE / self.name

    @property
    def script_path(self) -> Path:
        return self.folder / self.script

    @property
    def requirements(self) -> Path | None:
        """The pinned environment; None where it needs none."""
        return self.folder / "requirements.txt" if self.wanted else None


class UnknownFramework(Exception):
    """There is no framework of this name in the table."""


def declared(only: Sequence[str] = ()) -> list[Framework]:
    """All frameworks of the table, or those named, in the table's order. Raises: UnknownFramework."""
    table = TypeAdapter(list[Framework]).validate_python(tomllib.loads(_TABLE.read_text())["framework"])
    known = [framework.name for framework in table]
    for name in only:
        if name not in known:
            hint = f"; did you mean {guess}?" if (guess := nearest(name, known)) else ""
            raise UnknownFramework(f"no framework {name!r} in {_TABLE.name}{hint} There are: {', '.join(known)}")
    return [framework for framework in table if not only or framework.name in only]
