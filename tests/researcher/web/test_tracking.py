"""MLflow beside the page: started when somebody asks for it, ended with the page, and said when it cannot be had."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from researcher.store.errors import MlflowAway
from researcher.store.store import Store
from researcher.web.tracking import Tracking
from tests.fakes.shown_study import done, opened, planned
from tests.fakes.web_page import WebPage

pytestmark = [pytest.mark.anyio, pytest.mark.filterwarnings("ignore")]  # MLflow's own deprecations are not ours to mend

LIMIT_S = 600


@pytest.fixture
def store(home: Path) -> Iterator[Store]:
    found, _ = opened(home)
    yield found.store
    found.store.close()


async def test_mlflow_starts_when_its_link_is_followed_and_leads_to_the_run(
    page: WebPage, browser: httpx.AsyncClient
) -> None:
    study = done(page.home)
    trial = page.home.store.trials.all(study)[0]
    waiting = page.home.store.outbox.state("mlflow", study)
    try:
        address = f"/studies/{study}/mlflow"
        first = await browser.get(address)
        assert first.status_code == 202
        assert first.headers["refresh"] == "2"
        assert "MLflow is starting" in first.text
        started = page.tracking.started
        assert started is not None
        assert page.home.store.outbox.state("mlflow", study) == waiting
        started.join(LIMIT_S)
        assert page.home.store.outbox.state("mlflow", study)[0] == 0
        later = planned(page.home.store)
        with pytest.raises(MlflowAway, match="researcher copy"):
            page.tracking.link(later)
        assert page.home.store.outbox.state("mlflow", later)[0] > 0
        experiment = (await browser.get(address)).headers["location"]
        run = (await browser.get(address, params={"trial": trial.key})).headers["location"]
        assert run.startswith(f"{experiment.partition('?')[0]}/")
        async with httpx.AsyncClient() as client:
            assert (await client.get(experiment.partition("#")[0])).status_code == 200
        assert (await browser.get(address, params={"trial": "none"})).status_code == 404
    finally:
        page.tracking.close()
    async with httpx.AsyncClient() as client:
        with pytest.raises(httpx.ConnectError):
            await client.get(experiment.partition("#")[0])


async def test_a_port_that_is_taken_is_said_and_tried_again(store: Store) -> None:
    study = store.studies.create("a topic", {})
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        tracking = Tracking(store, port=taken.getsockname()[1], local=True)
        assert tracking.link(study).starting
        assert tracking.started is not None
        tracking.started.join(LIMIT_S)
        assert "--mlflow-port" in tracking.link(study).reason
        assert tracking.link(study).starting
        tracking.close()


async def test_a_page_that_closes_does_not_wait_for_mlflow_to_start(store: Store) -> None:
    tracking = Tracking(store, port=0, local=True)
    assert tracking.link(store.studies.create("a topic", {})).starting
    tracking.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "mlflow"]


async def test_a_configured_server_that_does_not_answer_is_said(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    tracking = Tracking(store, port=0, local=False)
    with pytest.raises(MlflowAway, match="does not answer"):
        tracking.link(store.studies.create("a topic", {}))
    tracking.close()
