"""Shows the status of the swarm servers that current studies use, or why a server's status is unknown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from foundation.logs import redact
from researcher.home import Home
from researcher.models import StudyRecord
from researcher.web.rendering import Renderer
from researcher.web.sheets import Sheets
from swarm.protocol.status import ServerStatus

Ask = Callable[[Sequence[str]], Sequence[ServerStatus | str]]
"""Asks all servers for their status at the same time. Returns, for each address, a status or a text that says why there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLine:
    """One server.

    `studies` lists the studies that use it. If the server reported no status, `status` is None and `reason` says why.
    """

    url: str
    given: bool
    """True if a person gave its address; else it was started for a study."""
    studies: list[StudyRecord]
    status: ServerStatus | None
    reason: str


class ServerPages:
    """Handler of the route /servers."""

    def __init__(self, home: Home, sheets: Sheets, renderer: Renderer, ask: Ask) -> None:
        self._store = home.store
        self._sheets = sheets
        self._page = renderer.page
        self._ask = ask

    def servers(self, request: Request) -> Response:
        """Show every server that an unfinished study uses."""
        return self._page(request, "servers", servers=self._sheets.shared("servers", self._lines))

    def _lines(self) -> list[ServerLine]:
        users: dict[str, list[StudyRecord]] = {}
        given: set[str] = set()
        for study in self._store.studies.all():
            if study.status.ended:
                continue
            given |= {url.rstrip("/") for url in study.options.servers}
            for url in self._used(study):
                users.setdefault(url, []).append(study)
        answers = self._ask(list(users))
        return [
            ServerLine(
                url=redact(url),
                given=url in given,
                studies=studies,
                status=None if isinstance(found, str) else found,
                reason=redact(found) if isinstance(found, str) else "",
            )
            for (url, studies), found in zip(users.items(), answers, strict=True)
        ]

    def _used(self, study: StudyRecord) -> list[str]:
        """List the addresses of a study's servers: the given ones, else those of attempts that have not ended."""
        if study.options.servers:
            return list(dict.fromkeys(url.rstrip("/") for url in study.options.servers))
        attempts = self._store.trials.attempts_of_study(study.id).values()
        return list(dict.fromkeys(each[-1].server_url.rstrip("/") for each in attempts if each[-1].ended_at is None))
