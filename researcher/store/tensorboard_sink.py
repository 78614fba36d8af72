"""Copies the records to TensorBoard: `STUDY/STAGE/ARM/seed-N` in one log directory, and a page of text per study.

Each trial is one event file, written atomically under a name derived from the trial, so sending it again replaces it with the
same bytes. Needs the package tensorboard, but not torch or tensorflow; it is imported on first use.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from foundation.logs import redact
from foundation.paths import user_data_dir, write_atomically
from researcher.models import TrialRecord
from researcher.store.outbox import Message
from researcher.store.sink import CopyFailed, CopySink, params_of, points_of, tags_of
from researcher.store.store import Store
from researcher.study.plan import Plan

FOLDER = "RESEARCHER_TENSORBOARD_DIR"
"""Environment variable that sets the log directory. The default is `tensorboard` in the user data directory."""
_LONGEST_NAME, _BEGINNING = 255, 60  # in bytes, and in characters
_ODD = re.compile(r"[^\w.,=+@-]+")


def default_folder(environ: Mapping[str, str] | None = None) -> Path:
    env = os.environ if environ is None else environ
    return Path(env[FOLDER]).expanduser().resolve() if env.get(FOLDER) else user_data_dir(env) / "tensorboard"


class TensorboardSink(CopySink):
    """Copies studies to TensorBoard; see the module's docstring."""

    name = "tensorboard"

    def __init__(self, store: Store, folder: Path | None = None) -> None:
        super().__init__(store)
        self.folder = folder or default_folder()

    def place(self) -> str:
        return str(self.folder)

    def _send(self, message: Message) -> None:
        try:
            if message.kind == "trial":
                self._send_trial(self._store.trials.get(message.study_id, message.ref))
            else:
                self._send_study(message)
        except ImportError as error:
            raise CopyFailed(f"the package tensorboard cannot be imported ({error})") from error
        except OSError as error:
            raise CopyFailed(f"cannot write to {self.folder}: {error}") from error

    def _send_trial(self, trial: TrialRecord) -> None:
        study = self._store.studies.get(trial.study_id)
        plan = self._plan(trial.study_id)
        started = trial.started_at or study.created_at
        folder = (
            self.folder / _safe(trial.study_id) / _safe(trial.stage) / _arm_folder(trial.arm) / f"seed-{trial.seed}"
        )
        write_atomically(folder / _file_name(int(started)), _records(_trial_events(plan, trial, started)))

    def _send_study(self, message: Message) -> None:
        """Write the newest page of text. It gets a new name each time, because a running TensorBoard never rereads a file."""
        folder = self.folder / _safe(message.study_id)
        made = folder / _file_name(message.seq)
        study = self._store.studies.get(message.study_id)
        write_atomically(made, _records(iter([_text_event("study", self._page(message.study_id), study.created_at)])))
        for older in folder.glob(_file_name(0).replace("0" * 10, "*")):
            if older.is_file() and older.name < made.name:
                older.unlink(missing_ok=True)

    def _page(self, study_id: str) -> str:
        study, plan = self._store.studies.get(study_id), self._plan(study_id)
        lines = [f"# {study.topic}", "", f"Status: {study.status}"]
        lines += [] if plan is None else [f"Plan: {plan.digest()}", f"Written by: {study.planned_by(plan)}", ""]
        lines += [f"- {one.hypothesis}: {one.verdict}. {one.reason}" for one in self._store.verdicts.all(study_id)]
        report = self._store.reports.files(study_id).get("markdown")
        if report is not None and Path(report).is_file():
            lines += ["", Path(report).read_text(encoding="utf-8")]
        return redact("\n".join(lines))


def _safe(name: str) -> str:
    """Turn `name` into a valid folder name."""
    return _ODD.sub("_", name).lstrip(".") or "_"


def _arm_folder(arm: str) -> str:
    """Return the name of an arm's folder. Long names, and names with characters that are invalid in file names, get a hash."""
    safe = _safe(arm)
    if safe == arm and len(arm.encode()) <= _LONGEST_NAME:
        return arm
    return f"{safe[:_BEGINNING]}-{hashlib.sha256(arm.encode()).hexdigest()[:8]}"


def _file_name(number: int) -> str:
    """Return the name of an event file. TensorBoard recognises event files by name, and reads a folder's files in name order."""
    return f"events.out.tfevents.{number:010d}.swarm"


def _records(events: Iterator[Any]) -> bytes:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter

    buffer = io.BytesIO()
    writer = RecordWriter(buffer)
    for event in [Event(file_version="brain.Event:2"), *events]:
        writer.write(event.SerializeToString(deterministic=True))
    return buffer.getvalue()


def _trial_events(plan: Plan | None, trial: TrialRecord, started: float) -> Iterator[Any]:
    """Yield the levels and the seed for the HParams page, the tags as text, and every point as a scalar."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams.summary_v2 import hparams_pb

    levels = {
        name: value if isinstance(value, bool | int | float) else str(value)
        for name, value in params_of(plan, trial).items()
    }
    yield Event(wall_time=started, step=0, summary=hparams_pb(levels, trial_id=trial.key, start_time_secs=started))
    tags = "\n".join(f"- {name}: {value}" for name, value in tags_of(plan, trial, {}).items())
    yield _text_event("tags", redact(tags), started)
    for name, value, at_ms, step in points_of(trial, started):
        point = Summary(value=[Summary.Value(tag=name, simple_value=value)])
        yield Event(wall_time=at_ms / 1000, step=step, summary=point)


def _text_event(tag: str, text: str, at: float) -> Any:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING
    from tensorboard.plugins.text.metadata import create_summary_metadata

    tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode()])
    value = Summary.Value(tag=tag, metadata=create_summary_metadata(tag, ""), tensor=tensor)
    return Event(wall_time=at, step=0, summary=Summary(value=[value]))
