"""`researcher findings`: list findings and contradictions; export findings to a file and import them."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from foundation.clock import SystemClock
from foundation.commandline import UsageError
from foundation.nearest import nearest
from foundation.paths import write_atomically
from researcher.analysis.knowledge import Contradiction, contradictions, told_of
from researcher.cli import DONE, answer
from researcher.describe import when
from researcher.exchange import FindingsRefused, read, written
from researcher.home import open_home
from researcher.models import Finding
from researcher.store.errors import FindingConflict
from researcher.store.store import Store
from researcher.study.draft import options_of
from researcher.study.spec import StudySpec
from swarm.models.catalogue import hosted_name

GROUP = "RESEARCHER_GROUP"
"""Environment variable with the name of the group that shares findings; used if --by is not given."""


def findings_command(args: argparse.Namespace) -> int:
    """List, export or import findings."""
    if args.action == "export":
        return _export(args)
    return _import(args) if args.action == "import" else _list(args)


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """Filters for findings; None matches everything."""

    instrument: str | None = None
    factor: str | None = None
    model: str | None = None

    @classmethod
    def of(cls, args: argparse.Namespace) -> Self:
        return cls(instrument=args.instrument, factor=args.factor, model=args.model)


def _list(args: argparse.Namespace) -> int:
    document, lines = listed(open_home().store, About.of(args))
    return answer(args.json, document, *lines)


def listed(store: Store, about: About) -> tuple[dict[str, Any], list[str]]:
    """Return the matching findings and their contradictions, as a document and as lines for people."""
    found, opposed = _chosen(store, about)
    document = {
        "findings": [{**each.model_dump(mode="json"), "recomputable": each.recomputable} for each in found],
        "contradictions": [_as_json(each, store) for each in opposed],
    }
    lines = [line for finding in found for line in _lines(finding)]
    lines += [line for each in opposed for line in _contradiction_lines(each, store)]
    if not found and (others := store.findings.all()):
        lines.append(_no_match(others, about))
    elif not found:
        lines.append(
            "no findings yet; every finished study that is valid adds some, and "
            "`researcher findings import FILE` adds those of others"
        )
    return document, lines


def _no_match(others: Sequence[Finding], about: About) -> str:
    """Write the message for filters that match nothing, with the nearest known names."""
    known = {
        "instrument": {each.instrument for each in others},
        "factor": {each.factor for each in others},
        "model": {name for each in others for name in each.models},
    }
    filters = []
    for name, names in known.items():
        if (value := getattr(about, name)) is not None:
            close = nearest(value, names)
            filters.append(f"{name} {value}" + (f" (did you mean {close}?)" if close not in (None, value) else ""))
    return f"no finding matches {' and '.join(filters)} (of {len(others)} in all)"


def _is_about(finding: Finding, model: str) -> bool:
    """True if a finding is about the model, in any spelling; a name with a fingerprint matches only those weights."""
    return model in finding.models or ("@" not in model and hosted_name(model) in map(hosted_name, finding.models))


def _chosen(store: Store, about: About) -> tuple[list[Finding], list[Contradiction]]:
    """Return the findings that match, and the contradictions that involve them."""
    everything = store.findings.all()
    wanted = {name: getattr(about, name) for name in ("instrument", "factor")}
    chosen = [
        each
        for each in everything
        if all(value in (None, getattr(each, name)) for name, value in wanted.items())
        and (about.model is None or _is_about(each, about.model))
    ]
    ids = {each.id for each in chosen}
    return chosen, [
        each
        for each in contradictions(everything, largest_seed=store.plans.largest_seed())
        if ids & {each.one.id, each.other.id}
    ]


def _lines(finding: Finding) -> list[str]:
    whose = "" if finding.recomputable else f"; imported {when(finding.imported_at or 0)}"
    checked = f"researcher verify {finding.study_id}" if finding.recomputable else f"ask {finding.origin}"
    return [
        told_of(finding),
        f"    {when(finding.at)}{whose}; plan {finding.plan_hash[:16]}; to check it: {checked}",
    ]


def _contradiction_lines(found: Contradiction, store: Store) -> list[str]:
    lines = [f"CONTRADICTION  {found.one.id} and {found.other.id}: {found.why}"]
    if found.settled_by is not None:
        return [*lines, f"    replicated since: {told_of(found.settled_by)}"]
    return [*lines, "    replicate it:", f"    {command_of(found, store)}"]


def command_of(found: Contradiction, store: Store) -> str:
    """Return the command that starts the replication: with the options of a recorded spec if there is one, else with the question."""
    replication = found.replication
    own = [each.study_id for each in (found.one, found.other) if each.recomputable]
    specs = [
        (StudySpec.model_validate(request.spec), store.plans.get(study).arms[0].levels)
        for study in own
        if (request := store.studies.get(study).request) is not None
    ]
    words = ["--topic", replication.topic, "--instrument", replication.instrument]
    seeds = ["--seeds", str(max(2, replication.seeds)), "--first-seed", str(replication.first_seed)]
    return shlex.join(["researcher", "start", *(options_of(*specs[0]) if specs else words), *seeds])


def _as_json(found: Contradiction, store: Store) -> dict[str, object]:
    proposed = found.replication
    return {
        "findings": [found.one.id, found.other.id],
        "why": found.why,
        "settled_by": None if found.settled_by is None else found.settled_by.id,
        "replication": {
            "topic": proposed.topic,
            "instrument": proposed.instrument,
            "seeds": proposed.seeds,
            "first_seed": proposed.first_seed,
            "command": command_of(found, store),
        },
    }


def _export(args: argparse.Namespace) -> int:
    by = args.by or os.environ.get(GROUP)
    if not by:
        raise UsageError(f"say whose findings these are: give --by 'Our group', or set {GROUP}")
    chosen, _ = _chosen(open_home().store, About.of(args))
    own = [each for each in chosen if args.all or each.recomputable]
    file = Path(args.file)
    if args.file != "-" and file.exists() and not args.force:
        raise UsageError(f"{file} exists; choose another name, or add --force")
    try:
        text = written(own, by)
    except ValueError as error:
        raise UsageError(f"these findings cannot be written: {error}") from error
    if args.file == "-":
        sys.stdout.write(text)
        return DONE
    write_atomically(file, text.encode())
    text = f"{file}: {len(own)} findings by {by}; others add them with `researcher findings import {file.name}`"
    return answer(args.json, {"file": str(file.resolve()), "findings": len(own), "by": by}, text)


def _import(args: argparse.Namespace) -> int:
    text = _text(args.file)
    try:
        numbered = read(text, at=SystemClock().now())
    except FindingsRefused as error:
        raise UsageError(f"nothing was imported from {args.file}\n{error}") from error
    at_line = {finding.id: number for number, finding in numbered}
    store = open_home().store
    try:
        new = store.findings.take([finding for _, finding in numbered], replace=args.replace)
    except FindingConflict as error:
        problems = "\n".join(f"line {at_line[id]}: {id} {problem}" for id, problem in error.problems.items())
        raise UsageError(f"nothing was imported from {args.file}\n{problems}") from error
    found = contradictions(store.findings.all(), largest_seed=store.plans.largest_seed())
    opposed = [each for each in found if {each.one.id, each.other.id} & set(at_line)]
    lines = [f"{args.file}: {len(numbered)} findings, {new} of them new; `researcher findings` shows all"]
    lines += [line for each in opposed for line in _contradiction_lines(each, store)]
    document = {"read": len(numbered), "new": new, "contradictions": [_as_json(each, store) for each in opposed]}
    return answer(args.json, document, *lines)


def _text(file: str) -> str:
    if file == "-":
        return sys.stdin.read()
    try:
        return Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is not UTF-8 text") from error
