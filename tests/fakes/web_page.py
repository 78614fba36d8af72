"""The web page over a store of its own, asked without a network by any number of browsers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx

from foundation.clock import ManualClock
from researcher.cli.drafting import GoalDrafting, TextDrafting
from researcher.home import Home
from researcher.serving import Access
from researcher.web.access import Guard
from researcher.web.app import Services, create_app
from researcher.web.sheets import Sheets
from researcher.web.tracking import Tracking
from swarm.protocol.status import ServerStatus

PORT = 8643
BASE = f"http://127.0.0.1:{PORT}"


@dataclass
class Answers:
    """What servers say of themselves, by address; the others do not answer."""

    by_url: dict[str, ServerStatus] = field(default_factory=dict)

    def statuses(self, urls: Sequence[str]) -> list[ServerStatus | str]:
        return [self.by_url.get(url, "nothing answers there") for url in urls]


@dataclass
class WebPage:
    """url: of the database."""

    home: Home
    url: str
    access: Access = field(default_factory=lambda: Access(host="127.0.0.1", port=PORT))
    clock: ManualClock = field(default_factory=ManualClock)
    daemons: list[int] = field(default_factory=list)
    """One entry for each time that the daemon was asked for."""
    asks: Answers = field(default_factory=Answers)
    app: Guard = field(init=False)
    tracking: Tracking = field(init=False)

    def __post_init__(self) -> None:
        sheets = Sheets(self.home, self.clock)
        self.tracking = Tracking(self.home.store, port=0, local=self.access.local, start_limit_s=600)
        studies = TextDrafting(self.home)
        services = Services(
            ensure_daemon=self._daemon,
            drafting=studies,
            goals=GoalDrafting(studies, self._daemon),
            ask=self.asks.statuses,
        )
        self.app = create_app(self.home, self.access, sheets, self.tracking, services)

    def _daemon(self) -> None:
        self.daemons.append(1)

    def browser(self, base: str = BASE) -> httpx.AsyncClient:
        """One person's browser, with cookies of its own. It tells where its forms come from, as browsers do."""
        origin = {"origin": base, "sec-fetch-site": "same-origin"}

        async def tell(request: httpx.Request) -> None:
            if request.method == "POST":
                request.headers.update({name: value for name, value in origin.items() if name not in request.headers})

        transport = httpx.ASGITransport(app=self.app)
        return httpx.AsyncClient(transport=transport, base_url=base, event_hooks={"request": [tell]})


async def answer(browser: httpx.AsyncClient, study: str, verdict: str, **fields: str) -> httpx.Response:
    """Look at the study's page and send its form."""
    page = await browser.get(f"/studies/{study}")
    given = {"token": form_token(page.text), "gate": "plan/1", "verdict": verdict, "by": "ada", **fields}
    return await browser.post(f"/studies/{study}/answer", data=given)


def form_token(html: str) -> str:
    """What the page's own forms carry."""
    found = re.search(r'name="token" value="(\w+)"', html)
    assert found is not None, html
    return found[1]
