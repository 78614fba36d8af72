"""`swarm models get|list`: fetches a model into the cache, or lists the models."""

from __future__ import annotations

import argparse
import json
from typing import Any

from foundation import logs
from swarm.models import ModelFolder, cached_models, resolve
from swarm.models.catalogue import known_names


def get_model(args: argparse.Namespace) -> int:
    """Fetch a model unless it is cached."""
    logs.configure("INFO")
    found = resolve(args.name)
    print(json.dumps(document(found)) if args.json else found.path)
    return 0


def list_models(args: argparse.Namespace) -> int:
    """List the cached models and those that can be fetched by name."""
    found = cached_models()
    if args.json:
        print(json.dumps({"cached": [document(model) for model in found], "known": known_names()}))
        return 0
    for model in found:
        print(f"{model.name}  {model.fingerprint[:12]}  {model.path}")
    print(f"known by name: {', '.join(known_names())}")
    return 0


def document(model: ModelFolder) -> dict[str, Any]:
    return {"name": model.name, "path": str(model.path), "fingerprint": model.fingerprint}
