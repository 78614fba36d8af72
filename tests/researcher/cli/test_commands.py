"""The commands as a person types them: one clear line for what is wrong, readable lines for what happens."""

from __future__ import annotations

import asyncio
import errno
import importlib.metadata
import json
import os
import pty
import signal
import socket
import subprocess
import sys
import time
from argparse import Namespace
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from threading import Timer
from typing import Any

import pytest

from bench.serving import ServerProcess
from foundation.clock import SystemClock
from foundation.commandline import UsageError
from foundation.gpus import Card
from foundation.paths import user_data_dir
from researcher.cli import _HOMES, FAILED, OUT_OF_BUDGET, USAGE, WAITING, Interrupted, doctor, run, status
from researcher.cli.request import seconds
from researcher.cli.resume import _to_its_end
from researcher.conduct import Outcome
from researcher.describe import event_text
from researcher.executor.processes import Berth, started_at
from researcher.executor.servers import server_token
from researcher.home import Home
from researcher.instruments.catalogue import InstrumentFolder, read_instrument
from researcher.llm.endpoint import LlmSettings
from researcher.main import main, parser
from researcher.models import OVER_BUDGET, Claim, Event, LlmCall, ReportSeal, StudyStatus
from researcher.ownership import this_process
from researcher.report.writer import wording
from researcher.sandbox.launch import Mode, Sandbox
from researcher.schedule.daemon import only_daemon
from researcher.schedule.timetable import Timetable
from researcher.store.errors import owner_text
from researcher.store.store import Store
from researcher.view import JsonView, LiveView, PlainView, StudyPicture, view_for
from swarm.client.sync import SwarmClient
from swarm.models import ModelFolder
from swarm.protocol.runspec import RunSpec
from tests.fakes.example_plan import ARMS, example_plan
from tests.fakes.repeat_study import FOLDER, repeat_plan
from tests.fakes.shown_study import at_gate, meet_gate, opened, running
from tests.fakes.shown_study import planned as shown_planned

TOPIC = "Does a learning rate of 4e-5 learn sums faster than 1e-5?"
ASKED = ["start", "--instrument", "arithmetic", "--vary", "learning_rate=1e-5,1e-4", "--claim", "increase"]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RESEARCHER_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("RESEARCHER_DATABASE_URL", raising=False)
    return tmp_path / "home"


@pytest.fixture
def study() -> str:
    """A study that is over, with a trial, a decision and a report."""
    store = Store.open()
    study = store.studies.create("a topic", {})
    store.plans.save(study, example_plan())
    [trial] = store.trials.ensure(study, "compare", [(ARMS[0], 0)])
    store.trials.record_intent(study, trial.key, 1, "http://a", "k#1", {})
    store.trials.finish(study, trial.key, {"heldout_accuracy": 0.5}, {"reward_mean": [(1, 0.1), (2, 0.9)]})
    detail = {"after": "compare", "action": "stop", "to": None, "seeds": None, "power": 0.9, "reason": "one stage"}
    store.journal.record(study, "decision", detail)
    store.studies.set_status(study, StudyStatus.DONE, "one stage")
    store.close()
    return study


@pytest.mark.parametrize(
    ("given", "meant"), [("--topik", "--topic"), ("--topik=x", "--topic"), ("--budgte", "--budget")]
)
def test_a_misspelt_option_is_named_before_what_is_missing(
    given: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["start", given, "x"])
    assert stopped.value.code == 2
    assert f"(did you mean {meant}?)" in capsys.readouterr().err


