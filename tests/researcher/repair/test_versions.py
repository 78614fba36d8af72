"""The versions of an instrument's code on the disk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from researcher.repair.code import Versions
from tests.fakes.repeat_study import FOLDER


def test_a_version_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done, fsync, rename = list[tuple[str, object]](), os.fsync, os.rename

    def synchronised(descriptor: int) -> None:
        done.append(("fsync", os.fstat(descriptor).st_ino))
        fsync(descriptor)

    def renamed(old: Path, new: Path) -> None:
        done.append(("rename", new))
        rename(old, new)

    monkeypatch.setattr(os, "fsync", synchronised)
    monkeypatch.setattr(os, "rename", renamed)
    _, folder = Versions(tmp_path / "code").keep(FOLDER, {"workflow.py": "mended = True\n"})
    at = done.index(("rename", folder))
    assert {path.stat().st_ino for path in (folder, *folder.rglob("*"))} == {number for _, number in done[:at]}
    assert done[at + 1 :] == [("fsync", (tmp_path / "code").stat().st_ino)]
