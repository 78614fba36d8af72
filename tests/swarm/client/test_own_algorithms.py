"""Functions of one's own, as clients read them from files and entry points into a spec."""

from __future__ import annotations

import hashlib
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from swarm.client import SourceFault, own_algorithms, with_sources
from swarm.client.own_algorithms import read_function
from swarm.protocol.algorithms import MOST_SOURCE, AlgorithmSpec

SOURCE = "def advantage(t):\n    return t.advantage_N\n\ndef loss(t):\n    return -t.logp_N\n"
NAME = f"mine-{hashlib.sha256(SOURCE.encode()).hexdigest()[:8]}.py"


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file, in the current directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(SOURCE)
    return tmp_path / "mine.py"


def test_the_text_travels_under_a_name_with_its_digest(mine: Path) -> None:
    for given in ("mine.py:loss", f"{mine}:loss"):
        made = with_sources({"name": "rloo", "loss": given, "kl": 0.1})
        assert made == {"name": "rloo", "loss": f"{NAME}:loss", "kl": 0.1, "sources": {NAME: SOURCE}}
        assert AlgorithmSpec.model_validate(made).own_functions == {"loss": (NAME, "loss")}
        assert with_sources(made) == made
    both = with_sources({"name": "mine.py:advantage", "loss": "mine.py:loss"})
    assert list(both["sources"]) == [NAME]
    mine.write_text(SOURCE + "# edited")
    assert NAME not in with_sources({"loss": "mine.py:loss"})["sources"]


def test_what_is_built_in_is_not_looked_for(mine: Path) -> None:
    plain = {"name": "grpo", "loss": "algorithm", "importance_correction": "masked", "clip_low": 0.1}
    assert with_sources(plain) == plain
    assert read_function("grop") is None


def test_an_entry_point_of_a_package_is_read_like_a_file(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint(name="ours", value="mine:advantage", group=own_algorithms.GROUP)
    monkeypatch.setattr(own_algorithms, "entry_points", lambda group, name: [point] if name == "ours" else [])
    monkeypatch.syspath_prepend(mine.parent)
    assert with_sources({"name": "ours"}) == {"name": f"{NAME}:advantage", "sources": {NAME: SOURCE}}
    assert "mine" not in sys.modules
    mine.unlink()
    with pytest.raises(SourceFault, match="reinstall its package"):
        with_sources({"name": "ours"})


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("none.py:loss", None, "cannot read none.py"),
        ("bad.py:los", SOURCE, "did you mean 'loss'"),
        ("bad.py:loss", "def loss(:", "line 1"),
        ("bad.py:loss", "class loss:\n    pass\n", "no function 'loss'"),
        ("bad.py:loss", "(" * 10_000, "bad.py"),
        ("bad.py:loss", SOURCE + "#" * MOST_SOURCE, "at most"),
        ("b ad.py:loss", SOURCE, "letters, digits"),
    ],
)
def test_a_file_without_such_a_function_is_refused(mine: Path, name: str, text: str | None, said: str) -> None:
    if text is not None:
        (mine.parent / name.partition(":")[0]).write_text(text)
    with pytest.raises(SourceFault, match=said):
        with_sources({"loss": name})
