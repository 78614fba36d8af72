"""`researcher report` and `researcher verify`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from foundation.streams import read_or_not
from researcher.cli import DONE, FAILED, answer, say, say_json
from researcher.home import Home, open_home
from researcher.ownership import owned_now
from researcher.report.conducted import Difference
from researcher.report.verify import reworded, verify
from researcher.store.errors import NotFound

_SHOWN = 12


def report_command(args: argparse.Namespace) -> int:
    """Write the report again from the records."""
    from researcher.conduct import report  # with all that carries studies out, which to verify takes none of

    home = open_home()
    study_id = home.store.studies.resolve(args.study)
    with owned_now(home.store, study_id) as store:
        folder = report(store, study_id, home.studies)
    files = {"markdown": str(folder / "report.md"), "html": str(folder / "report.html")}
    return answer(args.json, {"study": study_id, **files}, Path(files["markdown"]).read_text(), *files.values())


def verify_command(args: argparse.Namespace) -> int:
    """Recompute every claim; 1 and the claim's name on a difference."""
    home = open_home()
    study_id = home.store.studies.resolve(args.study)
    claims, seal = home.store.reports.claims(study_id), home.store.reports.seal(study_id)
    differences = differences_of(home, study_id)
    with read_or_not():
        _tell(differences, study_id, len(claims), reworded=seal is not None and reworded(seal), as_json=args.json)
    return FAILED if differences else DONE


def differences_of(home: Home, study_id: str) -> list[Difference]:
    """Everything in which a study's report and its records differ. Raises: NotFound without a report."""
    claims, reported = home.store.reports.claims(study_id), home.store.reports.files(study_id)
    if not claims and not reported:
        raise NotFound(f"{study_id} has no report to verify yet; `researcher status {study_id}` says how it is doing")
    files = {kind: str(_own_copy(home.studies / study_id, Path(path))) for kind, path in reported.items()}
    return verify(home.store.study_data(study_id), claims, files, home.store.reports.seal(study_id))


def _tell(differences: Sequence[Difference], study_id: str, claims: int, *, reworded: bool, as_json: bool) -> None:
    if as_json:
        rows = [difference.model_dump() for difference in differences]
        say_json({"study": study_id, "claims": claims, "differences": rows, "reworded": reworded})
        return
    for difference in differences[:_SHOWN]:
        say(str(difference))
    if len(differences) > _SHOWN:
        say(f"... and {len(differences) - _SHOWN} more, which follow from these; --json shows all")
    verdict = f"{len(differences)} differ" if differences else "all recompute"
    say(f"{study_id}: {claims} claims, {verdict}")
    if reworded and differences:
        say(
            "another version of researcher concluded the study: verdicts and what follows from them may differ for that alone"
        )
    elif reworded:
        say(f"another version of researcher worded it; `researcher report {study_id}` words it as this one does")


def _own_copy(folder: Path, recorded: Path) -> Path:
    """The report file in this home's own folder; a moved home recorded other paths."""
    return folder / recorded.name if folder.is_dir() else recorded
