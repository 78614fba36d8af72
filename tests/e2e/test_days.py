"""A study of three days in a minute or two of real time; two orchestrators that want one study; a database that comes and
goes. Real processes, real servers with the echo engine, and a town clock that the test moves.
"""

from __future__ import annotations

import itertools
import json
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import pytest

from bench.serving import ServerProcess
from researcher.models import StudyStatus, TrialStatus
from tests.fakes.play import HOUR_S, LATENCY, LIMIT_S, SEEDS, Play, at, server
from tests.fakes.postgres import postgres_server

pytestmark = pytest.mark.campaign


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Play]:
    with ExitStack() as stack:
        folder = tmp_path_factory.mktemp("undisturbed")
        servers = [server(stack, folder / name).url for name in ("a", "b")]
        play = Play(folder / "town", stack, servers, seeds=SEEDS)
        play.plan()
        sitting = play.begin("sit", play.study)
        assert sitting.wait(timeout=LIMIT_S) == 0, play.said()
        play.assert_each_trial_once_and_whole()
        yield play


def test_three_days_of_trouble_end_within_budget_in_the_verdict_of_a_quiet_study(
    tmp_path: Path, stack: ExitStack, undisturbed: Play
) -> None:
    one, other = (server(stack, tmp_path / name, *LATENCY) for name in ("a", "b"))
    facts = {"windows": ["22:00-07:00"], "days": 3, "seeds": SEEDS}
    play = Play(tmp_path / "town", stack, [one.url, other.url], **facts)
    daemon = _monday(play)
    daemon = _first_night(play, daemon, one, other)
    play.kill(daemon)
    play.clock.until(at("2026-03-03 12:00"))
    play.town.copy_is_away.unlink()
    daemon = play.begin("daemon")
    _second_night(play, daemon, one, other)
    play.kill(play.begin("daemon"))
    daemon = play.begin("daemon")
    play.clock.until(at("2026-03-04 22:00"))
    play.until("the lost server is missed", lambda: f"{other.url} does not answer" in play.said())
    play.clock.pass_time(31)
    play.until("it is done", lambda: play.store.studies.get(play.study).status is StudyStatus.DONE)
    assert daemon.wait(timeout=LIMIT_S) == 0  # nothing is left in its care: but it looks only now and then
    _assert_as_good_as_quiet(play, undisturbed)
    _assert_the_journal_explains_it(play, other)


def _monday(play: Play) -> subprocess.Popen[bytes]:
    """The daemon is killed before it had anything to do."""
    play.plan()
    daemon = play.begin("daemon")
    play.until("the daemon looks", lambda: "the daemon looks" in play.said())
    play.kill(daemon)
    return play.begin("daemon")


def _first_night(
    play: Play, daemon: subprocess.Popen[bytes], one: ServerProcess, other: ServerProcess
) -> subprocess.Popen[bytes]:
    """Daemon and worker are killed in mid-trial, and the records' copy goes away."""
    play.clock.until(at("2026-03-02 22:00"))
    play.until("both servers train", lambda: play.running(2, one.url) and play.running(2, other.url))
    play.kill(daemon)
    play.kill_worker()
    play.town.copy_is_away.touch()
    daemon = play.begin("daemon")
    play.until("another goes on", lambda: play.events("taken_over") and play.count(TrialStatus.DONE) >= 2)
    play.until("others are at it", lambda: play.running(1))
    play.clock.until(at("2026-03-03 07:00"))
    _assert_rests(play, one, other)
    return daemon


def _second_night(play: Play, daemon: subprocess.Popen[bytes], one: ServerProcess, other: ServerProcess) -> None:
    """An edit breaks the client; a person takes it back, and resumes. A server is lost for good."""
    workflow = play.instrument / "workflow.py"
    sound = workflow.read_bytes()
    play.clock.until(at("2026-03-03 22:00"))
    play.until("a trial goes on", lambda: play.events("trial_continued"))
    workflow.write_bytes(sound.replace(b"said = answer.json()", b"said = answer.jason()"))
    play.until("somebody is needed", lambda: play.store.studies.get(play.study).status is StudyStatus.FAILED)
    play.until("nobody works on it", lambda: play.worker() is None)
    if daemon.poll() is None:  # it may not have looked since
        play.kill(daemon)
    workflow.write_bytes(sound)
    play.begin("sit", play.study)
    play.until("the other server trains", lambda: play.running(1, other.url))
    other.kill()
    beats = itertools.count()
    play.until(
        "its trial is taken from it",
        lambda: any(other.url in detail["because"] for detail in play.events("attempt_withdrawn")),
        meanwhile=lambda: play.clock.pass_time(30) if next(beats) % 60 == 59 else None,
    )
    play.until("the last server trains", lambda: play.running(1, one.url))
    play.clock.until(at("2026-03-04 07:00"))
    _assert_rests(play, one)


def _assert_rests(play: Play, *servers: ServerProcess) -> None:
    """Outside its windows nobody works on it, what ran has a checkpoint, and the servers are free."""
    play.until("nobody works on it", lambda: play.worker() is None)
    study = play.store.studies.get(play.study)
    assert study.status is StudyStatus.WAITING
    assert "window" in (study.reason or "")
    assert play.count(TrialStatus.PAUSED) >= 1
    assert play.count(TrialStatus.RUNNING) == play.count(TrialStatus.SUBMITTED) == 0
    for one in servers:
        with one.client() as client:
            status: httpx.Response = client.get("/swarm/v1/status")
        assert status.json()["run_id"] is None
    assert (play.town.home / "studies" / play.study / "report.md").is_file()


