"""A fake that breaks the contract would prove nothing: the faulty engine keeps it, as long as it is not told to crash."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from swarm.protocol.runspec import RunSpec
from tests.contracts.engine_contract import EngineContract
from tests.fakes.engine import FaultyEngine

pytestmark = pytest.mark.anyio


class TestFaultyEngine(EngineContract):
    @pytest.fixture
    async def engine(self) -> AsyncIterator[FaultyEngine]:
        engine = FaultyEngine()
        await engine.boot()
        yield engine
        await engine.shutdown()

    @pytest.fixture
    def run_spec(self) -> RunSpec:
        return RunSpec.model_validate({"batch": {"group_size": 4}})
