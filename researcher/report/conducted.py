"""Checks a study's records against each other and against its plan: attempts at trials and at episodes, budgets, stage times."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from researcher.analysis.samples import same_number
from researcher.analysis.sentinel_findings import Unchecked
from researcher.analysis.sentinels import as_set, settings_of
from researcher.instruments.instrument import leaf_at, leaves
from researcher.models import AttemptRecord, TrialRecord, TrialStatus
from researcher.report.records import Records
from researcher.report.vocabulary import Value
from researcher.study.plan import Plan


class Difference(BaseModel):
    """One difference between the report and the records."""

    claim: str
    """Name of the claim. If it is not a claim: `plan`, `verdict H1`, `decision compare` or `file report.md`."""
    expression: str = ""
    reported: Value = None
    recomputed: Value = None
    problem: str

    def __str__(self) -> str:
        asked = f" = {self.expression}" if self.expression else ""
        if self.reported is None and self.recomputed is None:
            return f"{self.claim}{asked}: {self.problem}"
        return f"{self.claim}{asked}: reported {self.reported!r}, recomputed {self.recomputed!r}; {self.problem}"


def shown(column: object) -> Value:
    """Return a column's value in the form that a `Difference` shows: containers as JSON."""
    return column if column is None or isinstance(column, str | int | float) else json.dumps(column, ensure_ascii=False)


def same(one: object, other: object) -> bool:
    """True if two values are equal, numbers up to rounding."""
    if isinstance(one, int | float) and isinstance(other, int | float):
        return same_number(one, other)
    return one == other


def alike(one: object, other: object) -> bool:
    """True if two values are equal by `same`, comparing containers recursively."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(alike, one, other))
    return same(one, other)


_OUTCOMES = {
    TrialStatus.DONE: ("done",),
    TrialStatus.FAILED: ("failed", "withdrawn"),
    TrialStatus.PLANNED: ("failed", "withdrawn"),
}
"""Expected outcomes of the last attempt, by the trial's status; `open` for any other status."""
_SETTLED_BY_SERVERS = ("dtype", "checkpoint.keep")
"""Fields of a RunSpec that a server may change."""
_Path = tuple[str, ...]
_CODE: _Path = ("code_version",)
_CLOCK_S = 60.0
"""Tolerance for a clock that is set back between two records, in seconds."""


def conducted(records: Records) -> Iterator[Difference]:
    """Yield all differences that this module can find."""
    yield from _attempts(records)
    yield from _attrition(records)
    yield from _budgets(records)
    yield from _stage_times(records)


def _attempts(records: Records) -> Iterator[Difference]:
    """Compare attempts with the trial's status, and with the plan for its arm."""
    recorded = records.data.attempts
    if recorded is None:
        return
    plan_hash = records.plan.digest()
    for trial in records.data.trials:
        tried = recorded.get(trial.key, ())
        numbers, outcomes = [each.number for each in tried], [each.outcome for each in tried]
        wanted = _OUTCOMES.get(trial.status, ("open",))
        subject = f"attempts {trial.key}"
        if numbers != list(range(1, trial.attempt + 1)):
            told = {"reported": trial.attempt, "recomputed": len(numbers)}
            yield Difference(
                claim=subject, **told, problem="the trial's number of attempts differs from the recorded attempts"
            )
        elif outcomes and (outcomes[-1] not in wanted or {"done", "open"} & {*outcomes[:-1]}):
            problem = f"their outcomes ({', '.join(outcomes)}) do not fit a trial that is {trial.status}"
            yield Difference(claim=subject, problem=problem)
        elif tried and trial.status is TrialStatus.DONE:
            yield from _held(subject, trial, tried[-1].spec)
        for attempt in tried:
            yield from _as_planned(records, trial, attempt, plan_hash)


def _attrition(records: Records) -> Iterator[Difference]:
    """Compare the stored rows of episode attempts with the trial's evidence, which the sentinel and the report read."""
    recorded = records.data.attrition
    if recorded is None:
        return
    for trial in records.data.trials:
        found = trial.evidence.attrition if trial.evidence is not None else None
        then = recorded.get(trial.key, {})
        now = {} if found is None else {(trial.arm, kind, cause): count for kind, cause, count in found.rows()}
        for row in sorted(then.keys() | now.keys()):
            if then.get(row) != now.get(row):
                problem = "its episode attempts in SQL differ from those in its evidence"
                told = {"reported": then.get(row), "recomputed": now.get(row)}
                yield Difference(
                    claim=f"trial_attrition {trial.key}", expression=" ".join(row), **told, problem=problem
                )


def _held(subject: str, trial: TrialRecord, sent: Mapping[str, object]) -> Iterator[Difference]:
    """Compare the spec sent for the last attempt with the spec that the server ran.

    Skips trials whose spec was changed in between, since a sentinel checks those.
    """
    held = trial.evidence.spec if trial.evidence and not trial.evidence.changes else None
    if held is None:
        return
    ran = dict(leaves(held))
    for path, value in leaves(sent):
        if path in ran and path not in _SETTLED_BY_SERVERS and not same(value, ran[path]):
            told = {"reported": shown(value), "recomputed": shown(ran[path])}
            yield Difference(
                claim=subject, expression=path, **told, problem="the server ran a different spec from the one sent"
            )


