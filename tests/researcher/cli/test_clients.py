"""`--clients`: what is wrong with it is said before there is a study."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from foundation.clock import SystemClock
from foundation.commandline import UsageError
from researcher.cli import clients
from researcher.cli.clients import check_clients, check_cluster
from researcher.cli.instrument_llm import helpers
from researcher.instruments.catalogue import read_instrument
from researcher.llm.asking import Purse
from researcher.models import LlmCall, StudyOptions
from researcher.repair.writing import NEW
from researcher.store.store import Store
from tests.fakes.repeat_study import FOLDER, repeat_plan


@pytest.mark.parametrize("given", ["", "rya", "ray=", "local=http://head:8265", "ray=head:8265"])
def test_what_is_none_of_the_forms_is_refused(given: str) -> None:
    with pytest.raises(UsageError, match="http://HOST:8265"):
        check_clients(given)


def test_without_ray_the_command_that_installs_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    check_clients("local")
    with pytest.raises(UsageError, match=r"pip install 'swarm-researcher\[ray\]'"):
        check_clients("ray=http://head:8265")


def test_a_cluster_that_is_not_there_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
        monkeypatch.delenv(name, raising=False)

    def away(address: str | None) -> None:
        raise ConnectionError(f"Failed to connect to Ray at address: {address}.")

    monkeypatch.setattr("researcher.executor.ray_cluster._connected", away)
    with pytest.raises(UsageError, match=r"http://head:8265 cannot be used.*ray status"):
        check_cluster("ray=http://head:8265", repeat_plan(), read_instrument(FOLDER), [], lambda _: None)


def test_generated_code_and_an_llms_repairs_have_no_sandbox_on_ray(tmp_path: Path) -> None:
    folder = read_instrument(FOLDER)
    written = folder.instrument.model_copy(update={"generated": "an LLM"})
    with pytest.raises(UsageError, match="--clients local"):
        check_clients("ray", NEW)
    with pytest.raises(UsageError, match="--clients local"):
        check_cluster("ray", repeat_plan(), replace(folder, instrument=written), [], lambda _: None)
    store = Store.open(f"sqlite:///{tmp_path}/r.db")
    study = store.studies.create("a topic", {})
    environ = {
        "RESEARCHER_LLM_MODEL": "m",
        "RESEARCHER_LLM_API_KEY": "k",
        "RESEARCHER_LLM_BASE_URL": "http://127.0.0.1:9",
    }
    for words, mends in (("local", True), ("ray", False)):
        found = helpers(store, study, StudyOptions(repairs=3, clients=words), SystemClock(), lambda _: None, environ)
        assert (found.mending is not None, found.opinion is not None) == (mends, True)
    assert found.why_none == clients.NO_SANDBOX
    store.close()


def test_mending_and_opinions_are_paid_from_one_purse_with_the_planning(tmp_path: Path) -> None:
    store = Store.open(f"sqlite:///{tmp_path}/r.db")
    study = store.studies.create("a topic", {})
    planned = LlmCall(purpose="plan", model="m", request={}, prompt_tokens=70, completion_tokens=7, cost=0.5, at=0.0)
    store.journal.record_llm_call(study, planned)
    environ = {"RESEARCHER_LLM_MODEL": "m", "RESEARCHER_LLM_API_KEY": "k"}
    found = helpers(store, study, StudyOptions(repairs=3), SystemClock(), lambda _: None, environ)
    store.close()
    assert found.mending is not None
    assert found.opinion is not None
    assert found.mending.asker.purse is found.opinion.asker.purse
    assert found.mending.asker.purse == Purse(tokens=77, cost=0.5)
