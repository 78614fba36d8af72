"""Calls functions of a repository: `python run_cases.py PACKAGE < calls`, in the folder that holds the package. Imports nothing of ours.

Standard input is a list of {"module", "function", "arguments"}; on standard output each call gets a line, {"value": …} or {"raises": …}.
What the results have to be is not known here: the code that runs here was written by an agent.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys

MEMORY = 1 << 30
"""Bytes of address space."""


def main() -> None:
    # What the code prints must not be taken for a result.
    results = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    calls = json.load(sys.stdin)
    sys.path.insert(0, os.getcwd())
    sys.dont_write_bytecode = True
    results.write("ready\n")
    results.flush()
    for call in calls:
        results.write(result(sys.argv[1], call) + "\n")
        results.flush()


def result(package: str, call: dict[str, object]) -> str:
    try:
        function = getattr(importlib.import_module(f"{package}.{call['module']}"), str(call["function"]))
        return json.dumps({"value": function(*call["arguments"])}, sort_keys=True)  # type: ignore[misc]
    except BaseException as error:  # noqa: BLE001 - an exit or an interrupt of the agent's code is its result as well
        return json.dumps({"raises": type(error).__name__})


if __name__ == "__main__":
    main()