def test_days_beyond_ten_years_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ASKED, "--days", "3000000"]) == USAGE
    assert "schedule.days: should be less than or equal to 3650" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said", "nearest"),
    [
        (["lst", "--json"], "invalid choice", ["list"]),
        (["list", "--json", "--9"], "unrecognized arguments: --9", []),
        (["start", "--json", "--budgte", "8h"], "did you mean --budget?", ["--budget"]),
        (["findings", "export", "--json"], "required: FILE", []),
        (["--json", "list"], "write it after the command: researcher list --json", ["--json"]),
    ],
)
def test_a_command_line_that_asks_for_json_is_refused_in_json(
    arguments: list[str], said: str, nearest: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == USAGE
    told = json.loads(capsys.readouterr().err)
    assert said in told["error"]
    assert told["nearest"] == nearest


@pytest.mark.parametrize("command", [[*ASKED, "--engine", "echo"], ["resume"], ["daemon"]])
def test_a_log_level_that_is_none_is_refused_before_there_is_a_study(
    command: list[str], home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SWARM_LOG_LEVEL", "verbose")
    assert main(command) == USAGE
    assert "SWARM_LOG_LEVEL must be one of DEBUG, INFO" in capsys.readouterr().err
    assert not home.exists()


@pytest.mark.parametrize("token", ["päss", "two\nlines"])
def test_a_token_that_is_none_is_refused_by_the_name_of_its_variable(
    token: str, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SWARM_TOKEN", token)
    assert main([*ASKED, "--server", "http://127.0.0.1:1"]) == USAGE
    assert capsys.readouterr().err.startswith(
        "researcher start: SWARM_TOKEN: a token must be one line of printable ASCII"
    )
    assert not home.exists()
    with pytest.raises(UsageError):
        server_token({"SWARM_ADMIN_TOKEN": token})


def test_packages_cannot_be_installed_below_a_home_that_is_a_file(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home.touch()
    assert main(["instruments", "--install", "countdown"]) == USAGE
    assert capsys.readouterr().err.endswith("cannot be used (File exists); set RESEARCHER_HOME\n")


def test_a_machine_without_instruments_says_where_they_are_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("researcher.instruments.catalogue.OWN_STUDIES", tmp_path / "none")
    monkeypatch.delenv("RESEARCHER_STUDIES", raising=False)
    assert main(["instruments"]) == 0
    assert "RESEARCHER_STUDIES" in capsys.readouterr().out


def test_what_stands_behind_two_dashes_asks_for_no_json(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["lst", "--", "--json"])
    assert capsys.readouterr().err.startswith("researcher: ")


def test_what_writing_an_instrument_cost_counts_against_the_cap_of_its_planning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def wrote(
        topic: str, home: Home, settings: LlmSettings, calls: list[LlmCall], *_: object
    ) -> InstrumentFolder:
        asked: dict[str, Any] = {"messages": []}
        calls.append(LlmCall(purpose="write", model="m", request=asked, prompt_tokens=settings.max_tokens, at=0.0))
        return read_instrument(FOLDER)

    monkeypatch.setattr("researcher.cli.instrument_llm.new_instrument", wrote)
    for name, value in (("MODEL", "m"), ("API_KEY", "k"), ("BASE_URL", "http://127.0.0.1:9"), ("PATIENCE_S", "0")):
        monkeypatch.setenv(f"RESEARCHER_LLM_{name}", value)
    assert main(["start", "--topic", TOPIC, "--dry-run", "--instrument", "new"]) == USAGE
    assert "the next request could exceed the limit of 200000 tokens" in capsys.readouterr().err


def test_a_budget_that_pays_for_nothing_ends_with_the_code_for_budgets_and_says_what_it_was(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*ASKED, "--dry-run", "--budget", "1s"]) == OUT_OF_BUDGET
    said = capsys.readouterr().err
    assert "budget.wall: " in said
    assert "the budget is 1 s" in said
    assert said.count("\n") == 1


def test_seeds_that_no_run_takes_are_refused_beforehand(capsys: pytest.CaptureFixture[str]) -> None:
    """Also where only the most seeds of the last stage reach so far."""
    command = [*ASKED, "--dry-run", "--first-seed"]
    assert main([*command, str(2**31 - 5)]) == 0
    capsys.readouterr()
    assert main([*command, str(2**31 - 4)]) == USAGE
    said = capsys.readouterr().err
    assert "the largest seed is 2147483647" in said
    assert "--first-seed 2147483643 or less" in said


@pytest.mark.parametrize("budget", ["-5m", "0", "0h", "soon", "", "1e3"])
def test_a_budget_that_is_no_time_is_one_line_that_says_how_to_write_it(
    budget: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*ASKED, "--dry-run", "--budget", budget]) == USAGE
    said = capsys.readouterr().err
    assert f"{budget!r} is no" in said
    assert "write 8h, 90m" in said
    with pytest.raises(UsageError):
        seconds(budget)


def test_a_topic_file_that_cannot_be_read_is_one_clear_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name, says in (("nope", "No such file or directory"), ("binary", "not UTF-8 text"), (".", "Is a directory")):
        assert main(["start", "--topic", f"@{tmp_path / name}", "--dry-run"]) == USAGE
        said = capsys.readouterr().err
        assert says in said
        assert "Errno" not in said
        assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("topic", "says"),
    [(f"{TOPIC} \udcff", "not UTF-8 text"), (TOPIC + "?" * 10_000, "the maximum is 10000"), (" ", "is empty")],
)
def test_a_topic_that_cannot_be_recorded_is_one_clear_line(
    topic: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["start", "--topic", topic, "--dry-run"]) == USAGE
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1


def test_a_question_without_a_direction_says_so_in_its_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ASKED[:-2], "--dry-run"]) == 0
    assert "No direction is claimed: tested as higher" in capsys.readouterr().out
    assert main([*ASKED, "--dry-run"]) == 0
    assert "No direction is claimed" not in capsys.readouterr().out


def test_a_server_that_refuses_our_token_is_named_before_there_is_a_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = {"SWARM_CLIENT_TOKEN": "swt_right-0123456789", "SWARM_ADMIN_TOKEN": "swt_admin-0123456789"}
    with ServerProcess(tmp_path / "state", "--log-level", "warning", environ=tokens) as server:
        for token, told in (("", "no token was sent"), ("swt_other-0123456789", "the token is invalid")):
            monkeypatch.setenv("SWARM_TOKEN", token)
            assert main([*ASKED, "--server", server.url]) == USAGE
            said = capsys.readouterr().err
            assert server.url in said
            assert told in said
            assert "SWARM_TOKEN" in said
    assert Store.open().studies.all() == []


def test_a_plan_says_what_is_the_same_in_all_arms(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ASKED, "--set", "group_size=16", "--dry-run"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("the same"))
    assert "batch.group_size=16" in line
    assert "task.digits=1" in line
    assert "learning_rate" not in line


