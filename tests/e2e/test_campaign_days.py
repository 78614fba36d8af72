"""A campaign of three days in minutes of real time: through windows, kills, a database that restarts and records that cannot be
copied it comes to the decisions and the answer of one that nobody disturbed. Real processes and servers, the echo engine.
"""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from researcher.campaign.records import observe
from researcher.campaign.report import campaign_page
from researcher.campaign.verify import verify_campaign
from researcher.models import CampaignStatus, TrialStatus
from tests.fakes.play import LATENCY, LIMIT_S, Play, at, server
from tests.fakes.postgres import Postgres, postgres_server

pytestmark = pytest.mark.campaign

GOAL: dict[str, Any] = {
    "goal": "Which learning rate makes words be repeated soonest, and does the temperature matter?",
    "factors": {"learning_rate": [1e-5, 1e-3], "temperature": [0.7]},
    "budget": {"trials": 60},
}
_RESTARTED_EVERY_S = 10.0


class CampaignPlay(Play):
    """A town with one campaign."""

    @property
    def done(self) -> int:
        """Trials that are done, of all its studies."""
        trials = [each for study in self.store.studies.all() for each in self.store.trials.all(study.id, series=())]
        return sum(trial.status is TrialStatus.DONE for trial in trials)

    @property
    def has_ended(self) -> bool:
        return self.store.campaigns.get(self.owned).status.ended

    def decided(self) -> list[tuple[Any, ...]]:
        """What each decision was, without the question, which quotes what was measured."""
        found = []
        for each in self.store.campaigns.decisions(self.owned):
            [spec] = [offer["spec"] for offer in each.proposals if offer["chosen"]]
            asked = {name: value for name, value in spec.items() if name != "question"}
            found.append((each.action, each.hypothesis, each.alpha, asked))
        return found

    def told(self) -> tuple[Any, ...]:
        """The report's parts that follow from what was decided and found."""
        page = campaign_page(self.store, self.owned)
        tree = [(branch.hypothesis.id, branch.hypothesis.claim, branch.fate) for branch in page.tree]
        return page.status, page.best[0].words, page.answer[-1], tree


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CampaignPlay]:
    with ExitStack() as stack:
        folder = tmp_path_factory.mktemp("undisturbed")
        servers = [server(stack, folder / name).url for name in ("a", "b")]
        play = CampaignPlay(folder / "town", stack, servers, goal=GOAL)
        play.plan("campaign")
        assert play.begin("sit", play.owned).wait(timeout=LIMIT_S) == 0, play.said()
        yield play


@contextmanager
def restarted(database: Postgres) -> Iterator[list[str]]:
    """Restart it again and again meanwhile, every other time as a crash does it; yields how, each time."""
    modes: list[str] = []
    over = threading.Event()

    def again() -> None:
        while not over.wait(_RESTARTED_EVERY_S):
            mode: Any = "fast" if len(modes) % 2 else "immediate"
            database.restart(mode)
            modes.append(mode)

    thread = threading.Thread(target=again)
    thread.start()
    try:
        yield modes
    finally:
        over.set()
        thread.join()


def test_three_days_of_trouble_end_in_the_decisions_and_the_answer_of_a_quiet_campaign(
    tmp_path: Path, undisturbed: CampaignPlay
) -> None:
    schedule = {"windows": ["22:00-07:00"], "days": 3}
    with ExitStack() as stack:
        database = stack.enter_context(postgres_server())
        servers = [server(stack, tmp_path / name, *LATENCY).url for name in ("a", "b")]
        goal = {**GOAL, "schedule": schedule}
        play = CampaignPlay(tmp_path / "town", stack, servers, goal=goal, database=database.url)
        play.plan("campaign")
        restarts = stack.enter_context(restarted(database))
        _through(play)
        assert len(restarts) >= 3
        assert play.decided() == undisturbed.decided()
        assert play.told() == undisturbed.told()
        assert verify_campaign(play.store, play.owned, play.town.home / "studies" / play.owned) == []
        for study in play.store.studies.all():
            assert play.store.outbox.state("mlflow", study.id) == (0, None)


def _through(play: CampaignPlay) -> None:
    """Three nights. The daemon is killed before it had anything to do, and in each night, twice together with the worker."""
    daemon = play.begin("daemon")
    play.until("the daemon looks", lambda: "the daemon looks" in play.said())
    daemon = _killed(play, daemon)
    for night, least in ((2, 2), (3, 8)):
        play.clock.until(at(f"2026-03-0{night} 22:00"))
        play.until("trials are done", lambda least=least: play.done >= least)  # type: ignore[misc]
        play.kill_worker()
        play.town.copy_is_away.touch()
        daemon = _killed(play, daemon)
        play.until("more are done", lambda least=least: play.done >= least + 3)  # type: ignore[misc]
        play.clock.until(at(f"2026-03-0{night + 1} 07:00"))
        play.until("nobody works on it", lambda: play.worker() is None)
        assert play.store.campaigns.get(play.owned).status is CampaignStatus.WAITING
        play.town.copy_is_away.unlink()
    play.clock.until(at("2026-03-04 22:00"))
    play.until("somebody works on it", play.worker)
    daemon = _killed(play, daemon)
    play.until("it has ended", lambda: play.has_ended and play.worker() is None)
    assert play.store.campaigns.get(play.owned).status is CampaignStatus.DONE, play.said()
    assert daemon.wait(timeout=LIMIT_S) == 0, "nothing is left in its care"


def _killed(play: CampaignPlay, daemon: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
    """Another daemon in place of this one."""
    play.kill(daemon)
    return play.begin("daemon")


def test_a_campaign_over_two_instruments_goes_on_where_its_worker_died_and_pools_nothing(tmp_path: Path) -> None:
    """Each is explored for its share of the budget, on its own files; the echo engine has nothing confirmed."""
    with ExitStack() as stack:
        servers = [server(stack, tmp_path / name).url for name in ("a", "b")]
        play = CampaignPlay(tmp_path / "town", stack, servers, goal=GOAL, further=[str(tmp_path / "recall")])
        shutil.copytree(play.instrument, tmp_path / "recall")
        declaration = tmp_path / "recall" / "instrument.toml"
        declaration.write_text(declaration.read_text().replace('name = "repeat"', 'name = "recall"', 1))
        play.plan("campaign")
        worker = play.begin("sit", play.owned)

        def runs_there() -> bool:
            studies = play.store.studies.all()
            return any((each.options.instrument or "").endswith("recall") for each in studies)

        play.until("the second one is studied", runs_there)
        play.kill(worker)
        assert play.begin("sit", play.owned).wait(timeout=LIMIT_S) == 0, play.said()
        seen = observe(play.store, play.owned)
        assert [bool(view.studies) for view in seen.views] == [True, True]
        assert {study.study for view in seen.views for study in view.studies} == {study.study for study in seen.studies}
        for study in seen.studies:
            assert play.store.plans.get(study.study).instrument == seen.of(study).instrument
            assert "echo engine" in study.unfit
        counted = [sum(n for _, n, _ in view.measured().values()) for view in seen.views]
        assert sum(counted) <= play.done
        page = campaign_page(play.store, play.owned)
        assert (page.status, [best.words for best in page.best]) == (CampaignStatus.DONE, ["the default"] * 2)
        assert any("On recall: " in sentence for sentence in page.answer)
        assert verify_campaign(play.store, play.owned, play.town.home / "studies" / play.owned) == []
