"""The real small model, for tests that need one. Fetched once into the normal cache, then instant."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm.models import ModelUnavailable, resolve


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of SmolLM2-135M-Instruct."""
    try:
        return resolve("smollm2-135m").path
    except ModelUnavailable as error:
        pytest.fail(str(error))
