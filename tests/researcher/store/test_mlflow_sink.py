"""MLflow gets a true copy, once, also after an outage. One local MLflow database for the whole file: making it takes seconds."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from foundation.clock import ManualClock
from researcher.models import StudyStatus, TrialStatus, Verdict, VerdictRecord
from researcher.store.errors import MlflowAway
from researcher.store.mlflow_sink import MlflowSink, default_tracking_uri, experiment_name
from researcher.store.store import Store
from tests.fakes.example_plan import ARMS, example_plan

pytestmark = pytest.mark.filterwarnings("ignore")  # MLflow's own deprecations, which are not ours to mend


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mlflow")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store.open(f"sqlite:///{tmp_path}/r.db", clock=ManualClock())
    yield store
    store.close()


@pytest.fixture
def sink(store: Store, home: Path) -> MlflowSink:
    return MlflowSink(store, f"sqlite:///{home}/mlflow.db")


@pytest.fixture
def mlflow(sink: MlflowSink) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return sink._open()


def a_study(store: Store) -> tuple[str, str, str]:
    """A study with one trial done and one failed."""
    study = store.create_study("Does it work?", {})
    store.save_plan(study, example_plan())
    store.set_stage_status(study, "compare", "running")
    done, failed = (trial.key for trial in store.ensure_trials(study, "compare", [(ARMS[0], 0), (ARMS[1], 0)]))
    for key in (done, failed):
        store.record_intent(study, key, 1, "http://a", f"{study}/{key}#1", {"seed": 0})
        store.record_submitted(study, key, "run-1", {"code_version": "c0de"})
    store.finish_trial(study, done, {"heldout_accuracy": 0.5}, {"reward_mean": [(1, 0.1), (2, 0.4)]})
    store.fail_attempt(study, failed, "no reason")
    store.fail_trial(study, failed, "gave up")
    return study, done, failed


def runs_of(mlflow: Any, store: Store, study: str) -> dict[str, Any]:
    experiment = mlflow.get_experiment_by_name(experiment_name(store.study(study)))
    found = mlflow.search_runs([experiment.experiment_id])
    runs = {run.data.tags["swarm.key"]: run for run in found}
    assert len(runs) == len(found)
    return runs


def test_a_study_is_copied_with_its_curves_and_artifacts(
    store: Store, sink: MlflowSink, mlflow: Any, tmp_path: Path
) -> None:
    study, done, failed = a_study(store)
    assert sink.drain(study) > 0
    assert store.outbox_state(study) == (0, None)
    runs = runs_of(mlflow, store, study)
    assert set(runs) == {"stage:compare", f"trial:{done}", f"trial:{failed}"}
    good, bad = runs[f"trial:{done}"], runs[f"trial:{failed}"]
    assert good.data.tags["mlflow.parentRunId"] == runs["stage:compare"].info.run_id
    assert good.data.params == {"arm": ARMS[0], "seed": "0", "learning_rate": "1e-05"}
    assert good.data.metrics["final.heldout_accuracy"] == 0.5
    history = mlflow.get_metric_history(good.info.run_id, "reward_mean")
    assert [(point.step, point.value) for point in history] == [(1, 0.1), (2, 0.4)]
    assert good.data.tags["swarm.hypothesis"] == "H1"
    assert good.data.tags["swarm.code_version"] == "c0de"
    assert good.data.tags["swarm.plan_hash"] == example_plan().digest()
    assert (good.info.status, bad.info.status) == ("FINISHED", "FAILED")
    assert bad.data.tags["swarm.reason"] == "gave up"
    assert store.trial(study, failed).status == TrialStatus.FAILED
    spec = Path(mlflow.download_artifacts(good.info.run_id, "spec.json", str(tmp_path)))
    assert json.loads(spec.read_text()) == {"seed": 0}


def test_sending_everything_again_leaves_one_of_each(store: Store, sink: MlflowSink, mlflow: Any) -> None:
    study, done, _ = a_study(store)
    waiting = store.unsent(study)
    sink.drain(study)
    before = runs_of(mlflow, store, study)
    again = MlflowSink(store, sink.tracking_uri)
    known = again._study(mlflow, study)
    for message in waiting:  # as after a crash between sending and marking
        again._send(mlflow, known, message)
    after = runs_of(mlflow, store, study)
    assert {key: run.info.run_id for key, run in after.items()} == {key: run.info.run_id for key, run in before.items()}
    assert len(mlflow.get_metric_history(after[f"trial:{done}"].info.run_id, "reward_mean")) == 2


def test_verdict_and_report_are_added_to_what_is_there(
    store: Store, sink: MlflowSink, mlflow: Any, tmp_path: Path
) -> None:
    study, done, _ = a_study(store)
    sink.drain(study)
    report = tmp_path / "report.md"
    report.write_text("# Yes")
    store.record_verdict(
        study, "compare", VerdictRecord(hypothesis="H1", verdict=Verdict.SUPPORTED, reason="", effect=None)
    )
    store.set_stage_status(study, "compare", "done")
    store.record_report(study, {"markdown": str(report)})
    store.set_study_status(study, StudyStatus.DONE)
    sink.drain(study)
    runs = runs_of(mlflow, store, study)
    assert runs[f"trial:{done}"].data.tags["swarm.verdict.H1"] == "supported"
    assert runs["stage:compare"].info.status == "FINISHED"
    assert [item.path for item in mlflow.list_artifacts(runs["report"].info.run_id)] == ["report.md"]
    experiment = mlflow.get_experiment_by_name(experiment_name(store.study(study)))
    assert "H1: supported" in experiment.tags["mlflow.note.content"]
    assert experiment.tags["swarm.status"] == "done"


def test_an_outage_is_noted_and_caught_up(store: Store, sink: MlflowSink, mlflow: Any) -> None:
    study, done, _ = a_study(store)
    away = MlflowSink(store, "http://127.0.0.1:9")
    assert away.drain(study) == 0
    waiting, error = store.outbox_state(study)
    assert waiting > 0
    assert error
    assert sink.drain(study) == waiting
    assert f"trial:{done}" in runs_of(mlflow, store, study)


def test_where_mlflow_is(tmp_path: Path) -> None:
    assert default_tracking_uri({"MLFLOW_TRACKING_URI": "http://m:5000"}) == "http://m:5000"
    assert default_tracking_uri({"RESEARCHER_HOME": str(tmp_path)}) == f"sqlite:///{tmp_path}/mlflow.db"


def test_a_kill_while_mlflow_makes_its_database_leaves_none_rather_than_half_of_one(
    tmp_path: Path, store: Store
) -> None:
    half_made = tmp_path / ".mlflow.db.new"
    half_made.write_bytes(b"cut short")
    study, _, _ = a_study(store)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert MlflowSink(store, f"sqlite:///{tmp_path}/mlflow.db").drain(study) > 0
    assert not half_made.exists()


def test_pages_of_a_study_and_of_its_trials_are_found(store: Store, sink: MlflowSink, mlflow: Any) -> None:
    study, done, _ = a_study(store)
    experiment = sink.page(study)
    assert sink.page(study, done) == experiment  # nothing of it was sent yet
    sink.drain(study)
    run = sink.page(study, done)
    assert run.startswith(f"{experiment}/runs/")
    assert mlflow.get_run(run.rpartition("/")[2]).data.tags["swarm.key"] == f"trial:{done}"


def test_an_outage_is_said_when_a_page_is_asked_for(store: Store) -> None:
    study, _, _ = a_study(store)
    with pytest.raises(MlflowAway, match="does not answer"):
        MlflowSink(store, "http://127.0.0.1:9").page(study)
