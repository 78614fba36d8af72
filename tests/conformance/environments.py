"""One virtual environment per framework, outside the repository, made from its pinned requirements.

An environment is kept under the hash of its requirements: it is made once, and made again when they change.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from foundation.paths import model_cache_dir
from tests.conformance.frameworks import Framework

_READY = ".ready"


class NotInstalled(Exception):
    """pip could not make the environment; the text is what it said."""


def cache_dir() -> Path:
    """Where environments are kept, beside the cache of models."""
    return model_cache_dir().with_name("conformance")


def python_of(framework: Framework) -> Path:
    """The interpreter of the framework's environment, made now if need be. Raises: NotInstalled."""
    if framework.requirements is None:
        return Path(sys.executable)
    if not framework.requirements.exists():
        raise NotInstalled(f"{framework.requirements} is missing; make it with --resolve {framework.name}")
    folder = _folder(framework.name, framework.requirements)
    if not (folder / _READY).exists():
        _make(folder, "--no-deps", "-r", str(framework.requirements))
        (folder / _READY).touch()
    return folder / "bin" / "python"


def resolve(framework: Framework) -> None:
    """Let pip choose versions for what the framework wants, and pin them all. Raises: NotInstalled."""
    if framework.requirements is None:
        return
    folder = cache_dir() / f"{framework.name}-resolving"
    _make(folder, "--prefer-binary", *framework.wanted)
    frozen = _run(*_pip(folder), "freeze")
    framework.requirements.write_text(f"# {' '.join(framework.wanted)}, and what pip chose with it\n{frozen}")
    made = _folder(framework.name, framework.requirements)
    if not made.exists():
        folder.rename(made)
        (made / _READY).touch()


def version_of(framework: Framework) -> str:
    """The pinned version of the framework itself; empty where it needs no environment."""
    if framework.requirements is None:
        return ""
    package = re.split(r"[\[<>=]", framework.wanted[0])[0]
    for line in framework.requirements.read_text().splitlines():
        name, _, version = line.partition("==")
        if name.lower().replace("_", "-") == package.lower().replace("_", "-"):
            return version
    raise NotInstalled(f"{framework.requirements} does not pin {package}; make it anew with --resolve {framework.name}")


def _folder(name: str, requirements: Path) -> Path:
    """Where an environment with these pins is kept."""
    return cache_dir() / f"{name}-{hashlib.sha256(requirements.read_bytes()).hexdigest()[:12]}"


def _make(folder: Path, *install: str) -> None:
    _run(sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder))
    _run(*_pip(folder), "install", "--quiet", *install)


def _pip(folder: Path) -> Sequence[str]:
    return (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(folder / "bin" / "python"))


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotInstalled(f"{' '.join(command)} failed:\n{(done.stderr or done.stdout)[-3000:]}")
    return done.stdout
