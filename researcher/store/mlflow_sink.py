"""Copies the records to MLflow: one experiment per study, a run per stage, a child run per trial, the report as an artifact.

SQL is the source of truth. The sink reads changes from the outbox and looks up the current state when it sends them. Sending a
change twice still leaves one run, so a crash or an outage costs only time. Only this file and `mlflow_traces.py` import mlflow.
The import takes seconds, so it waits until the first `drain`.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import NullPool, create_engine
from sqlalchemy.engine import make_url
from sqlalchemy.exc import SQLAlchemyError

from foundation.locks import locked
from foundation.logs import redact
from foundation.paths import user_data_dir
from foundation.streams import one_line
from researcher.instruments.instrument import HELDOUT_REWARD, HELDOUT_SUCCESS
from researcher.models import LONGEST_TOPIC, StudyRecord, StudyStatus, TrialRecord, TrialStatus
from researcher.store.database import sqlite_url
from researcher.store.errors import MlflowAway
from researcher.store.mlflow_traces import send_episodes
from researcher.store.outbox import Message
from researcher.store.sink import CopyFailed, CopySink, params_of, points_of, tags_of
from researcher.store.store import Store
from researcher.study.plan import Plan, Stage

KEY = "swarm.key"
"""Tag that identifies a run: `stage:<id>`, `trial:<key>` or `report`."""
_STUDY = "swarm.study"
"""Tag that identifies a study's experiment."""
_PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20"}
"""Keeps MLflow from retrying for minutes while we wait; the outbox retries instead."""
_CONNECT_S = 5
_NETWORKED = ("postgresql", "mysql")
"""Kinds of database servers that MLflow may use. Their drivers all accept `connect_timeout`."""
_NOTE, _COLOUR = "mlflow.note.content", "mlflow.runColor"
_PALETTE = ("#077A9D", "#C82D4C", "#00875C", "#B45F06", "#8A63BF", "#5D7283", "#AC9A2D", "#E65B77")
_WILD = str.maketrans("'\\", "__")
_CUT_OFF = {StudyStatus.STOPPED: "KILLED", StudyStatus.FAILED: "FAILED"}
"""MLflow status for unfinished runs of a study that stopped or failed."""
_METRICS_PER_BATCH = 1000  # MLflow's limit


def default_tracking_uri(environ: Mapping[str, str] | None = None) -> str:
    """Return `MLFLOW_TRACKING_URI`, or else the URI of a SQLite file in the user data directory."""
    env = os.environ if environ is None else environ
    return env.get("MLFLOW_TRACKING_URI") or sqlite_url(user_data_dir(env) / "mlflow.db")


def experiment_name(study: StudyRecord) -> str:
    return f"{study.id}: {one_line(study.topic)[:120]}"


@dataclass(slots=True)
class _Study:
    """A study's data, looked up once per drain."""

    record: StudyRecord
    plan: Plan | None
    experiment_id: str
    runs: dict[str, str] = field(default_factory=dict)
    """MLflow run ids, by the value of the `KEY` tag."""


