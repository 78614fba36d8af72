"""swarm top: on a screen, and once as text or JSON."""

from __future__ import annotations

import asyncio
import html
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from textual.widgets import DataTable, Sparkline, Static

from bench.serving import ServerProcess
from swarm.cli.diagnosis import ClientRecord
from swarm.cli.top import ServerView, Watch, server_text, sparkline
from swarm.cli.top_app import Panel, Top
from swarm.client import Patience, SwarmClient
from swarm.client import sync as synchronous
from swarm.protocol.runspec import RunSpec
from swarm.protocol.status import MixStatus, Phase, RunReport, StepMetrics
from tests.swarm.cli.conftest import Swarm, spec

NOWHERE = "http://127.0.0.1:9"


def test_servers_are_printed_once_as_text_and_as_json(history: dict[str, Any], swarm: Swarm) -> None:
    code, out, err = swarm("top", "--once")
    assert code == 0, err
    assert f"run {history['run']} running  step 2/50" in out
    assert "reward ▁█ 0.500 → 1.000" in out
    assert "client bad  version v2  3 episodes  reward -  3 failed" in out
    assert "KeyError: 'answer'" in out
    code, out, _ = swarm("top", history["url"], NOWHERE, "--once", "--json")
    assert code == 1
    here, away = json.loads(out)["servers"]
    assert here["status"]["phase"] == "rolling"
    assert (away["status"], "swarm serve" in away["error"]) == (None, True)


def test_what_cannot_be_watched_is_refused(swarm: Swarm) -> None:
    assert swarm("top", "notaurl")[0] == 2
    assert swarm("top", "--json")[0] == 2


def test_without_a_terminal_nothing_is_drawn(swarm: Swarm) -> None:
    code, out, err = swarm("top", NOWHERE)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "swarm top needs a terminal; to print the state once" in err


def test_families_are_shown(history: dict[str, Any]) -> None:
    with synchronous.SwarmClient(history["url"]) as client:
        status = client.status()
    status.pool.by_mix = {"math": MixStatus(running=2, ended=1, trained_groups=3, debt=-0.5)}
    assert "math  2 running  1 ended  3 groups trained  debt -0.50" in server_text(ServerView(url="u", status=status))


def test_a_run_whose_own_defaults_train_nothing_says_so_wherever_it_is_looked_at(
    server: ServerProcess, swarm: Swarm
) -> None:
    code, _, err = swarm("run", "start", "--set", "sampling.top_p=0.9", "--set", "sampling.train=off")
    assert (code, "warning: sampling.top_p is 0.9" in err, "set sampling.top_p to 1" in err) == (0, True, True)
    for command in (("run", "status"), ("top", "--once")):
        assert "set sampling.top_p to 1" in swarm(*command)[1]
    assert "set sampling.top_p to 1" in server.log_path.read_text()
    code, _, err = swarm("run", "patch", "--set", "sampling.top_p=1")
    assert (code, err) == (0, "")
    assert "sampling.top_p" not in swarm("run", "status")[1]


@pytest.mark.parametrize(
    ("values", "drawn"),
    [([], ""), ([1.0], "▁"), ([0.0, 0.5, 1.0], "▁▅█"), ([float(n) for n in range(8)] * 1, "▁▂▃▄▅▆▇█")],
)
def test_a_curve_is_drawn_from_lowest_to_highest(values: list[float], drawn: str) -> None:
    assert sparkline(values) == drawn


def test_a_long_curve_fits() -> None:
    assert len(sparkline([float(n) for n in range(1000)])) <= 60


@pytest.mark.anyio
async def test_the_screen_follows_several_servers_and_survives_one_that_is_away(history: dict[str, Any]) -> None:
    patience = Patience(connect_s=0.0, later_s=0.0)
    async with SwarmClient(history["url"], patience=patience) as here, SwarmClient(NOWHERE, patience=patience) as away:
        app = Top([Watch(here), Watch(away)])
        async with app.run_test(size=(120, 50)) as pilot:
            first, second = app.query(Panel)
            async with asyncio.timeout(60):
                while not (first.query_one(".clients", DataTable).row_count == 2 and second.has_class("away")):
                    await pilot.pause(0.05)
            assert history["run"] in str(first.query_one(".head", Static).content)
            assert first.query_one(".curve", Sparkline).data == [0.5, 1.0]
            assert "KeyError" in str(first.query_one(".failures", Static).content)
            assert "swarm serve" in str(second.query_one(".head", Static).content)
            await asyncio.to_thread(_one_more, history["url"])
            async with asyncio.timeout(60):
                while first.query_one(".clients", DataTable).row_count != 3:
                    await pilot.pause(0.05)
            await pilot.press("n")
            await pilot.press("q")
        assert app.return_code == 0


