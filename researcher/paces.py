"""Speeds of earlier trials on the servers that a new study will use. They price the study better than an estimate."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from researcher.analysis.durations import EVENTS
from researcher.design.pricing import Pace
from researcher.models import StudyOptions, StudyRecord
from researcher.store.store import Store

_NEWEST = 20
"""Maximum number of studies to look at. Older ones ran with other code or on another machine."""


_SERIES = ("tokens_called", "episodes", "step_s")
"""The series from which tokens per episode, and a calibration's pace, are computed."""


def paces_on(store: Store, servers: Sequence[str], engine: str) -> list[Pace]:
    """Return the paces of the newest studies on the same servers, newest first.

    `servers` are their addresses; if empty, the servers are those that this machine starts with `engine`.
    """
    here = StudyOptions(servers=tuple(servers), engine=engine, machine=socket.gethostname())
    alike = [study for study in store.studies.all() if study.plan_version and _place(study.options) == _place(here)]
    found = (_pace_of(store, each) for each in alike[:_NEWEST])
    return [pace for pace in found if pace is not None]


def _pace_of(store: Store, study: StudyRecord) -> Pace | None:
    trials, events = store.trials.all(study.id, series=_SERIES), store.journal.events(study.id, *EVENTS)
    of = Pace.calibrated if study.options.calibrates else Pace.of
    return of(study.id, store.plans.get(study.id), trials, events)


def _place(options: StudyOptions) -> tuple[object, ...]:
    """Return what identifies the servers of a study: their addresses, or the machine and engine.

    The pace of given servers does not depend on the machine that uses them.
    """
    given = sorted(url.rstrip("/") for url in options.servers)
    return tuple(given) if given else (options.engine, options.machine)
