"""Draws an instrument's tasks as a check before anything runs: `python -m swarm.client.rehearsal FOLDER WORKFLOW`.

Reads a JSON object on standard input: `parameters`, a list of parameters for `tasks`; `heldout`, the number of held-out tasks,
including the `skipped` ones, which are not scored; `thorough`; optionally `modules` that must be installed and `names` of
parameters that `tasks` must accept. Writes a JSON object on standard output: `problem`, or the found `tasks`. Only draws tasks:
calls no model and gives no reward. Runs in its own process, because it executes the instrument's code.

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
"""Number of train tasks to draw normally, and in a thorough check."""
_POSITIONAL = 3
"""Number of positional arguments of `tasks`: split, seed, count."""


async def rehearse(
    workflow: Workflow, parameters: Mapping[str, Any], heldout: int, *, skipped: int = 0, thorough: bool = False
) -> dict[str, Any]:
    """Draw and check tasks. Returns an example of a train and a held-out task, and how many of each were drawn.

    skipped: number of held-out tasks that others score; checks that drawing more does not change the first ones.
    thorough: always check that, and also that streams are reproducible and that all seeds have the same held-out tasks.
    Raises: WorkflowFault naming what is wrong; whatever `tasks` raises.
    """
    most = _MANY if thorough else _FEW
    train = await _drawn(workflow, parameters, "train", 1, most)
    held_out = await _drawn(workflow, parameters, "heldout", 1, heldout)
    if not train or not held_out:
        raise WorkflowFault(f"tasks('{'heldout' if train else 'train'}', ...) gives no tasks")
    if len(train) < most:
        raise WorkflowFault(f"tasks('train', ...) gives {len(train)} tasks and ends; it must go on for ever")
    both = {task.id for task in train} & {task.id for task in held_out}
    if both:
        raise WorkflowFault(f"the task {min(both)!r} is both trained and held out: its evaluation would show nothing")
    if len({task.id for task in held_out}) < len(held_out):
        raise WorkflowFault("tasks('heldout', ...) gives the same task twice; give every held-out task once")
    fewer = skipped or (len(held_out) // 2 if thorough else 0)
    if fewer and await _drawn(workflow, parameters, "heldout", 1, fewer) != held_out[:fewer]:
        raise WorkflowFault(
            "tasks('heldout', ...) depends on the count; the first tasks have to stay the first, however many are asked for"
        )
    if thorough:
        if await _drawn(workflow, parameters, "train", 1, _MANY) != train:
            raise WorkflowFault(
                "tasks('train', 1, ...) gives other tasks the second time; draw from random.Random(seed)"
            )
        if await _drawn(workflow, parameters, "heldout", 2, heldout) != held_out:
            raise WorkflowFault(
                "tasks('heldout', ...) depends on the seed; every seed has to be evaluated on the same tasks"
            )
    return {"train": len(train), "heldout": len(held_out), "examples": [_shown(train[0]), _shown(held_out[0])]}


async def _drawn(workflow: Workflow, parameters: Mapping[str, Any], split: str, seed: int, most: int) -> list[Task]:
    found: list[Task] = []
    async for task in each(workflow.tasks(split, seed, most, **parameters)):
        if not isinstance(task, Task):
            raise WorkflowFault(f"tasks('{split}', ...) gives {type(task).__name__}, not swarm.client.Task")
        found.append(task)
        if len(found) == most:
            break
    return found


def _require(modules: Sequence[str]) -> None:
    """Check that the modules are installed. Raises: WorkflowFault naming the missing ones."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise WorkflowFault(f"this Python ({sys.executable}) has no {', '.join(missing)}, which the instrument imports")


def _require_parameters(workflow: Workflow, names: Sequence[str]) -> None:
    """Check that `tasks` accepts these parameters. Raises: WorkflowFault naming one that it does not."""
    known = inspect.signature(workflow.tasks).parameters
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in known.values()):
        return
    own = list(known)[_POSITIONAL:]
    for name in names:
        if name not in own:
            guess = nearest(name, own)
            raise WorkflowFault(f"tasks takes no {name!r}" + (f"; did you mean {guess!r}?" if guess else ""))


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
        # The instrument's own errors, or parameters that it does not accept.
        answer: dict[str, Any] = {"problem": f"{error}"}
    else:
        answer = {"tasks": found}
    sys.stdout.write(json.dumps(answer) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
