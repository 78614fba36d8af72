"""Somebody who follows a page in a folder of their own: writes its files, types its commands, and compares what they see.

A page is followed from its first fenced block to its last:

    `name.py`: … and a block        the file is written
    ```bash                         each line is typed; comments are for people
    ```text                         what the block before it said: each line stands in it, in this order; `…` is anything
    ![…](….svg)                     a picture of a terminal with it, which is drawn anew where PICTURES=draw is set; ids and times are left out
    ```sh and all others            shown, and not typed: they need what this machine may not have

`swarm serve` runs until the page ends, on a free port in the place of the one that the page names (8642 by default). A study or campaign
that would train a real model is only planned: `--dry-run` is added unless it has `--engine echo`.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

from bench.serving import ServerProcess

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "docs" / "images"
LIMIT_S = 900
_WIDTH = 130
"""Columns of a picture."""
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$|^!\[.*?\]\(\S*/(\S+\.svg)\)$", re.DOTALL | re.MULTILINE)
_FILE = re.compile(r"^`([\w./-]+)`:", re.MULTILINE)
_SERVE = re.compile(r"swarm serve\b(?!.*--plan)")
_STUDY = re.compile(r"researcher (campaign )?start\b(?!.*(--engine echo|--dry-run))")
_PROGRAMS = {"swarm": "-m swarm.main", "researcher": "-m researcher.main", "python": ""}
_SETTINGS = (
    "RESEARCHER_DATABASE_URL",
    "MLFLOW_TRACKING_URI",
    "RESEARCHER_STUDIES",
    "RESEARCHER_LLM_MODEL",
    "SWARM_URL",
)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block, or a picture by its name. file: the name that stands before a block."""

    language: str
    text: str
    file: str | None
    picture: str | None


def blocks(page: str) -> list[Block]:
    """The fenced blocks and pictures of a page, in their order."""
    found, end = [], 0
    for match in _BLOCK.finditer(page):
        names = _FILE.findall(page[end : match.start()])
        found.append(Block(match[1], match[2], names[-1] if names else None, match[3]))
        end = match.end()
    return found


def missing(shown: str, seen: str) -> str | None:
    """The first line of `shown` that does not stand in `seen` behind those before it; None when all do."""
    rest = [line.rstrip() for line in seen.splitlines()]
    for line in filter(None, map(str.rstrip, shown.splitlines())):
        pattern = re.compile(".*".join(map(re.escape, line.split("…"))))
        at = next((at for at, other in enumerate(rest) if pattern.fullmatch(other)), None)
        if at is None:
            return line
        rest = rest[at + 1 :]
    return None


def drawn(seen: str) -> str:
    """An SVG of a terminal, the same for the same text: ids and times are not shown."""
    same = re.sub(r"\b(ca|ep|run|srv|st)-[0-9a-f]{16}\b", r"\1-…", re.sub(r"\b\d+\.\d\d s\b", "… s", seen))
    console = Console(record=True, width=_WIDTH, file=io.StringIO())
    console.print(Text.from_ansi(same.rstrip()))
    return console.export_svg(title="")


@dataclass
class Reader:
    """Follows a page. said: what each command said, in their order."""

    folder: Path
    environ: dict[str, str]
    open: ExitStack
    said: list[tuple[str, str]] = field(default_factory=list)
    ports: dict[str, str] = field(default_factory=dict)
    """The page's port → the one in its place."""

    def follow(self, page: str) -> None:
        """From the first block to the last. A command has to succeed, and to say what the page shows."""
        seen = ""
        for block in blocks(page):
            if block.picture:
                kept = PICTURES / block.picture
                if os.environ.get("PICTURES") == "draw":
                    kept.write_text(drawn(seen))
                assert kept.read_text() == drawn(seen), f"another picture: set PICTURES=draw to draw {kept.name} anew"
            elif block.file:
                self.writes(block.file, block.text)
            elif block.language == "bash":
                seen = "".join(self.types(line) for line in block.text.replace("\\\n", "").splitlines() if line.strip())
            elif block.language == "text":
                lacking = missing(block.text, seen)
                assert lacking is None, f"not said: {lacking}\nbut:\n{seen}"

    def writes(self, name: str, text: str) -> None:
        """A file in the folder."""
        file = self.folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(self._ported(text))

    def types(self, line: str) -> str:
        """What a line says, on both streams. It has to succeed."""
        if _SERVE.match(line):
            self._serves(shlex.split(line, comments=True)[2:])
            return ""
        if setting := re.match(r"export (\w+)=", line):
            self.environ[setting[1]] = self._shell(f'{line}; printf %s "${setting[1]}"')
            return ""
        command = line.split(" #")[0].strip()
        said = self._shell(self._ported(command + (" --dry-run" if _STUDY.match(command) else "")))
        for of_page, ours in self.ports.items():
            said = said.replace(f"127.0.0.1:{ours}", f"127.0.0.1:{of_page}")
        self.said.append((command, said))
        return said

    def _shell(self, line: str) -> str:
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=self.folder,
            env=self.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert done.returncode == 0, f"{line}\n{done.stdout[-4000:]}"
        return done.stdout

    def _serves(self, words: list[str]) -> None:
        at = words.index("--port") if "--port" in words else len(words)
        port = words[at + 1] if at < len(words) else "8642"
        state = self.folder.parent / f"server-{port}"
        server = self.open.enter_context(ServerProcess(state, *words[:at], *words[at + 2 :], "--log-level", "warning"))
        self.ports[port] = server.url.rpartition(":")[2]
        self.environ.setdefault("SWARM_URL", server.url)

    def _ported(self, text: str) -> str:
        for of_page, ours in self.ports.items():
            text = text.replace(f"127.0.0.1:{of_page}", f"127.0.0.1:{ours}")
        return text


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    """Has `swarm`, `researcher` and `python` of this checkout, an empty folder, and no settings."""
    programs, folder = tmp_path / "bin", tmp_path / "mine"
    programs.mkdir()
    folder.mkdir()
    for name, options in _PROGRAMS.items():
        (programs / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {options} "$@"\n')
        (programs / name).chmod(0o755)
    environ = {name: value for name, value in os.environ.items() if name not in _SETTINGS}
    environ |= {"RESEARCHER_HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    environ["PATH"] = f"{programs}{os.pathsep}{environ['PATH']}"
    with ExitStack() as stack:
        yield Reader(folder, environ, stack)
        for file in (tmp_path / "home").glob("studies/**/pid"):  # what a study that failed may have left
            with suppress(ProcessLookupError, PermissionError, ValueError):
                os.killpg(int(file.read_text()), signal.SIGKILL)
