"""verl on the processor, in this process and in every child of it."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator

import pytest

from tests.swarm.engine.verl.platform_environment import ENVIRONMENT, version_with_vllm


@pytest.fixture(scope="module")
def cpu_platform() -> Iterator[None]:
    """verl looks for its platform once, when it is first imported: give this fixture before anything of verl.

    For a module at a time: no test elsewhere, and no child of one, is to take itself for a rank.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        patch.setattr(importlib.metadata, "version", version_with_vllm)
        yield
