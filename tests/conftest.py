"""Fixtures that every test may use."""

from __future__ import annotations

import pytest

pytest_plugins = ["tests.models_fixture", "tests.ray_fixture", "tests.tiny_llama", "tests.vllm_fixture"]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
