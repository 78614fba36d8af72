"""Errors while trials run.

ExecutorError
├── ServerUnfit       this server cannot be used; another may work
├── NoServersLeft     no server can be used; trials are left as they are
├── ClusterUnreachable  the Ray cluster where clients run does not answer; trials are left as they are
├── RunLost           the run that an attempt should continue is gone: the trial starts again
├── EvidenceMissing   the server's records do not show a complete trial (yet)
├── ModelsNotKept     a trial's trained model could not be exported; its server's state is still there
└── AttemptFailed     this attempt failed; the trial may be tried again
    └── Unmended      the instrument's code fails and could not be repaired: another attempt would not help

`MendByHand`, a StudyHalted: the instrument's code fails, and only a person may repair it.
`InstrumentChanged`, a ValueError.
"""

from __future__ import annotations

from researcher.halts import StudyHalted


class ExecutorError(Exception):
    """Base class of the errors that the executor raises on purpose."""


class ServerUnfit(ExecutorError):
    """A server cannot be used. `url` is its address, if known."""

    def __init__(self, reason: str, url: str = "") -> None:
        super().__init__(reason)
        self.url = url


class NoServersLeft(ExecutorError):
    pass


class ClusterUnreachable(ExecutorError):
    pass


class MendByHand(StudyHalted):
    """A person has to repair the code. `text` says where it failed and what to do."""

    def __init__(self, text: str) -> None:
        super().__init__("repair", text)


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
    """The instrument's files differ from those that the plan was made for."""
