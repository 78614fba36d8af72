"""The store keeps its promises on SQLite and on PostgreSQL."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from foundation.clock import ManualClock
from researcher.store import database
from researcher.store.checkpoints import with_saver
from researcher.store.database import default_url, sqlite_file
from researcher.store.errors import DatabaseRefused
from researcher.store.journal import JournalReader
from researcher.store.store import Store
from researcher.study.plan import Plan
from tests.contracts.store_contract import StoreContract
from tests.fakes.example_plan import example_plan
from tests.fakes.postgres import fresh_database


class TestSQLite(StoreContract):
    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        return f"sqlite:///{tmp_path}/folder/researcher.db"


class TestPostgreSQL(StoreContract):
    @pytest.fixture
    def url(self, postgres_url: str) -> Iterator[str]:
        with fresh_database(postgres_url) as url:
            yield url


def test_a_line_that_is_committed_after_one_with_a_higher_number_is_read_all_the_same(postgres_url: str) -> None:
    with fresh_database(postgres_url) as url:
        store, other = Store.open(url), Store.open(url)
        study = store.studies.create("a topic", {})
        journal = JournalReader(store.journal, study)
        with other._db.writing() as session:
            other._db.note(session, study, "late")
            session.flush()
            store.journal.record(study, "early", {})
            assert [event.kind for event in journal.look()] == ["early"]
        assert [event.kind for event in journal.look()] == ["late"]
        assert [event.kind for event in journal.events] == ["late", "early"]
        store.close()
        other.close()


def test_a_long_journal_is_read_once(tmp_path: Path) -> None:
    store = Store.open(f"sqlite:///{tmp_path}/r.db")
    study = store.studies.create("a topic", {})
    journal = JournalReader(store.journal, study)
    for looks in range(3):
        for number in range(150):
            store.journal.record(study, "note", {"n": 150 * looks + number})
        assert [event.detail["n"] for event in journal.look()] == list(range(150 * looks, 150 * (looks + 1)))
        assert journal.look() == []
    assert [event.detail["n"] for event in journal.events] == list(range(450))
    store.close()


def test_sqlite_is_opened_with_its_guarantees(tmp_path: Path) -> None:
    store = Store.open(f"sqlite:///{tmp_path}/r.db")
    with store._db.engine.connect() as connection:
        read = {
            name: connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in ("journal_mode", "foreign_keys")
        }
    assert read == {"journal_mode": "wal", "foreign_keys": 1}
    store.close()


def test_without_a_url_the_records_are_in_the_users_data_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RESEARCHER_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("RESEARCHER_DATABASE_URL", raising=False)
    Store.open().close()
    assert (tmp_path / "home" / "researcher.db").is_file()
    monkeypatch.setenv("RESEARCHER_DATABASE_URL", f"sqlite:///{tmp_path}/other.db")
    Store.open().close()
    assert (tmp_path / "other.db").is_file()


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("mysql://u:secret@h/db", "not supported"),
        ("nonsense", "cannot be read"),
        ("sqlite://", "does not name a permanent file"),
        ("sqlite:///:memory:", "does not name a permanent file"),
        ("postgresql://u:secret@127.0.0.1:1/db", "RESEARCHER_DATABASE_URL"),
        ("postgresql://u:secret@127.0.0.1:notaport/db", "cannot be read"),
        ("sqlite:///{home}/r.db?timeout=x", r"options of the database URL \(timeout\) cannot be read"),
    ],
)
def test_a_database_that_cannot_be_used_gives_one_clear_error_without_the_password(
    url: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "RESTART_S", 0.0)
    with pytest.raises(DatabaseRefused, match=says) as caught:
        Store.open(url.replace("{home}", str(tmp_path)))
    assert "secret" not in str(caught.value)


def test_signs_of_urls_in_the_name_of_a_home_are_part_of_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "50%20 of? it"
    monkeypatch.setenv("RESEARCHER_HOME", str(home))
    monkeypatch.delenv("RESEARCHER_DATABASE_URL", raising=False)
    Store.open().close()
    assert (home / "researcher.db").is_file()
    assert with_saver(default_url(), lambda saver: saver is not None)
    assert sqlite_file(default_url()) == home / "researcher.db"
    assert [file for file in tmp_path.iterdir() if file != home] == []


def test_a_file_of_the_users_home_or_of_this_folder_is_named_from_the_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for name in ("~/r.db", "r.db", f"{tmp_path}/r.db"):
        url = default_url({"RESEARCHER_DATABASE_URL": f"sqlite:///{name}?timeout=5"})
        assert url == f"sqlite:///{tmp_path}/r.db?timeout=5"
    Store.open("sqlite:///~/own.db").close()
    assert (tmp_path / "own.db").is_file()


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "r.db").write_text("not a database, but long enough to look like a file of some kind" * 10)
    with pytest.raises(DatabaseRefused, match=r"r\.db.*move it away to start with an empty database"):
        Store.open(f"sqlite:///{tmp_path}/r.db")


def test_a_place_where_no_database_can_be_says_what_names_it(tmp_path: Path) -> None:
    (tmp_path / "r.db").mkdir()
    with pytest.raises(DatabaseRefused, match=r"RESEARCHER_DATABASE_URL or else RESEARCHER_HOME"):
        Store.open(f"sqlite:///{tmp_path}/r.db")


def test_a_store_left_open_by_a_killed_process_opens_again(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/r.db"
    code = (
        "import os, signal; from researcher.store.store import Store\n"
        f"s = Store.open({url!r}); s.studies.create('x', {{}})\n"
        "with s._db.writing() as session: os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code], check=False, timeout=60)
    store = Store.open(url, clock=ManualClock())
    assert [study.topic for study in store.studies.all()] == ["x"]
    store.studies.create("y", {})
    store.close()


def test_the_plan_in_sql_is_the_canonical_json(tmp_path: Path) -> None:
    from tests.fakes.example_plan import example_plan

    store = Store.open(f"sqlite:///{tmp_path}/r.db")
    study = store.studies.create("x", {})
    store.plans.save(study, example_plan(question="größer?"))
    store.close()
    connection = sqlite3.connect(tmp_path / "r.db")
    text, digest = connection.execute("SELECT canonical, digest FROM plans").fetchone()
    connection.close()
    assert Plan.model_validate_json(text).digest() == digest


def test_a_server_that_cannot_be_reached_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "RESTART_S", 0.2)
    with pytest.raises(DatabaseRefused) as refused:
        Store.open("postgresql://nobody@127.0.0.1:1/none")
    assert "\n" not in str(refused.value)
    assert "127.0.0.1" in str(refused.value)
    assert "check RESEARCHER_DATABASE_URL" in str(refused.value)


def test_the_largest_seed_counts_seeds_of_an_arms_own(tmp_path: Path) -> None:
    store = Store.open(f"sqlite:///{tmp_path / 'researcher.db'}")
    plan = example_plan()
    first, second = plan.arms
    apart = plan.model_copy(update={"arms": (first, second.model_copy(update={"seed_offset": 700}))})
    assert store.plans.largest_seed() == -1
    store.plans.save(store.studies.create("q", {}), plan)
    assert store.plans.largest_seed() == 4
    store.plans.save(store.studies.create("q", {}), apart)
    assert store.plans.largest_seed() == 704
    store.close()