def _one_more(url: str) -> None:
    with synchronous.SwarmClient(url, client_id="third") as client, client.episode(task_id="t") as episode:
        episode.abort("enough")


def _seen(branch: int, *made: tuple[int, int]) -> RunReport:
    """A run as it is on that branch. made: branch and number of its steps."""
    steps = [StepMetrics(step=step, branch=on, at=0.0, config_version=1, values={}) for on, step in made]
    facts: dict[str, Any] = {"run_id": "r", "spec": RunSpec(), "status": "running", "phase": Phase.ROLLING}
    return RunReport(
        branch=branch, step=made[-1][1], config_version=1, changes=[], steps=steps, started_at=0.0, **facts
    )


@pytest.mark.anyio
@pytest.mark.parametrize("again", [[(0, 1), (1, 2)], [(0, 1), (1, 2), (1, 3)], [(0, 1), (1, 2), (1, 3), (1, 4)]])
async def test_after_a_restore_that_nobody_saw_no_step_of_the_branch_before_is_shown(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch, again: list[tuple[int, int]]
) -> None:
    runs = [_seen(0, (0, 1), (0, 2), (0, 3)), _seen(1, *again)]
    async with SwarmClient(server.url) as client:
        run_id = await client.start_run(spec())

        async def run(_: str, since_step: int = 0) -> RunReport:
            later = [step for step in runs[0].steps if step.step > since_step]
            return runs[0].model_copy(update={"run_id": run_id, "steps": later})

        monkeypatch.setattr(client, "run", run)
        watch = Watch(client)
        await watch.now()
        del runs[0]
        assert [(step.branch, step.step) for step in (await watch.now()).steps] == again


class Script:
    """A server that shows what a test says, then stays as it is."""

    url = "http://scripted"

    def __init__(self, *views: ServerView) -> None:
        self._views = views

    async def views(self) -> AsyncIterator[ServerView]:
        for view in self._views:
            yield view
        await asyncio.Event().wait()


@pytest.mark.anyio
async def test_a_server_that_goes_away_stays_on_the_screen_as_it_was(server: ServerProcess) -> None:
    async with SwarmClient(server.url) as client:
        await client.start_run(spec())
        view = await Watch(client).now()
    app = Top([Script(view, view.model_copy(update={"error": "gone [for] now"}))])
    async with app.run_test(size=(100, 30)) as pilot:
        panel = app.query_one(Panel)
        async with asyncio.timeout(60):
            while not panel.has_class("away"):
                await pilot.pause(0.05)
        assert "gone [for] now" in str(panel.query_one(".head", Static).content)
        assert "groups:" in str(panel.query_one(".pool", Static).content)


class ScriptedAbroad(Script):
    url = "http://[fe80::1]:8642"


@pytest.mark.anyio
async def test_what_looks_like_markup_is_shown_as_it_is_and_a_digest_by_its_beginning(server: ServerProcess) -> None:
    async with SwarmClient(server.url) as client:
        await client.start_run(spec())
        view = await Watch(client).now()
    assert view.status is not None
    view.status.pool.by_mix = {
        "[b]math[/]": MixStatus(running=2, ended=1, trained_groups=3, debt=0.0),
        "[/math]": MixStatus(),
    }
    clients = [
        ClientRecord(client_id=name, client_version=version, episodes=1, failed=0, reward_mean=None)
        for name, version in (("a[/b]", "[v2]"), ("[red]a", "0123456789ab" + 52 * "c"))
    ]
    app = Top([ScriptedAbroad(view.model_copy(update={"clients": clients}))])
    async with app.run_test(size=(160, 40)) as pilot:
        drawn = ""
        async with asyncio.timeout(60):
            while "1 episodes" not in drawn or "debt" not in drawn:
                await pilot.pause(0.05)
                drawn = html.unescape(app.export_screenshot()).replace("\xa0", " ")
    for shown in (
        "a[/b]",
        "[red]a",
        "version [v2]",
        "version 0123456789ab… ",
        "[b]math[/]",
        "[/math]",
        ScriptedAbroad.url,
    ):
        assert shown in drawn