class MlflowSink(CopySink):
    """Copies studies to MLflow; see the module's docstring."""

    name = "mlflow"

    def __init__(self, store: Store, tracking_uri: str | None = None) -> None:
        super().__init__(store)
        self.tracking_uri = tracking_uri or default_tracking_uri()
        self._client: Any = None
        self._studies: dict[str, _Study] = {}

    def place(self) -> str:
        return redact(self.tracking_uri)

    def drain(self, study_id: str | None = None) -> int:
        self._studies.clear()  # the cached data may have changed since the last drain
        return super().drain(study_id)

    def _send(self, message: Message) -> None:
        try:
            client = self._open()
            if message.study_id not in self._studies:
                self._studies[message.study_id] = self._study(client, message.study_id)
            self._send_kind(client, self._studies[message.study_id], message)
        except self._outages() as error:
            raise CopyFailed(str(error)) from error

    def page(self, study_id: str, trial_key: str | None = None) -> str:
        """Return the path of a page in MLflow's UI: the run of `trial_key` if it was already sent, else the study's curves by arm.

        Raises: MlflowAway.
        """
        try:
            client, record = self._open(), self._store.studies.get(study_id)
            experiment_id = self._known_experiment(client, record)
            if experiment_id is None:
                raise MlflowAway(f"{study_id} is not in MLflow yet; `researcher copy {study_id}` sends it")
            study = _Study(record, None, experiment_id)
            run_id = None if trial_key is None else self._find(client, study, f"trial:{trial_key}")
        except CopyFailed as error:
            raise MlflowAway(str(error)) from error
        except self._outages() as error:
            raise MlflowAway(redact(f"MLflow at {self.tracking_uri} does not answer: {error}")) from error
        return page_of(experiment_id, run_id)

    def _outages(self) -> tuple[type[Exception], ...]:
        """Return the exceptions that mean the copy cannot be written now: from MLflow, its database, a missing driver or the OS."""
        from mlflow.exceptions import MlflowException

        return (MlflowException, SQLAlchemyError, ImportError, OSError)

    def _open(self) -> Any:
        """Return MLflow's client. It is created on first use, because the import takes seconds."""
        if self._client is None:
            for name, value in _PATIENCE.items():
                os.environ.setdefault(name, value)
            from mlflow.tracking import MlflowClient

            for noisy in ("mlflow", "alembic"):
                logging.getLogger(noisy).setLevel(logging.WARNING)
            if (database := self._file()) is not None:
                _made_whole(database, MlflowClient)
            elif self.tracking_uri.startswith(_NETWORKED):
                _answers(self.tracking_uri)
            self._client = MlflowClient(self.tracking_uri)
        return self._client

    def _study(self, client: Any, study_id: str) -> _Study:
        record = self._store.studies.get(study_id)
        return _Study(record, self._plan(study_id), self._experiment(client, record))

    def _experiment(self, client: Any, study: StudyRecord) -> str:
        """Return the id of the study's experiment; create the experiment if missing. Raises: CopyFailed if a person deleted it."""
        known = self._known_experiment(client, study)
        if known is not None:
            return known
        return str(client.create_experiment(experiment_name(study), self._artifacts(), {_STUDY: study.id}))

    def _known_experiment(self, client: Any, study: StudyRecord) -> str | None:
        """Return the id of the study's experiment, even if a person renamed it, or None if there is none.

        Raises: CopyFailed if a person deleted it; the sink never brings it back.
        """
        from mlflow.entities import ViewType

        name = experiment_name(study)
        asked = f"tags.`{_STUDY}` = '{study.id}'"
        found = client.search_experiments(ViewType.ALL, filter_string=asked, order_by=["creation_time ASC"])
        if not found and (named := client.get_experiment_by_name(name)) is not None:
            found = [named]
        if not found:
            return None
        alive = [each for each in found if each.lifecycle_stage == "active"]
        if not alive:
            how = f"`mlflow experiments restore --experiment-id {found[0].experiment_id}` brings it back"
            raise CopyFailed(f"the experiment {found[0].name!r} was deleted in MLflow; {how}")
        return str(alive[0].experiment_id)

    def _artifacts(self) -> str | None:
        """Return the artifact folder next to a local database, or None for a server, which has its own."""
        database = self._file()
        return None if database is None else (database.absolute().parent / "mlartifacts").as_uri()

    def _file(self) -> Path | None:
        """Return the file of a local database, or None if MLflow's URI names a server."""
        if not self.tracking_uri.startswith("sqlite:///"):
            return None
        return Path(make_url(self.tracking_uri).database or "")

    def _send_kind(self, client: Any, study: _Study, message: Message) -> None:
        if message.kind == "study":
            self._send_study(client, study)
        elif message.kind == "stage":
            self._send_stage(client, study, message.ref)
        elif message.kind == "trial":
            self._send_trial(client, study, self._store.trials.get(study.record.id, message.ref))
        elif message.kind == "verdict":
            self._send_verdict(client, study, message.ref)
        elif message.kind == "report":
            self._send_report(client, study)
        else:
            raise ValueError(f"the outbox holds a message of unknown kind {message.kind!r}")

    # -- one method per kind of message -------------------------------------------------------------------------------

    def _send_study(self, client: Any, study: _Study) -> None:
        tags = {
            _STUDY: study.record.id,
            "swarm.status": study.record.status,
            _NOTE: self._note(study),
            **view_tags(study.plan),
        }
        if study.plan is not None:
            tags["swarm.plan_hash"] = study.plan.digest()
            tags["swarm.planner"] = study.record.planned_by(study.plan)
        for key, value in tags.items():
            client.set_experiment_tag(study.experiment_id, key, str(value))
        if study.record.status in _CUT_OFF:
            self._send_cut_off(client, study)

    def _send_cut_off(self, client: Any, study: _Study) -> None:
        """End the unfinished runs of a stopped or failed study: its stages, and its started trials with their errors."""
        for trial in self._store.trials.all(study.record.id, series=()):
            if trial.attempt and not trial.status.ended:
                self._send_trial(client, study, trial)
        for stage, status in self._store.plans.stage_status(study.record.id).items():
            if status == "running":
                self._end_stage(client, study, stage)

    def _note(self, study: _Study) -> str:
        lines = [study.record.topic[:LONGEST_TOPIC], "", f"Status: {study.record.status}"]
        lines += [f"- {verdict.hypothesis}: {verdict.verdict}" for verdict in self._store.verdicts.all(study.record.id)]
        lines += [f"Report ({name}): {path}" for name, path in self._store.reports.files(study.record.id).items()]
        return "\n".join(lines)

    def _send_stage(self, client: Any, study: _Study, stage: str) -> None:
        client.set_tag(self._stage_run(client, study, stage), _NOTE, _stage_note(study.plan, stage))
        self._end_stage(client, study, stage)

    def _stage_run(self, client: Any, study: _Study, stage: str) -> str:
        began, _ = self._store.plans.stage_times(study.record.id).get(stage, (None, None))
        return self._run(client, study, f"stage:{stage}", stage, began or study.record.created_at, {})

    def _end_stage(self, client: Any, study: _Study, stage: str) -> None:
        """Set the status of the stage's run to match SQL: done, ended with its study, or running again after `resume`."""
        run_id = self._stage_run(client, study, stage)
        _, ended = self._store.plans.stage_times(study.record.id).get(stage, (None, None))
        if ended is not None:
            client.set_terminated(run_id, "FINISHED", int(ended * 1000))
        elif not _cut_off(client, study, run_id):
            client.update_run(run_id, "RUNNING")

    def _send_trial(self, client: Any, study: _Study, trial: TrialRecord) -> None:
        from mlflow.entities import Metric, Param, RunTag

        started = trial.started_at or study.record.created_at
        parent = self._stage_run(client, study, trial.stage)
        run_id = self._run(
            client,
            study,
            f"trial:{trial.key}",
            f"{trial.arm} seed {trial.seed}",
            started,
            {"mlflow.parentRunId": parent},
        )
        attempts = self._store.trials.attempts(study.record.id, trial.key)
        blueprint = (attempts[-1].blueprint or {}) if attempts else {}
        params = [Param(name, str(value)) for name, value in params_of(study.plan, trial).items()]
        told = {
            **tags_of(study.plan, trial, blueprint),
            _COLOUR: _colour(study.plan, trial),
            _NOTE: _trial_note(study, trial),
        }
        tags = [RunTag(name, value) for name, value in told.items()]
        client.log_batch(run_id, params=params, tags=tags)
        ended = trial.status.ended  # the times of points are only stable once the trial has ended
        points = [Metric(name, value, at, step) for name, value, at, step in points_of(trial, started) if ended]
        for begin in range(0, len(points), _METRICS_PER_BATCH):
            client.log_batch(run_id, metrics=points[begin : begin + _METRICS_PER_BATCH])
        if attempts:
            held = trial.evidence.spec if trial.evidence is not None else None  # the server's spec, if known
            client.log_dict(run_id, held or attempts[-1].spec, "spec.json")
            client.log_dict(run_id, blueprint, "blueprint.json")
        for attempt in attempts:
            if attempt.reason:  # includes the client's last words
                client.log_text(run_id, redact(attempt.reason), f"attempts/{attempt.number}-{attempt.outcome}.txt")
        failures = self._store.journal.events(study.record.id, "client_failed", trial=trial.key)
        for number, failure in enumerate(failures, start=1):
            client.log_dict(run_id, failure.detail, f"failures/{number}.json")
        episodes = self._store.trials.sampled_episodes(study.record.id, trial.key)
        send_episodes(self.tracking_uri, study.experiment_id, run_id, trial, episodes)
        status = {TrialStatus.DONE: "FINISHED", TrialStatus.FAILED: "FAILED"}.get(trial.status)
        if status is not None:
            client.set_terminated(run_id, status, int((trial.ended_at or started) * 1000))
        else:
            _cut_off(client, study, run_id)

    def _send_verdict(self, client: Any, study: _Study, hypothesis: str) -> None:
        """Tag every run of the hypothesis's arms with the verdict."""
        verdicts = {record.hypothesis: record.verdict for record in self._store.verdicts.all(study.record.id)}
        planned = [] if study.plan is None else [one for one in study.plan.hypotheses if one.id == hypothesis]
        arms = {arm for one in planned for arm in one.sides}
        for trial in self._store.trials.all(study.record.id):
            run_id = self._find(client, study, f"trial:{trial.key}") if trial.arm in arms else None
            if run_id is not None and hypothesis in verdicts:
                client.set_tag(run_id, f"swarm.verdict.{hypothesis}", str(verdicts[hypothesis]))

    def _send_report(self, client: Any, study: _Study) -> None:
        written = [event.at for event in self._store.journal.events(study.record.id, "report")]
        run_id = self._run(client, study, "report", "report", min(written, default=study.record.created_at), {})
        for path in self._store.reports.files(study.record.id).values():
            if Path(path).is_file():
                client.log_artifact(run_id, path)
        client.set_terminated(run_id, "FINISHED", int(max(written, default=study.record.created_at) * 1000))
        self._send_study(client, study)

    # -- runs ---------------------------------------------------------------------------------------------------------

    def _run(self, client: Any, study: _Study, key: str, name: str, at: float, tags: dict[str, str]) -> str:
        """Return the id of the run with this key; create the run if missing."""
        run_id = self._find(client, study, key)
        if run_id is None:
            made = client.create_run(
                study.experiment_id, int(at * 1000), {**tags, KEY: key, _STUDY: study.record.id}, name
            )
            run_id = study.runs[key] = str(made.info.run_id)
        return run_id

    def _find(self, client: Any, study: _Study, key: str) -> str | None:
        if key not in study.runs:
            found = client.search_runs([study.experiment_id], _asked(key))
            for run in found:
                if run.data.tags[KEY] == key:
                    study.runs[key] = str(run.info.run_id)
                    break
        return study.runs.get(key)


