from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from foundation.clock import ManualClock
from researcher.store.store import Store
from tests.fakes.postgres import postgres


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def store(tmp_path: Path, clock: ManualClock) -> Iterator[Store]:
    store = Store.open(f"sqlite:///{tmp_path}/r.db", clock=clock)
    yield store
    store.close()


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    with postgres() as url:
        yield url
