"""MLflow's copy of the records: one experiment per study, a run per stage, a child run per trial, the report as artifact.

SQL is the truth. What changed is read from the outbox, and looked up again when it is sent; sending the same thing twice
leaves one run, so a crash or an outage costs nothing but time. The only importer of mlflow, which takes seconds: nothing
is imported before the first `drain`.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy.exc import SQLAlchemyError

from foundation.logs import redact
from foundation.paths import user_data_dir
from researcher.models import Plan, StudyRecord, TrialRecord, TrialStatus
from researcher.store.errors import MlflowAway, NotFound
from researcher.store.outbox import Message
from researcher.store.store import Store

KEY = "swarm.key"
"""The tag by which a run is found again: `stage:<id>`, `trial:<key>` or `report`."""
_PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20"}
"""MLflow would retry for minutes by itself; here the outbox does that, and nobody waits."""
_METRICS_PER_BATCH = 1000  # MLflow refuses more


def default_tracking_uri(environ: Mapping[str, str] | None = None) -> str:
    """`MLFLOW_TRACKING_URI`, else a SQLite file in the user data directory."""
    env = os.environ if environ is None else environ
    return env.get("MLFLOW_TRACKING_URI") or f"sqlite:///{user_data_dir(env) / 'mlflow.db'}"


def experiment_name(study: StudyRecord) -> str:
    return f"{study.id}: {' '.join(study.topic.split())[:120]}"


@dataclass(slots=True)
class _Study:
    """What sending needs to know of one study, looked up once per drain."""

    record: StudyRecord
    plan: Plan | None
    experiment_id: str
    runs: dict[str, str] = field(default_factory=dict)
    """Run ids by key."""


class MlflowSink:
    """`drain` now and then, and at the end. Safe to call from a thread of its own."""

    def __init__(self, store: Store, tracking_uri: str | None = None) -> None:
        self._store = store
        self.tracking_uri = tracking_uri or default_tracking_uri()
        self._client: Any = None

    def drain(self, study_id: str | None = None) -> int:
        """Send what waits, oldest first; returns how many messages were sent.

        An outage ends the attempt, not the caller: the rest waits, and `store.outbox_state` has the error.
        """
        waiting = self._store.unsent(study_id)
        if not waiting:
            return 0
        studies: dict[str, _Study] = {}
        sent = 0
        for messages in _same(waiting):
            first = messages[0]
            try:
                client = self._open()
                if first.study_id not in studies:
                    studies[first.study_id] = self._study(client, first.study_id)
                self._send(client, studies[first.study_id], first)
            except self._outages() as error:
                logging.getLogger(__name__).warning("MLflow did not take %s: %s", first.kind, error)
                self._store.mark_unsent(first.seq, redact(str(error))[:500])
                break
            for message in messages:
                self._store.mark_sent(message.seq)
            sent += len(messages)
        return sent

    def page(self, study_id: str, trial_key: str | None = None) -> str:
        """The page in MLflow's UI, below its address: of a study, or of one trial's run where that was sent already.

        Raises: MlflowAway.
        """
        try:
            client = self._open()
            study = self._study(client, study_id)
            run_id = None if trial_key is None else self._find(client, study, f"trial:{trial_key}")
        except self._outages() as error:
            raise MlflowAway(redact(f"MLflow at {self.tracking_uri} does not answer: {error}")) from error
        return f"#/experiments/{study.experiment_id}" + ("" if run_id is None else f"/runs/{run_id}")

    def _outages(self) -> tuple[type[Exception], ...]:
        """What a copy that cannot be written may raise: MLflow's own, its database's, the system's."""
        from mlflow.exceptions import MlflowException

        return (MlflowException, SQLAlchemyError, OSError)

    def _open(self) -> Any:
        """MLflow's client; its import takes seconds, so it waits for the first message."""
        if self._client is None:
            for name, value in _PATIENCE.items():
                os.environ.setdefault(name, value)
            from mlflow.tracking import MlflowClient

            for noisy in ("mlflow", "alembic"):
                logging.getLogger(noisy).setLevel(logging.WARNING)
            if self.tracking_uri.startswith("sqlite:///"):
                _made_whole(Path(self.tracking_uri.removeprefix("sqlite:///")), MlflowClient)
            self._client = MlflowClient(self.tracking_uri)
        return self._client

    def _study(self, client: Any, study_id: str) -> _Study:
        record = self._store.study(study_id)
        try:
            plan = self._store.plan(study_id)
        except NotFound:
            plan = None
        name = experiment_name(record)
        found = client.get_experiment_by_name(name)
        experiment_id = found.experiment_id if found else client.create_experiment(name, self._artifacts())
        return _Study(record, plan, experiment_id)

    def _artifacts(self) -> str | None:
        """Beside a local database; a server has a place of its own."""
        if not self.tracking_uri.startswith("sqlite:///"):
            return None
        return (Path(self.tracking_uri.removeprefix("sqlite:///")).parent / "mlartifacts").as_uri()

    def _send(self, client: Any, study: _Study, message: Message) -> None:
        if message.kind == "study":
            self._send_study(client, study)
        elif message.kind == "stage":
            self._send_stage(client, study, message.ref)
        elif message.kind == "trial":
            self._send_trial(client, study, self._store.trial(study.record.id, message.ref))
        elif message.kind == "verdict":
            self._send_verdict(client, study, message.ref)
        elif message.kind == "report":
            self._send_report(client, study)
        else:
            raise ValueError(f"the outbox holds a message of unknown kind {message.kind!r}")

    # -- one kind each ------------------------------------------------------------------------------------------------

    def _send_study(self, client: Any, study: _Study) -> None:
        tags = {
            "swarm.study": study.record.id,
            "swarm.status": study.record.status,
            "mlflow.note.content": self._note(study),
        }
        if study.plan is not None:
            tags["swarm.plan_hash"] = study.plan.digest()
            tags["swarm.planner"] = study.plan.planner
        for key, value in tags.items():
            client.set_experiment_tag(study.experiment_id, key, str(value))

    def _note(self, study: _Study) -> str:
        lines = [study.record.topic, "", f"Status: {study.record.status}"]
        lines += [f"- {verdict.hypothesis}: {verdict.verdict}" for verdict in self._store.verdicts(study.record.id)]
        lines += [f"Report ({name}): {path}" for name, path in self._store.report_files(study.record.id).items()]
        return "\n".join(lines)

    def _send_stage(self, client: Any, study: _Study, stage: str) -> None:
        run_id = self._run(client, study, f"stage:{stage}", stage, study.record.created_at, {})
        if self._store.stage_status(study.record.id).get(stage) == "done":
            client.set_terminated(run_id, "FINISHED")

    def _send_trial(self, client: Any, study: _Study, trial: TrialRecord) -> None:
        from mlflow.entities import Metric, Param, RunTag

        started = trial.started_at or study.record.created_at
        parent = self._run(client, study, f"stage:{trial.stage}", trial.stage, started, {})
        run_id = self._run(
            client,
            study,
            f"trial:{trial.key}",
            f"{trial.arm} seed {trial.seed}",
            started,
            {"mlflow.parentRunId": parent},
        )
        attempts = self._store.attempts(study.record.id, trial.key)
        blueprint = (attempts[-1].blueprint or {}) if attempts else {}
        params = [Param(name, str(value)) for name, value in _params(study.plan, trial).items()]
        tags = [RunTag(name, value) for name, value in _tags(study.plan, trial, blueprint).items()]
        client.log_batch(run_id, params=params, tags=tags)
        points = [Metric(name, value, at, step) for name, value, at, step in _points(trial, started)]
        for begin in range(0, len(points), _METRICS_PER_BATCH):
            client.log_batch(run_id, metrics=points[begin : begin + _METRICS_PER_BATCH])
        if attempts:
            client.log_dict(run_id, attempts[-1].spec, "spec.json")
            client.log_dict(run_id, blueprint, "blueprint.json")
        status = {TrialStatus.DONE: "FINISHED", TrialStatus.FAILED: "FAILED"}.get(trial.status)
        if status is not None:
            client.set_terminated(run_id, status, int((trial.ended_at or started) * 1000))

    def _send_verdict(self, client: Any, study: _Study, hypothesis: str) -> None:
        """The verdict as a tag on every run of the hypothesis' arms."""
        verdicts = {record.hypothesis: record.verdict for record in self._store.verdicts(study.record.id)}
        planned = [] if study.plan is None else [one for one in study.plan.hypotheses if one.id == hypothesis]
        arms = {arm for one in planned for arm in one.sides}
        for trial in self._store.trials(study.record.id):
            run_id = self._find(client, study, f"trial:{trial.key}") if trial.arm in arms else None
            if run_id is not None and hypothesis in verdicts:
                client.set_tag(run_id, f"swarm.verdict.{hypothesis}", str(verdicts[hypothesis]))

    def _send_report(self, client: Any, study: _Study) -> None:
        run_id = self._run(client, study, "report", "report", study.record.created_at, {})
        for path in self._store.report_files(study.record.id).values():
            if Path(path).is_file():
                client.log_artifact(run_id, path)
        client.set_terminated(run_id, "FINISHED")
        self._send_study(client, study)

    # -- runs ---------------------------------------------------------------------------------------------------------

    def _run(self, client: Any, study: _Study, key: str, name: str, at: float, tags: dict[str, str]) -> str:
        """The run of that key, made where it is not there yet."""
        run_id = self._find(client, study, key)
        if run_id is None:
            made = client.create_run(
                study.experiment_id, int(at * 1000), {**tags, KEY: key, "swarm.study": study.record.id}, name
            )
            run_id = study.runs[key] = str(made.info.run_id)
        return run_id

    def _find(self, client: Any, study: _Study, key: str) -> str | None:
        if key not in study.runs:
            quoted = key.replace("'", "\\'")
            found = client.search_runs([study.experiment_id], f"tags.`{KEY}` = '{quoted}'", max_results=1)
            if not found:
                return None
            study.runs[key] = str(found[0].info.run_id)
        return study.runs[key]


