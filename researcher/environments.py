"""The Python that runs an instrument's clients, and a check that it can list the instrument's tasks.

An instrument may pin packages of its own (`requirements` in its instrument.toml). If this Python has all of them, clients run under
it. Otherwise they run under the instrument's own environment, which extends this one and is created once, by `researcher
instruments --install`. No other part of the product uses that environment.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from foundation.paths import last_bytes
from researcher.executor.diagnosis import exception_line
from researcher.executor.processes import child_environ
from researcher.instruments.catalogue import InstrumentFolder, open_instrument
from researcher.refusals import PlanningRefused
from researcher.sandbox.launch import confined
from researcher.study.plan import Plan

_PIN = re.compile(r"([A-Za-z0-9][\w.\-]*)==([\w.+!]+)")
_COMPLETE = "complete"
_INSTALL_LIMIT_S = 1800.0
_REHEARSAL_LIMIT_S = 300.0
_TOLD_BYTES = 1 << 20


def pins(folder: InstrumentFolder) -> dict[str, str]:
    """Return the pinned versions by package. Raises: PlanningRefused for a line that pins no version."""
    if folder.instrument.requirements is None:
        return {}
    file = folder.path / folder.instrument.requirements
    found = {}
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        text = line.partition("#")[0].strip()
        pin = _PIN.fullmatch(text)
        if text and pin is None:
            raise PlanningRefused(f"{file}, line {number}: write name==version, got {text!r}")
        if pin is not None:
            found[pin[1]] = pin[2]
    return found


def interpreter(folder: InstrumentFolder, root: Path) -> str:
    """Return the Python for this instrument's clients. `root` is the user's data directory.

    Raises: PlanningRefused, which says what to do, when the instrument's packages are not installed.
    """
    wanted = pins(folder)
    missing = [f"{name}=={pinned}" for name, pinned in wanted.items() if _installed(name) != pinned]
    if not missing:
        return sys.executable
    place = _place(wanted, root)
    if (place / _COMPLETE).is_file():
        return str(place / "bin" / "python")
    name = folder.instrument.name
    raise PlanningRefused(
        f"{name} needs {', '.join(missing)}, which this Python does not have: `researcher instruments --install {name}` installs "
        "them into a separate environment"
    )


def install(folder: InstrumentFolder, root: Path) -> str:
    """Create the instrument's own environment if it is needed and missing, and return its Python.

    Raises: PlanningRefused with pip's last line of output.
    """
    wanted = pins(folder)
    place = _place(wanted, root)
    if all(_installed(name) == pinned for name, pinned in wanted.items()) or (place / _COMPLETE).is_file():
        return interpreter(folder, root)
    shutil.rmtree(place, ignore_errors=True)
    venv.EnvBuilder(symlinks=True).create(place)
    python = place / "bin" / "python"
    site = next((place / "lib").glob("python*/site-packages"))
    beneath = dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib")))
    (site / "beneath.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in beneath))
    command = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--no-deps",
        "--disable-pip-version-check",
    ]
    done = subprocess.run(
        [*command, *(f"{name}=={pinned}" for name, pinned in wanted.items())],
        capture_output=True,
        text=True,
        timeout=_INSTALL_LIMIT_S,
        check=False,
    )
    if done.returncode:
        shutil.rmtree(place, ignore_errors=True)
        said = [line for line in done.stderr.splitlines() if line.strip()] or [f"it ended with {done.returncode}"]
        raise PlanningRefused(f"the packages of {folder.instrument.name} cannot be installed; pip says: {said[-1]}")
    (place / _COMPLETE).write_text(json.dumps(wanted, indent=2) + "\n")
    return str(python)


def rehearsed(
    folder: InstrumentFolder,
    python: str,
    parameters: Sequence[Mapping[str, Any]],
    heldout: int,
    skipped: int = 0,
    *,
    thorough: bool = False,
    names: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """List tasks for each of these parameter sets in a separate process (swarm/client/rehearsal.py).

    An instrument that an LLM wrote runs in the sandbox, because nobody may have read its code yet.

    Args:
        heldout: number of held-out tasks wanted, including the `skipped` ones, which the plan does not score.
        names: parameters that `tasks` must accept, even if no set gives them.
    Raises: PlanningRefused with the instrument's own message, or with the exception and where it was raised.
    """
    name = folder.instrument.name
    asked = {
        "parameters": [dict(each) for each in parameters],
        "heldout": heldout,
        "skipped": skipped,
        "thorough": thorough,
        "names": [*names],
    }
    with tempfile.TemporaryDirectory(prefix="tasks-") as place:
        code, out, said = _carried_out(folder, python, json.dumps(asked), Path(place))
    if code is None:
        raise PlanningRefused(f"{name} did not list its tasks within {_REHEARSAL_LIMIT_S:.0f} s")
    if code:
        lines = said.strip().splitlines() or [f"its process ended with {code}"]
        error = exception_line(said) or lines[-1].strip()
        where = next((line.strip() for line in reversed(lines) if line.strip().startswith('File "')), "")
        raise PlanningRefused(f"{name} fails when it lists its tasks: {error} {where}")
    answer = json.loads(out.strip().splitlines()[-1])
    if "problem" in answer:
        raise PlanningRefused(f"{name}: {answer['problem']}")
    return list(answer["tasks"])


def _carried_out(folder: InstrumentFolder, python: str, asked: str, place: Path) -> tuple[int | None, str, str]:
    """Run the rehearsal. `place` is an empty folder.

    Returns its exit code (None: it took too long) and the ends of its stdout and stderr.
    """
    command = [python, "-m", "swarm.client.rehearsal", str(folder.path), folder.instrument.workflow]
    environ = child_environ()
    if folder.instrument.generated is not None:
        command, environ = confined(command, environ, place, reads=[folder.path])
    out, err = place / "out.log", place / "err.log"
    with out.open("wb") as to_out, err.open("wb") as to_err:
        try:
            done = subprocess.run(
                command,
                input=asked.encode(),
                env=environ,
                stdout=to_out,
                stderr=to_err,
                timeout=_REHEARSAL_LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return None, "", ""
    return done.returncode, _tail(out), _tail(err)


def _tail(file: Path) -> str:
    with file.open("rb") as opened:
        return last_bytes(opened, _TOLD_BYTES).decode(errors="replace")


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _place(wanted: Mapping[str, str], root: Path) -> Path:
    """Return the folder of the environment for these pins on this Python."""
    what = json.dumps([sorted(wanted.items()), sys.version, os.path.realpath(sys.prefix)])
    return root / "environments" / hashlib.sha256(what.encode()).hexdigest()[:16]


Draw = Callable[[InstrumentFolder, str, Sequence[Mapping[str, Any]], int, int], list[dict[str, Any]]]
"""Signature of `rehearsed`, without its parameters after `skipped`."""


def drawn_once(draw: Draw) -> Draw:
    """Return `draw` with a cache, for checking many plans together: equal requests are drawn once. Refusals are not cached."""
    known: dict[str, list[dict[str, Any]]] = {}

    def drawn(
        folder: InstrumentFolder, python: str, parameters: Sequence[Mapping[str, Any]], heldout: int, skipped: int
    ) -> list[dict[str, Any]]:
        asked = json.dumps([str(folder.path), python, [dict(each) for each in parameters], heldout, skipped])
        if asked not in known:
            known[asked] = draw(folder, python, parameters, heldout, skipped)
        return known[asked]

    return drawn


def check_tasks(plan: Plan, folder: InstrumentFolder, python: str, draw: Draw = rehearsed) -> Plan:
    """List a few tasks of every arm before the study begins, so that wrong data or parameters show up early.

    Returns the plan, with fewer held-out tasks if an arm, or another instrument that models are scored on, has fewer than planned.

    Raises: PlanningRefused, also when the plan skips held-out tasks and too few are left after them.
    """
    plan = _with_tasks_elsewhere(plan, python, draw)
    fewest = count_heldout(plan, folder, python, plan.heldout_upto, draw)
    if fewest >= plan.heldout_upto:
        return plan
    if plan.heldout_from:
        raise PlanningRefused(
            f"{plan.instrument} has {fewest} held-out tasks, but {plan.heldout_upto} are needed: the first {plan.heldout_from} are "
            f"left to other studies, and {plan.heldout_tasks} more are scored; score fewer, or give the instrument more"
        )
    note = f"Every trial is evaluated on {fewest} held-out tasks instead of {plan.heldout_tasks}: there are no more of them."
    return plan.model_copy(update={"heldout_tasks": fewest, "assumptions": (*plan.assumptions, note)})


def _with_tasks_elsewhere(plan: Plan, python: str, draw: Draw) -> Plan:
    """Reduce the number of tasks scored on other instruments that have fewer. They too run under the study's `python`."""
    found = []
    for each in plan.transfers:
        [drawn] = draw(open_instrument(each.instrument), python, [each.task], each.tasks, 0)
        found.append(each.model_copy(update={"tasks": min(each.tasks, int(drawn["heldout"]))}))
    return plan.model_copy(update={"transfers": tuple(found)})


def count_heldout(plan: Plan, folder: InstrumentFolder, python: str, most: int, draw: Draw = rehearsed) -> int:
    """Return the number of held-out tasks that every arm of the plan has, at most `most`.

    Raises: PlanningRefused as `rehearsed` does.
    """
    wanted: list[dict[str, Any]] = []
    for arm in plan.arms:
        levels = plan.levels_of(arm).items()
        own = {target.removeprefix("task."): level for target, level in levels if target.startswith("task.")}
        parameters = {**folder.instrument.defaults.task, **plan.task, **own}
        if parameters not in wanted:
            wanted.append(parameters)
    drawn = draw(folder, python, wanted, most, plan.heldout_from)
    return min(int(found["heldout"]) for found in drawn)