def _as_planned(records: Records, trial: TrialRecord, attempt: AttemptRecord, plan_hash: str) -> Iterator[Difference]:
    """Compare the specs sent to server and client with the plan and the arm. Either may be missing for a failed attempt."""
    versions = (records.plan.instrument_code, *(repair.new for repair in records.data.repairs))
    for part, sent, wanted in (
        ("spec", attempt.spec, _spec(records, trial, plan_hash)),
        ("blueprint", attempt.blueprint, _blueprint(records, trial, attempt)),
    ):
        for path, planned in wanted.items() if sent else ():
            used = leaf_at(sent, path)
            if path == _CODE and used in versions:
                continue
            if not as_set(f"run.{'.'.join(path)}", used, planned):
                yield Difference(
                    claim=f"attempt {attempt.number} at {trial.key}",
                    expression=f"{part} {'.'.join(path)}",
                    reported=shown(used),
                    recomputed=shown(planned),
                    problem=f"its {part} does not match the plan and the arm",
                )


def _spec(records: Records, trial: TrialRecord, plan_hash: str) -> dict[_Path, object]:
    """Return the RunSpec fields that the plan sets. Runs of further models are not recorded."""
    study, plan = records.data.study_id, records.plan
    fields = plan.run_fields(plan.levels_of(plan.arm(trial.arm))) if plan.sources else {}
    labels = {"study": study, "trial": trial.key, "arm": trial.arm, "seed": str(trial.seed), "plan": plan_hash}
    return {
        **{tuple(path.split(".")): value for path, value in _settings(plan, trial, "run").items()},
        **{("algorithm", "sources", file): text for file, text in _texts(fields).items()},
        ("limits", "steps"): plan.steps_of(trial.arm),
        ("seed",): trial.seed,
        **{("labels", name): label for name, label in labels.items()},
    }


def _texts(fields: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the source texts of a run's custom functions."""
    found: Mapping[str, str] = fields.get("algorithm", {}).get("sources", {})
    return found


def _blueprint(records: Records, trial: TrialRecord, attempt: AttemptRecord) -> dict[_Path, object]:
    plan = records.plan
    return {
        **{("parameters", name): value for name, value in _settings(plan, trial, "task").items()},
        ("trial_key",): trial.key,
        ("run_id",): attempt.run_id,
        ("seed",): trial.seed,
        ("group_size",): leaf_at(attempt.spec, ("batch", "group_size")),
        _CODE: plan.instrument_code,
        ("heldout", "tasks"): plan.heldout_tasks,
        ("heldout", "first"): plan.heldout_from or None,  # a blueprint that skips no tasks omits the field
        ("heldout", "episodes"): plan.heldout_episodes,
        ("heldout", "temperature"): plan.heldout_temperature,
        ("heldout", "interim", "every"): plan.heldout_every or None,
        ("heldout", "interim", "tasks"): plan.interim_tasks if plan.heldout_every else None,
    }


def _settings(plan: Plan, trial: TrialRecord, root: str) -> dict[str, object]:
    """Return this trial's settings whose paths start with `root`, without that prefix; empty if the plan lacks one of its factors."""
    try:
        found = settings_of(plan, trial)
    except Unchecked:
        return {}
    return {path.removeprefix(f"{root}."): value for path, value in found.items() if path.startswith(f"{root}.")}


def _budgets(records: Records) -> Iterator[Difference]:
    """Compare the recorded budget with the plan's. No budget is recorded before the first attempt."""
    recorded = records.data.budgets
    if not recorded or not any(trial.attempt for trial in records.data.trials):
        return
    for kind, planned in records.plan.budget.model_dump().items():
        limit = recorded.get(kind)
        if limit is not planned and (limit is None or planned is None or not same(limit, planned)):
            problem = "the study was held to a different budget than the plan's"
            yield Difference(claim=f"budget {kind}", reported=limit, recomputed=planned, problem=problem)


def _stage_times(records: Records) -> Iterator[Difference]:
    """Check that each stage began before its own trials and after those of earlier stages, and ended after its own."""
    times = records.data.stage_times
    if not times or not any(begun for begun, _ in times.values()):
        return
    earlier = 0.0
    for decision in records.path:
        begun, ended = times.get(decision.after, (None, None))
        trials = [trial for trial in records.data.trials if trial.stage == decision.after]
        first = min((trial.started_at for trial in trials if trial.started_at is not None), default=None)
        last = max((trial.ended_at for trial in trials if trial.ended_at is not None), default=None)
        told = {"claim": f"stage {decision.after}"}
        if begun is None or begun < earlier - _CLOCK_S or (first is not None and begun > first + _CLOCK_S):
            problem = "the stage has no start time, or started before an earlier stage's trials had ended, or after its own had started"
            yield Difference(**told, expression="started_at", reported=begun, recomputed=first, problem=problem)
        if ended is None or ended < (last or begun or 0.0) - _CLOCK_S:
            problem = "it did not end after its trials"
            yield Difference(**told, expression="ended_at", reported=ended, recomputed=last, problem=problem)
        earlier = max(earlier, last or 0.0)
