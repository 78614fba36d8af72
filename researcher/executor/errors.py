"""What goes wrong while trials run.

ExecutorError
├── ServerUnfit       this server cannot be used; another may
├── NoServersLeft     none can; trials are left as they are
├── ClusterUnreachable  the Ray cluster where clients live does not answer; trials are left as they are
├── StudyHalted       a stop or a pause was asked for, the study's window closed, or its budget is spent
│   └── MendByHand    the instrument's code fails, and nobody but a person may mend it
├── RunLost           the run that an attempt was to go on with is no more: the trial starts afresh
├── EvidenceMissing   the server's records do not show a whole trial (yet)
├── ModelsNotKept     what a trial trained could not be written as a folder; its server's state is still there
└── AttemptFailed     this attempt came to nothing; the trial may be tried again
    └── Unmended      the instrument's code fails and could not be mended: no other attempt will do better

and `InstrumentChanged`, a ValueError.
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


class ClusterUnreachable(ExecutorError):
    pass


Wish = Literal["stop", "pause", "window", "budget"]
_WHY: dict[Wish, str] = {
    "stop": "a stop was asked for",
    "pause": "a pause was asked for",
    "window": "its window closed",
    "budget": "its budget of wall time is spent",
}


class StudyHalted(ExecutorError):
    """A stop ends the trials that run; whatever else halts a study pauses them."""

    def __init__(self, wish: Wish) -> None:
        super().__init__(_WHY[wish])
        self.wish: Wish | Literal["mend"] = wish


class MendByHand(StudyHalted):
    """text: where it failed, and what to do."""

    def __init__(self, text: str) -> None:
        Exception.__init__(self, text)
        self.wish = "mend"


class RunLost(ExecutorError):
    pass


class EvidenceMissing(ExecutorError):
    pass


class ModelsNotKept(ExecutorError):
    pass


class AttemptFailed(ExecutorError):
    pass


class Unmended(AttemptFailed):
    pass


class InstrumentChanged(ValueError):
    """The instrument's files are not those that the plan was made for."""
