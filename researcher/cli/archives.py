"""`researcher export`, `reproduce` and `copy`: archive a study, rerun a trial of an archive, and send pending records to the sinks."""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from pathlib import Path

from foundation import logs
from foundation.commandline import UsageError
from researcher.archive import Archive, read_archive, write_archive
from researcher.cli import DONE, FAILED, answer
from researcher.cli.resume import run_interruptibly
from researcher.cli.worker import lone_trials, setup
from researcher.executor.blueprint import Code
from researcher.home import Home, open_home
from researcher.instruments.catalogue import InstrumentFolder, open_instrument
from researcher.models import TrialRecord, TrialStatus
from researcher.store.mlflow_sink import MlflowSink
from researcher.store.sinks import check_installed, open_sink


def export_command(args: argparse.Namespace) -> int:
    """Write a study's archive to a file."""
    home = open_home()
    study_id = home.store.studies.resolve(args.study)
    study, plan = home.store.studies.get(study_id), home.store.plans.get(study_id)
    file = Path(args.to or f"{study_id}.tar.gz")
    if file.exists() and not args.force:
        raise UsageError(f"{file} exists; choose another name with --to, or --force")
    instrument = open_instrument(study.options.instrument or plan.instrument)
    size = write_archive(home.store, study_id, instrument, home.studies / study_id, file)
    text = f"{file}: {size / 1e6:.2f} MB; `researcher reproduce {shlex.quote(str(file))}` reruns one of its trials"
    return answer(args.json, {"study": study_id, "file": str(file.resolve()), "bytes": size}, text)


def reproduce_command(args: argparse.Namespace) -> int:
    """Rerun one trial of an archive as its own study, and show both results side by side."""
    logs.configure("WARNING")
    home = open_home()
    home.studies.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home.studies, prefix=".archive-") as folder:
        archive = read_archive(Path(args.archive), Path(folder))
        then = archive.trial(args.trial)
        instrument = archive.instrument(then)
        topic = f"Reproduction of {then.key}: {archive.topic}"
        engine = args.engine or _engine(then)
        study_id = home.store.studies.create(topic, {"servers": args.server, "engine": engine})
        now = run_interruptibly(_again(home, study_id, archive, instrument, then))
    rows = [
        {"metric": name, "then": then.finals.get(name), "now": now.finals.get(name)}
        for name in sorted({*then.finals, *now.finals})
    ]
    computed = {"then": _computed_in(then), "now": _computed_in(now)}
    weights = {"then": _weights(then), "now": _weights(now)}
    result = {"study": study_id, "trial": now.key, "status": now.status, "reason": now.reason, "metrics": rows}
    lines = [f"{now.key}: {now.status}{f' ({now.reason})' if now.reason else ''}"]
    lines.append(f"{'metric':26} {'then':>12} {'now':>12}")
    lines += [f"{row['metric']:26} {_number(row['then']):>12} {_number(row['now']):>12}" for row in rows]
    if None not in computed.values() and computed["then"] != computed["now"]:
        lines.append(f"computed in {computed['then']} then and in {computed['now']} now; the two round differently")
    if None not in weights.values() and weights["then"] != weights["now"]:
        lines.append(f"started from weights {weights['then']} then and {weights['now']} now")
    answer(args.json, {**result, "computed_in": computed, "weights": weights}, *lines)
    return DONE if now.status is TrialStatus.DONE else FAILED


def _computed_in(trial: TrialRecord) -> str | None:
    """Return the dtype that the trial computed in; None if it was not recorded."""
    spec = trial.evidence.spec if trial.evidence is not None else None
    return None if spec is None else spec.get("dtype")


def _engine(trial: TrialRecord) -> str:
    """Choose the engine for the reproduction: echo if the trial ran on echo, else local."""
    found = trial.evidence.model if trial.evidence is not None else None
    return "echo" if found is not None and found.engine == "echo" else "local"


def _weights(trial: TrialRecord) -> str | None:
    """Return a prefix of the hosted model's fingerprint; None if it was not recorded."""
    found = trial.evidence.model if trial.evidence is not None else None
    return None if found is None or found.fingerprint is None else found.fingerprint[:12]


async def _again(
    home: Home, study_id: str, archive: Archive, instrument: InstrumentFolder, then: TrialRecord
) -> TrialRecord:
    home.store.journal.record(study_id, "reproduces", {"study": archive.study_id, "trial": then.key})
    mended = archive.sandboxed(instrument.code) or instrument.instrument.generated is not None
    code = Code(folder=instrument.path, version=instrument.code, sandboxed=mended)
    arranged = setup(home, instrument, archive.plan, code=code, repairs=(instrument.code,))
    because = f"reran one trial of {archive.study_id}"
    pairs = [(then.arm, then.seed)]
    (done,) = await lone_trials(
        home,
        study_id,
        archive.plan,
        arranged,
        then.stage,
        pairs,
        because=because,
        tell=_to_stderr,
    )
    return done


def _to_stderr(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def _number(value: object) -> str:
    return "-" if value is None else f"{value:.6g}"


def copy_command(args: argparse.Namespace) -> int:
    """Send each sink its pending records once. If some remain, print why and return 1."""
    store = open_home().store
    study_id = store.studies.resolve(args.study)
    names = args.sink or [MlflowSink.name, *store.studies.get(study_id).options.sinks]
    check_installed(names)
    rows = []
    for name in dict.fromkeys(names):
        sink = open_sink(store, name)
        sent = sink.drain(study_id)
        waiting, error = store.outbox.state(name, study_id)
        rows.append({"sink": name, "place": sink.place(), "sent": sent, "waiting": waiting, "error": error})
    lines = []
    for row in rows:
        still = f", {row['waiting']} wait: {row['error']}" if row["waiting"] else ""
        lines.append(f"{row['sink']:12} {row['sent']} sent{still}; {row['place']}")
    answer(args.json, {"study": study_id, "sinks": rows}, *lines)
    return FAILED if any(row["waiting"] for row in rows) else DONE
