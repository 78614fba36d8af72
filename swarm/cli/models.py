"""`swarm models get|list|export`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foundation.commandline import UsageError
from swarm.cli import stored_run
from swarm.protocol.errors import SwarmError

if TYPE_CHECKING:
    from swarm.models import ModelFolder


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The `models` commands."""
    models = subparsers.add_parser("models", help="fetch, list and export models")
    commands = models.add_subparsers(dest="models_command", required=True, metavar="COMMAND")
    get = commands.add_parser("get", help="have a model in the cache; prints its folder")
    get.add_argument("name", metavar="NAME", help="smollm2-135m, smollm2-81m, a hub name OWNER/NAME, or a folder")
    get.set_defaults(run=get_model)
    listing = commands.add_parser("list", help="what the cache holds")
    listing.set_defaults(run=list_models)
    export = commands.add_parser("export", help="a checkpoint of a run as a Hugging Face folder")
    export.add_argument("run_at", metavar="RUN[@STEP]", help="STEP: a kept checkpoint, 0 (the hosted model) or 'best'")
    export.add_argument("--to", type=Path, required=True, metavar="DIR", help="a new folder")
    export.add_argument(
        "--adapter", action="store_true", help="the adapter alone, for peft and vLLM (default: merged into the model)"
    )
    stored_run.add_options(export)
    export.set_defaults(run=export_run)
    for command in (get, listing, export):
        command.add_argument("--json", action="store_true", help="answer as JSON")


def get_model(args: argparse.Namespace) -> int:
    """Fetch a model unless it is there."""
    from foundation import logs
    from swarm.models import resolve

    logs.configure("INFO")
    found = resolve(args.name)
    print(json.dumps(_document(found)) if args.json else found.path)
    return 0


def list_models(args: argparse.Namespace) -> int:
    """List what is cached, and what could be fetched by name."""
    from swarm.models import cached_models
    from swarm.models.catalogue import known_names

    found = cached_models()
    if args.json:
        print(json.dumps({"cached": [_document(model) for model in found], "known": known_names()}))
        return 0
    for model in found:
        print(f"{model.name}  {model.fingerprint[:12]}  {model.path}")
    print(f"known by name: {', '.join(known_names())}")
    return 0


def export_run(args: argparse.Namespace) -> int:
    """Write a checkpoint as a folder that transformers and vLLM load."""
    run_id, wanted = stored_run.split(args.run_at)
    run = stored_run.find(args, run_id)
    step = run.step_called(wanted)
    checkpoint, to = run.checkpoint(step), args.to.expanduser().resolve()
    from swarm.engine.local import trained_model

    try:
        if not args.adapter:
            made = trained_model.export_model(run.model, checkpoint, to)
        elif checkpoint is None:
            raise UsageError(f"{run.row.run_id}@0 is the hosted model: it has no adapter")
        else:
            made = trained_model.export_adapter(run.model, checkpoint, to)
    except OSError as error:
        raise StorageFault(f"cannot write {to}: {error.strerror or error}") from error
    facts = _document(made) | {"run_id": run.row.run_id, "step": step}
    print(json.dumps(facts) if args.json else made.path)
    return 0


class StorageFault(SwarmError):
    """A folder cannot be written."""


def _document(model: ModelFolder) -> dict[str, Any]:
    return {"name": model.name, "path": str(model.path), "fingerprint": model.fingerprint}