def test_watching_shows_lines_that_a_person_can_read(study: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", study]) == 0
    said = capsys.readouterr().out
    assert f"{ARMS[0]} seed 0: done, step 2 ▁█" in said
    assert "after compare: stop (one stage)" in said
    assert "{" not in said


def test_held_out_curves_of_a_trial_that_trains_are_in_status_and_watch(capsys: pytest.CaptureFixture[str]) -> None:
    store = Store.open()
    study, trial = running(store)
    store.trials.record_progress(study, trial.key, 2, [("heldout_reward", 0, 0.125), ("heldout_reward", 2, 0.5)])
    store.close()
    assert main(["watch", study]) == WAITING
    assert "step 2 ▁▃, held out 0.50 at step 2" in capsys.readouterr().out
    assert main(["watch", study, "--json"]) == WAITING
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    (shown,) = [line["trial"] for line in lines if line.get("trial", {}).get("key") == trial.key]
    assert shown["newest"] == {"reward_mean": [2, 0.25], "heldout_reward": [2, 0.5]}
    main(["status", study, "--json"])
    (told,) = [each for each in json.loads(capsys.readouterr().out)["trials"] if each["key"] == trial.key]
    assert told["curves"] == {"reward_mean": [[1, 0.1], [2, 0.25]], "heldout_reward": [[0, 0.125], [2, 0.5]]}


def test_a_study_that_ran_out_of_budget_says_so_by_its_exit_code(
    study: str, capsys: pytest.CaptureFixture[str]
) -> None:
    store = Store.open()
    store.journal.record(study, OVER_BUDGET, {"because": "no time is left"})
    store.studies.set_status(study, StudyStatus.STOPPED, "no time is left")
    for command in (["status"], ["status", "--json"], ["watch"], ["watch", "--json"]):
        assert main([*command, study]) == OUT_OF_BUDGET
    store.studies.set_status(study, StudyStatus.STOPPED, "stopped on request")
    assert main(["status", study]) == 0
    store.close()


def test_a_study_that_nobody_works_on_any_more_waits_by_its_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    store = Store.open()
    study, _ = running(store)
    assert main(["status", study]) == WAITING
    store.leases.acquire(study, "elsewhere/1/1.0", 60.0)
    assert main(["status", study]) == 0
    store.close()
    assert "worked on by process 1 on elsewhere" in capsys.readouterr().out


def test_a_topic_of_several_lines_and_control_characters_is_listed_on_one(capsys: pytest.CaptureFixture[str]) -> None:
    store = Store.open()
    study = store.studies.create(f"{TOPIC}\n\x1b[2J\tAnd\u2028why? " + "x" * 200, {})
    store.close()
    main(["list"])
    listed = capsys.readouterr().out
    first, then = listed.splitlines()
    assert f"{TOPIC} [2J And why? xxx" in first
    assert len(first) < 200
    main(["status", study])
    told = capsys.readouterr().out
    assert "\x1b" not in told
    assert then.strip() in told


def test_the_list_says_of_a_study_whose_process_was_killed_what_status_says(
    study: str, capsys: pytest.CaptureFixture[str]
) -> None:
    store = Store.open()
    store.studies.set_status(study, StudyStatus.RUNNING)
    store.leases.acquire(study, f"{socket.gethostname()}/1/0.0", ttl_s=600)
    store.close()
    main(["list"])
    assert "nobody works on it; `researcher resume` continues it" in capsys.readouterr().out
    main(["list", "--json"])
    (listed,) = json.loads(capsys.readouterr().out)
    main(["status", study, "--json"])
    told = json.loads(capsys.readouterr().out)
    assert (listed["worker"], listed["unattended"]) == (told["worker"], told["unattended"])


def test_a_study_whose_timetable_this_machine_cannot_read_stays_in_the_list(
    study: str, capsys: pytest.CaptureFixture[str]
) -> None:
    store = Store.open()
    store.studies.set_status(study, StudyStatus.RUNNING)
    store.studies.save_schedule(study, {"timetable": {"zone": "Mars/Olympus"}, "carried": True})
    store.close()
    with only_daemon():
        for command in (["list"], ["status", study]):
            assert main(command) == (0 if command == ["list"] else WAITING)
            said = capsys.readouterr().out
            assert "nobody works on it here: its timetable cannot be read on this machine" in said
            assert "'Mars/Olympus' is not a time zone that this machine knows" in said


def test_a_plan_is_shown_by_its_hash(study: str, capsys: pytest.CaptureFixture[str]) -> None:
    plan = example_plan()
    assert main(["show", plan.digest()[:16]]) == 0
    assert plan.digest() in capsys.readouterr().out
    assert main(["show", "0" * 16]) == FAILED


def test_an_engine_for_servers_that_are_given_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ASKED, "--engine", "echo", "--server", "http://127.0.0.1:1"]) == USAGE
    assert "drop one of them" in capsys.readouterr().err
    assert Store.open().studies.all() == []


def test_several_servers_are_given_at_once_or_one_by_one() -> None:
    given = ["start", "study.yaml", "--server", "http://a", "http://b", "--server", "http://c"]
    assert parser().parse_args(given).server == ["http://a", "http://b", "http://c"]


