"""Finds out why a client ended too early: infrastructure, or the instrument's own code. The rules look, in turn, at

the server's state · how the process ended · the exception's kind · where it was raised · the ledger's reasons

Pure: text and numbers in, a `Diagnosis` out. If no rule decides, the cause is `UNKNOWN`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from swarm.protocol.status import Phase


class Cause(StrEnum):
    INFRASTRUCTURE = "infrastructure"
    """Machine, network, server: the same code may succeed next time."""
    CODE = "code"
    """The instrument's own code: it will fail again until somebody repairs it."""
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Symptoms:
    """Everything known about a client that ended.

    Attributes:
        folder: the folder of its code.
        exit_code: None if nobody saw it end.
        lost: why its host ended it, if that is what happened.
        said: its standard error.
        aborted: the reasons of the episodes that it aborted.
        phase: the server's phase; None if the server does not answer.
        stalled: whether the client was alive but made no progress.
    """

    folder: Path
    exit_code: int | None = None
    lost: str = ""
    said: str = ""
    aborted: Sequence[str] = ()
    phase: Phase | None = None
    stalled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Why a client ended. `by` says who decided that: `rules`, or the name of the LLM that gave the opinion."""

    cause: Cause
    why: str
    error: str = ""
    """The exception's last line, if there is one."""
    place: str = ""
    """`workflow.py:41`: the innermost line of the instrument's own code in the traceback."""
    trace: str = ""
    by: str = "rules"

    @property
    def kind(self) -> str:
        """The exception's class name, or ""."""
        return _kind(self.error)

    def __str__(self) -> str:
        where = f" at {self.place}" if self.place else ""
        what = f" ({self.error})" if self.error else ""
        said = "" if self.by == "rules" else f", in the opinion of {self.by}"
        return f"{self.why}{where}{what}: {_WORDS[self.cause]}{said}"


_WORDS = {
    Cause.INFRASTRUCTURE: "infrastructure",
    Cause.CODE: "a fault of the instrument's code",
    Cause.UNKNOWN: "the cause is not known",
}

_PASSING = frozenset(
    [
        "ServerUnreachable",
        "NotASwarmServer",
        "EngineFailed",
        "StorageFull",
        "ServerBusy",
        "ServerFault",
        "NotRolling",
        "Draining",
        "MixFull",
        "LeaseLost",
        "OverLimit",
        "Unauthorized",
        "Forbidden",
        "ConfigConflict",
        "IdempotencyConflict",
        "TeamAborted",
        "TeamUndecided",
        "APIConnectionError",
        "APITimeoutError",
        "InternalServerError",
        "RateLimitError",
        "AuthenticationError",
        "PermissionDeniedError",
        "ConnectError",
        "ConnectTimeout",
        "ReadError",
        "ReadTimeout",
        "WriteError",
        "WriteTimeout",
        "CloseError",
        "PoolTimeout",
        "RemoteProtocolError",
        "ConnectionError",
        "ConnectionResetError",
        "ConnectionRefusedError",
        "ConnectionAbortedError",
        "BrokenPipeError",
        "MemoryError",
        "TimeoutError",
        "CancelledError",
        "KeyboardInterrupt",
    ]
)
"""Names of exceptions that are not the fault of the code that met them."""
_OWN = frozenset({"WorkflowFault", "EpisodeUnfinished", "SyntaxError", "IndentationError", "TabError"})
"""Exceptions that point to the instrument's code wherever they are raised."""
_PASSING_ERRNO = frozenset({5, 11, 12, 23, 24, 28, 30, 104, 110, 111, 113, 122})
"""errno values that are the machine's fault: I/O error, try again, no memory, too many files, no space, read-only, network,
quota."""
_PASSING_STATUS = frozenset({401, 403, 404, 408, 409, 410, 425, 429})
"""HTTP status codes for problems with the lease, the run or the server rather than with the request."""

_TRACEBACK = "Traceback (most recent call last):"
_FRAME = re.compile(r'^\s+File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<function>.+))?$', re.MULTILINE)
_ERROR = re.compile(r"^(?P<kind>[A-Za-z_][\w.]*)(?:: (?P<text>.*))?$")
_GROUP = "Exception Group Traceback"
_GUTTER = re.compile(r"^(?:  )+[|+] ?", re.MULTILINE)
"""Prefix of every traceback line of an exception group and its members."""
_ERRNO = re.compile(r"\[Errno (\d+)\]")
_STATUS = re.compile(r"\b(?:Client|Server) error '(\d{3}) ")
_SHOWN = 6000
"""Number of characters kept from the end of a traceback."""