def _asked(key: str) -> str:
    """Return a filter that matches the run with this key, and possibly others.

    MLflow's string literals cannot contain a quote, so the wildcard `_`, which matches any one character, stands for it. In such
    keys `_` also replaces backslashes, because some databases treat them as escapes.
    """
    if "'" not in key:
        return f"tags.`{KEY}` = '{key}'"
    return f"tags.`{KEY}` LIKE '{key.translate(_WILD)}'"


def _colour(plan: Plan | None, trial: TrialRecord) -> str:
    """Return the colour of the trial's arm, the same for all its seeds."""
    arms = [] if plan is None else [arm.name for arm in plan.arms]
    return _PALETTE[arms.index(trial.arm) % len(_PALETTE) if trial.arm in arms else 0]


def _cut_off(client: Any, study: _Study, run_id: str) -> bool:
    """End an unfinished run if its study stopped or failed, and return whether it did."""
    status = _CUT_OFF.get(study.record.status)
    if status is not None:
        client.set_terminated(run_id, status, int((study.record.ended_at or study.record.updated_at) * 1000))
    return status is not None


def _stage_note(plan: Plan | None, stage: str) -> str:
    planned = [] if plan is None else [each for each in plan.stages if each.id == stage]
    return "\n".join(
        f"{each.kind.replace('_', ' ')}: {_seeds(each)} seeds, starting at {each.first_seed}, of {', '.join(each.arms)}"
        for each in planned
    )


