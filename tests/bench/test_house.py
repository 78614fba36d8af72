"""What `bench.house` counts."""

from __future__ import annotations

from pathlib import Path

from bench.house import figures


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
