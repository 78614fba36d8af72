"""What goes wrong while trials run.

ExecutorError
├── ServerUnfit       this server cannot be used; another may
├── NoServersLeft     none can; trials are left as they are
├── StudyHalted       a stop or a pause was asked for, or the study's window closed
│   └── MendByHand    the instrument's code fails, and nobody but a person may mend it
├── EvidenceMissing   the server's records do not show a whole trial (yet)
└── AttemptFailed     this attempt came to nothing; the trial may be tried again
    └── Unmended      the instrument's code fails and could not be mended: no other attempt will do better

and `InstrumentChanged` of blueprint.py, a ValueError.
"""

from __future__ import annotations

from typing import Literal


class ExecutorError(Exception):
    """Base of what the executor raises on purpose."""


class ServerUnfit(ExecutorError):
    """url: of the server, where it is known."""

    def __init__(self, reason: str, url: str = "") -> None:
        super().__init__(reason)
        self.url = url


class NoServersLeft(ExecutorError):
    pass


class StudyHalted(ExecutorError):
    def __init__(self, wish: Literal["stop", "pause", "window", "mend"]) -> None:
        why = "the study is outside its windows" if wish == "window" else f"a {wish} was asked for"
        super().__init__(f"{why}; `researcher resume` goes on")
        self.wish = wish


class MendByHand(StudyHalted):
    """text: where it failed, and what to do."""

    def __init__(self, text: str) -> None:
        Exception.__init__(self, text)
        self.wish = "mend"


class EvidenceMissing(ExecutorError):
    pass


class AttemptFailed(ExecutorError):
    pass


class Unmended(AttemptFailed):
    pass
