"""A made-up campaign whose records a page can show, at any of its moments."""

from __future__ import annotations

from typing import Any

from researcher.home import Home
from researcher.models import CampaignStatus
from tests.fakes.campaign import MadeUpCampaign


class ShownCampaign(MadeUpCampaign):
    """Its records and reports are where the page of that home looks for them."""

    def __init__(self, home: Home, url: str, **fields: Any) -> None:
        home.studies.mkdir(parents=True, exist_ok=True)
        super().__init__(home.studies, url=url, **fields)

    async def to(self, status: CampaignStatus) -> None:
        """Carry it out until it rests, and check how. Nobody is left working on it."""
        outcome = await self.carry_out()
        assert outcome.status is status, outcome.reason
