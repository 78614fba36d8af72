"""Loads `tasks` and `rollout` from an instrument's file or a user's module."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from foundation.nearest import nearest
from swarm.client.errors import WorkflowFault
from swarm.client.tasks import Rollout, TaskStream
from swarm.client.team import Partner


@dataclass(frozen=True, slots=True)
class Workflow:
    """The functions of a workflow.

    Args:
        tasks: `tasks(split, seed, count, **parameters)` returns a stream of Task. `split` is `train` or `heldout`; if `count` is
            None, the stream is endless.
        rollout: `rollout(episode, task)` makes one attempt at a task.
        close: optional; called after the last rollout.
        meet: optional; `meet(partners)` gets the other models by role before the first rollout of a trial that trains several.
    """

    tasks: Callable[..., TaskStream]
    rollout: Rollout
    close: Callable[[], Awaitable[None]] | None = None
    meet: Callable[[Mapping[str, Partner]], None] | None = None


def load_workflow(folder: Path, file: str) -> Workflow:
    """Load the workflow in `folder`/`file`. It can import its neighbours with relative imports (`from .reward import score`).

    Raises: WorkflowFault, and any error that the file itself raises.
    """
    return workflow_of(load_module(folder, file), str(folder / file))


def load_module(folder: Path, file: str) -> ModuleType:
    """Load the module afresh. Raises: WorkflowFault if the file does not exist, and any error that the file itself raises."""
    path = folder / file
    if not path.is_file():
        raise WorkflowFault(f"workflow file {path} does not exist")
    return _load_in_package(path)


def workflow_of(module: ModuleType, where: str) -> Workflow:
    """Return the workflow that a loaded module defines. Error messages call the module `where`. Raises: WorkflowFault."""
    for name in ("tasks", "rollout"):
        if not callable(getattr(module, name, None)):
            raise WorkflowFault(f"{where} defines no function {name!r}")
    if not inspect.iscoroutinefunction(module.rollout):
        raise WorkflowFault(f"{where}: rollout must be `async def rollout(episode, task)`")
    return Workflow(
        tasks=module.tasks,
        rollout=module.rollout,
        close=getattr(module, "close", None),
        meet=getattr(module, "meet", None),
    )


def load_rollout(reference: str) -> Rollout:
    """Load the rollout that `reference` names, as `module:function` or `file.py:function`. A plain function will run in a thread.

    Raises: WorkflowFault, and any error that the module itself raises.
    """
    source, _, name = reference.rpartition(":")
    if not source or not name or (source.startswith(".") and not source.endswith(".py")):
        raise WorkflowFault(f"{reference!r} is not the name of a rollout; write module:function or file.py:function")
    if source.endswith(".py"):
        path = Path(source).expanduser().resolve()
        if not path.is_file():
            raise WorkflowFault(f"file {path} does not exist")
        return _member(_load_in_package(path), name, source)
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        module = importlib.import_module(source)
    except ModuleNotFoundError as error:
        if error.name is None or not (source == error.name or source.startswith(f"{error.name}.")):
            raise
        raise WorkflowFault(
            f"module {source!r} not found; run from its folder, or write path/to/file.py:{name}"
        ) from error
    return _member(module, name, source)


def _load_in_package(path: Path) -> ModuleType:
    """Load a file as a module of a package that stands for its folder, so that relative imports find its neighbours."""
    folder = path.resolve().parent
    package = "study_" + "".join(char if char.isalnum() else "_" for char in folder.name)
    home = sys.modules.get(package)
    if home is None or list(home.__path__) != [str(folder)]:
        home = ModuleType(package)
        home.__path__ = [str(folder)]
        sys.modules[package] = home
    spec = importlib.util.spec_from_file_location(f"{package}.{path.stem}", path)
    if spec is None or spec.loader is None:
        raise WorkflowFault(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _member(module: ModuleType, name: str, source: str) -> Rollout:
    found = getattr(module, name, None)
    if found is None:
        guess = nearest(name, [other for other in vars(module) if not other.startswith("_")])
        hint = f" (did you mean {guess!r}?)" if guess else ""
        raise WorkflowFault(f"{source} has no {name!r}{hint}", nearest=[guess] if guess else [])
    if inspect.iscoroutinefunction(found):
        asynchronous: Rollout = found
        return asynchronous
    if not callable(found):
        raise WorkflowFault(
            f"{source}:{name} is not a function: a rollout is `def {name}(episode, task)`, plain or async"
        )
    from swarm.client.sync import plain_rollout  # starts no thread until it is played

    return plain_rollout(found)
