"""Services by apprise: a real webhook, wrong addresses, and the secrecy of all of them."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from researcher.cli import FAILED, USAGE
from researcher.executor.processes import child_environ
from researcher.main import main
from researcher.notify.services import AppriseNotifier, Notifier, NotSent, check_names, notifier_of
from researcher.refusals import SpecRefused
from tests.contracts.notifier_contract import NotifierContract, Received, a_notice
from tests.fakes.notices import SECRET, FakeNotifier, Webhook, webhook

NOBODY = f"json://127.0.0.1:1/{SECRET}"


@pytest.fixture
def hook() -> Iterator[Webhook]:
    with webhook() as found:
        yield found


class TestApprise(NotifierContract):
    @pytest.fixture
    def notifier(self, hook: Webhook) -> Notifier:
        return AppriseNotifier(hook.url)

    @pytest.fixture
    def away(self) -> Notifier:
        return AppriseNotifier(NOBODY)

    @pytest.fixture
    def received(self, hook: Webhook) -> Callable[[], list[Received]]:
        return hook.received


class TestFake(NotifierContract):
    @pytest.fixture
    def notifier(self) -> FakeNotifier:
        return FakeNotifier()

    @pytest.fixture
    def away(self) -> Notifier:
        return FakeNotifier(away=True)

    @pytest.fixture
    def received(self, notifier: FakeNotifier) -> Callable[[], list[Received]]:
        return notifier.received


@pytest.mark.parametrize("status", [404, 500])
def test_what_a_service_answers_is_told_by_its_status(hook: Webhook, status: int) -> None:
    hook.status = status
    with pytest.raises(NotSent, match=f"HTTP {status}"):
        AppriseNotifier(hook.url).send(a_notice())


@pytest.mark.parametrize("url", ["", "  ", SECRET, f"nonsense://{SECRET}", f"slack://{SECRET}"])
def test_a_wrong_address_is_refused_by_its_variable_and_never_quoted(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with pytest.raises(SpecRefused, match="RESEARCHER_NOTIFY_TEAM") as refused:
        check_names(["TEAM"], {"RESEARCHER_NOTIFY_TEAM": url})
    assert SECRET not in "".join(traceback.format_exception(refused.value))
    assert SECRET not in caplog.text


def test_a_service_that_fails_says_nothing_of_its_address(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="apprise")
    with pytest.raises(NotSent) as failed:
        notifier_of("TEAM", {"RESEARCHER_NOTIFY_TEAM": NOBODY}).send(a_notice())
    assert SECRET not in "".join(traceback.format_exception(failed.value))
    assert SECRET not in caplog.text


def test_clients_and_servers_do_not_learn_the_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESEARCHER_NOTIFY_TEAM", NOBODY)
    assert "RESEARCHER_NOTIFY_TEAM" not in child_environ()
    assert child_environ(own=True)["RESEARCHER_NOTIFY_TEAM"] == NOBODY


def test_a_person_can_try_a_service(
    hook: Webhook, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["notify", "TEAM"]) == USAGE
    monkeypatch.setenv("RESEARCHER_NOTIFY_TEAM", hook.url)
    assert main(["notify", "TEAM"]) == 0
    assert len(hook.posts) == 1
    hook.status = 403
    assert main(["notify", "TEAM", "--json"]) == FAILED
    said = capsys.readouterr()
    assert "HTTP 403" in said.out
    assert SECRET not in said.out + said.err


def test_an_address_in_a_study_file_is_refused_without_being_quoted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RESEARCHER_HOME", str(tmp_path))
    monkeypatch.delenv("RESEARCHER_DATABASE_URL", raising=False)
    file = tmp_path / "study.yaml"
    asked = "question: Is it better?\ninstrument: arithmetic\ncompare: {learning_rate: {levels: [4e-5]}}\n"
    for name, says in ((f"slack://{SECRET}", "names in capitals"), ("TEAM", "set RESEARCHER_NOTIFY_TEAM")):
        file.write_text(f"{asked}notify: ['{name}']\n")
        assert main(["start", str(file)]) == USAGE
        said = capsys.readouterr().err
        assert "study.yaml:4: notify: " in said
        assert says in said
        assert SECRET not in said
