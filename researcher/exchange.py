"""Findings as JSON lines, so that groups can share them: one finding per line, versioned and strictly validated.

This module validates each line, including its numbers. The store decides whether a finding is already known.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, StringConstraints, ValidationError, model_validator

from foundation.strict import StrictModel, explain
from researcher.instruments.instrument import Direction, Scalar
from researcher.models import Effect, Finding
from researcher.study.plan import Verdict

SCHEMA = 2
"""Schema version that we write. We also read version 1, which has no `seeds`."""
LONGEST_LINE = 200_000
_LONGEST_QUESTION = 20_000
_SHOWN = 10
_YEAR_9999 = datetime(9999, 1, 1, tzinfo=UTC).timestamp()
"""Start of the last year that `datetime` can show in every time zone, in Unix seconds."""
_SEEDS_END = 2**30
"""Upper limit of the seeds in a finding: half of all seeds, so that a replication can use larger ones."""
_Name = Annotated[str, StringConstraints(min_length=1, max_length=120, pattern=r"^[^\x00-\x1f\x7f]+$")]
_Text = Annotated[str, StringConstraints(min_length=1, max_length=2000, pattern=r"^[^\x00-\x1f\x7f]+$")]
_Side = Annotated[tuple[dict[_Name, Scalar], ...], Field(max_length=64)]


class FindingsRefused(ValueError):
    """This version cannot read the file of findings. The text names every wrong line; nothing was imported."""


class SharedEffect(Effect):
    """An `Effect` as it is shared: fields are checked, and further fields are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    n_baseline: Annotated[int, Field(ge=0)]
    n_treatment: Annotated[int, Field(ge=0)]
    level: Annotated[float, Field(gt=0, lt=1)]

    @model_validator(mode="after")
    def _within_its_interval(self) -> Self:
        if not self.low <= self.diff <= self.high:
            raise ValueError(f"the difference {self.diff:g} is not within its interval {self.low:g} to {self.high:g}")
        return self


class SharedFinding(StrictModel):
    """One line of a file of findings.

    `by` names the group that made the finding. `plan_hash` is the hash of the study's frozen plan; the plan itself is not shared.
    """

    schema_version: Literal[1, 2]
    id: _Name
    by: _Name
    study_id: _Name
    plan_hash: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
    question: Annotated[str, StringConstraints(max_length=_LONGEST_QUESTION)]
    instrument: _Name
    instrument_version: Annotated[str, StringConstraints(max_length=60)]
    model: _Name
    factor: _Name
    metric: _Name
    statement: _Text
    direction: Direction
    margin: Annotated[float, Field(gt=0)] | None
    baseline: _Side
    treatment: _Side
    verdict: Verdict
    effect: SharedEffect | None
    scope: dict[str, Any]
    seeds: Annotated[tuple[Annotated[int, Field(ge=0, lt=_SEEDS_END)], ...], Field(max_length=10_000)] | None = None
    at: Annotated[float, Field(ge=0, lt=_YEAR_9999)]

    @model_validator(mode="after")
    def _seeds_are_of_the_second_schema(self) -> Self:
        if (self.schema_version == 1) == ("seeds" in self.model_fields_set):
            raise ValueError("schema_version 2 requires the field seeds, and schema_version 1 must not have it")
        return self

    @model_validator(mode="after")
    def _a_verdict_has_its_effect(self) -> Self:
        if self.verdict is Verdict.INVALID:
            raise ValueError("an invalid study leaves no finding")
        if self.effect is None and self.verdict is not Verdict.INCONCLUSIVE:
            raise ValueError(f"the verdict is {self.verdict}, but there is no effect")
        if self.effect is not None and self.effect.metric != self.metric:
            raise ValueError(f"the effect is on {self.effect.metric!r}, the finding on {self.metric!r}")
        return self


def written(findings: Iterable[Finding], by: str) -> str:
    """Return the findings as JSON lines.

    `by` is the name to put on our own findings; imported ones keep their origin's name. Raises: ValueError when a finding cannot be
    written as a line of this schema.
    """
    return "".join(f"{_shared(finding, by).model_dump_json()}\n" for finding in findings)


def _shared(finding: Finding, by: str) -> SharedFinding:
    fields = finding.model_dump(mode="json", exclude={"origin": True, "imported_at": True, "effect": {"trial_s"}})
    fields["question"] = finding.question[:_LONGEST_QUESTION]  # early versions did not limit topics
    return SharedFinding.model_validate({**fields, "schema_version": SCHEMA, "by": finding.origin or by})


def read(text: str, *, at: float) -> list[tuple[int, Finding]]:
    """Return every finding with its line number. `at` is the current time, which becomes the time of import.

    Raises: FindingsRefused when any line is wrong, or when two lines with the same id differ.
    """
    problems: list[str] = []
    found: dict[str, tuple[int, Finding]] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            finding = _finding(line, at)
        except FindingsRefused as error:
            problems.append(f"line {number}: {error}")
            continue
        first, same = found.setdefault(finding.id, (number, finding))
        if same != finding:
            problems.append(f"line {number}: {finding.id} differs from line {first}")
    if problems:
        more = [f"... and {len(problems) - _SHOWN} more lines"] if len(problems) > _SHOWN else []
        raise FindingsRefused("\n".join([*problems[:_SHOWN], *more]))
    return list(found.values())


def _finding(line: str, at: float) -> Finding:
    if len(line) > LONGEST_LINE:
        raise FindingsRefused(f"a finding may have at most {LONGEST_LINE} characters, but this one has {len(line)}")
    try:
        fields = json.loads(line, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise FindingsRefused(f"this is not a JSON object on one line ({error})") from error
    if not isinstance(fields, dict):
        raise FindingsRefused("this is not a JSON object")
    version = fields.get("schema_version")
    if version not in (1, SCHEMA) or isinstance(version, bool):
        newer = isinstance(version, int) and version > SCHEMA
        raise FindingsRefused(
            f"schema_version is {version!r}; this version reads 1 and {SCHEMA}"
            + (": update swarm-researcher" if newer else ": `researcher findings export` writes such files")
        )
    try:
        shared = SharedFinding.model_validate_json(line)
    except ValidationError as error:
        raise FindingsRefused("; ".join(str(each) for each in explain(error, SharedFinding))) from error
    own = shared.model_dump(exclude={"schema_version", "by"})
    return Finding.model_validate({**own, "origin": shared.by, "imported_at": at})


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is not a number in JSON")
