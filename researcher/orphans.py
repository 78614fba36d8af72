"""Studies that no process works on: stops or pauses them, and ends the servers and clients that a dead worker left running. If nothing
continues the study, frees the disk of its servers too."""

from __future__ import annotations

import asyncio
from typing import Literal

from foundation.clock import SystemClock
from researcher.conduct import interim_report
from researcher.executor.cleanup import discard_if_over, end_left_of
from researcher.halts import STOPPED_ON_REQUEST, STOPPED_UNPLANNED
from researcher.home import Home
from researcher.models import StudyStatus
from researcher.ownership import lives_here, owned_at_rest, owned_now
from researcher.store.errors import LeaseHeld


def halt(home: Home, study_id: str, wish: Literal["stop", "pause"]) -> list[str]:
    """Stop the study, or leave it where it is for a pause, and end what a dead worker left running.

    Returns a line for each server on which that failed. Raises: LeaseHeld when a process works on the study.
    """
    folder, clock = home.studies / study_id, SystemClock()
    with owned_at_rest(home.store, study_id) as own:
        left = asyncio.run(end_left_of(own, study_id, folder, clock))
        if wish == "stop":
            planned = own.studies.get(study_id).plan_version is not None
            reason = STOPPED_ON_REQUEST if planned else STOPPED_UNPLANNED
            own.studies.set_status(study_id, StudyStatus.STOPPED, reason)
            interim_report(own, study_id, home.studies)
            asyncio.run(discard_if_over(own, study_id, folder, clock))
        return left


def end_left(home: Home, study_id: str) -> list[str] | None:
    """End what a dead worker of an ended study left running.

    Returns a line for each server on which that failed; None if its last worker left nothing.
    """
    lease = home.store.leases.holder(study_id)
    if lease is None or lives_here(lease.owner):
        return None
    folder, clock = home.studies / study_id, SystemClock()
    try:
        with owned_now(home.store, study_id) as own:
            left = asyncio.run(end_left_of(own, study_id, folder, clock))
            asyncio.run(discard_if_over(own, study_id, folder, clock))
            return left
    except LeaseHeld:
        return None


def halt_newest(home: Home, campaign_id: str, wish: Literal["stop", "pause"]) -> list[str]:
    """Do for the newest study of a campaign what `halt` does, or `end_left` if it has ended and the campaign stops. One that has not
    begun stays as it is.

    Returns what a person should know, such as a line for each server on which that failed. Raises: LeaseHeld when a process works on
    the study.
    """
    for decision in reversed(home.store.campaigns.decisions(campaign_id)):
        if decision.study_id is not None:
            study = home.store.studies.get(decision.study_id)
            if study.status.ended:
                if wish == "pause":
                    return []  # the resumed campaign winds it up
                left = end_left(home, study.id)
                then = [f"`researcher resume {study.id}` frees its disk"] if study.status is StudyStatus.DONE else []
                return [] if left is None else [*then, *left]
            return [] if study.plan_version is None else halt(home, study.id, wish)
    return []
