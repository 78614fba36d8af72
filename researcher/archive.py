"""A study as one file: its plan, trials with every number, run specs and code. Enough to run a trial again.

study.json      id, topic, plan with its hash, versions of the packages
trials.jsonl    one TrialRecord per line, with series, finals and evidence
attempts.jsonl  one AttemptRecord per line: RunSpec and blueprint
events.jsonl    the journal        findings.jsonl, claims.jsonl, verdicts.jsonl
llm_calls.jsonl requests to the planner LLM, with its raw answers
episodes.jsonl  a few of each trial's episodes, call by call, with the trial's key
instrument/     the instrument's folder        report/   the report as written
code/VERSION/   versions of that folder that were repaired while the study ran
"""

from __future__ import annotations

import gzip
import io
import json
import platform
import tarfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path

from pydantic import BaseModel, ValidationError

from foundation.paths import visible_files, write_atomically
from researcher.instruments.catalogue import InstrumentFolder, folder_digest, read_instrument
from researcher.models import Event, RepairRecord, TrialRecord, TrialStatus
from researcher.store.errors import StoreError
from researcher.store.store import Store
from researcher.study.plan import Plan

FORMAT = 1
_HEAD = ("plan_hash", "study_id", "topic")
_LARGEST = 1 << 30
"""Maximum unpacked size of an archive, in bytes."""


class ArchiveRefused(StoreError):
    """The file is not an archive of a study, or its content does not match its recorded hashes or format."""


@dataclass(frozen=True, slots=True)
class Archive:
    """An unpacked study. `folder` holds its files."""

    study_id: str
    topic: str
    plan: Plan
    trials: list[TrialRecord]
    folder: Path
    repairs: tuple[RepairRecord, ...] = ()

    def trial(self, wanted: str | None) -> TrialRecord:
        """Return the trial with that key; by default the first finished trial. Raises: ArchiveRefused."""
        for trial in self.trials:
            if trial.key == wanted or (wanted is None and trial.status is TrialStatus.DONE):
                return trial
        known = ", ".join(trial.key for trial in self.trials[:3])
        raise ArchiveRefused(
            f"the archive has no trial {'that finished' if wanted is None else wanted}; it has {known}"
        )

    def instrument(self, trial: TrialRecord | None = None) -> InstrumentFolder:
        """Return the instrument's code as it was when the trial ended: the original, or a repaired version.

        Raises: ArchiveRefused when the code does not have the recorded hash.
        """
        wanted, place = self.plan.instrument_code, self.folder / "instrument"
        mended = trial.evidence.code_versions if trial is not None and trial.evidence is not None else None
        if mended and list(mended)[-1] != wanted:
            wanted = list(mended)[-1]
            place = self.folder / "code" / wanted[:16]
        if not place.is_dir():
            raise ArchiveRefused(f"the archive lacks the code {wanted[:12]} that the trial ended with")
        found = read_instrument(place)
        if found.code != wanted:
            raise ArchiveRefused("the instrument in the archive is not the one that its plan was made with")
        return found

    def sandboxed(self, code: str) -> bool:
        """Return whether an LLM wrote that version, so that it must run in the sandbox."""
        return any(record.new == code and not record.by_person for record in self.repairs)


