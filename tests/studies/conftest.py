"""A real server with the echo engine for instruments."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.serving import ServerProcess


@pytest.fixture
def echo_server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path / "state", "--log-level", "warning") as server:
        yield server
