"""A home that was written before gates and options became what they are: its database opens, and its report verifies.

earlier_home.tar.gz holds the tables as SQL and the studies' folders; HOME stands for where it was.
"""

from __future__ import annotations

import json
import sqlite3
import tarfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from researcher.cli import DONE
from researcher.gates import answer_gate, pass_plan
from researcher.main import main
from researcher.models import Answer, StudyOptions, StudyStatus
from researcher.store.store import Store
from tests.fakes.shown_study import SERVER, meet_gate


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    with tarfile.open(Path(__file__).parent / "earlier_home.tar.gz") as packed:
        packed.extractall(tmp_path, filter="data")
    script = (tmp_path / "researcher.sql").read_text().replace("HOME", str(tmp_path))
    with closing(sqlite3.connect(tmp_path / "researcher.db")) as database:
        database.executescript(script)
    monkeypatch.setenv("RESEARCHER_HOME", str(tmp_path))
    monkeypatch.delenv("RESEARCHER_DATABASE_URL", raising=False)
    opened = Store.open()
    yield opened
    opened.close()


def called(store: Store, topic: str) -> str:
    [study] = [each.id for each in store.studies.all() if each.topic.startswith(topic)]
    return study


def test_its_studies_are_listed_and_its_report_verifies(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--json"]) == DONE
    assert len(json.loads(capsys.readouterr().out)) == 6
    done = called(store, "Done")
    assert store.reports.claims(done)
    assert main(["verify", done]) == DONE
    assert "all recompute" in capsys.readouterr().out
    assert main(["status", done]) == DONE
    assert "H1: supported" in capsys.readouterr().out


def test_its_options_are_read(store: Store) -> None:
    study = store.studies.get(called(store, "As `start`"))
    assert study.request is not None
    assert study.request.author == "file"
    wanted = StudyOptions(request=study.request, servers=(SERVER,), sinks=("tensorboard",), repairs=3)
    assert study.options == wanted
    assert store.studies.get(called(store, "Waits")).options.approve == "plan"
    assert store.studies.get(called(store, "Was running")).pause_requested


def test_its_gates_stand_where_they_stood(store: Store) -> None:
    waiting, approved, gone_on = (called(store, topic) for topic in ("Waits", "Was approved", "Went on"))
    gate = store.gates.open(waiting)
    assert gate is not None
    assert (gate.name, gate.answer) == ("plan/1", None)
    answer_gate(store, waiting, Answer(verdict="reject", words="too dear", by="ada"))
    assert store.studies.get(waiting).status is StudyStatus.STOPPED
    gate = store.gates.open(approved)
    assert gate is not None
    assert gate.answer == Answer(verdict="approve", words="go ahead", by="ada")
    assert meet_gate(store, approved) is StudyStatus.RUNNING
    assert store.gates.open(gone_on) is None
    pass_plan(store, gone_on, store.plans.get(gone_on))  # is not asked again
