"""Fixtures that every test may use."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator

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


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What a test said may hold half a character, which no worker of pytest-xdist can tell."""
    report = yield
    report.sections = [
        (name, text.encode(errors="backslashreplace").decode(errors="replace")) for name, text in report.sections
    ]
    return report


_ENGINES, _RAY = "engines", "ray"


@pytest.hookimpl(tryfirst=True)  # before xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Two lanes, when pytest-xdist is asked for them: what boots an engine, one test after the other, beside all other files.

    Those on the Ray cluster come last: it idles at a tenth of a core, and nothing else has to run beside it.
    """
    lanes = {item: _lane(item) for item in items}
    items.sort(key=lambda item: {_ENGINES: 0, _RAY: 2}.get(lanes[item], 1))
    for item in items:
        item.add_marker(pytest.mark.xdist_group(lanes[item]))


def _lane(item: pytest.Item) -> str:
    """A file's tests share its fixtures, and so does everything that uses the one booted vLLM or the one cluster."""
    if "ray_cluster" in getattr(item, "fixturenames", ()):
        return _RAY
    return _ENGINES if item.get_closest_marker("slow") else item.nodeid.partition("::")[0]
