"""A task as a person gives it on the command line: a query, or an object {id, query, metadata} as JSON or in a file."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from foundation.commandline import UsageError
from swarm.cli.documents import option_json, read_document

if TYPE_CHECKING:
    from swarm.client import Task

_FIELDS = {"id", "query", "metadata"}


def add_options(parser: argparse.ArgumentParser, *, required: bool, default_id: str) -> None:
    """`--task`, `--task-id`, `--metadata`."""
    parser.add_argument(
        "--task",
        required=required,
        metavar="QUERY",
        help="the task's query; or a task {id, query, metadata} as JSON, or in @FILE",
    )
    parser.add_argument("--task-id", metavar="ID", help=f"default: {default_id}")
    parser.add_argument("--metadata", metavar="JSON", help="the task's metadata")
    parser.set_defaults(default_task_id=default_id)


def task_of(args: argparse.Namespace) -> Task:
    """The task that the options name. Raises: UsageError."""
    from swarm.client import Task

    document: dict[str, Any] = {"id": args.default_task_id, "query": "", "metadata": {}, **_document(args.task)}
    if args.task_id is not None:
        document["id"] = args.task_id
    if args.metadata is not None:
        document["metadata"] = option_json(args.metadata, "--metadata")
    unknown = sorted(set(document) - _FIELDS)
    if unknown or not isinstance(document["metadata"], dict):
        raise UsageError(f"a task has id, query and metadata (an object){f', not {unknown[0]}' if unknown else ''}")
    if not str(document["id"]):
        raise UsageError("the task's id is empty; give one, or leave --task-id out")
    return Task(id=str(document["id"]), query=str(document["query"]), metadata=document["metadata"])


def _document(text: str) -> dict[str, Any]:
    if text.startswith("@"):
        return read_document(text[1:])
    if not text.lstrip().startswith("{"):
        return {"query": text}
    document = option_json(text, "--task looks like a task {id, query, metadata}, but")
    if not isinstance(document, dict) or "query" not in document:
        raise UsageError(
            '--task is an object without a query; write {"query": "..."}, where a prompt may look like JSON'
        )
    return document
