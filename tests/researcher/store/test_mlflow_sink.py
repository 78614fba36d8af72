"""MLflow gets a true copy, once, also after an outage. One local MLflow database for the whole file: making it takes seconds."""

from __future__ import annotations

import json
import re
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from foundation.clock import ManualClock
from researcher.models import StudyStatus, TrialStatus, VerdictRecord
from researcher.store.errors import MlflowAway
from researcher.store.mlflow_sink import MlflowSink, default_tracking_uri, experiment_name, view_tags
from researcher.store.sink import CopySink
from researcher.store.store import Store
from researcher.study.plan import Verdict
from tests.contracts import sink_contract
from tests.contracts.sink_contract import CopiedTrial, send_without_marking
from tests.fakes.example_plan import ARMS, SEAL, example_plan
from tests.fakes.sampled import an_episode

pytestmark = pytest.mark.filterwarnings("ignore")  # MLflow's own deprecations, which are not ours to mend


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mlflow")


@pytest.fixture
def sink(store: Store, home: Path) -> MlflowSink:
    return MlflowSink(store, f"sqlite:///{home}/mlflow.db")


@pytest.fixture
def mlflow(sink: MlflowSink) -> Any:
    return MlflowClient(sink.tracking_uri)


class TestMlflow(sink_contract.SinkContract):
    @pytest.fixture
    def away(self, store: Store) -> CopySink:
        return MlflowSink(store, "http://127.0.0.1:9")

    def copied(self, sink: CopySink, store: Store, study: str) -> list[CopiedTrial]:
        client = MlflowClient(sink.place())
        experiment = client.get_experiment_by_name(experiment_name(store.studies.get(study)))
        runs = client.search_runs([experiment.experiment_id], "params.arm LIKE '%'", order_by=["params.arm"])
        return [self._trial(client, run) for run in runs]

    def _trial(self, client: Any, run: Any) -> CopiedTrial:
        curve = [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, "reward_mean")]
        finals = {k.removeprefix("final."): v for k, v in run.data.metrics.items() if k.startswith("final.")}
        return CopiedTrial(run.data.params["arm"], run.data.params["seed"], curve, finals)


def a_study(store: Store) -> tuple[str, str, str]:
    """A study with one trial done and one failed."""
    episodes = [an_episode("ep-1"), an_episode("ep-2", kind="eval", reward=0.0)]
    return sink_contract.a_study(store, {"reward_mean": [(1, 0.1), (2, 0.4)]}, episodes)


def runs_of(mlflow: Any, store: Store, study: str) -> dict[str, Any]:
    experiment = mlflow.get_experiment_by_name(experiment_name(store.studies.get(study)))
    found = mlflow.search_runs([experiment.experiment_id])
    runs = {run.data.tags["swarm.key"]: run for run in found}
    assert len(runs) == len(found)
    return runs


def test_a_study_is_copied_with_its_curves_and_artifacts(
    store: Store, sink: MlflowSink, mlflow: Any, tmp_path: Path
) -> None:
    study, done, failed = a_study(store)
    assert sink.drain(study) > 0
    assert store.outbox.state("mlflow", study) == (0, None)
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
    assert store.trials.get(study, failed).status == TrialStatus.FAILED
    spec = Path(mlflow.download_artifacts(good.info.run_id, "spec.json", str(tmp_path)))
    assert json.loads(spec.read_text()) == {"seed": 0}
    why = Path(mlflow.download_artifacts(bad.info.run_id, "attempts/1-failed.txt", str(tmp_path)))
    assert why.read_text() == "no reason"
    assert [each.path for each in mlflow.list_artifacts(good.info.run_id)] == ["blueprint.json", "spec.json"]


def test_a_topic_that_is_longer_than_a_note_may_be_is_cut(store: Store, sink: MlflowSink, mlflow: Any) -> None:
    study = store.studies.create("a" * 30_000, {})
    sink.drain(study)
    assert store.outbox.state("mlflow", study) == (0, None)


