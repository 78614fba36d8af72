"""The migrations make what the models say, on both databases, and are found."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Engine, text

from foundation.paths import shipped
from researcher.analysis.knowledge import findings_of
from researcher.models import Notice, NoticeKind, VerdictRecord
from researcher.store.database import connect, upgrade
from researcher.store.store import Store
from researcher.store.tables import SCHEMA_REVISION, Base
from researcher.study.plan import Verdict
from tests.contracts.store_contract import EFFECT
from tests.fakes.example_plan import example_plan
from tests.fakes.postgres import fresh_database


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/r.db"
        return
    with fresh_database(request.getfixturevalue("postgres_url")) as found:
        yield found


def test_an_empty_database_is_brought_to_what_the_models_say(url: str) -> None:
    engine = connect(url)
    upgrade(engine)
    upgrade(engine)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert context.get_current_revision() == SCHEMA_REVISION
        assert compare_metadata(context, Base.metadata) == []
    engine.dispose()


def at_revision(url: str, revision: str) -> Engine:
    """The database as an earlier release left it."""
    engine = connect(url)
    config = _config()
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, revision)
    return engine


def insert(engine: Engine, table: str, **values: object) -> None:
    names = ", ".join(f'"{name}"' for name in values)
    with engine.begin() as connection:
        connection.execute(
            text(f"INSERT INTO {table} ({names}) VALUES ({', '.join(f':{name}' for name in values)})"), values
        )


def a_first_study(engine: Engine) -> None:
    plan = example_plan()
    insert(
        engine, "studies", id="st-1", topic="t", options="{}", status="done", stop_requested=False,
        pause_requested=False, created_at=1.0, updated_at=1.0,
    )  # fmt: skip
    insert(
        engine, "plans", study_id="st-1", version=1, digest=plan.digest(), canonical=plan.canonical(), created_at=1.0
    )


def test_findings_of_the_first_release_learn_what_they_compared_from_their_plans(url: str) -> None:
    engine, plan = at_revision(url, "0001"), example_plan()
    a_first_study(engine)
    fields = {
        "study_id": "st-1", "instrument": "repeat", "model": "echo", "factor": "learning_rate",
        "metric": "heldout_accuracy", "verdict": "supported", "at": 3.0, "scope": json.dumps({"steps": 6}),
        "statement": plan.hypotheses[0].statement,
    }  # fmt: skip
    insert(engine, "findings", id="st-1/H1", plan_hash=plan.digest(), effect=json.dumps(EFFECT.model_dump()), **fields)
    insert(engine, "findings", id="st-1/H9", plan_hash="gone", **fields)
    engine.dispose()
    store = Store.open(url)
    record = VerdictRecord(hypothesis="H1", verdict=Verdict.SUPPORTED, reason="", effect=EFFECT)
    whole, bare = store.findings.all()
    assert [whole] == findings_of("st-1", plan, [record], 3.0)
    assert (bare.id, bare.baseline, bare.margin, bare.scope, bare.effect) == ("st-1/H9", (), None, {"steps": 6}, None)
    store.close()


def test_findings_of_our_own_studies_learn_their_seeds_from_their_trials(url: str) -> None:
    engine, plan = at_revision(url, "0005"), example_plan()
    a_first_study(engine)
    for key, version, seed in (("a", 1, 7), ("b", 1, 0), ("c", 1, 7), ("d", 2, 99)):
        insert(
            engine, "trials", study_id="st-1", key=key, plan_version=version, stage="floor", arm="x", seed=seed,
            position=0, status="done", attempt=1,
        )  # fmt: skip
    fields = {
        "study_id": "st-1", "instrument": "repeat", "model": "echo", "factor": "f", "metric": "m", "verdict": "supported",
        "at": 3.0, "scope": "{}", "statement": "s", "question": "q", "instrument_version": "1", "direction": "increase",
        "baseline": "[]", "treatment": "[]", "plan_hash": plan.digest(),
    }  # fmt: skip
    insert(engine, "findings", id="st-1/H1", **fields)
    insert(engine, "findings", id="st-9/H1", origin="Group 7", **fields)
    engine.dispose()
    store = Store.open(url)
    assert [finding.seeds for finding in store.findings.all()] == [(0, 7), None]
    store.close()


def test_what_mlflow_had_taken_stays_taken_and_the_rest_still_waits_for_every_sink(url: str) -> None:
    engine = at_revision(url, "0001")
    a_first_study(engine)
    common = {"study_id": "st-1", "kind": "study", "ref": "st-1", "created_at": 1.0}
    insert(engine, "outbox", seq=1, tries=0, sent_at=2.0, **common)
    insert(engine, "outbox", seq=2, tries=3, error="no route", **common)
    insert(engine, "outbox", seq=3, tries=0, **common)
    engine.dispose()
    store = Store.open(url)
    assert [message.seq for message in store.outbox.unsent("mlflow", "st-1")] == [2, 3]
    assert store.outbox.state("mlflow", "st-1") == (2, "no route")
    assert [message.seq for message in store.outbox.unsent("tensorboard")] == [1, 2, 3]
    store.close()


def test_records_of_the_first_release_are_kept(url: str) -> None:
    engine = at_revision(url, "0001")
    insert(
        engine, "studies", id="st-1", topic="a topic", options="{}", status="running", stop_requested=False,
        pause_requested=False, created_at=1.5, updated_at=2.5,
    )  # fmt: skip
    engine.dispose()
    store = Store.open(url)
    [study] = store.studies.all()
    assert (study.id, study.topic, study.created_at) == ("st-1", "a topic", 1.5)
    store.studies.request_pause("st-1")
    assert store.studies.get("st-1").pause_requested
    store.close()


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(shipped("migrations")))
    return config


def test_the_code_names_the_newest_migration() -> None:
    config = _config()
    assert ScriptDirectory.from_config(config).get_heads() == [SCHEMA_REVISION]


def test_there_is_no_way_down_rather_than_half_of_one() -> None:
    scripts = ScriptDirectory.from_config(_config()).walk_revisions()
    assert [script.revision for script in scripts if hasattr(script.module, "downgrade")] == []


def test_verdicts_of_earlier_releases_learn_from_their_reasons_which_sentinels_fired(url: str) -> None:
    engine = at_revision(url, "0009")
    a_first_study(engine)
    reasons = {
        "H1": ("invalid", "heldout_leak: held-out tasks: among them; collapse: a; collapse: b"),
        "H2": ("invalid", "worse_on_heldout: worse afterwards"),
        "H3": ("inconclusive", "not enough trials: none"),
    }
    for position, (hypothesis, (verdict, reason)) in enumerate(reasons.items()):
        insert(
            engine, "verdicts", study_id="st-1", plan_version=1, stage="compare", hypothesis=hypothesis,
            position=position, verdict=verdict, reason=reason, at=3.0,
        )  # fmt: skip
    engine.dispose()
    store = Store.open(url)
    found = {record.hypothesis: record.sentinels for record in store.verdicts.all("st-1")}
    assert found == {"H1": ("heldout_leak", "collapse"), "H2": ("worse_on_heldout",), "H3": ()}
    store.close()


def test_notices_that_stood_in_the_outbox_move_to_their_table_with_what_became_of_them(url: str) -> None:
    engine = at_revision(url, "0008")
    a_first_study(engine)
    notice = Notice(kind=NoticeKind.GATE, subject_id="st-1", key="gate/plan/1", title="t", body="b")
    common = {"study_id": "st-1", "kind": "notify:TEAM", "ref": notice.model_dump_json(), "created_at": 1.0}
    for seq in (1, 2):
        insert(engine, "outbox", seq=seq, **common)
    insert(engine, "outbox", seq=3, **common | {"kind": "study", "ref": "st-1"})
    insert(engine, "deliveries", sink="notify:TEAM", seq=1, tries=0, sent_at=2.0)
    engine.dispose()
    store = Store.open(url)
    assert [waiting.notice for waiting in store.notices.unsent("TEAM")] == [notice]
    assert [message.kind for message in store.outbox.unsent("mlflow")] == ["study"]
    store.close()
