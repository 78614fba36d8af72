"""What benches share: processes that begin together, and figures of the code."""

from __future__ import annotations

import os
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from bench.crowd import portion, together
from bench.house import figures


def meet(name: str, barrier: Barrier) -> str:
    barrier.wait()
    return name


def die_at(name: str, barrier: Barrier) -> str:
    if name == "b":
        os._exit(3)
    barrier.wait()
    return name


def test_each_process_gives_back_what_it_did() -> None:
    assert sorted(together(meet, [("a",), ("b",), ("c",)])) == ["a", "b", "c"]


def test_a_process_that_dies_ends_the_others_which_wait_for_it() -> None:
    with pytest.raises(RuntimeError, match="a client process failed"):
        together(die_at, [("a",), ("b",)])


def test_portions_make_up_the_whole() -> None:
    assert [portion(10, 4, index) for index in range(4)] == [3, 3, 2, 2]


def test_files_lines_functions_and_circles_are_counted(tmp_path: Path) -> None:
    package = tmp_path / "shop"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "till.py").write_text("from shop import goods\n\ndef pay(sum: int) -> int:\n    return sum\n")
    (package / "goods.py").write_text("import shop.till\n\ndef price(of):\n    return 1\n")
    (package / "shelf.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from shop import goods\n\ndef late():\n    import shop.till\n"
    )
    found = figures("shop", tmp_path)
    assert (found["files"], found["lines"], found["functions"]) == (4, 14, 3)
    assert found["typed"] == round(1 / 3, 4)
    assert found["cycles"] == [["shop.goods", "shop.till"]]
