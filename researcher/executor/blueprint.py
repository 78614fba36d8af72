"""Turns a planned trial into its two inputs: the server's RunSpec and the client's blueprint.

Pure functions. They start with the instrument's defaults, then apply the plan, then the arm's levels, each at its factor's
`target`. A person can read both inputs and run them by hand.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from researcher.executor.errors import InstrumentChanged
from researcher.instruments.catalogue import InstrumentFolder
from researcher.instruments.instrument import STUDY_MODEL, STUDY_STEPS, Factor, Instrument, Metric, Scalar
from researcher.models import TrialRecord
from researcher.study.plan import Plan, Transfer
from swarm.protocol.blueprint import Elsewhere, HeldOut, Interim, PartnerRun, TrialBlueprint
from swarm.protocol.runspec import RunSpec, merge_patch

_LONGEST_NAME, _BEGINNING = 120, 40
"""Maximum length of an arm's name in a folder name, in bytes; and the number of characters kept of a longer name. (File systems
allow 255 bytes, encrypted ones 143.)"""

Series = Mapping[str, Sequence[tuple[int, float]]]
Finals = Callable[[Sequence[Metric], Series], dict[str, float]]
"""Computes a trial's metrics from the recorded series. Raises: ValueError when a series that they need is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """A version of an instrument's code. `version` is the SHA-256 over the files of its folder. If `sandboxed`, an LLM wrote it,
    so it only runs in a sandbox."""

    folder: Path
    version: str
    sandboxed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The instrument as it is on this machine.

    Attributes:
        code_version: SHA-256 over its folder as it is now.
        studies: parent of the studies' folders.
        python: interpreter of its clients, from the instrument's own environment if it needs one.
        repairs: versions that were recorded as repairs of this study's code.
    """

    instrument: Instrument
    instrument_dir: Path
    code_version: str
    finals: Finals
    studies: Path
    python: str = sys.executable
    sandboxed: bool = False
    repairs: tuple[str, ...] = ()
    others: Mapping[str, InstrumentFolder] = field(default_factory=dict)
    """Further instruments on which the plan scores trained models, by name."""

    @property
    def code(self) -> Code:
        return Code(folder=self.instrument_dir, version=self.code_version, sandboxed=self.sandboxed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A plan with the setup to run it. Raises: InstrumentChanged when an instrument's code is not the code that the plan froze."""

    study_id: str
    plan: Plan
    setup: Setup

    def __post_init__(self) -> None:
        if self.setup.code_version not in (self.plan.instrument_code, *self.setup.repairs):
            raise InstrumentChanged(
                f"the instrument in {self.setup.instrument_dir} has changed since the plan was frozen; "
                "put the old files back, or start a new study"
            )
        for each in self.plan.transfers:
            if each.instrument not in self.setup.others or self.setup.others[each.instrument].code != each.code:
                raise InstrumentChanged(
                    f"the instrument {each.instrument}, on which trained models are scored, has changed since the plan was frozen; "
                    "put the old files back, or start a new study"
                )

    def folder(self, trial: TrialRecord, attempt: int) -> Path:
        """Return the folder of one attempt, for its blueprint and its client's output."""
        trials = self.setup.studies / self.study_id / "trials" / trial.key.split("/", 1)[0]
        plain = f"{_written(trial.arm)}-seed{trial.seed}"
        if (
            _is_short(plain) and (trials / plain).is_dir()
        ):  # an earlier version named folders like this: its client may still use it
            return trials / plain / f"attempt{attempt}"
        return trials / folder_name(trial) / f"attempt{attempt}"


def folder_name(trial: TrialRecord) -> str:
    """Return the name of a trial's folder, `ARM-seedN`. An arm whose name is long, or has characters that are invalid in file
    names, gets a hash."""
    arm = _written(trial.arm)
    if arm != trial.arm or not _is_short(arm):
        arm = f"{arm[:_BEGINNING]}-{hashlib.sha256(trial.arm.encode()).hexdigest()[:8]}"
    return f"{arm}-seed{trial.seed}"


def _written(arm: str) -> str:
    return "".join(char if char.isalnum() or char in "-_.=" else "-" for char in arm)


def _is_short(name: str) -> bool:
    return len(name.encode()) <= _LONGEST_NAME


def run_spec(work: Work, trial: TrialRecord, role: str | None = None) -> RunSpec:
    """Build the spec of the run that trains the instrument's own model or, if `role` is given, that role's model.

    Raises: ValidationError for a spec that no server would accept; ValueError for an unknown factor.
    """
    plan = work.plan
    levels = {
        target: level for name, level in plan.arm(trial.arm).levels.items() for target in _factor(work, name).targets
    }
    fields: dict[str, Any] = merge_patch(work.setup.instrument.defaults.run, plan.run_fields(levels, role))
    steps = int(levels.get(STUDY_STEPS, plan.steps))
    labels = {
        "study": work.study_id,
        "trial": trial.key,
        "arm": trial.arm,
        "seed": str(trial.seed),
        "plan": plan.digest(),
        **({} if role is None else {"role": role}),
    }
    fields = merge_patch(fields, {"seed": trial.seed, "limits": {"steps": steps}, "labels": labels})
    return RunSpec.model_validate(fields)


def trial_blueprint(
    work: Work,
    trial: TrialRecord,
    spec: RunSpec,
    server_url: str,
    run_id: str,
    partners: Mapping[str, PartnerRun] | None = None,
    code: Code | None = None,
) -> TrialBlueprint:
    """Build the input of `python -m swarm.client.trial`. `partners` are the runs of other models, by role. `code` is the version
    to run, by default the setup's."""
    defaults, plan = work.setup.instrument.defaults, work.plan
    interim = Interim(every=plan.heldout_every, tasks=plan.interim_tasks) if plan.heldout_every else None
    code = code or work.setup.code
    return TrialBlueprint(
        trial_key=trial.key,
        server_url=server_url,
        run_id=run_id,
        partners=dict(partners or {}),
        instrument_dir=str(code.folder),
        workflow=work.setup.instrument.workflow,
        code_version=code.version,
        parameters={**defaults.task, **plan.task, **_task_levels(work, trial)},
        seed=trial.seed,
        group_size=spec.batch.group_size,
        concurrency=defaults.concurrency,
        heldout=HeldOut(
            tasks=plan.heldout_tasks,
            first=plan.heldout_from,
            episodes=plan.heldout_episodes,
            temperature=plan.heldout_temperature,
            interim=interim,
        ),
        elsewhere=tuple(_elsewhere(each, work.setup.others[each.instrument]) for each in plan.transfers),
    )


def _elsewhere(transfer: Transfer, folder: InstrumentFolder) -> Elsewhere:
    return Elsewhere(
        instrument=transfer.instrument,
        instrument_dir=str(folder.path),
        workflow=folder.instrument.workflow,
        code_version=folder.code,
        parameters=transfer.task,
        heldout=HeldOut(tasks=transfer.tasks, episodes=transfer.episodes, temperature=transfer.temperature),
    )


def _task_levels(work: Work, trial: TrialRecord) -> dict[str, Scalar]:
    levels = {}
    for name, level in work.plan.arm(trial.arm).levels.items():
        room, _, path = _factor(work, name).target.partition(".")
        if room == "task":
            levels[path] = level
    return levels


def _factor(work: Work, name: str) -> Factor:
    """Return the factor as the plan defines it, or else as the instrument declares it."""
    for factor in (*work.plan.factors, *work.setup.instrument.factors):
        if factor.name == name:
            room = factor.target.partition(".")[0]
            if room not in ("run", "roles", "task") and factor.target not in (STUDY_STEPS, STUDY_MODEL):
                kinds = f"run.…, roles.…, task.…, {STUDY_STEPS} or {STUDY_MODEL}"
                raise ValueError(f"factor {name!r} has target {factor.target!r}; use {kinds}")
            return factor
    raise ValueError(f"the plan varies {name!r}, which is not a factor of {work.setup.instrument.name}")