def _seeds(stage: Stage) -> str:
    return str(stage.seeds) if stage.seeds == stage.max_seeds else f"{stage.seeds} to {stage.max_seeds}"


def _trial_note(study: _Study, trial: TrialRecord) -> str:
    levels = ", ".join(f"{name} = {value}" for name, value in params_of(study.plan, trial).items() if name != "arm")
    asked = [] if study.plan is None else [one for one in study.plan.hypotheses if trial.arm in one.sides]
    lines = [f"Stage {trial.stage}; {levels}.", *(f"- {one.id}: {one.statement}" for one in asked)]
    return "\n".join([*lines, f"`researcher show {trial.key}` has its blueprint."])


def _answers(database: str) -> None:
    """Connect once and raise any error. MLflow itself would retry for two minutes on every call."""
    engine = create_engine(database, poolclass=NullPool, connect_args={"connect_timeout": _CONNECT_S})
    engine.connect().close()


def _made_whole(database: Path, client: Callable[[str], Any]) -> None:
    """Let MLflow create its database under a temporary name, then rename it, so that a kill leaves no partial database."""
    if database.exists():
        return
    database.parent.mkdir(parents=True, exist_ok=True)
    path = database.with_name(f".{database.name}.lock")
    with path.open("w") as lock:
        locked(lock, path)
        if database.exists():
            return
        unfinished = database.with_name(f".{database.name}.new")
        unfinished.unlink(missing_ok=True)
        client(sqlite_url(unfinished)).search_experiments(max_results=1)
        unfinished.replace(database)


