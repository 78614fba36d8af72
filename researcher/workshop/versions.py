"""The versions of an instrument's code that a study has run, each a folder of its own under the study's."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from foundation.paths import synchronise, visible_files
from researcher.executor.blueprint import Code
from researcher.executor.errors import InstrumentChanged
from researcher.instruments.catalogue import folder_digest


class Versions:
    """root: `code` in the study's folder. A version's folder is named after its hash, and never changed."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def folder(self, version: str) -> Path:
        return self._root / version[:16]

    def keep(self, folder: Path, changes: Mapping[str, str] | None = None) -> tuple[str, Path]:
        """A copy of the folder's files, some of them changed; its version, and where it is, also after a power cut."""
        self._root.mkdir(parents=True, exist_ok=True)
        place = Path(tempfile.mkdtemp(dir=self._root, prefix=".new-"))
        try:
            for name, file in visible_files(folder):
                (place / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, place / name)
            for name, text in (changes or {}).items():
                (place / name).write_text(text, encoding="utf-8")
            version = folder_digest(place)
            if not self.folder(version).exists():
                place.chmod(0o755)
                for path in (*place.rglob("*"), place):
                    synchronise(path)
                os.rename(place, self.folder(version))
                synchronise(self._root)
        finally:
            shutil.rmtree(place, ignore_errors=True)
        return version, self.folder(version)

    def kept(self, version: str) -> Path | None:
        """Where a version is; None where it was never kept. Raises: InstrumentChanged when its files are not its own."""
        folder = self.folder(version)
        if not folder.is_dir():
            return None
        if folder_digest(folder) != version:
            raise InstrumentChanged(f"the files in {folder} were changed after the study took them up; put them back")
        return folder

    def mended(self, version: str) -> Code:
        """A version that no person wrote. Raises: InstrumentChanged when it is gone."""
        folder = self.kept(version)
        if folder is None:
            raise InstrumentChanged(f"the mended code {version[:12]} of the study is gone from {self.folder(version)}")
        return Code(folder=folder, version=version, sandboxed=True)


def texts(folder: Path) -> dict[str, str]:
    """The folder's files that are text, by name."""
    found = {}
    for name, file in visible_files(folder):
        try:
            found[name] = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
    return found