def _assert_as_good_as_quiet(play: Play, undisturbed: Play) -> None:
    play.assert_each_trial_once_and_whole()
    assert play.verdicts() == undisturbed.verdicts() == [("H1", "supported")]
    moved = {detail["trial"] for detail in play.events("trial_continued")}
    whole = {f"{trial.arm}/{trial.seed}" for trial in play.store.trials.all(play.study) if trial.key not in moved}
    finals, quiet = play.finals(), undisturbed.finals()
    assert finals.keys() == quiet.keys()
    assert {name: finals[name] for name in whole} == {name: quiet[name] for name in whole}
    [wall] = [budget for budget in play.store.budgets.all(play.study) if budget.kind == "wall_s"]
    assert wall.reserved == 0
    assert 9 * HOUR_S < wall.spent < 27.5 * HOUR_S < wall.limit  # three nights at most, of the 64 hours that it took
    assert play.store.outbox.state("mlflow", play.study) == (0, None)
    copied = [json.loads(line) for line in play.said("copied.jsonl").splitlines()]
    assert len({seq for seq, _, _ in copied}) == len(copied)
    assert {ref for _, kind, ref in copied if kind == "trial"} == {t.key for t in play.store.trials.all(play.study)}


def _assert_the_journal_explains_it(play: Play, lost: ServerProcess) -> None:
    assert len(play.events("taken_over")) == 1
    paused, continued = play.events("trial_paused"), play.events("trial_continued")
    assert {detail["because"] for detail in paused} == {"its window closed", "interrupted"}
    steps = {(detail["trial"], detail["step"]) for detail in paused}
    assert {(detail["trial"], detail["step"]) for detail in continued} <= steps
    assert all("jason" in detail["error"] for detail in play.events("client_failed"))
    excused = Counter(detail["run"] for detail in play.events("losses_excused"))
    assert set(excused.values()) == {1}, "what is lost after the repair counts"
    [failed] = [detail for detail in play.events("study") if detail["status"] == StudyStatus.FAILED]
    assert "workflow.py" in failed["because"]
    assert any(lost.url in detail["because"] for detail in play.events("attempt_withdrawn"))
    waits = [detail for detail in play.events("study") if detail["status"] == StudyStatus.WAITING]
    assert sum("opens at" in detail["because"] for detail in waits) >= 2
    begun = Counter(detail["trial"] for detail in play.events("trial_begun"))
    ended = Counter(
        detail["trial"]
        for kind in ("attempt_failed", "attempt_withdrawn", "trial_done")
        for detail in play.events(kind)
    )
    assert begun == ended


def test_of_two_orchestrators_one_owns_the_study_and_the_other_says_so_and_takes_over_when_it_dies(
    tmp_path: Path, stack: ExitStack, undisturbed: Play
) -> None:
    servers = [server(stack, tmp_path / name, *LATENCY).url for name in ("a", "b")]
    play = Play(tmp_path / "town", stack, servers, seeds=SEEDS)
    play.plan()
    first = play.begin("sit", play.study)
    play.until("it trains", lambda: play.running(1))
    assert play.begin("sit", play.study, log="second.log").wait(timeout=LIMIT_S) == 1
    said = play.said("second.log")
    assert "LeaseHeld" in said
    assert f"process {first.pid} on " in said
    assert play.worker() == first.pid

    # On the same machine a dead owner is known to be dead.
    play.kill(first)
    second = play.begin("sit", play.study)
    play.until("the second owns it", lambda: play.worker() == second.pid)
    play.until("a trial is done under it", lambda: play.count(TrialStatus.DONE) >= 1 and play.running(1))

    # On another, only the end of its lease says so.
    play.kill(second)
    elsewhere = ("sit", play.study, "--host", "elsewhere")
    assert play.begin(*elsewhere, log="elsewhere.log").wait(timeout=LIMIT_S) == 1
    assert "if that process is gone, try again in" in play.said("elsewhere.log")
    play.clock.pass_time(61)
    third = play.begin(*elsewhere, log="elsewhere.log")
    assert third.wait(timeout=LIMIT_S) == 0, play.said("elsewhere.log")
    assert len(play.events("taken_over")) == 2
    play.assert_each_trial_once_and_whole()
    assert play.finals() == undisturbed.finals()
    assert play.verdicts() == undisturbed.verdicts()


def test_a_database_that_is_restarted_every_few_seconds_loses_nothing_and_doubles_nothing(
    tmp_path: Path, stack: ExitStack, undisturbed: Play
) -> None:
    database = stack.enter_context(postgres_server())
    servers = [server(stack, tmp_path / name, *LATENCY).url for name in ("a", "b")]
    play = Play(tmp_path / "town", stack, servers, seeds=SEEDS, database=database.url)
    play.plan()
    sitting = play.begin("sit", play.study)
    play.until("it works", lambda: play.running(1))
    restarts = 0
    while sitting.poll() is None:
        database.restart("fast" if restarts % 2 else "immediate")
        restarts += 1
        with suppress(subprocess.TimeoutExpired):
            sitting.wait(timeout=3)
    assert sitting.returncode == 0, play.said()
    assert restarts >= 3
    play.assert_each_trial_once_and_whole()
    assert set(Counter(detail["trial"] for detail in play.events("trial_begun")).values()) == {1}
    assert play.finals() == undisturbed.finals()
    assert play.verdicts() == undisturbed.verdicts()
    assert play.store.outbox.state("mlflow", play.study) == (0, None)
