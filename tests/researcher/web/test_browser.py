"""The page in a real browser: a study from its gate to its report, curves that grow, and what an enemy wrote."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from researcher.models import CampaignStatus
from researcher.schedule.daemon import only_daemon
from tests.fakes.browser import Browser, Tab, browser, chromium
from tests.fakes.shown_campaign import ShownCampaign
from tests.fakes.shown_study import at_gate, finish, opened, running
from tests.fakes.study import study_plan

PROGRAM = chromium()
pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(PROGRAM is None, reason="there is no Chromium here: install Debian's `chromium`"),
]

ROOT = Path(__file__).parents[3]
REPEAT = ROOT / "tests" / "instruments" / "repeat"
QUESTION = "Compare learning_rate 1e-5, 0.001"
NASTY = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>"
LIMIT_S = 300


@pytest.fixture(scope="module")
def chrome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    assert PROGRAM is not None
    with browser(PROGRAM, tmp_path_factory.mktemp("chromium")) as found:
        yield found


def environ(home: Path) -> dict[str, str]:
    mine = {"RESEARCHER_HOME": str(home), "PYTHONPATH": str(ROOT)}
    others = ("RESEARCHER_DATABASE_URL", "MLFLOW_TRACKING_URI", "RESEARCHER_UI_TOKEN")
    return {**{name: value for name, value in os.environ.items() if name not in others}, **mine}


def researcher(home: Path, *words: str) -> int:
    command = [sys.executable, "-m", "researcher.main", *words]
    return subprocess.run(command, env=environ(home), capture_output=True, timeout=LIMIT_S, check=False).returncode


@contextmanager
def served(home: Path, *words: str) -> Iterator[str]:
    """`researcher ui` over that home; its address."""
    command = [sys.executable, "-m", "researcher.main", "ui", "--port", "0", "--no-browser", "--json", *words]
    with subprocess.Popen(command, env=environ(home), stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield json.loads(server.stdout.readline())["url"]
        finally:
            server.send_signal(signal.SIGTERM)
            ended = server.wait(LIMIT_S)
    assert ended == 0


def _harmless(tab: Tab) -> None:
    assert tab.complaints() == []
    assert tab.run("window.hacked") is None


def test_a_study_from_its_gate_to_its_report_without_a_reload(chrome: Browser, tmp_path: Path) -> None:
    home = tmp_path / "home"
    asked = ("--instrument", str(REPEAT), "--vary", "learning_rate=1e-5,1e-3", "--claim", "increase")
    assert researcher(home, "start", *asked, "--engine", "echo", "--seeds", "3", "--approve", "plan") == 3
    with served(home) as url:
        tab = chrome.tab()
        tab.go(url)
        tab.wait("document.querySelector('.study .asks')")
        tab.click(".study")
        tab.wait("document.querySelector('#gate button[value=approve]')")
        assert QUESTION in tab.text()
        tab.type("#gate input[name=by]", "ada")
        tab.type("#gate input[name=words]", "worth it")
        tab.click("#gate button[value=approve]")
        tab.wait("document.querySelector('#told')?.innerText.includes('approved by ada: worth it')")
        assert tab.run("document.querySelector('#status').innerText") == "waiting"
        tab.run("window.loadedOnce = true")
        assert researcher(home, "resume") == 0
        tab.wait("document.querySelector('#status').innerText === 'done'")
        tab.wait("document.querySelector('.verdict .number')")
        assert tab.run("window.loadedOnce") is True
        assert tab.run("document.querySelectorAll('#trials .spark').length") == 6
        assert "supported" in tab.text()
        tab.click("#head .links a")
        tab.wait("document.title.startsWith('Compare learning_rate')")
        assert tab.run("document.querySelector('section.answer') !== null")
        _harmless(tab)


def test_curves_grow_and_trials_appear_while_somebody_looks(chrome: Browser, tmp_path: Path) -> None:
    home, _ = opened(tmp_path / "home")
    study, trial = running(home.store)
    with served(home.root, study) as url:
        tab = chrome.tab()
        tab.go(url)
        tab.run("window.loadedOnce = true")
        points = "document.querySelectorAll('#trials tbody tr')[0].querySelector('polyline').points.length"
        assert tab.run(points) == 2
        home.store.trials.record_progress(
            study, trial.key, 5, [("reward_mean", step, 0.1 * step) for step in range(3, 6)]
        )
        tab.wait(f"{points} === 5")
        (new,) = home.store.trials.ensure(study, "floor", [("lr=base", 2)])
        finish(home.store, study, new, 0.4)
        tab.wait("document.querySelectorAll('#trials tbody tr').length === 3")
        assert tab.run("window.loadedOnce") is True
        _harmless(tab)
    tab.wait("document.querySelector('#news').className === 'lost'")  # the page says that it is old
    home.store.close()


def test_what_a_person_types_outlives_what_changes_around_it(chrome: Browser, tmp_path: Path) -> None:
    home, _ = opened(tmp_path / "home")
    study = at_gate(home.store)
    with served(home.root, study) as address:
        first, second = chrome.tab(), chrome.tab(apart=True)
        for tab in (first, second):
            tab.go(address)
        first.type("#gate input[name=words]", "half a sentence")
        home.store.journal.record(study, "note", {"text": "something happened"})
        first.wait("document.querySelector('#journal').innerText.includes('something happened')")
        assert first.run("document.querySelector('#gate input[name=words]').value") == "half a sentence"
        second.type("#gate input[name=by]", "bob")
        second.click("#gate button[value=approve]")
        first.wait("document.querySelector('#told')?.innerText.includes('approved by bob')")
    home.store.close()


def test_what_others_wrote_does_nothing_in_a_browser(chrome: Browser, tmp_path: Path) -> None:
    home, _ = opened(tmp_path / "home")
    plan = study_plan().model_copy(update={"question": NASTY, "assumptions": (NASTY,)})
    study = at_gate(home.store, NASTY, plan=plan)
    with served(home.root) as address:
        tab = chrome.tab()
        tab.go(address)
        assert NASTY in tab.text()
        tab.click(".study")
        tab.wait("document.querySelector('#gate button')")
        assert NASTY in tab.run("document.querySelector('h1').innerText")
        home.store.journal.record(study, "note", {"text": NASTY})
        tab.wait("document.querySelector('#journal').innerText.includes('window.hacked')")
        _harmless(tab)
    home.store.close()


def _fits(tab: Tab) -> None:
    """Nothing lies beside the window."""
    assert tab.run("document.documentElement.scrollWidth <= innerWidth")


def _tab_to(tab: Tab, selector: str) -> list[str]:
    """Press Tab until that element has the focus; what had it on the way. Each shows that it has it."""
    passed = []
    for _ in range(60):
        tab.press("Tab")
        assert tab.run("getComputedStyle(document.activeElement).outlineStyle") == "solid"
        passed.append(tab.run("document.activeElement.name || document.activeElement.innerText"))
        if tab.run(f"document.activeElement.matches({json.dumps(selector)})"):
            return passed
    raise AssertionError(f"the keyboard does not reach {selector}, only {passed}")


async def test_a_campaign_is_steered_by_keyboard_on_a_narrow_screen_and_without_scripts(
    chrome: Browser, tmp_path: Path
) -> None:
    home, url = opened(tmp_path / "home")
    made = ShownCampaign(home, url, approve="confirm", budget={"wall": "2h"})
    await made.to(CampaignStatus.WAITING)
    with served(home.root) as address:
        tab = chrome.tab()
        tab.width(360)
        for path in ("/", "/campaigns", f"/campaigns/{made.id}"):
            tab.go(address + path)
            _fits(tab)
        passed = _tab_to(tab, "#newest [name=words]")
        assert passed[-2:] == ["by", "words"]
        tab.write("half a sentence")
        tab.run("window.loadedOnce = true")
        made.store.campaigns.record(made.id, "told", {"words": "rates diverge", "by": "bob"})
        made.store.campaigns.set_status(made.id, CampaignStatus.WAITING, "something changed")
        tab.wait("document.querySelector('#said').innerText.includes('rates diverge')")
        assert tab.run("window.loadedOnce") is True
        tab.write(", and the rest")
        assert tab.run("document.querySelector('#newest [name=words]').value") == "half a sentence, and the rest"
        _tab_to(tab, "#newest [value=approve]")
        tab.press("Enter")
        tab.wait("document.querySelector('#newest h2').innerText.startsWith('Now: 3. confirm')")
        assert "half a sentence, and the rest" in tab.text()
        _tab_to(tab, "#amend > summary")
        tab.press("Enter")
        _tab_to(tab, "#amend [name=trials]")
        tab.write("40")
        _tab_to(tab, "#amend [name=because]")
        tab.write("enough")
        tab.press("Enter")
        tab.wait("document.querySelector('#said').innerText.includes('trials 40: enough')")
        _harmless(tab)
        plain = chrome.tab(apart=True)
        plain.scripts(run=False)
        plain.go(f"{address}/campaigns/{made.id}")
        _tab_to(plain, "#tell textarea")
        plain.write("without any script")
        _tab_to(plain, "#tell button")
        plain.press("Enter")
        plain.wait("document.querySelector('#said').innerText.includes('without any script')")
    home.store.close()


def test_a_study_is_drafted_by_keyboard_on_a_narrow_screen(chrome: Browser, tmp_path: Path) -> None:
    home, _ = opened(tmp_path / "home")
    running(home.store)
    with served(home.root) as address:
        tab = chrome.tab()
        tab.width(360)
        tab.go(f"{address}/servers")
        tab.wait("document.querySelector('.server').innerText.includes('unreachable')")
        _fits(tab)
        tab.go(f"{address}/draft")
        _tab_to(tab, "#topic textarea")
        tab.write("Does GRPO learn one-digit sums faster with a learning rate of 4e-5 than with 1e-5?")
        _tab_to(tab, "#topic button")
        tab.press("Enter")
        tab.wait("document.querySelector('#file textarea').value.includes('instrument: arithmetic')")
        _tab_to(tab, "#file textarea")
        tab.write("sedes: 3\n")
        _tab_to(tab, "#file button")
        tab.press("Enter")
        tab.wait("document.querySelector('#problems')?.innerText.includes('sedes')")
        _fits(tab)
        tab.type(
            "#file textarea", "question: a\ninstrument: arithmetic\ncompare: {learning_rate: {levels: [1e-5, 4e-5]}}"
        )
        _tab_to(tab, "#file button")
        tab.press("Enter")
        tab.wait("document.querySelector('#price')?.innerText.includes('trials')")
        _fits(tab)
        _harmless(tab)
    home.store.close()


def test_a_campaign_is_begun_by_keyboard_on_a_narrow_screen(
    chrome: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, _ = opened(tmp_path / "home")
    monkeypatch.setenv("RESEARCHER_HOME", str(home.root))
    monkeypatch.delenv("RESEARCHER_DATABASE_URL", raising=False)
    with only_daemon(), served(home.root) as address:  # the one that the page starts waits, and finds nothing to do
        tab = chrome.tab()
        tab.width(360)
        tab.go(f"{address}/campaigns")
        _tab_to(tab, "#campaigns a[href='/draft/campaign']")
        tab.press("Enter")
        tab.wait("document.querySelector('#topic textarea')")
        _fits(tab)
        _tab_to(tab, "#topic textarea")
        tab.write("What makes GRPO learn one-digit sums fastest? Two hours.")
        _tab_to(tab, "#topic button")
        tab.press("Enter")
        tab.wait("document.querySelector('#file textarea').value.includes('budget: {wall: 2h}')")
        _fits(tab)
        _tab_to(tab, "#file textarea")
        tab.write("bugdet: 3\n")
        _tab_to(tab, "#file button")
        tab.press("Enter")
        tab.wait("document.querySelector('#problems')?.innerText.includes('bugdet')")
        _fits(tab)
        goal = "goal: sums\ninstruments: [arithmetic]\nfactors: {kl: [0.1]}\nbudget: {trials: 100}\n"
        tab.type("#file textarea", goal)
        _tab_to(tab, "#file button")
        tab.press("Enter")
        tab.wait("document.querySelector('#price')?.innerText.includes('first study')")
        _fits(tab)
        _harmless(tab)
        _tab_to(tab, "#file button[formaction$=start]")
        tab.press("Enter")
        tab.wait("document.querySelector('h1')?.innerText === 'sums'")
        assert tab.run("location.pathname").startswith("/campaigns/ca-")
        _fits(tab)
        assert researcher(home.root, "campaign", "stop") == 0
        tab.wait("document.body.innerText.includes('stopped')")
        _harmless(tab)
    home.store.close()