def _same(waiting: list[Message]) -> Iterator[list[Message]]:
    """Messages about the same thing, together: it is looked up when it is sent, so once is enough."""
    grouped: dict[tuple[str, str, str], list[Message]] = {}
    for message in waiting:
        grouped.setdefault((message.study_id, message.kind, message.ref), []).append(message)
    yield from grouped.values()


def _params(plan: Plan | None, trial: TrialRecord) -> dict[str, object]:
    levels = {} if plan is None else next((arm.levels for arm in plan.arms if arm.name == trial.arm), {})
    return {"arm": trial.arm, "seed": trial.seed, **levels}


def _tags(plan: Plan | None, trial: TrialRecord, blueprint: Mapping[str, Any]) -> dict[str, str]:
    tags = {"swarm.arm": trial.arm, "swarm.seed": str(trial.seed), "swarm.stage": trial.stage}
    tags["swarm.status"] = trial.status
    tags["swarm.attempts"] = str(trial.attempt)
    if trial.reason:
        tags["swarm.reason"] = trial.reason[:5000]
    if plan is not None:
        concerned = [one.id for one in plan.hypotheses if trial.arm in one.sides]
        tags["swarm.hypothesis"] = ",".join(concerned)
        tags["swarm.plan_hash"] = plan.digest()
    if "code_version" in blueprint:
        tags["swarm.code_version"] = str(blueprint["code_version"])
    return tags


def _points(trial: TrialRecord, started: float) -> Iterator[tuple[str, float, int, int]]:
    """Name, value, time in ms, step. Times are spread over the trial, and equal whenever it is sent again."""
    began, ended = int(started * 1000), int((trial.ended_at or started) * 1000)
    for name, value in trial.finals.items():
        yield f"final.{name}", value, ended, 0
    for name, line in trial.series.items():
        for index, (step, value) in enumerate(line, start=1):
            yield name, value, began + (ended - began) * index // len(line), step


def _made_whole(database: Path, client: Callable[[str], Any]) -> None:
    """Let MLflow make its database under another name, and rename it: a kill in the middle leaves none, not half of one."""
    if database.exists():
        return
    database.parent.mkdir(parents=True, exist_ok=True)
    with open(database.with_name(f".{database.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if database.exists():
            return
        unfinished = database.with_name(f".{database.name}.new")
        unfinished.unlink(missing_ok=True)
        client(f"sqlite:///{unfinished}").search_experiments(max_results=1)
        unfinished.replace(database)
