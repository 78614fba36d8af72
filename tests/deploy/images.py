"""Dockerfiles, read and played: there is no Docker where the tests run."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_FLAG = re.compile(r"--[\w-]+(=\S+)?\s+")


@dataclass(frozen=True, slots=True)
class Step:
    """One instruction. flags: its `--name=value`; text: the rest, its lines joined."""

    name: str
    flags: tuple[str, ...]
    text: str

    @property
    def words(self) -> list[str]:
        """Of the exec form `["a", "b"]`, else as a shell splits it."""
        return json.loads(self.text) if self.text.startswith("[") else shlex.split(self.text)


def steps_of(file: Path) -> list[Step]:
    """The instructions of a Dockerfile, in order, without comments."""
    lines = [line for line in file.read_text().splitlines() if line.strip() and not line.lstrip().startswith("#")]
    found = []
    for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines():
        name, _, rest = line.partition(" ")
        flags = []
        while (flag := _FLAG.match(rest)) is not None:
            flags.append(flag[0].strip())
            rest = rest[flag.end() :]
        found.append(Step(name, tuple(flags), rest.strip()))
    return found


def last(steps: list[Step], name: str) -> Step:
    """The one of this name that counts."""
    return [step for step in steps if step.name == name][-1]


def is_of_the_system(step: Step) -> bool:
    """Whether it changes the machine beneath: packages and users of the system."""
    return step.name == "RUN" and step.text.startswith("apt-get ")


def sources(step: Step) -> list[Path]:
    """What a COPY takes from the repository."""
    return [ROOT / word for word in step.words[:-1]]


def play(steps: list[Step], place: Path, environ: dict[str, str]) -> None:
    """Run the steps that do not touch the system, in order, beneath the folder `place` in place of `/`. Raises: CalledProcessError."""
    folder = place
    for step in steps:
        if step.name == "WORKDIR":
            folder = place / step.text.lstrip("/")
            folder.mkdir(parents=True, exist_ok=True)
        elif step.name == "COPY":
            _copy(sources(step), folder / step.words[-1], many=len(step.words) > 2 or step.text.endswith("/"))
        elif step.name == "RUN" and not is_of_the_system(step):
            subprocess.run(["sh", "-ec", step.text], cwd=folder, env=environ, check=True)


def _copy(taken: list[Path], target: Path, *, many: bool) -> None:
    for each in taken:
        if each.is_dir():
            shutil.copytree(each, target, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            to = target / each.name if many else target
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(each, to)