VIEW = "arms"
"""Key of the saved view in the page's URL."""
_TAG = f"mlflow.sharedViewState.{VIEW}"
_KIND = "mlflow.experimentKind"


_FIRST, _REST = "learning", "rest"
_REST_NAME = "Model metrics"
"""The UI's built-in section for metrics without a slash in their names. The UI sorts it alphabetically."""


def view_tags(plan: Plan | None) -> dict[str, str]:
    """Return the experiment's tags: the saved view, and a mark that its runs are training runs.

    Without the mark, the UI would guess the kind from the traces. The view starts with the reward and the deciding metrics by
    arm; all other charts follow. Metrics keep their names, so experiments of earlier versions look the same.
    """
    state: dict[str, Any] = {
        "searchFilter": "params.arm LIKE '%'",
        "orderByKey": "attributes.start_time",
        "orderByAsc": True,
        "groupBy": {"aggregateFunction": "average", "groupByKeys": [{"mode": "param", "groupByData": "arm"}]},
        "useGroupedValuesInCharts": True,
        "runsHiddenMode": "SHOW_ALL",
    }
    if plan is not None:
        state |= {
            "compareRunCharts": _first_charts(plan),
            "compareRunSections": [
                {"uuid": _FIRST, "name": "Learning", "display": True, "isReordered": True},
                {"uuid": _REST, "name": _REST_NAME, "display": True, "isReordered": False},
            ],
            "isAccordionReordered": False,
        }
    return {_TAG: json.dumps(state), _KIND: "custom_model_development"}


def _first_charts(plan: Plan) -> list[dict[str, Any]]:
    """Return the charts of the first section, in the format of MLflow's UI."""
    rewards = ["reward_mean", *([HELDOUT_REWARD] if plan.heldout_every else [])]
    name = "reward in training and on held-out tasks" if plan.heldout_every else "reward in training"
    lines = [(name, rewards), *([("success on held-out tasks", [HELDOUT_SUCCESS])] if plan.heldout_every else [])]
    deciding = dict.fromkeys(one.metric for one in plan.hypotheses)
    return [
        *(_chart("LINE", keys[0], name) | _LINE | {"selectedMetricKeys": keys} for name, keys in lines),
        *(_chart("BAR", f"final.{metric}", f"{metric}, which decides") for metric in deciding),
    ]


def _chart(kind: str, metric: str, name: str) -> dict[str, Any]:
    return {
        "uuid": f"{_FIRST}-{metric}",
        "type": kind,
        "runsCountToCompare": 10,
        "metricSectionId": _FIRST,
        "deleted": False,
        "isGenerated": False,
        "metricKey": metric,
        "displayName": name,
    }


_LINE = {
    "lineSmoothness": 0,
    "xAxisScaleType": "linear",
    "scaleType": "linear",
    "range": {},
    "xAxisKey": "step",
    "selectedXAxisMetricKey": "",
    "yAxisKey": "metric",
    "yAxisExpressions": [],
    "ignoreOutliers": False,
    "useGlobalXaxisKey": True,
    "useGlobalLineSmoothing": True,
}


def page_of(experiment_id: str, run_id: str | None = None) -> str:
    """Return the path of a page in MLflow's UI: one run, or the study's saved view."""
    if run_id is not None:
        return f"#/experiments/{experiment_id}/runs/{run_id}"
    return f"#/experiments/{experiment_id}/runs?viewStateShareKey={VIEW}&compareRunsMode=CHART"
