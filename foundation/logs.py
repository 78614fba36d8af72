"""Logging that redacts secrets before it writes a line (invariant I9)."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Mapping
from typing import TextIO

from foundation.commandline import UsageError
from foundation.nearest import nearest

SECRET_PREFIXES = ("swk", "swl", "swt", "swd")  # our API keys, leases, tokens and team keys: `swk_…`
_CHATTY = ("httpx", "httpx2", "httpcore", "urllib3")
"""Libraries that log a line for each request."""
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_ALIASES = {"WARN": "WARNING", "FATAL": "CRITICAL"}
"""Alternative level names that Python knows."""
_SECRET = re.compile(
    r"\b(?:" + "|".join(SECRET_PREFIXES) + r")_[A-Za-z0-9_\-.]+"
    r"|\bsk-[A-Za-z0-9_\-]{8,}"
    r"|(?i:(?<=bearer )[A-Za-z0-9_\-.=]{8,})"
    r"|(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"
)


def redact(text: str) -> str:
    """Return `text` with API keys, leases, bearer tokens and URL credentials replaced by `[redacted]`."""
    return _SECRET.sub("[redacted]", text)


class _RedactingFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


def level_of(environ: Mapping[str, str]) -> str:
    """Return the log level: `SWARM_LOG_LEVEL`, else INFO. Raises: UsageError for an unknown level."""
    given = environ.get("SWARM_LOG_LEVEL", "").strip()
    name = _ALIASES.get(given.upper(), given.upper())
    if name in _LEVELS:
        return name
    if not given:
        return "INFO"
    guess = nearest(given.upper(), _LEVELS)
    hint = f"; did you mean {guess}?" if guess else ""
    raise UsageError(
        f"SWARM_LOG_LEVEL must be one of {', '.join(_LEVELS)}, not {given!r}{hint}", [guess] if guess else []
    )


def configure(level: str = "INFO", stream: TextIO | None = None) -> None:
    """Send log lines to `stream` (standard error by default). A `main` function calls this once."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_RedactingFormatter("%(asctime)s %(levelname).1s %(name)s  %(message)s", "%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in _CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)
