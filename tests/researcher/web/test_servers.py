"""Servers of studies that run, as the page shows them."""

from __future__ import annotations

import httpx
import pytest

from researcher.cli.servers import ask_servers
from researcher.models import StudyStatus
from swarm.protocol.status import EngineStatus, Phase, PoolStatus, ServerStatus
from tests.fakes.shown_study import SERVER, done, running
from tests.fakes.web_page import WebPage

pytestmark = pytest.mark.anyio


async def test_servers_of_studies_that_run_say_how_they_are(page: WebPage, browser: httpx.AsyncClient) -> None:
    done(page.home)
    assert "No study uses a server now" in (await browser.get("/servers")).text
    study, _ = running(page.home.store)
    away = page.home.store.studies.create("another", {"servers": ["http://10.0.0.8:8642/", SERVER]})
    page.asks.by_url[SERVER] = ServerStatus(
        server_id="s",
        revision=1,
        phase=Phase.ROLLING,
        run_id="run-2",
        step=7,
        model="smollm2-135m",
        pool=PoolStatus(running=5, ended=3, groups_ready=1, groups_needed=4, groups_open=2),
        engine=EngineStatus(backend="local", device="cuda", tokens_per_s=812.0),
    )
    page.clock.advance(2)
    text = (await browser.get("/servers")).text
    assert text.count('<article class="card server">') == 2
    for words in (
        SERVER,
        "smollm2-135m",
        "local on cuda, 812 tokens/s",
        "run-2, step 7",
        "5 running, 3 ended",
        "1 of 4 ready",
        "rolling",
        f'href="/studies/{study}"',
        f'href="/studies/{away}"',
    ):
        assert words in text
    assert text.count("unreachable") == 1
    assert "nothing answers there" in text
    for each in (study, away):
        page.home.store.studies.set_status(each, StudyStatus.STOPPED)
    page.clock.advance(2)
    assert "No study uses a server now" in (await browser.get("/servers")).text


def test_an_address_where_nothing_answers_is_no_error() -> None:
    assert ask_servers(["http://127.0.0.1:9"]) == ["nothing answers there"]
    assert ask_servers([]) == []