def diagnose(seen: Symptoms) -> Diagnosis:
    """Apply the rules in order; the first that decides wins."""
    if seen.phase is Phase.FAILED:
        return Diagnosis(cause=Cause.INFRASTRUCTURE, why="the server's engine failed")
    if seen.phase is None:
        return Diagnosis(cause=Cause.INFRASTRUCTURE, why="the server does not answer")
    if seen.lost:
        return Diagnosis(cause=Cause.INFRASTRUCTURE, why=f"the client was lost: {seen.lost}")
    code = seen.exit_code
    if code is not None and (code < 0 or code > 128) and not seen.stalled:  # the executor killed a stalled one
        number = -code if code < 0 else code - 128
        return Diagnosis(cause=Cause.INFRASTRUCTURE, why=f"the client was killed by signal {number}")
    if code == 2:
        return Diagnosis(cause=Cause.INFRASTRUCTURE, why="the client could not use its blueprint")
    found = _by_traceback(seen)
    if found is not None:
        return found
    if seen.stalled:
        return Diagnosis(cause=Cause.UNKNOWN, why="the client was alive but ended no episode")
    return Diagnosis(cause=Cause.UNKNOWN, why="the client ended early and left no traceback")


def _by_traceback(seen: Symptoms) -> Diagnosis | None:
    """Diagnose by the last traceback or, if that one reports failed rollouts, by the tracebacks of the rollouts."""
    blocks = _blocks(seen.said)
    if not blocks:
        return None
    last = _judge(blocks[-1], seen.folder)
    if last.kind != "RolloutsFailing":
        return last
    rollouts = [part for text in seen.aborted for part in _blocks(text)[-1:]] or blocks[:-1]
    judged = [_judge(block, seen.folder) for block in rollouts]
    if not judged:
        return replace(last, cause=Cause.UNKNOWN, why="rollouts failed, one after the other")
    most = Counter(each.cause for each in judged).most_common(1)[0][0]
    typical = next(each for each in reversed(judged) if each.cause is most)
    return replace(typical, why=f"rollouts failed, one after the other: {typical.why}")


def _blocks(text: str) -> list[str]:
    """Return the text after each "Traceback". The members of an exception group follow the group, innermost last."""
    return (_GUTTER.sub("", text) if _GROUP in text else text).split(_TRACEBACK)[1:]


def _judge(block: str, folder: Path) -> Diagnosis:
    """Diagnose one traceback: something other than the code failed, the code failed, or it is unclear."""
    frames = list(_FRAME.finditer(block))
    error = exception_line(block)
    kind, own = _kind(error), [frame for frame in frames if _inside(frame["file"], folder)]
    place = f"{Path(own[-1]['file']).relative_to(folder)}:{own[-1]['line']}" if own else ""
    trace = f"{_TRACEBACK}{block[-_SHOWN:]}".strip()

    def found(cause: Cause, why: str) -> Diagnosis:
        return Diagnosis(cause=cause, why=why, error=error, place=place, trace=trace)

    if kind in _PASSING or _passing_number(error):
        return found(Cause.INFRASTRUCTURE, "something other than the code failed")
    if kind in _OWN or (frames and frames[-1]["function"] == "hand_in"):
        return found(Cause.CODE, "the instrument cannot be used as it is")
    if own:
        return found(Cause.CODE, "the instrument raised an error")
    return found(Cause.UNKNOWN, "an error was raised outside the instrument")


def _passing_number(error: str) -> bool:
    errno, status = _ERRNO.search(error), _STATUS.search(error)
    if errno is not None:
        return int(errno[1]) in _PASSING_ERRNO
    return status is not None and (int(status[1]) >= 500 or int(status[1]) in _PASSING_STATUS)


def exception_line(block: str) -> str:
    """Return the first line after a traceback's last frame, such as `KeyError: 'total'`, or ""."""
    end = max((frame.end() for frame in _FRAME.finditer(block)), default=0)
    for line in block[end:].splitlines():
        if line and not line[0].isspace() and _ERROR.match(line):
            return line[:300]
    return ""


def _kind(error: str) -> str:
    """Return the exception's class name without its module."""
    return error.partition(":")[0].rpartition(".")[2]


def _inside(file: str, folder: Path) -> bool:
    try:
        return Path(file).resolve().is_relative_to(folder.resolve())
    except OSError:
        return False
