"""What goes wrong while trials run.

ExecutorError
├── ServerUnfit       this server cannot be used; another may
├── NoServersLeft     none can; trials are left as they are
├── ClusterUnreachable  the Ray cluster where clients live does not answer; trials are left as they are
├── RunLost           the run that an attempt was to go on with is no more: the trial starts afresh
├── EvidenceMissing   the server's records do not show a whole trial (yet)
├── ModelsNotKept     what a trial trained could not be written as a folder; its server's state is still there
└── AttemptFailed     this attempt came to nothing; the trial may be tried again
    └── Unmended      the instrument's code fails and could not be mended: no other attempt will do better

`MendByHand`, a StudyHalted: the instrument's code fails, and nobody but a person may mend it.
`InstrumentChanged`, a ValueError.
"""

from __future__ import annotations

from researcher.halts import StudyHalted


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


class MendByHand(StudyHalted):
    """text: where it failed, and what to do."""

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
    """The instrument's files are not those that the plan was made for."""
