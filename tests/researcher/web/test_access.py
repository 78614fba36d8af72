"""Who may see the page: addresses, the token, sessions, headers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from foundation.commandline import UsageError
from researcher.serving import Access, load_token
from tests.fakes.shown_study import at_gate, opened
from tests.fakes.web_page import PORT, WebPage, answer

pytestmark = pytest.mark.anyio

TOKEN = "a-token-of-some-length"
ELSEWHERE = f"http://10.0.0.9:{PORT}"


@pytest.fixture
def guarded(home: Path) -> WebPage:
    found, url = opened(home)
    return WebPage(found, url, Access(host="0.0.0.0", port=PORT, token=TOKEN))


def test_an_address_that_others_can_reach_needs_a_token() -> None:
    exposed: list[dict[str, Any]] = [
        {"host": "0.0.0.0"},
        {"host": "example.org"},
        {"host": "127.0.0.1", "public_url": "https://a.org"},
    ]
    for fields in exposed:
        with pytest.raises(UsageError, match="RESEARCHER_UI_TOKEN"):
            Access(port=PORT, **fields)
    for host in ("127.0.0.1", "localhost", "::1"):
        assert Access(host=host, port=PORT).local


def test_tokens_come_from_a_file_or_the_environment_and_are_long_enough(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    assert load_token({}, tmp_path / "token") == TOKEN
    assert load_token({"RESEARCHER_UI_TOKEN": TOKEN}, None) == TOKEN
    assert load_token({}, None) is None
    (tmp_path / "short").write_text("short")
    for file in (tmp_path / "short", tmp_path / "none"):
        with pytest.raises(UsageError):
            load_token({}, file)


def test_a_public_address_is_one_without_a_path() -> None:
    for url in ("example.org", "https://example.org/researcher", "ftp://example.org"):
        with pytest.raises(UsageError, match="--public-url"):
            Access(host="127.0.0.1", port=PORT, token=TOKEN, public_url=url)


async def test_a_strangers_name_that_points_at_this_machine_is_not_served(browser: httpx.AsyncClient) -> None:
    for host in ("evil.example", f"evil.example:{PORT}", f"127.0.0.1:{PORT + 1}", "127.0.0.1"):
        refused = await browser.get("/", headers={"host": host})
        assert refused.status_code == 403
        assert "set-cookie" not in refused.headers
    for host in (f"localhost:{PORT}", f"[::1]:{PORT}"):
        assert (await browser.get("/", headers={"host": host})).status_code == 200


def test_a_page_on_another_address_of_this_machine_is_served_under_its_own_name() -> None:
    for host, name in (("127.0.0.2", "127.0.0.2"), ("::1", "[::1]")):
        page = Access(host=host, port=PORT)
        assert page.url == f"http://{name}:{PORT}"
        assert page.serves(f"{name}:{PORT}")
        assert not page.serves(f"127.0.0.3:{PORT}")
    assert Access(host="127.0.0.2", port=80).serves("127.0.0.2")


async def test_every_answer_carries_the_headers_that_keep_it_in_place(browser: httpx.AsyncClient) -> None:
    for address in ("/", "/nowhere", "/static/page.js", "/studies/st-none"):
        headers = (await browser.get(address)).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert headers["cache-control"] == "no-store"
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "same-origin"


async def test_nothing_on_the_page_comes_from_elsewhere(page: WebPage, browser: httpx.AsyncClient) -> None:
    study = at_gate(page.home.store)
    text = (await browser.get(f"/studies/{study}")).text
    assert 'src="http' not in text
    assert 'href="http' not in text
    assert " style=" not in text
    assert " on" not in "".join(part for part in text.split("<") if part.startswith(("a ", "button", "form", "input")))


async def test_the_sessions_cookie_is_for_this_page_alone(browser: httpx.AsyncClient) -> None:
    cookie = (await browser.get("/")).headers["set-cookie"]
    assert cookie.startswith(f"researcher_{PORT}=")
    assert "HttpOnly" in cookie
    assert "SameSite=Lax" in cookie
    assert "set-cookie" not in (await browser.get("/")).headers


async def test_with_a_token_nothing_is_shown_or_done_before_it_was_given(guarded: WebPage) -> None:
    study = at_gate(guarded.home.store)
    async with guarded.browser(ELSEWHERE) as browser:
        for address in ("/", f"/studies/{study}", f"/studies/{study}/report", f"/studies/{study}/mlflow"):
            sent = await browser.get(address)
            assert sent.status_code == 303
            assert sent.headers["location"].startswith("/login?next=/")
        refused = await browser.post(f"/studies/{study}/answer", data={"verdict": "approve"})
        assert refused.status_code == 401
        wrong = await browser.post("/login", data={"password": "not the token at all", "next": "/"})
        assert wrong.status_code == 403
        assert "not the token" in wrong.text
        assert (await browser.get("/")).status_code == 303
        right = await browser.post("/login", data={"password": TOKEN, "next": f"/studies/{study}"})
        assert right.headers["location"] == f"/studies/{study}"
        assert (await answer(browser, study, "approve")).status_code == 303
    guarded.home.store.close()


async def test_a_cookie_that_this_page_did_not_make_is_worth_nothing(guarded: WebPage) -> None:
    other = Access(host="0.0.0.0", port=PORT, token=TOKEN)
    async with guarded.browser(ELSEWHERE) as browser:
        for forged in (other.new_session(), "x.y", "x", ""):
            assert (await browser.get("/", headers={"cookie": f"researcher_{PORT}={forged}"})).status_code == 303
    guarded.home.store.close()


async def test_logging_in_leads_to_no_other_site(guarded: WebPage) -> None:
    async with guarded.browser(ELSEWHERE) as browser:
        for onward in ("//evil.example", "https://evil.example", "/\\evil.example", "/a\r\nset-cookie: x=y"):
            sent = await browser.post("/login", data={"password": TOKEN, "next": onward})
            assert sent.headers["location"] == "/"
    guarded.home.store.close()


async def test_where_browsers_are_elsewhere_mlflow_is_not_started_for_them(guarded: WebPage) -> None:
    study = at_gate(guarded.home.store)
    async with guarded.browser(ELSEWHERE) as browser:
        await browser.post("/login", data={"password": TOKEN})
        sent = await browser.get(f"/studies/{study}/mlflow")
        assert sent.status_code == 503
        assert "MLFLOW_TRACKING_URI" in sent.text
    guarded.home.store.close()
