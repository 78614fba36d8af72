"""Where files and code are looked for."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import pytest

import foundation
from foundation.paths import user_cache_dir, user_data_dir
from researcher.executor.processes import child_environ
from researcher.sandbox.launch import scrubbed, spec_of

ROOT = str(Path(__file__).resolve().parents[2])


def _paths_of_children(folder: Path) -> set[str]:
    environ = {"PYTHONPATH": "/theirs"}
    spec = spec_of(["python"], folder, reads=[])
    return {child_environ(environ)["PYTHONPATH"], scrubbed(environ, spec)["PYTHONPATH"]}


def test_children_find_a_clone_before_all_else(tmp_path: Path) -> None:
    assert _paths_of_children(tmp_path) == {f"{ROOT}:/theirs"}


def test_where_we_are_installed_our_neighbours_do_not_stand_before_the_packages_of_an_instrument(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foundation, "__file__", f"{sysconfig.get_path('purelib')}/foundation/__init__.py")
    assert _paths_of_children(tmp_path) == {"/theirs"}


@pytest.mark.skipif(sys.platform != "linux", reason="XDG is for Linux")
def test_folders_of_xdg_begin_at_the_root_or_are_the_usual_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("RESEARCHER_HOME", raising=False)
    for given, expected in (
        ("/data", Path("/data")),
        ("data", tmp_path / ".local/share"),
        ("", tmp_path / ".local/share"),
    ):
        monkeypatch.setenv("XDG_DATA_HOME", given)
        assert user_data_dir() == expected / "swarm-researcher"
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    assert user_cache_dir() == tmp_path / ".cache/swarm-researcher"
