"""Why a study stops or rests: the exception that says so, and the check for stop and pause requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from researcher.models import StudyStatus

if TYPE_CHECKING:  # the store takes longer to import than a dry run takes
    from researcher.store.store import Store

STOPPED_ON_REQUEST = "stopped on request; `researcher resume` continues it"
STOPPED_UNPLANNED = "stopped on request, before it had a plan; `researcher start` asks anew"

Cause = Literal["stop", "pause", "window", "days", "budget", "gate", "rejected", "repair"]

_STUDY: dict[Cause, str] = {
    "stop": STOPPED_ON_REQUEST,
    "pause": "paused on request; `researcher resume` continues it",
    "window": "waits for its next window",
    "days": "its days are over; `researcher report` shows what was found",
    "budget": "its budget is spent",
}
_TRIAL: dict[Cause, str] = {
    "stop": "a stop was requested",
    "pause": "a pause was requested",
    "window": "its window closed",
}


class StudyHalted(Exception):
    """The study stops or rests. A stop ends the running trials; any other cause pauses them.

    `str()` says why the trials were ended or paused. `reason` says why the study stopped, or what it waits for.
    """

    def __init__(self, cause: Cause, reason: str | None = None) -> None:
        self.cause = cause
        self.reason = reason or _STUDY[cause]
        super().__init__(_TRIAL.get(cause, self.reason))

    @property
    def status(self) -> StudyStatus:
        """The study's new status."""
        if self.cause == "repair":
            return StudyStatus.FAILED
        return StudyStatus.STOPPED if self.cause in ("stop", "days", "rejected") else StudyStatus.WAITING


def check_requests(store: Store, study_id: str) -> None:
    """Check whether a person asked for a stop or a pause. Raises: StudyHalted."""
    study = store.studies.get(study_id)
    if study.stop_requested:
        raise StudyHalted("stop")
    if study.pause_requested:
        raise StudyHalted("pause")
