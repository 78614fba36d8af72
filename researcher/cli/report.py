"""`researcher report` and `researcher verify`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from foundation.streams import read_or_not
from researcher.cli import DONE, FAILED, answer
from researcher.home import Home, open_home
from researcher.ownership import owned_now
from researcher.report.conducted import Difference
from researcher.report.verify import reworded, verify
from researcher.store.errors import NotFound

_SHOWN = 12


def report_command(args: argparse.Namespace) -> int:
    """Rewrite the report from the records."""
    home = open_home()
    study_id = home.store.studies.resolve(args.study)
    files = write(home, study_id)
    return answer(args.json, {"study": study_id, **files}, Path(files["markdown"]).read_text(), *files.values())


def write(home: Home, study_id: str) -> dict[str, str]:
    """Write the report from the records and return its files. Raises: LeaseHeld while a process works on the study."""
    from researcher.conduct import report  # imports everything that runs studies, which `verify` does not need

    with owned_now(home.store, study_id) as store:
        return files_of(report(store, study_id, home.studies))


def files_of(folder: Path) -> dict[str, str]:
    """Return the report's paths in this study folder, whether or not it has been written."""
    return {"markdown": str(folder / "report.md"), "html": str(folder / "report.html")}


def verify_command(args: argparse.Namespace) -> int:
    """Recompute every claim. If any differ, name them and return 1."""
    home = open_home()
    document, lines = verified(home, home.store.studies.resolve(args.study))
    with read_or_not():
        answer(args.json, document, *lines)
    return FAILED if document["differences"] else DONE


def verified(home: Home, study_id: str) -> tuple[dict[str, Any], list[str]]:
    """Recompute every claim, and return the result as a document and as lines. Raises: NotFound without a report."""
    claims, seal = home.store.reports.claims(study_id), home.store.reports.seal(study_id)
    differences = differences_of(home, study_id)
    new_words = seal is not None and reworded(seal)
    rows = [difference.model_dump() for difference in differences]
    document = {"study": study_id, "claims": len(claims), "differences": rows, "reworded": new_words}
    return document, list(_lines(differences, study_id, len(claims), reworded=new_words))


def differences_of(home: Home, study_id: str) -> list[Difference]:
    """List all differences between a study's report and its records. Raises: NotFound without a report."""
    claims, reported = home.store.reports.claims(study_id), home.store.reports.files(study_id)
    if not claims and not reported:
        raise NotFound(f"{study_id} has no report to verify yet; `researcher status {study_id}` says how it is doing")
    files = {kind: str(_own_copy(home.studies / study_id, Path(path))) for kind, path in reported.items()}
    return verify(home.store.study_data(study_id), claims, files, home.store.reports.seal(study_id))


def _lines(differences: Sequence[Difference], study_id: str, claims: int, *, reworded: bool) -> Iterator[str]:
    yield from map(str, differences[:_SHOWN])
    if len(differences) > _SHOWN:
        yield f"... and {len(differences) - _SHOWN} more that follow from these; --json shows all"
    verdict = f"{len(differences)} differ" if differences else "all recompute"
    yield f"{study_id}: {claims} claims, {verdict}"
    if reworded and differences:
        yield "a different version of researcher concluded the study, which alone may change verdicts and what follows from them"
    elif reworded:
        yield f"a different version of researcher worded this report; `researcher report {study_id}` rewrites it with this version"


def _own_copy(folder: Path, recorded: Path) -> Path:
    """Return the report file in this home's own folder, since a moved home has recorded other paths."""
    return folder / recorded.name if folder.is_dir() else recorded
