"""A page of its own for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from tests.fakes.shown_study import opened
from tests.fakes.web_page import WebPage


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RESEARCHER_HOME", str(tmp_path / "home"))
    for name in ("RESEARCHER_DATABASE_URL", "MLFLOW_TRACKING_URI", "RESEARCHER_UI_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "home"


@pytest.fixture
def page(home: Path) -> Iterator[WebPage]:
    found, url = opened(home)
    yield WebPage(found, url)
    found.store.close()


@pytest.fixture
async def browser(page: WebPage) -> AsyncIterator[httpx.AsyncClient]:
    async with page.browser() as client:
        yield client
