from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fakes.postgres import postgres


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    with postgres() as url:
        yield url
