"""The `swarm` command: serve a model, run training, play episodes, look at records.

Exit codes: 0 done, 1 failed (with one line on standard error), 2 bad usage. `swarm episode` has more codes (swarm/cli/episodes.py).
A command's code is imported only when it runs, so that `--help` is instant.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import sys
from collections.abc import Sequence
from typing import Any

from foundation.commandline import Parser, UsageError, error_line
from foundation.imports import advice
from foundation.streams import read_or_not, silence
from swarm.cli.parser import add_commands
from swarm.protocol.errors import SwarmError
from swarm.server import main as server

_UNWRITABLE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
"""Errors that mean standard output cannot be written, for example because the disk is full or the terminal is gone."""


def parser() -> Parser:
    """Return a parser with all commands. Each sets `run` to the `module:function` that carries it out and returns an exit code."""
    swarm = Parser(prog="swarm", description="Host a trainable model, and train it from any agent's calls.")
    commands: Any = swarm.add_subparsers(dest="command", required=True, metavar="COMMAND")
    server.add_parser(commands)
    add_commands(commands)
    return swarm


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Errors that we raise on purpose are shown in one line, without a traceback."""
    args = parser().parse_args(arguments)
    try:
        code = int(_named(args.run)(args))
        with read_or_not():  # includes the output that Python would flush at exit
            return code
    except UsageError as error:
        return _fail(args, error, 2)
    except SwarmError as error:
        return _fail(args, error, _named(args.exit_code)(error) if "exit_code" in args else 1)
    except ModuleNotFoundError as error:
        lacking = advice(error, "server")
        if lacking is None:
            raise
        return _fail(args, SwarmError(lacking), 1)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output went away, as `head` does
        silence(sys.stdout)
        return 0
    except OSError as error:
        if error.errno not in _UNWRITABLE or error.filename is not None:
            raise
        silence(sys.stdout)
        return _fail(args, SwarmError(f"cannot write: {error.strerror}"), 1)


def _named(function: str) -> Any:
    """Import and return the function named by `module:function`."""
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)


def _fail(args: argparse.Namespace, error: UsageError | SwarmError, code: int) -> int:
    text = " ".join(str(error).split())
    if getattr(args, "json", False):
        sys.stderr.write(error_line(text, code=str(error.code), nearest=error.nearest))
    else:
        words = [args.command, getattr(args, f"{args.command}_command", None)]
        sys.stderr.write(f"swarm {' '.join(word for word in words if word)}: {text}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
