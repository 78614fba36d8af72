"""Checks an instrument's tasks before anything runs: `python -m swarm.client.rehearsal FOLDER WORKFLOW`.

Reads a JSON object from standard input: `parameters`, a list of parameter sets for `tasks`; `heldout`, the number of held-out tasks,
including the first `skipped` ones, which are not scored; `thorough`; and optionally `modules` that must be installed and `names` of
parameters that `tasks` must accept. Writes a JSON object to standard output that contains either a `problem` or the `tasks`.
It only generates tasks: it calls no model and computes no reward. It runs in its own process because it executes the instrument's code.

Exit codes: 0 answered, with or without a problem; 1 the instrument's code crashed (the traceback is on standard error).
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from foundation.nearest import nearest
from swarm.client.errors import WorkflowFault
from swarm.client.tasks import Task, each
from swarm.client.workflow import Workflow, load_workflow
from swarm.protocol.errors import SwarmError

_FEW, _MANY = 3, 200
"""Number of training tasks to check normally, and in a thorough check."""
_POSITIONAL = 3
"""Number of positional arguments of `tasks`: split, seed and count."""


async def rehearse(
    workflow: Workflow, parameters: Mapping[str, Any], heldout: int, *, skipped: int = 0, thorough: bool = False
) -> dict[str, Any]:
    """Generate and check tasks. Returns one example each of a training and a held-out task, and how many of each were checked.

    Args:
        workflow: the workflow that defines `tasks`.
        parameters: keyword arguments for `tasks`.
        heldout: number of held-out tasks to request.
        skipped: number of held-out tasks that others score. If not 0, check that requesting more does not change the first ones.
        thorough: always make that check, and also check that streams are reproducible and that all seeds give the same held-out tasks.
    Raises: WorkflowFault that says what is wrong; any exception from `tasks`.
    """
    most = _MANY if thorough else _FEW
    train = await _drawn(workflow, parameters, "train", 1, most)
    held_out = await _drawn(workflow, parameters, "heldout", 1, heldout)
    if not train or not held_out:
        raise WorkflowFault(f"tasks('{'heldout' if train else 'train'}', ...) yields no tasks")
    if len(train) < most:
        raise WorkflowFault(f"tasks('train', ...) ends after {len(train)} tasks; it must be endless")
    both = {task.id for task in train} & {task.id for task in held_out}
    if both:
        raise WorkflowFault(
            f"task {min(both)!r} is both in 'train' and in 'heldout', so evaluating on it would show nothing"
        )
    if len({task.id for task in held_out}) < len(held_out):
        raise WorkflowFault("tasks('heldout', ...) yields the same task twice; yield every held-out task once")
    fewer = skipped or (len(held_out) // 2 if thorough else 0)
    if fewer and await _drawn(workflow, parameters, "heldout", 1, fewer) != held_out[:fewer]:
        raise WorkflowFault(
            "tasks('heldout', ...) depends on the count; the first tasks must stay the same however many are requested"
        )
    if thorough:
        if await _drawn(workflow, parameters, "train", 1, _MANY) != train:
            raise WorkflowFault(
                "tasks('train', 1, ...) yields different tasks the second time; take all randomness from random.Random(seed)"
            )
        if await _drawn(workflow, parameters, "heldout", 2, heldout) != held_out:
            raise WorkflowFault(
                "tasks('heldout', ...) depends on the seed; every seed must be evaluated on the same tasks"
            )
    return {"train": len(train), "heldout": len(held_out), "examples": [_shown(train[0]), _shown(held_out[0])]}


async def _drawn(workflow: Workflow, parameters: Mapping[str, Any], split: str, seed: int, most: int) -> list[Task]:
    found: list[Task] = []
    async for task in each(workflow.tasks(split, seed, most, **parameters)):
        if not isinstance(task, Task):
            raise WorkflowFault(f"tasks('{split}', ...) yields {type(task).__name__}, not swarm.client.Task")
        found.append(task)
        if len(found) == most:
            break
    return found


def _require(modules: Sequence[str]) -> None:
    """Raise WorkflowFault if any of these modules is not installed; the error names the missing ones."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise WorkflowFault(
            f"this Python ({sys.executable}) lacks {', '.join(missing)}, which the instrument imports; install it"
        )


def _require_parameters(workflow: Workflow, names: Sequence[str]) -> None:
    """Raise WorkflowFault if `tasks` does not accept one of these parameters; the error names it."""
    known = inspect.signature(workflow.tasks).parameters
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in known.values()):
        return
    own = list(known)[_POSITIONAL:]
    for name in names:
        if name not in own:
            guess = nearest(name, own)
            raise WorkflowFault(f"tasks has no parameter {name!r}" + (f"; did you mean {guess!r}?" if guess else ""))


def _shown(task: Task) -> dict[str, str]:
    return {"id": task.id, "query": task.query}


def main(arguments: Sequence[str] | None = None) -> int:
    folder, file = sys.argv[1:] if arguments is None else arguments
    asked = json.load(sys.stdin)
    found: list[dict[str, Any]] = []
    try:
        _require(asked.get("modules", []))
        workflow = load_workflow(Path(folder), file)
        _require_parameters(workflow, asked.get("names", []))
        for parameters in asked["parameters"]:
            skipped, thorough = asked.get("skipped", 0), asked["thorough"]
            wanted = rehearse(workflow, parameters, asked["heldout"], skipped=skipped, thorough=thorough)
            found.append(asyncio.run(wanted))
    except (SwarmError, ValueError, TypeError) as error:
        # Errors that the instrument raises, or parameters that it does not accept.
        answer: dict[str, Any] = {"problem": f"{error}"}
    else:
        answer = {"tasks": found}
    sys.stdout.write(json.dumps(answer) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