def test_a_study_that_the_daemon_carries_is_watched_before_it_begins_and_between_its_windows(
    study: str, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(status, "_LOOK_EVERY_S", 0.05)
    store = Store.open()
    store.studies.set_status(study, StudyStatus.WAITING, "waits for its next window")
    store.studies.save_schedule(study, {"timetable": closed(), "carried": True})
    with only_daemon() as alone:
        assert alone
        ending = Timer(0.5, store.studies.set_status, (study, StudyStatus.DONE, "one stage"))
        ending.start()
        assert main(["watch", study]) == 0
        ending.join()
    assert "the daemon continues it" in capsys.readouterr().out
    store.studies.set_status(study, StudyStatus.WAITING, "waits for its next window")
    monkeypatch.setattr(status, "_STARTING_S", 0.2)
    capsys.readouterr()
    assert main(["watch", study]) == 3  # no daemon lives
    assert "the daemon continues it" not in capsys.readouterr().out
    store.close()


def test_a_trial_whose_key_several_studies_have_is_shown_by_study(
    study: str, capsys: pytest.CaptureFixture[str]
) -> None:
    store = Store.open()
    [trial] = store.trials.all(study)
    again = store.studies.create("a topic", {})
    store.plans.save(again, example_plan())
    store.trials.ensure(again, "compare", [(ARMS[0], 0)])
    store.close()
    assert main(["show", trial.key]) == 2
    said = capsys.readouterr().err
    assert f"`researcher show {study}/{trial.key}`" in said
    assert main(["show", f"{study}/{trial.key}"]) == 0
    assert json.loads(capsys.readouterr().out)["study_id"] == study


def test_a_trial_is_shown_by_study_arm_and_seed(study: str, capsys: pytest.CaptureFixture[str]) -> None:
    arm = ARMS[0]
    for reference in ("latest", study, study[:6]):
        assert main(["show", f"{reference}/{arm}/0"]) == 0
        assert json.loads(capsys.readouterr().out)["arm"] == arm
    assert main(["show", f"latest/{arm}/7"]) == FAILED
    assert f"did you mean {arm}/0?" in capsys.readouterr().err


def test_watching_as_json_is_an_object_per_line(study: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", study, "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    kinds = [next(iter(line)) for line in lines]
    assert (kinds.count("trial"), kinds.count("study"), kinds[-1]) == (1, 1, "study")
    told = [line["event"]["kind"] for line in lines if "event" in line]
    assert told == ["trial_begun", "trial_done", "decision", "study"]
    assert main(["status", study, "--json"]) == 0
    assert lines[-1] == {"study": json.loads(capsys.readouterr().out)}
    last = lines[-1]["study"]
    assert (last["id"], last["status"], last["unattended"], last["amendments"]) == (study, "done", None, [])
    assert len(last["decisions"]) == 1


def test_events_of_any_kind_are_told_as_sentences() -> None:
    told = event_text(Event(seq=1, study_id="s", at=0.0, kind="budget_changed", detail={"wall_s": 60, "by": None}))
    assert told == "budget changed: wall_s 60"


@pytest.mark.parametrize(("command", "code"), [("start", FAILED), ("resume", FAILED), ("list", 0), ("watch", 0)])
def test_a_reader_that_went_away_is_a_success_only_for_commands_that_only_show(
    command: str, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(_: Namespace) -> int:
        raise BrokenPipeError

    homes = {"start": "start", "resume": "resume", "list": "status", "watch": "status"}
    __import__(f"researcher.cli.{homes[command]}")
    monkeypatch.setattr(f"researcher.cli.{homes[command]}.{command}_command", broken)
    with (tmp_path / "out").open("w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert run(Namespace(command=command, json=False)) == code


@pytest.mark.parametrize(("term", "kind"), [("xterm", LiveView), ("dumb", PlainView)])
def test_a_terminal_that_cannot_redraw_is_told_in_lines(
    monkeypatch: pytest.MonkeyPatch, term: str, kind: type[LiveView] | type[PlainView]
) -> None:
    monkeypatch.setenv("TERM", term)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    other, end = pty.openpty()
    with os.fdopen(other), os.fdopen(end, "w") as terminal:
        view = view_for(as_json=False, stream=terminal)
        view.close()
        assert isinstance(view, kind)


@pytest.mark.parametrize("kind", [PlainView, JsonView])
def test_a_study_goes_on_when_nobody_reads_its_view_any_more(kind: type[PlainView] | type[JsonView]) -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stream:
        view = kind(stream)
        view.say("read")
        os.close(reader)
        for number in range(3):
            view.say("unread")
            view.show(StudyPicture(study_id="s", topic="t", phase=f"phase {number}"))
        view.close()


def test_a_study_that_nobody_works_on_is_stopped_at_once_with_its_server(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = Store.open()
    resting = store.studies.create("a topic", {})
    store.plans.save(resting, example_plan())
    store.studies.set_status(resting, StudyStatus.RUNNING)
    left = Berth(home / "studies" / resting / "server" / "process", SystemClock())
    left.start(["sleep", "600"], dict(os.environ))
    assert main(["stop", resting]) == 0
    assert not left.alive()
    assert "researcher resume" in capsys.readouterr().out
    assert store.studies.get(resting).status is StudyStatus.STOPPED
    assert main(["stop", resting]) == 0
    assert "already" in capsys.readouterr().out


@pytest.mark.parametrize("status", [StudyStatus.DONE, StudyStatus.STOPPED, StudyStatus.FAILED])
@pytest.mark.parametrize("command", [["stop"], ["resume", "--scheduled"]])
def test_what_a_researcher_left_that_was_killed_after_the_study_had_ended_is_ended(
    command: list[str], status: StudyStatus, study: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = Store.open()
    store.studies.set_status(study, status, "as it was")
    store.leases.acquire(study, f"{this_process()}0", 60.0)  # a process of this machine that is no more
    left = Berth(home / "studies" / study / "server" / "process", SystemClock())
    left.start(["sleep", "600"], dict(os.environ))
    main([*command, study])
    assert not left.alive()
    assert (store.studies.get(study).status, store.studies.get(study).reason) == (status, "as it was")
    assert store.leases.holder(study) is None
    said = capsys.readouterr().out
    assert ("ended what was left running" in said) == (command == ["stop"])
    assert main(["stop", study]) == 0
    assert capsys.readouterr().out == f"{study}: {status} already\n"


def test_what_a_killed_researcher_left_on_given_servers_is_stopped_with_its_study(
    tmp_path: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, away = Store.open(), "http://127.0.0.1:9"
    with ServerProcess(tmp_path / "a") as left_on, ServerProcess(tmp_path / "b") as lent:
        urls = [left_on.url, lent.url, away]
        resting = store.studies.create("a topic", {"servers": urls})
        store.plans.save(resting, example_plan())
        store.trials.ensure(resting, "compare", [(ARMS[0], 0)])
        store.studies.set_status(resting, StudyStatus.RUNNING)
        client = Berth(home / "studies" / resting / "trials" / "0123" / "lr-seed0" / "attempt1", SystemClock())
        client.start(["sleep", "600"], dict(os.environ))
        with SwarmClient(left_on.url) as swarm, SwarmClient(lent.url) as other:
            left = swarm.start_run(RunSpec(labels={"study": resting})).run_id
            theirs = other.start_run(RunSpec(labels={"study": "st-other"})).run_id
            assert main(["stop", resting]) == 0
            said = capsys.readouterr().out
            assert (swarm.run(left).phase == "rolling", other.run(theirs).phase == "rolling") == (False, True)
    assert not client.alive()
    assert f"`swarm run stop --url {away}`" in said
    assert left_on.url not in said
    assert store.studies.get(resting).status is StudyStatus.STOPPED


def test_a_study_that_moves_to_another_server_leaves_nothing_running_on_the_old_ones(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store, away = Store.open(), "http://127.0.0.1:9"
    monkeypatch.setattr("researcher.cli.resume.conduct", lambda *_, **__: 0)
    monkeypatch.setattr("researcher.executor.cleanup._STOP_S", 2.0)
    with (
        ServerProcess(tmp_path / "a") as old,
        ServerProcess(tmp_path / "b") as kept,
        ServerProcess(tmp_path / "c") as lent,
        socket.create_server(("127.0.0.1", 0)) as silent,
    ):
        hung = f"http://127.0.0.1:{silent.getsockname()[1]}"
        study = store.studies.create("a topic", {"servers": [old.url, f"{kept.url}/", lent.url, away, hung]})
        store.plans.save(study, repeat_plan())
        store.studies.set_status(study, StudyStatus.RUNNING)
        own = Berth(home / "studies" / study / "server" / "process", SystemClock())
        own.start(["sleep", "600"], dict(os.environ))
        with SwarmClient(old.url) as first, SwarmClient(kept.url) as second, SwarmClient(lent.url) as third:
            labels = {"study": study}
            left, stays = (each.start_run(RunSpec(labels=labels)).run_id for each in (first, second))
            theirs = third.start_run(RunSpec(labels={"study": "st-other"})).run_id
            assert main(["resume", study, "--server", kept.url]) == 0
            said = capsys.readouterr().out
            assert first.run(left).phase != "rolling"
            assert (second.run(stays).phase, third.run(theirs).phase) == ("rolling", "rolling")
    assert not own.alive()
    assert store.studies.get(study).options.servers == (kept.url,)
    assert all(f"`swarm run stop --url {url}`" in said for url in (away, hung))
    assert old.url not in said


def test_a_study_that_somebody_works_on_is_asked_to_stop(capsys: pytest.CaptureFixture[str]) -> None:
    store = Store.open()
    worked_on = store.studies.create("a topic", {})
    store.studies.set_status(worked_on, StudyStatus.RUNNING)
    store.leases.acquire(worked_on, "elsewhere/1/1.0", 60.0)
    assert main(["stop", worked_on, "--json"]) == 0
    assert "asked process 1 on elsewhere" in json.loads(capsys.readouterr().out)["told"]
    assert (store.studies.get(worked_on).status, store.studies.get(worked_on).stop_requested) == (
        StudyStatus.RUNNING,
        True,
    )


def test_to_resume_beside_a_living_researcher_says_how_to_follow_or_end_it(capsys: pytest.CaptureFixture[str]) -> None:
    store = Store.open()
    study = store.studies.create("a topic", {})
    store.plans.save(study, example_plan())
    owner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        store.leases.acquire(study, f"{socket.gethostname()}/{owner.pid}/{started_at(owner.pid)}", 60.0)
        assert main(["resume", study]) == FAILED
    finally:
        owner.kill()
        owner.wait()
    said = capsys.readouterr().err
    assert (
        f"process {owner.pid} on {socket.gethostname()} is working on {study}: `researcher watch {study}` follows it"
        in said
    )
    assert f"`researcher stop {study}` stops it" in said
    assert "wait" not in said


def test_on_a_full_disk_the_command_says_to_make_room(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(home))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "mkdir", full)
        assert main([*ASKED, "--engine", "echo"]) == USAGE
        assert "No space left on device); make room on that disk" in capsys.readouterr().err
    monkeypatch.setattr(Store, "open", full)
    assert main([*ASKED, "--engine", "echo"]) == FAILED
    assert "make room on that disk, then try again" in capsys.readouterr().err


def test_a_database_that_no_longer_fits_on_its_disk_says_to_make_room(tmp_path: Path) -> None:
    code = (
        "import resource, signal, sys; from researcher.main import main; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000)); sys.exit(main(['list']))"
    )
    environ = {**os.environ, "RESEARCHER_HOME": str(tmp_path / "small")}
    ran = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False)
    assert ran.returncode == FAILED
    assert "make room on that disk, then try again" in ran.stderr


def test_a_reason_may_be_called_one(capsys: pytest.CaptureFixture[str]) -> None:
    found, _ = opened(user_data_dir())
    study = at_gate(found.store)
    assert main(["reject", study, "--reason", "too dear"]) == 0
    assert "rejected" in capsys.readouterr().out


@pytest.mark.parametrize("wish", ["stop", "pause"])
def test_an_owner_that_lives_is_asked_though_its_lease_lapsed(
    wish: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = Store.open()
    worked_on = store.studies.create("a topic", {})
    store.plans.save(worked_on, example_plan())
    store.studies.set_status(worked_on, StudyStatus.RUNNING)
    store.leases.acquire(worked_on, this_process(), -1.0)
    its_server = Berth(home / "studies" / worked_on / "server" / "process", SystemClock())
    its_server.start(["sleep", "600"], dict(os.environ))
    try:
        assert main([wish, worked_on]) == 0
        assert its_server.alive()
    finally:
        asyncio.run(its_server.end(0.0))
    assert f"asked {owner_text(this_process())} to {wish}" in capsys.readouterr().out
    assert store.studies.get(worked_on).status is StudyStatus.RUNNING


def test_a_study_whose_machine_is_gone_is_stopped_once_its_lease_lapsed() -> None:
    store = Store.open()
    left = store.studies.create("a topic", {})
    store.plans.save(left, example_plan())
    store.leases.acquire(left, "elsewhere/1/1.0", -1.0)
    assert main(["stop", left]) == 0
    assert store.studies.get(left).status is StudyStatus.STOPPED


def test_a_study_that_is_stopped_at_rest_has_its_report(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = Store.open()
    study, _ = running(store)
    assert main(["stop", study]) == 0
    page = home / "studies" / study / "report.md"
    assert str(page) in capsys.readouterr().out
    assert page.is_file()
    assert store.studies.get(study).status is StudyStatus.STOPPED


def test_a_study_is_stopped_at_rest_though_its_report_cannot_be_written(
    study: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = Store.open()
    store.studies.set_status(study, StudyStatus.WAITING, "waits for its next window")
    (home / "studies").mkdir(exist_ok=True)
    (home / "studies" / study).write_text("in the way")
    assert main(["stop", study]) == 0
    assert "report.md" not in capsys.readouterr().out
    assert store.studies.get(study).status is StudyStatus.STOPPED


def test_a_reproduction_is_not_taken_for_a_study_to_go_on_with(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One trial was to be run again; resuming it would run the whole plan."""
    store = Store.open()
    again = store.studies.create("Reproduction of a trial", {"servers": [], "engine": "echo"})
    store.plans.save(again, example_plan())
    store.journal.record(again, "reproduces", {"study": "st-1", "trial": "k/a/0"})
    store.close()
    conducted: list[str] = []
    monkeypatch.setattr("researcher.cli.resume.conduct", lambda home, study, **_: conducted.append(study))
    assert main(["resume", again]) == FAILED
    assert conducted == []
    assert "researcher reproduce" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["watch", "doctor", "reproduce"])
def test_what_was_no_study_under_way_is_not_said_to_go_on(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = importlib.import_module(f"researcher.cli.{_HOMES[command]}")

    def interrupted(args: Namespace) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(home, f"{command}_command", interrupted)
    assert run(Namespace(command=command, json=False)) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_terminal_that_closes_after_ctrl_c_does_not_cut_the_end_short() -> None:
    ended = list[str]()

    async def work() -> Outcome:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()
        finally:
            os.kill(os.getpid(), signal.SIGHUP)
            for _ in range(100):  # as long as servers take to end
                await asyncio.sleep(0)
            ended.append("the servers")
        raise AssertionError

    before = signal.signal(signal.SIGINT, signal.default_int_handler), signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        with pytest.raises(Interrupted):
            _to_its_end("st-1", work())
    finally:
        signal.signal(signal.SIGINT, before[0])
        signal.signal(signal.SIGHUP, before[1])
    assert ended == ["the servers"]


def test_a_start_that_was_interrupted_while_it_planned_points_at_no_study(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("researcher.cli.start.plan_of", interrupted)
    assert main(ASKED) == 130
    assert "resume" not in capsys.readouterr().err


@pytest.mark.parametrize("carried", [True, False])
def test_a_study_whose_start_was_killed_before_its_plan_was_frozen_says_what_to_do(
    carried: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    store = Store.open()
    cut = store.studies.create("a topic", {"servers": []})
    store.studies.save_schedule(cut, {"timetable": {"zone": "UTC"}, "carried": carried})
    told = {}
    for command in ("resume", "show", "report", "export", "status", "watch", "verify"):
        code = main([command, cut])
        told[command] = "".join(capsys.readouterr())
        assert "Traceback" not in told[command]
        assert (command, code) in (("status", 3), ("watch", 3), (command, FAILED))
    for command in ("resume", "show", "report", "export"):
        assert "was interrupted before it froze a plan (then start again)" in told[command]
    for command in ("status", "watch"):
        assert "it has no plan: `researcher start` asks anew, `researcher stop` ends this one" in told[command]
    assert f"`researcher status {cut}`" in told["verify"]
    assert main(["stop", cut]) == 0
    assert main(["list"]) == 0
    said = capsys.readouterr().out
    assert "before it had a plan; `researcher start` asks anew" in said
    assert f"{cut}  stopped" in said
    store.close()


def test_a_study_that_was_interrupted_is_named(
    study: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    store = Store.open()
    store.studies.set_status(study, StudyStatus.RUNNING)
    newer = store.studies.create("a later topic", {})
    store.close()
    monkeypatch.setattr("researcher.cli.resume.work_on", interrupted)
    assert main(["resume", study]) == 130
    said = capsys.readouterr().err
    assert f"`researcher resume {study}`" in said
    assert newer not in said


def test_a_person_who_answers_for_a_study_that_was_stopped_is_told_that_it_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found, _ = opened(user_data_dir())
    waiting = at_gate(found.store)
    found.store.studies.save_schedule(waiting, {"timetable": {"zone": "UTC"}, "carried": True})
    assert main(["stop", waiting]) == 0
    capsys.readouterr()
    main(["approve", waiting])
    said = capsys.readouterr()
    assert "the daemon continues" not in said.out + said.err
    assert "researcher resume" in said.out + said.err
    found.store.close()


NO_DAEMON = "no daemon is running: `researcher daemon` or `researcher resume` "


@pytest.mark.parametrize(
    ("carried", "daemon", "goes_on"),
    [
        (True, True, "the daemon continues"),
        (True, False, f"{NO_DAEMON}continues"),
        (False, False, "`researcher resume` continues it"),
    ],
)
def test_an_answer_is_told_from_the_moment_it_is_given(
    carried: bool, daemon: bool, goes_on: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(status, "_STARTING_S", 0.0)
    found, _ = opened(user_data_dir())
    waiting = at_gate(found.store)
    found.store.studies.save_schedule(waiting, {"timetable": {"zone": "UTC"}, "carried": carried})

    def told(*command: str) -> str:
        with only_daemon() if daemon else nullcontext():
            main([command[0], waiting, *command[1:]])
        return capsys.readouterr().out

    before = told("status")
    assert "waits for a person's word on the plan" in before
    assert "there is an answer" in before
    assert (goes_on in before) == carried
    assert goes_on in told("approve", "--because", "worth it")
    after = told("status")
    assert "waiting (approved by" in after
    assert ": worth it)" in after
    assert "waits for a person's word" not in after
    assert goes_on in after
    assert "answer given: gate plan/1, verdict approve, words worth it" in told("watch")
    assert meet_gate(found.store, waiting) is StudyStatus.RUNNING
    found.store.close()


@pytest.mark.parametrize(("timetable", "goes_on"), [({}, "continues it"), ({"until": 1.0}, "ends it")])
@pytest.mark.parametrize("daemon", [True, False])
def test_a_study_in_the_daemons_care_says_whether_there_is_one(
    daemon: bool,
    timetable: dict[str, float],
    goes_on: str,
    study: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(status, "_STARTING_S", 0.0)
    store = Store.open()
    store.studies.set_status(study, StudyStatus.RUNNING)
    store.studies.save_schedule(study, {"timetable": {"zone": "UTC", **timetable}, "carried": True})
    store.close()
    with only_daemon() if daemon else nullcontext():
        assert main(["status", study]) == (0 if daemon else WAITING)
    said = capsys.readouterr().out
    assert (f"the daemon {goes_on}" in said, f"{NO_DAEMON}{goes_on}" in said) == (daemon, not daemon)
    if not daemon:
        assert main(["watch", study]) == WAITING
        said = capsys.readouterr().out
        assert (said.count(goes_on), said.count(NO_DAEMON)) == (1, 1)


def test_what_is_asked_of_a_study_that_asks_nothing_says_how_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    found, _ = opened(user_data_dir())
    study = shown_planned(found.store)
    found.store.studies.set_status(study, StudyStatus.WAITING, "paused on request")
    assert main(["approve", study]) == FAILED
    assert f"{study} is not waiting for an answer: it is waiting (paused on request)" in capsys.readouterr().err
    assert main(["amend", study, "--seeds", "2..3", "--because", "more"]) == USAGE
    assert "fixed number of seeds per arm; write --seeds 3" in capsys.readouterr().err
    assert main(["resume", "nonesuch"]) == FAILED
    assert "no study has an id that begins with 'nonesuch'" in capsys.readouterr().err
    found.store.close()


def test_a_question_in_place_of_a_file_is_told_where_it_belongs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["start", "does lr matter"]) == USAGE
    assert "if this is a question, put --topic before it: --topic 'does lr matter'" in capsys.readouterr().err
    assert main(["draft", "--instrument", "arithmetic", "--vary", "kl=0,0.1", "--budget", "15m"]) == 0
    assert "wall: 15m" in capsys.readouterr().out


@pytest.mark.parametrize("mode", [Mode.BUBBLEWRAP, Mode.LIMITS])
def test_the_doctor_warns_of_a_weaker_sandbox(
    mode: Mode, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "sandbox", lambda: Sandbox(mode, "somehow"))
    main(["doctor"])
    [line] = [line for line in capsys.readouterr().out.splitlines() if "sandbox: " in line]
    assert line.startswith("ok" if mode is Mode.BUBBLEWRAP else "WARNING")


def closed() -> dict[str, Any]:
    """A timetable whose window is hours away."""
    hour = time.gmtime().tm_hour
    window = f"{(hour + 11) % 24:02}:00-{(hour + 12) % 24:02}:00"
    return Timetable.of([window], None, time.time(), zone="UTC").model_dump(mode="json")


@pytest.mark.parametrize("rests", ["planned", "window", "gate", "answered", "paused", "stuck"])
def test_only_what_a_person_has_to_see_to_waits_by_its_exit_code_beside_a_daemon(
    rests: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found, _ = opened(user_data_dir())
    store = found.store
    study = at_gate(store) if rests in ("gate", "answered") else shown_planned(store)
    store.studies.save_schedule(
        study, {"timetable": closed() if rests == "window" else {"zone": "UTC"}, "carried": True}
    )
    if rests == "answered":
        main(["approve", study])
    elif rests == "paused":
        store.studies.request_pause(study)
    elif rests == "window":
        store.studies.set_status(study, StudyStatus.WAITING, "waits for its next window")
    elif rests == "stuck":
        store.studies.set_status(study, StudyStatus.WAITING, "http://a:1 does not answer")
    capsys.readouterr()
    with only_daemon():
        assert main(["status", study]) == (WAITING if rests in ("gate", "paused", "stuck") else 0)
        said = capsys.readouterr().out
        assert ("deal with what it waits for" in said) == (rests == "stuck")
        assert "no daemon is running" not in said
    assert main(["status", study]) == WAITING
    store.close()


def test_a_plan_that_is_amended_after_its_answer_waits_for_another(capsys: pytest.CaptureFixture[str]) -> None:
    found, _ = opened(user_data_dir())
    waiting = at_gate(found.store)
    main(["approve", waiting])
    assert main(["amend", waiting, "--seeds", "4", "--because", "more"]) == 0
    capsys.readouterr()
    main(["status", waiting])
    said = capsys.readouterr().out
    assert "waits for a person's word on the plan" in said
    assert "nobody works on it until there is an answer" in said
    found.store.close()


@pytest.mark.parametrize("verdict", ["approve", "reject"])
def test_an_answer_at_a_gate_that_is_gone_is_refused(verdict: str, capsys: pytest.CaptureFixture[str]) -> None:
    found, _ = opened(user_data_dir())
    waiting = at_gate(found.store)
    main(["status", waiting])
    assert f"waits at gate plan/1: `researcher approve {waiting} --gate plan/1`" in capsys.readouterr().out
    main(["amend", waiting, "--seeds", "4", "--because", "more"])
    answer = [verdict, waiting, "--because", "as I saw it", "--gate"]
    assert main([*answer, "plan/1"]) == FAILED
    assert f"{waiting} no longer waits at plan/1: it waits at plan/2" in capsys.readouterr().err
    assert found.store.gates.open(waiting) is not None
    assert main([*answer, "plan/2"]) == 0
    main(["status", waiting, "--json"])
    assert json.loads(capsys.readouterr().out.partition("\n")[2])["gate"] is None
    found.store.close()


def test_numbers_that_differ_are_told_by_the_exit_code_when_nobody_reads_which(
    study: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store.open()
    store.reports.save_claims(study, [Claim(name="n", expression='plan("heldout_temperature")', value=77.0, text="77")])
    store.close()
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", buffering=1) as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert main(["verify", study]) == FAILED


def test_a_report_whose_claims_are_gone_does_not_verify(study: str, capsys: pytest.CaptureFixture[str]) -> None:
    store = Store.open()
    store.reports.record(study, {"markdown": "report.md"}, ReportSeal(files={}, claims="", wording=wording()))
    store.close()
    assert main(["verify", study]) == FAILED
    said = capsys.readouterr()
    assert "no report to verify" not in said.out + said.err
    assert "differ" in said.out


@pytest.mark.parametrize(("can", "said"), [(True, "computes in bfloat16"), (False, "computes in float32")])
def test_the_doctor_says_what_a_model_is_computed_in(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], can: bool, said: str
) -> None:
    monkeypatch.setattr(doctor, "multiplies_bfloat16", lambda: can)
    main(["doctor"])
    assert said in capsys.readouterr().out


def test_the_doctor_counts_the_memory_that_a_container_is_given(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for total, row in ((4_000_000_000, "MISSING  memory: 4 GB"), (None, "ok       memory: size unknown")):
        monkeypatch.setattr(doctor, "total_memory", lambda total=total: total, raising=False)
        main(["doctor"])
        assert row in capsys.readouterr().out


CARD = Card(index=0, name="NVIDIA H100 80GB HBM3", total=85_000_000_000, free=80_000_000_000, driver="580.95.05")


def graphics(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *found: Card,
    common: tuple[str, ...] = (),
    **environ: str,
) -> dict[str, tuple[bool, str]]:
    """The doctor's rows on a machine with these GPUs. common: models that are planned for without being here."""
    monkeypatch.setattr(doctor, "SHAPES", common)
    monkeypatch.setattr(doctor, "answered_cards", lambda: list(found))
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    main(["doctor", "--json"])
    return {row["check"]: (row["ok"], row["detail"]) for row in json.loads(capsys.readouterr().out)}


def without_vllm(distribution: str) -> str:
    raise importlib.metadata.PackageNotFoundError(distribution)


def test_the_doctor_looks_at_what_a_gpu_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", without_vllm)
    rows = graphics(monkeypatch, capsys, CARD, CC="sh")
    assert rows["gpu 0"] == (True, "NVIDIA H100 80GB HBM3, 85 GB, of which 80 GB are free")
    assert rows["NVIDIA driver"][0]
    assert rows["C compiler"][0]
    assert not rows["vllm for CUDA"][0]
    assert "LOCK=requirements/gpu.txt" in rows["vllm for CUDA"][1]


def test_the_doctor_names_a_driver_that_is_too_old_and_a_compiler_that_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old = replace(CARD, driver="535.183.01")
    rows = graphics(monkeypatch, capsys, CARD, replace(old, index=1), CC="no-such-compiler")
    assert "gpu 1" in rows
    assert rows["C compiler"] == (False, "CC=no-such-compiler was not found; Triton compiles kernels with it")
    assert graphics(monkeypatch, capsys, old)["NVIDIA driver"] == (False, "535.183.01; CUDA 13 needs 580 or newer")


def test_the_doctor_asks_the_server_how_a_model_that_is_here_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        doctor, "cached_models", lambda: [ModelFolder(path=tmp_path / "none", name="none", fingerprint="0" * 64)]
    )
    rows = graphics(monkeypatch, capsys, CARD)
    assert f"there is no model or folder '{tmp_path / 'none'}'" in rows["fits: none"][1].replace('"', "'")


def test_the_doctor_plans_each_card_for_common_models_without_fetching_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SWARM_MODELS", str(tmp_path / "cache"))
    small = replace(CARD, index=1, total=24 << 30)
    rows = graphics(monkeypatch, capsys, CARD, small, replace(small, index=2), common=("Qwen/Qwen3-8B",))
    plans = {check: detail for check, (_, detail) in rows.items() if check.startswith("fits: ")}
    assert plans.keys() == {"fits: Qwen/Qwen3-8B, gpu 0", "fits: Qwen/Qwen3-8B, gpu 1"}  # the third is like the second
    large, little = plans.values()
    assert large.startswith(
        "Qwen/Qwen3-8B on a GPU of 79.2 GiB, calls of up to 4,096 tokens, bfloat16; all weights: do not fit"
    )
    assert "; adapters of rank 16: side by side" in large
    assert "does not fit on this GPU of 24.0 GiB" in little
    assert not list((tmp_path / "cache").glob("*"))


def test_the_doctor_is_content_with_a_machine_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = graphics(monkeypatch, capsys)
    assert rows["gpu"] == (True, "none found by NVIDIA's driver; models run on the CPU")
    assert "C compiler" not in rows


def test_a_damaged_database_is_one_row_of_the_doctors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RESEARCHER_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("RESEARCHER_DATABASE_URL", raising=False)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "researcher.db").write_bytes(b"no database " * 100)
    assert main(["doctor"]) == FAILED
    said = capsys.readouterr().out
    assert "MISSING  database: cannot open" in said
    assert "models:" in said


@pytest.mark.parametrize(
    ("options", "given", "told"),
    [
        ({}, "host:8642", "is not an address"),
        ({"keep_models": True}, "http://127.0.0.1:1", "the study keeps its models"),
    ],
)
def test_a_study_does_not_go_on_with_servers_that_are_none_or_keep_no_models(
    options: dict[str, object], given: str, told: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = Store.open()
    study = store.studies.create("a topic", {"servers": [], **options})
    store.plans.save(study, example_plan())
    assert main(["resume", study, "--server", given]) == USAGE
    assert told in capsys.readouterr().err
    assert store.studies.get(study).options.servers == ()
