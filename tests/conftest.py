"""Fixtures that every test may use."""

from __future__ import annotations

import pytest

pytest_plugins = ["tests.models_fixture", "tests.ray_fixture", "tests.tiny_llama", "tests.vllm_fixture"]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in the same hook
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where two workers run, a file's tests stay together with what they share, and all that boots an engine is one worker's: it takes
    the memory, and is begun first since it is the longest. Tests on the Ray cluster come last, since it idles at a tenth of a core.
    """
    items.sort(key=lambda item: ("engines", "files", "ray").index(_kind(item)))
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            kind = _kind(item)
            item.add_marker(pytest.mark.xdist_group(str(item.path) if kind == "files" else kind))


def _kind(item: pytest.Item) -> str:
    fixtures = getattr(item, "fixturenames", ())
    if "ray_cluster" in fixtures:
        return "ray"
    return "engines" if "vllm" in fixtures or item.get_closest_marker("slow") is not None else "files"
