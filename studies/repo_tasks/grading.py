"""The hidden tests, run on what an agent left behind: in a process of its own that reads the system and a copy of the package."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from swarm.client import GraderFailed, run_confined

from .repositories import Case, Repository, same

LIMIT_S = 30.0
"""For all calls together: what is not answered by then has failed."""
MOST_FILES, MOST_BYTES = 500, 1 << 20
"""Of the agent's package that are looked at: so many files, of at most so many bytes together."""
_RUNNER = Path(__file__).with_name("run_cases.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    """fixed, kept: shares of the hidden tests that failed and that passed before. changed: whether the code is not what it was."""

    fixed: float
    kept: float
    changed: bool


async def graded(folder: Path, repository: Repository) -> Grade:
    """Raises: GraderFailed, WorkflowFault where the tests cannot be run at all."""
    code = await asyncio.to_thread(left_behind, folder, repository.package)
    with tempfile.TemporaryDirectory(prefix="grading-") as place:
        _copy(code, Path(place))
        runner = shutil.copy(_RUNNER, place)
        calls = json.dumps([case.call() for case in repository.hidden]).encode()
        command = [sys.executable, "-I", runner, repository.package]
        pythons, solutions = [Path(sys.prefix), Path(sys.base_prefix)], [_RUNNER.parent]
        end = await run_confined(command, Path(place), given=calls, reads=pythons, hidden=solutions, limit_s=LIMIT_S)
    ready, *results = end.said.decode(errors="replace").splitlines() or [""]
    if ready != "ready":
        raise GraderFailed(f"the hidden tests did not run: the program {end.how}; it said last: {end.last_words()}")
    passed = [case for case, said in zip(repository.hidden, results, strict=False) if same(said, case.expected)]
    before = {
        path: text.encode() for path, text in repository.files.items() if path.startswith(f"{repository.package}/")
    }
    return Grade(
        fixed=_share(passed, [case for case in repository.hidden if case.fails]),
        kept=_share(passed, [case for case in repository.hidden if not case.fails]),
        changed=code != before,
    )


def left_behind(folder: Path, package: str) -> dict[str, bytes]:
    """The package's files by path. Links are left out: they may lead to what the agent could not read itself."""
    found: dict[str, bytes] = {}
    looked, room = 0, MOST_BYTES
    if (folder / package).is_symlink():
        return found
    for place, folders, names in os.walk(folder / package):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        for name in sorted(names):
            looked += 1
            if looked > MOST_FILES:
                return found
            path = Path(place, name)
            if not path.is_symlink() and path.is_file() and path.stat().st_size <= room:
                found[str(path.relative_to(folder))] = path.read_bytes()
                room -= len(found[str(path.relative_to(folder))])
    return found


def _copy(code: dict[str, bytes], place: Path) -> None:
    for path, content in code.items():
        (place / path).parent.mkdir(parents=True, exist_ok=True)
        (place / path).write_bytes(content)


def _share(passed: list[Case], cases: list[Case]) -> float:
    """Of `cases`, those that passed; 1.0 where there are none."""
    return len([case for case in cases if case in passed]) / len(cases) if cases else 1.0
