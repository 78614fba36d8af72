"""Copies the records to Weights & Biases: a run per trial, grouped by study, and one run per study with its verdicts.

Runs are written offline unless `WANDB_MODE` or an API key says otherwise; `wandb sync` uploads offline runs. Run ids are derived
from study and trial, so sending a trial twice still leaves one run. Needs the package wandb, which is imported on first use.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foundation.logs import redact
from foundation.paths import user_data_dir
from researcher.models import StudyRecord, TrialRecord, TrialStatus
from researcher.store.outbox import Message
from researcher.store.sink import CopyFailed, CopySink, losses_of, params_of, tags_of
from researcher.store.store import Store

PROJECT = "swarm-researcher"
_PATIENCE_S = 30.0
_STEP, _EPISODE = "step", "episode"
_PRIVATE = {
    "disable_git": True,
    "disable_code": True,
    "x_disable_meta": True,
    "x_disable_machine_info": True,
    "x_disable_stats": True,
    "x_save_requirements": False,
    "console": "off",
    "silent": True,
}
"""Settings that stop wandb from collecting data about the machine and the process."""


class WandbSink(CopySink):
    """Copies studies to Weights & Biases; see the module's docstring. Runs are written to `folder` before, or instead of, an
    upload."""

    name = "wandb"

    def __init__(self, store: Store, folder: Path | None = None, environ: Mapping[str, str] | None = None) -> None:
        super().__init__(store)
        self._environ = os.environ if environ is None else environ
        self.folder = folder or Path(self._environ.get("WANDB_DIR") or user_data_dir(self._environ))

    @property
    def mode(self) -> str:
        """`WANDB_MODE`, else online with an API key, else offline."""
        given = self._environ.get("WANDB_MODE")
        return given or ("online" if self._environ.get("WANDB_API_KEY") else "offline")

    def place(self) -> str:
        where = self.folder / "wandb"
        return f"{where} (offline; `wandb sync` sends it)" if self.mode == "offline" else f"{where} ({self.mode})"

    def _send(self, message: Message) -> None:
        try:
            import wandb
        except ImportError as error:
            raise CopyFailed(f"the package wandb cannot be imported ({error})") from error
        study = self._store.studies.get(message.study_id)
        try:
            if message.kind == "trial":
                self._send_trial(wandb, study, self._store.trials.get(study.id, message.ref))
            else:
                self._send_study(wandb, study)
        except (wandb.Error, OSError, TimeoutError) as error:
            raise CopyFailed(redact(str(error)) or type(error).__name__) from error

    def _send_trial(self, wandb: Any, study: StudyRecord, trial: TrialRecord) -> None:
        plan = self._plan(study.id)
        run = self._run(
            wandb,
            study,
            f"trial:{trial.key}",
            job_type=trial.stage,
            name=f"{trial.arm} seed {trial.seed}",
            config={**params_of(plan, trial), **tags_of(plan, trial, {})},
        )
        run.define_metric("*", step_metric=_STEP)
        run.define_metric("eval_*", step_metric=_EPISODE)
        for row in _rows(trial)[run.starting_step :]:  # a resumed run has the earlier rows already
            run.log(row)
        run.summary.update({f"final.{name}": value for name, value in trial.finals.items()} | losses_of(trial))
        run.finish(exit_code=1 if trial.status is TrialStatus.FAILED else 0)

    def _send_study(self, wandb: Any, study: StudyRecord) -> None:
        """Send the study's current status, verdicts and report."""
        plan = self._plan(study.id)
        config = {} if plan is None else {"plan_hash": plan.digest(), "planner": study.planned_by(plan)}
        run = self._run(wandb, study, "study", job_type="study", name="study", config={"topic": study.topic, **config})
        verdicts = {f"verdict.{one.hypothesis}": one.verdict.value for one in self._store.verdicts.all(study.id)}
        run.summary.update({"status": study.status.value, **verdicts})
        files = [path for path in map(Path, self._store.reports.files(study.id).values()) if path.is_file()]
        if files:
            report = wandb.Artifact(f"report-{study.id}", type="report")
            for path in files:
                report.add_file(str(path))
            run.log_artifact(report)
        run.finish(exit_code=0)

    def _run(
        self, wandb: Any, study: StudyRecord, key: str, *, job_type: str, name: str, config: dict[str, Any]
    ) -> Any:
        run_id = hashlib.sha256(f"{study.id}\x1f{key}".encode()).hexdigest()[:16]
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.mode == "offline":
            for earlier in (self.folder / "wandb").glob(f"offline-run-*-{run_id}"):
                shutil.rmtree(earlier)
        return wandb.init(
            project=self._environ.get("WANDB_PROJECT") or PROJECT,
            id=run_id,
            group=study.id,
            job_type=job_type,
            name=name,
            notes=study.topic[:500],
            config=config,
            dir=str(self.folder),
            mode=self.mode,
            reinit="create_new",
            resume=None if self.mode == "offline" else "allow",
            settings=wandb.Settings(
                init_timeout=_PATIENCE_S, finish_timeout=_PATIENCE_S, finish_timeout_raises=True, **_PRIVATE
            ),
        )


def _rows(trial: TrialRecord) -> list[dict[str, float]]:
    """Return one row per step with all its values. Evaluations, which are indexed by episode, get separate rows."""
    rows: dict[tuple[str, int], dict[str, float]] = defaultdict(dict)
    for name, line in trial.series.items():
        axis = _EPISODE if name.startswith("eval_") else _STEP
        for at, value in line:
            rows[axis, at] |= {axis: at, name: value}
    return [rows[key] for key in sorted(rows)]