def test_two_that_copy_at_once_leave_one_of_each(
    store: Store, sink: MlflowSink, mlflow: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    study, done, failed = a_study(store)
    waiting, looked, copied = len(store.outbox.unsent("mlflow", study)), threading.Event(), threading.Event()
    find = sink._find

    def find_and_dawdle(client: Any, study: Any, key: str) -> str | None:
        found = find(client, study, key)
        if found is None and not looked.is_set():
            looked.set()
            copied.wait(0.5)
        return found

    monkeypatch.setattr(sink, "_find", find_and_dawdle)
    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(sink.drain, study)
        assert looked.wait(60)
        second = MlflowSink(store, sink.tracking_uri).drain(study)
        copied.set()
        assert first.result(60) + second == waiting
    assert set(runs_of(mlflow, store, study)) == {"stage:compare", f"trial:{done}", f"trial:{failed}"}


def test_sampled_episodes_are_traces_of_the_trials_run_and_sent_again_they_are_the_same(
    store: Store, sink: MlflowSink, mlflow: Any
) -> None:
    study, done, failed = a_study(store)
    send_without_marking(store, sink, study)
    sink.drain(study)
    runs = runs_of(mlflow, store, study)
    where = {"locations": [runs["stage:compare"].info.experiment_id]}
    traces = {trace.info.client_request_id: trace for trace in mlflow.search_traces(**where)}
    assert set(traces) == {"ep-1", "ep-2"}
    assert len(mlflow.search_traces(**where)) == 2
    of_run = mlflow.search_traces(**where, run_id=runs[f"trial:{done}"].info.run_id)
    assert {trace.info.client_request_id for trace in of_run} == {"ep-1", "ep-2"}
    assert mlflow.search_traces(**where, run_id=runs[f"trial:{failed}"].info.run_id) == []
    trace = traces["ep-1"]
    assert (trace.info.tags["swarm.reward"], trace.info.tags["swarm.arm"], trace.info.tags["swarm.fate"]) == (
        "1", ARMS[0], "trained"
    )  # fmt: skip
    assert (trace.info.request_time, trace.info.execution_duration) == (100_000, 2000)
    assert trace.info.token_usage == {"input_tokens": 14, "output_tokens": 5, "total_tokens": 19}
    root, first, last = trace.data.spans
    assert (root.span_type, root.parent_id, root.outputs["reward"]) == ("AGENT", None, 1.0)
    assert (first.parent_id, first.name, last.name) == (root.span_id, "solver", "agent")
    assert first.inputs == {"messages": [{"role": "user", "content": "2 + 2 = ?"}]}
    assert first.outputs["content"] == "4"
    assert last.attributes["mlflow.chat.tokenUsage"] == {"input_tokens": 7, "output_tokens": 3, "total_tokens": 10}
    assert (first.end_time_ns - first.start_time_ns, first.attributes["swarm.weights_step"]) == (250_000_000, 3)


def test_one_filter_finds_the_best_of_an_arm(store: Store, sink: MlflowSink, mlflow: Any) -> None:
    study, done, _ = a_study(store)
    sink.drain(study)
    experiment = mlflow.get_experiment_by_name(experiment_name(store.studies.get(study)))
    asked = f"params.arm = '{ARMS[0]}' and tags.`swarm.stage` = 'compare' and tags.`swarm.hypothesis` LIKE '%H1%'"
    [found] = mlflow.search_runs([experiment.experiment_id], asked, order_by=["metrics.`final.heldout_accuracy` DESC"])
    assert found.data.tags["swarm.key"] == f"trial:{done}"


def test_the_saved_view_shows_the_arms_curves_and_nothing_has_to_be_arranged(
    store: Store, sink: MlflowSink, mlflow: Any
) -> None:
    study, done, failed = a_study(store)
    sink.drain(study)
    experiment = mlflow.get_experiment_by_name(experiment_name(store.studies.get(study)))
    key = re.search(r"viewStateShareKey=(\w+)", sink.page(study))
    assert key is not None
    view = json.loads(experiment.tags[f"mlflow.sharedViewState.{key[1]}"])
    assert view["groupBy"]["groupByKeys"] == [{"mode": "param", "groupByData": "arm"}]
    shown = mlflow.search_runs([experiment.experiment_id], view["searchFilter"])
    assert {run.data.tags["swarm.key"] for run in shown} == {f"trial:{done}", f"trial:{failed}"}
    assert len({run.data.tags["mlflow.runColor"] for run in shown}) == 2
    assert experiment.tags["mlflow.experimentKind"] == "custom_model_development"
    assert "4e-5 learns faster" in shown[0].data.tags["mlflow.note.content"]
    stage = runs_of(mlflow, store, study)["stage:compare"]
    assert stage.data.tags["mlflow.note.content"] == f"compare: 3 to 5 seeds, starting at 0, of {ARMS[0]}, {ARMS[1]}"
    assert experiment.tags["mlflow.note.content"].startswith("Does it work?")


def test_the_saved_view_opens_with_reward_and_what_decides() -> None:
    plan = example_plan()
    deciding = plan.hypotheses[0].metric
    for every, lines in ((0, [["reward_mean"]]), (2, [["reward_mean", "heldout_reward"], ["heldout_success"]])):
        tags = view_tags(plan.model_copy(update={"heldout_every": every}))
        view = json.loads(tags["mlflow.sharedViewState.arms"])
        charts = view["compareRunCharts"]
        assert [chart["selectedMetricKeys"] for chart in charts[:-1]] == lines
        assert (charts[-1]["type"], charts[-1]["metricKey"]) == ("BAR", f"final.{deciding}")
        first, rest = view["compareRunSections"]
        assert {chart["metricSectionId"] for chart in charts} == {first["uuid"]}
        assert (first["name"], rest["name"]) == ("Learning", "Model metrics")  # the latter is MLflow's own
    assert "compareRunCharts" not in json.loads(view_tags(None)["mlflow.sharedViewState.arms"])


def test_verdict_and_report_are_added_to_what_is_there(
    store: Store, sink: MlflowSink, mlflow: Any, tmp_path: Path
) -> None:
    study, done, _ = a_study(store)
    sink.drain(study)
    report = tmp_path / "report.md"
    report.write_text("# Yes")
    store.verdicts.record(
        study, "compare", VerdictRecord(hypothesis="H1", verdict=Verdict.SUPPORTED, reason="", effect=None)
    )
    store.plans.set_stage_status(study, "compare", "done")
    store.reports.record(study, {"markdown": str(report)}, SEAL)
    store.studies.set_status(study, StudyStatus.DONE)
    sink.drain(study)
    runs = runs_of(mlflow, store, study)
    assert runs[f"trial:{done}"].data.tags["swarm.verdict.H1"] == "supported"
    assert runs["stage:compare"].info.status == "FINISHED"
    assert [item.path for item in mlflow.list_artifacts(runs["report"].info.run_id)] == ["report.md"]
    experiment = mlflow.get_experiment_by_name(experiment_name(store.studies.get(study)))
    assert "H1: supported" in experiment.tags["mlflow.note.content"]
    assert experiment.tags["swarm.status"] == "done"


@pytest.mark.parametrize(("ends", "run"), [(StudyStatus.STOPPED, "KILLED"), (StudyStatus.FAILED, "FAILED")])
def test_what_a_study_left_unfinished_is_there_with_what_broke_it(
    store: Store, clock: ManualClock, sink: MlflowSink, mlflow: Any, tmp_path: Path, ends: StudyStatus, run: str
) -> None:
    study = store.studies.create("Does it work?", {})
    store.plans.save(study, example_plan())
    clock.advance(10)
    began = clock.now()
    store.plans.set_stage_status(study, "compare", "running")
    [trial] = store.trials.ensure(study, "compare", [(ARMS[0], 0)])
    store.trials.record_intent(study, trial.key, 1, "http://a", "k", {"seed": 0})
    store.journal.record(study, "client_failed", {"trial": trial.key, "trace": "KeyError: 'total'"})
    sink.drain(study)
    assert runs_of(mlflow, store, study)["stage:compare"].info.status == "RUNNING"
    clock.advance(10)
    store.studies.set_status(study, ends, "its code is wrong")
    sink.drain(study)
    runs = runs_of(mlflow, store, study)
    stage, broken = runs["stage:compare"], runs[f"trial:{trial.key}"]
    assert (stage.info.status, broken.info.status) == (run, run)
    assert (stage.info.start_time, stage.info.end_time) == (int(began * 1000), int((began + 10) * 1000))
    why = Path(mlflow.download_artifacts(broken.info.run_id, "failures/1.json", str(tmp_path)))
    assert json.loads(why.read_text())["trace"] == "KeyError: 'total'"
    store.studies.set_status(study, StudyStatus.RUNNING)
    store.plans.set_stage_status(study, "compare", "running")
    sink.drain(study)
    assert runs_of(mlflow, store, study)["stage:compare"].info.status == "RUNNING"


@pytest.mark.parametrize(
    "arms", [("it's", 'it\'s "q"'), ("don't\\", "don_t\\"), ("100%", "100' or tags.`a` = 'b"), ('"q"', "a\nb's")]
)
def test_arms_whose_names_hold_quotes_have_one_run_each_with_the_verdict(
    store: Store, sink: MlflowSink, mlflow: Any, arms: tuple[str, str]
) -> None:
    study, *trials = sink_contract.a_study(store, arms=arms)
    keys = [f"trial:{key}" for key in trials]
    send_without_marking(store, sink, study)
    store.verdicts.record(
        study, "compare", VerdictRecord(hypothesis="H1", verdict=Verdict.SUPPORTED, reason="", effect=None)
    )
    again = MlflowSink(store, sink.tracking_uri)
    again.drain(study)
    runs = runs_of(mlflow, store, study)
    assert set(runs) == {"stage:compare", *keys}
    assert [runs[key].data.tags.get("swarm.verdict.H1") for key in keys] == ["supported", "supported"]
    pages = [again.page(study, key) for key in trials]
    assert [page.rpartition("/")[2] for page in pages] == [runs[key].info.run_id for key in keys]


def test_a_database_named_by_a_relative_path_is_written_there(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    study, _, _ = a_study(store)
    assert MlflowSink(store, "sqlite:///mlflow.db").drain(study) > 0
    assert store.outbox.state("mlflow", study) == (0, None)
    assert (tmp_path / "mlflow.db").exists()
    assert list((tmp_path / "mlartifacts").rglob("spec.json"))


def test_a_database_whose_driver_is_absent_is_said(store: Store) -> None:
    study, _, _ = a_study(store)
    away = MlflowSink(store, "mysql://root:hunter2@127.0.0.1/mlflow")
    assert away.drain(study) == 0
    assert "MySQLdb" in str(store.outbox.state("mlflow", study)[1])
    with pytest.raises(MlflowAway, match="MySQLdb") as said:
        away.page(study)
    assert "hunter2" not in str(said.value)


def test_a_database_that_is_down_is_said_at_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def try_for_minutes(uri: str) -> None:
        raise AssertionError("MLflow's own patience was reached")

    monkeypatch.setattr("mlflow.store.db.utils.create_sqlalchemy_engine_with_retry", try_for_minutes)
    study, _, _ = a_study(store)
    assert MlflowSink(store, "postgresql+psycopg://me@127.0.0.1:9/mlflow").drain(study) == 0
    assert "connection" in str(store.outbox.state("mlflow", study)[1])


def experiment_of(mlflow: Any, study: str) -> Any:
    [found] = mlflow.search_experiments(filter_string=f"tags.`swarm.study` = '{study}'")
    return found


def test_an_experiment_that_a_person_renamed_stays_the_studys(store: Store, sink: MlflowSink, mlflow: Any) -> None:
    study, _, _ = a_study(store)
    sink.drain(study)
    mlflow.rename_experiment(experiment_of(mlflow, study).experiment_id, f"mine {study}")
    store.studies.set_status(study, StudyStatus.DONE)
    assert sink.drain(study) == 1
    assert experiment_of(mlflow, study).name == f"mine {study}"
    assert experiment_of(mlflow, study).tags["swarm.status"] == "done"


def test_an_experiment_that_a_person_deleted_is_not_made_again_and_how_to_restore_it_is_said(
    store: Store, sink: MlflowSink, mlflow: Any
) -> None:
    study, _, _ = a_study(store)
    sink.drain(study)
    gone = experiment_of(mlflow, study).experiment_id
    mlflow.delete_experiment(gone)
    store.studies.set_status(study, StudyStatus.DONE)
    assert sink.drain(study) == 0
    assert f"mlflow experiments restore --experiment-id {gone}" in str(store.outbox.state("mlflow", study)[1])
    with pytest.raises(MlflowAway, match="was deleted"):
        sink.page(study)
    mlflow.restore_experiment(gone)
    assert sink.drain(study) == 1


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


def test_signs_of_urls_in_the_name_of_a_home_are_part_of_mlflows_place_too(tmp_path: Path, store: Store) -> None:
    home = tmp_path / "50%20 of? it"
    home.mkdir()
    study, _, _ = a_study(store)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sink = MlflowSink(store, default_tracking_uri({"RESEARCHER_HOME": str(home)}))
        assert sink.drain(study) > 0
    assert store.outbox.state("mlflow", study)[1] is None
    assert {"mlflow.db", "mlartifacts"} <= {file.name for file in home.iterdir()}


def test_pages_of_a_study_and_of_its_trials_are_found(store: Store, sink: MlflowSink, mlflow: Any) -> None:
    study, done, _ = a_study(store)
    with pytest.raises(MlflowAway, match="is not in MLflow yet"):
        sink.page(study)  # nothing was sent yet, and looking makes nothing
    sink.drain(study)
    experiment = sink.page(study)
    assert sink.page(study, "none") == experiment
    run = sink.page(study, done)
    assert run.startswith(f"{experiment.partition('?')[0]}/")
    assert mlflow.get_run(run.rpartition("/")[2]).data.tags["swarm.key"] == f"trial:{done}"


def test_an_outage_is_said_when_a_page_is_asked_for(store: Store) -> None:
    study, _, _ = a_study(store)
    with pytest.raises(MlflowAway, match="does not answer"):
        MlflowSink(store, "http://127.0.0.1:9").page(study)
