"""verl on the processor, in this process and in every child of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.swarm.engine.verl.platform_environment import ENVIRONMENT


@pytest.fixture(scope="module")
def cpu_platform() -> Iterator[None]:
    """verl looks for its platform once, when it is first imported: give this fixture before anything of verl.

    For a module at a time: no test elsewhere, and no child of one, is to take itself for a rank.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        yield
