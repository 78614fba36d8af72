"""Fixtures that every test may use."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("any_machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any_machine")  # how fast a busy machine is decides no test

pytest_plugins = ["tests.models_fixture", "tests.ray_fixture", "tests.tiny_llama", "tests.vllm_fixture"]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def root_logger_says_warnings() -> Iterator[None]:
    """Whatever a test or what it imports makes of the root logger (verl's server sets it to errors alone): the next one hears warnings."""
    logging.root.setLevel(logging.WARNING)
    yield
    logging.root.setLevel(logging.WARNING)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those on the Ray cluster last: it idles at a tenth of a core, and nothing else has to run beside it."""
    items.sort(key=lambda item: "ray_cluster" in getattr(item, "fixturenames", ()))
