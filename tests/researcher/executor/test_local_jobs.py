"""Clients as processes of this machine keep the contract of clients."""

from __future__ import annotations

import pytest

from tests.contracts.client_job_contract import ClientJobContract

pytestmark = pytest.mark.anyio


class TestLocalJobs(ClientJobContract):
    @pytest.fixture
    def words(self) -> str:
        return "local"
