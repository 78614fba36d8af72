"""`swarm models get|list`."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from swarm.models import ModelFolder


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The `models` commands."""
    models = subparsers.add_parser("models", help="fetch and list models")
    commands = models.add_subparsers(dest="models_command", required=True, metavar="COMMAND")
    get = commands.add_parser("get", help="have a model in the cache; prints its folder")
    get.add_argument("name", metavar="NAME", help="smollm2-135m, a hub name OWNER/NAME, or a folder")
    get.set_defaults(run=get_model)
    listing = commands.add_parser("list", help="what the cache holds")
    listing.set_defaults(run=list_models)
    for command in (get, listing):
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


def _document(model: ModelFolder) -> dict[str, str]:
    return {"name": model.name, "path": str(model.path), "fingerprint": model.fingerprint}
