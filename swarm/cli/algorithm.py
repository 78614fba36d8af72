"""`swarm algorithm check`: tests users' own functions before a run uses them."""

from __future__ import annotations

import argparse
import ast
import json
from dataclasses import asdict
from pathlib import Path

from foundation.commandline import UsageError
from swarm.client.own_algorithms import SourceFault, read_function
from swarm.engine.algorithms.checks import Check, check_function
from swarm.protocol.algorithms import AlgorithmSpec

_FIELDS = {"advantage": "name", "loss": "loss", "importance_correction": "importance_correction"}
"""Maps the role of a function to the spec's field that names it."""
_ENDINGS = {"advantage": "advantage", "loss": "loss", "correction": "importance_correction"}
_WORDS = {True: "ok", False: "FAILED", None: "-"}


def check_functions(args: argparse.Namespace) -> int:
    """Check the named functions. Returns exit code 1 if a check fails, else 0."""
    failed = False
    for name, role in _functions(args.function, args.role):
        file = args.function.partition(".py")[0] + ".py"
        try:
            source = read_function(f"{file}:{name}")
        except SourceFault as error:
            raise UsageError(str(error)) from error
        assert source is not None
        field, reference = _FIELDS[role], f"{Path(file).name}:{name}"
        spec = AlgorithmSpec.model_validate({field: reference, "sources": {Path(file).name: source.text}})
        found = check_function(spec, field, detached=args.detached)
        failed = failed or any(check.passed is False for check in found)
        _show(reference, role, found, as_json=args.json)
    return 1 if failed else 0


def _show(reference: str, role: str, found: list[Check], *, as_json: bool) -> None:
    if as_json:
        passed = all(check.passed is not False for check in found)
        document = {"function": reference, "role": role, "passed": passed, "checks": [asdict(each) for each in found]}
        print(json.dumps(document))
        return
    for check in found:
        print(f"{reference} ({role})  {check.check:<13}  {_WORDS[check.passed]:<6}  {check.detail}".rstrip())


def _functions(given: str, role: str | None) -> list[tuple[str, str]]:
    """Return the name and role of each function that `given` names. Raises: UsageError."""
    path, found, name = given.rpartition(":") if not given.endswith(".py") else (given, "", "")
    if not path.endswith(".py") or (found and not name.isidentifier()):
        raise UsageError(f"{given!r} is neither FILE.py nor FILE.py:NAME")
    names = [name] if found else _names(Path(path))
    roles = [(each, role or _role(each)) for each in names]
    known = [(each, what) for each, what in roles if what is not None]
    if not known:
        which = f"which kind of function {name} is" if found else f"which functions of {path} to check"
        raise UsageError(
            f"cannot tell {which}: end function names with advantage, loss or correction, or give --as with FILE.py:NAME"
        )
    if role is not None and not found:
        raise UsageError("--as applies to a single function: name it as FILE.py:NAME")
    return known


def _names(path: Path) -> list[str]:
    """Return the names of the file's public top-level functions. Raises: UsageError."""
    try:
        parsed = ast.parse(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"{path} is not valid Python: {error}") from error
    return [each.name for each in parsed.body if isinstance(each, ast.FunctionDef) and not each.name.startswith("_")]


def _role(name: str) -> str | None:
    return next((role for ending, role in _ENDINGS.items() if name.endswith(ending)), None)
