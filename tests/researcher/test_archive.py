"""A study as a file: everything comes back, nothing that was tampered with does."""

from __future__ import annotations

import io
import json
import tarfile
from importlib.metadata import version
from pathlib import Path

import pytest

from researcher.archive import Archive, ArchiveRefused, read_archive, write_archive
from researcher.instruments.catalogue import InstrumentFolder, read_instrument
from researcher.models import TrialStatus
from researcher.store.store import Store
from tests.fakes.repeat_study import FOLDER
from tests.fakes.study import study_plan


@pytest.fixture
def instrument() -> InstrumentFolder:
    return read_instrument(FOLDER)


@pytest.fixture
def archive(tmp_path: Path, instrument: InstrumentFolder) -> Path:
    store = Store.open(f"sqlite:///{tmp_path / 'records.sqlite'}")
    study = store.studies.create("a question", {})
    store.plans.save(study, study_plan().model_copy(update={"instrument_code": instrument.code}))
    (trial,) = store.trials.ensure(study, "floor", [("lr=base", 0)])
    store.trials.record_intent(study, trial.key, 1, "http://server", "key", {"seed": 0})
    store.trials.record_submitted(study, trial.key, "run-1", {})
    store.trials.finish(study, trial.key, {"auc": 0.5}, {"reward_mean": [(1, 0.25)]})
    reports = tmp_path / "report"
    reports.mkdir()
    (reports / "report.md").write_text("# Report")
    write_archive(store, study, instrument, reports, tmp_path / "study.tar.gz")
    first = (tmp_path / "study.tar.gz").read_bytes()
    write_archive(store, study, instrument, reports, tmp_path / "study.tar.gz")
    assert (tmp_path / "study.tar.gz").read_bytes() == first
    store.close()
    return tmp_path / "study.tar.gz"


def _rewritten(archive: Path, name: str, change: bytes) -> Path:
    """The same archive with one file replaced."""
    changed = archive.with_name("changed.tar.gz")
    with tarfile.open(archive) as old, tarfile.open(changed, "w:gz") as new:
        for member in old:
            found = old.extractfile(member)
            assert found is not None
            content = change if member.name == name else found.read()
            member.size = len(content)
            new.addfile(member, io.BytesIO(content))
    return changed


def _read(file: Path) -> Archive:
    return read_archive(file, file.parent / "unpacked")


def test_everything_comes_back(archive: Path, instrument: InstrumentFolder) -> None:
    found = _read(archive)
    assert found.topic == "a question"
    assert found.instrument().code == instrument.code
    trial = found.trial(None)
    assert (trial.status, trial.finals, trial.series) == (
        TrialStatus.DONE,
        {"auc": 0.5},
        {"reward_mean": [(1, 0.25)]},
    )
    assert json.loads((found.folder / "attempts.jsonl").read_text())["run_id"] == "run-1"
    assert (found.folder / "report" / "report.md").read_text() == "# Report"


def test_distributions_that_are_broken_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    for name, metadata in {"foo-1.0": None, "bar-1.0": "Name: bar\n", "pydantic-0.0": "Name: pydantic\n"}.items():
        (tmp_path / "site" / f"{name}.dist-info").mkdir(parents=True)
        if metadata is not None:
            (tmp_path / "site" / f"{name}.dist-info" / "METADATA").write_text(metadata)
    whole = version("pydantic")
    monkeypatch.syspath_prepend(tmp_path / "site")
    found = _read(request.getfixturevalue("archive"))
    packages = json.loads((found.folder / "study.json").read_text())["packages"]
    assert (packages["pydantic"], "foo" in packages, "bar" in packages) == (whole, False, False)


def test_a_trial_that_is_not_there_is_named(archive: Path) -> None:
    with pytest.raises(ArchiveRefused, match="no such"):
        _read(archive).trial("no such")


def test_a_plan_that_was_changed_is_refused(archive: Path) -> None:
    head = json.loads((_read(archive).folder / "study.json").read_text())
    head["plan"]["steps"] += 1
    with pytest.raises(ArchiveRefused, match="no longer has its hash"):
        _read(_rewritten(archive, "study.json", json.dumps(head).encode()))


def test_an_instrument_that_was_changed_is_refused(archive: Path) -> None:
    text = (FOLDER / "instrument.toml").read_bytes() + b"\n# changed\n"
    with pytest.raises(ArchiveRefused, match="not the one"):
        _read(_rewritten(archive, "instrument/instrument.toml", text)).instrument()


@pytest.mark.parametrize("content", [b"", b"no archive", b"\x1f\x8b\x08\x00broken"])
def test_what_is_no_archive_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "file.tar.gz"
    file.write_bytes(content)
    with pytest.raises(ArchiveRefused, match="cannot be read"):
        _read(file)


def test_a_path_that_leads_out_of_the_archive_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file.tar.gz"
    with tarfile.open(file, "w:gz") as opened:
        opened.addfile(tarfile.TarInfo("../escaped"), io.BytesIO())
    with pytest.raises(ArchiveRefused, match="cannot be read"):
        _read(file)


def test_a_file_that_was_damaged_anywhere_is_refused_in_one_line(archive: Path, tmp_path: Path) -> None:
    whole = archive.read_bytes()
    damaged = tmp_path / "damaged.tar.gz"
    for at in range(20, len(whole), max(1, len(whole) // 60)):
        damaged.write_bytes(
            whole[:at] + bytes([whole[at] ^ 0xFF, whole[(at + 1) % len(whole)] ^ 0x55]) + whole[at + 2 :]
        )
        with pytest.raises(ArchiveRefused):
            read_archive(damaged, tmp_path / f"unpacked-{at}")


@pytest.mark.parametrize("content", [b"[]", b'"text"', b'{"format": 1}'])
def test_a_head_that_lacks_something_is_refused(archive: Path, content: bytes) -> None:
    with pytest.raises(ArchiveRefused, match="cannot be read"):
        _read(_rewritten(archive, "study.json", content))


@pytest.mark.parametrize("field", ["plan_hash", "study_id", "topic"])
def test_a_head_without_one_of_its_fields_is_refused(archive: Path, field: str) -> None:
    _read(archive)
    head = json.loads((archive.parent / "unpacked" / "study.json").read_bytes())
    del head[field]
    with pytest.raises(ArchiveRefused, match=field):
        _read(_rewritten(archive, "study.json", json.dumps(head).encode()))
