"""`researcher copy`: send what waits in the outbox, whichever sink it waits for."""

from __future__ import annotations

import argparse

from researcher.commands import DONE, FAILED
from researcher.commands.home import open_home, say, say_json
from researcher.store.mlflow_sink import MlflowSink
from researcher.store.sinks import check_installed, open_sink


def copy_command(args: argparse.Namespace) -> int:
    """Drain each sink once; 1 when something still waits, and why."""
    store = open_home().store
    study_id = store.resolve_study(args.study)
    names = args.sink or [MlflowSink.name, *store.study(study_id).options.get("sinks", ())]
    check_installed(names)
    rows = []
    for name in dict.fromkeys(names):
        sink = open_sink(store, name)
        sent = sink.drain(study_id)
        waiting, error = store.outbox_state(name, study_id)
        rows.append({"sink": name, "place": sink.place(), "sent": sent, "waiting": waiting, "error": error})
    if args.json:
        say_json({"study": study_id, "sinks": rows})
    else:
        for row in rows:
            still = f", {row['waiting']} wait: {row['error']}" if row["waiting"] else ""
            say(f"{row['sink']:12} {row['sent']} sent{still}; {row['place']}")
    return FAILED if any(row["waiting"] for row in rows) else DONE