def write_archive(store: Store, study_id: str, instrument: InstrumentFolder, reports: Path, file: Path) -> int:
    """Write the study into `file` (.tar.gz) and return its size in bytes. The same records give the same bytes."""
    data = store.study_data(study_id)
    kept = reports / "code"
    source = instrument.path
    if instrument.code != data.plan.instrument_code:
        source = kept / data.plan.instrument_code[:16]
        if not source.is_dir() or folder_digest(source) != data.plan.instrument_code:
            raise ArchiveRefused(
                f"the instrument in {instrument.path} was changed after the plan was made; restore it, then export again"
            )
    head = {
        "format": FORMAT,
        "study_id": study_id,
        "topic": data.topic,
        "plan_hash": data.plan_hash,
        "plan": data.plan.model_dump(mode="json"),
        **({} if data.request is None else {"request": data.request.model_dump(mode="json")}),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "packages": _packages(),
    }
    attempts = [attempt for trial in data.trials for attempt in store.trials.attempts(study_id, trial.key)]
    parts: dict[str, bytes] = {
        "study.json": json.dumps(head, indent=2, sort_keys=True).encode(),
        "trials.jsonl": _lines(data.trials),
        "attempts.jsonl": _lines(attempts),
        "events.jsonl": _lines(data.events),
        "verdicts.jsonl": _lines(data.verdicts),
        "claims.jsonl": _lines(store.reports.claims(study_id)),
        "findings.jsonl": _lines(store.findings.all(study_id=study_id)),
        "llm_calls.jsonl": _lines(data.llm_calls),
        "episodes.jsonl": "".join(
            f"{json.dumps({'trial': key, **episode.model_dump(mode='json')})}\n"
            for key, episodes in sorted(data.samples.items())
            for episode in episodes
        ).encode(),
    }
    parts |= {f"instrument/{name}": path.read_bytes() for name, path in visible_files(source)}
    for record in data.repairs:
        place = kept / record.new[:16]
        parts |= {f"code/{place.name}/{name}": path.read_bytes() for name, path in visible_files(place)}
    report = [path for path in sorted(reports.glob("*.*")) if path.suffix in (".md", ".html", ".svg")]
    parts |= {f"report/{path.name}": path.read_bytes() for path in report}
    packed = _packed(parts)
    write_atomically(file, packed)
    return len(packed)


def _packages() -> dict[str, str]:
    """Return the versions of installed packages by name. Half-removed packages without a name or version are left out."""
    return dict(sorted(known for each in distributions() if (known := _known_as(each)) is not None))


def _known_as(distribution: Distribution) -> tuple[str, str] | None:
    try:
        found = distribution.metadata
    except FileNotFoundError:  # raised by the backport importlib_metadata, which takes over once something imports it
        return None
    return (found["Name"].lower(), found["Version"]) if "Name" in found and "Version" in found else None


def read_archive(file: Path, into: Path) -> Archive:
    """Unpack an archive. Raises: ArchiveRefused, with one line that says what is wrong with the file."""
    try:
        with tarfile.open(file, "r:gz") as opened:
            if sum(member.size for member in opened) > _LARGEST:
                raise ArchiveRefused(f"{file} would unpack to more than a gigabyte; it is not an archive of a study")
            opened.extractall(into, filter="data")
        _check_sum(file)
        head = json.loads((into / "study.json").read_bytes())
        if not isinstance(head, dict):
            raise ArchiveRefused(f"{file} cannot be read as a study's archive: study.json is not a JSON object")
        if head.get("format") != FORMAT:
            raise ArchiveRefused(f"{file} has format {head.get('format')!r}; this version reads {FORMAT}")
        plan, digest, study_id, topic = Plan.model_validate(head["plan"]), *map(head.__getitem__, _HEAD)
        trials = [TrialRecord.model_validate_json(line) for line in (into / "trials.jsonl").read_bytes().splitlines()]
        events = [Event.model_validate_json(line) for line in (into / "events.jsonl").read_bytes().splitlines()]
        repairs = tuple(RepairRecord.model_validate(each.detail) for each in events if each.kind == "repaired")
    except (OSError, EOFError, tarfile.TarError, zlib.error, ValidationError, ValueError, KeyError) as error:
        raise ArchiveRefused(f"{file} cannot be read as a study's archive: {error}") from error
    if plan.digest() != digest:
        raise ArchiveRefused(f"the plan in {file} no longer has its hash {str(digest)[:16]}")
    return Archive(str(study_id), str(topic), plan, trials, into, repairs)


def _check_sum(file: Path) -> None:
    """Read to the end of the file, where gzip stores its checksum; tarfile stops before it. Raises: OSError on a mismatch."""
    with gzip.open(file) as zipped:
        while zipped.read(1 << 20):
            pass


def _lines(records: Iterable[BaseModel]) -> bytes:
    return "".join(f"{record.model_dump_json()}\n" for record in records).encode()


def _packed(parts: dict[str, bytes]) -> bytes:
    raw = io.BytesIO()
    with gzip.GzipFile(fileobj=raw, mode="wb", mtime=0) as zipped, tarfile.open(fileobj=zipped, mode="w") as opened:
        for name, content in sorted(parts.items()):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            opened.addfile(entry, io.BytesIO(content))
    return raw.getvalue()
