"""The `swarm` command: serve a model, run training, hold episodes, look at records.

Exit codes: 0 done, 1 failed (one line on standard error), 2 the command line cannot be understood; `swarm episode` has
more of them (swarm/cli/episodes.py).
"""

from __future__ import annotations

import argparse
import errno
import json
import sys
from collections.abc import Sequence
from typing import Any

from foundation.commandline import Parser, UsageError
from foundation.imports import advice
from foundation.streams import read_or_not, silence

_UNWRITABLE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
"""Of standard output: a full disk, a terminal that is gone."""


def parser() -> Parser:
    """All commands. Each sets `run`, a function of the parsed arguments that answers with an exit code."""
    from swarm.cli import attempt, chat, episodes, join, ledger, models, replay, runs, top, trace
    from swarm.server import main as server

    swarm = Parser(prog="swarm", description="Host a trainable model, and train it from any agent's calls.")
    commands: Any = swarm.add_subparsers(dest="command", required=True, metavar="COMMAND")
    server.add_parser(commands)
    runs.add_parser(commands)
    episodes.add_parser(commands)
    attempt.add_parser(commands)
    join.add_parser(commands)
    top.add_parser(commands)
    trace.add_parser(commands)
    ledger.add_parser(commands)
    models.add_parser(commands)
    chat.add_parser(commands)
    replay.add_parser(commands)
    return swarm


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Errors that we raise on purpose are one line, never a traceback."""
    args = parser().parse_args(arguments)
    from swarm.protocol.errors import SwarmError

    try:
        code = int(args.run(args))
        with read_or_not():  # also what Python would write at its end
            return code
    except UsageError as error:
        return _fail(args, error, 2)
    except SwarmError as error:
        return _fail(args, error, args.exit_code(error) if "exit_code" in args else 1)
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


def _fail(args: argparse.Namespace, error: Exception, code: int) -> int:
    text = " ".join(str(error).split())
    if getattr(args, "json", False):
        document = {"error": text, "code": str(getattr(error, "code", "")) or None}
        sys.stderr.write(json.dumps(document) + "\n")
    else:
        words = [args.command, getattr(args, f"{args.command}_command", None)]
        sys.stderr.write(f"swarm {' '.join(word for word in words if word)}: {text}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
