"""What trials of earlier studies took on the servers that a new study will use: its price, before anything is estimated."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from researcher.design.pricing import Pace
from researcher.models import StudyOptions
from researcher.store.store import Store

_NEWEST = 20
"""How many studies are looked at: an older pace is one of other code, or of another machine."""


_SERIES = ("tokens_called", "episodes")
"""What tokens per episode are counted from."""


def paces_on(store: Store, servers: Sequence[str], engine: str) -> list[Pace]:
    """Of the newest studies on the same servers, the newest first. servers: those given; none are started on this machine,
    with this engine."""
    here = StudyOptions(servers=tuple(servers), engine=engine, machine=socket.gethostname())
    alike = [study.id for study in store.studies.all() if study.plan_version and _place(study.options) == _place(here)]
    found = (Pace.of(each, store.plans.get(each), store.trials.all(each, series=_SERIES)) for each in alike[:_NEWEST])
    return [pace for pace in found if pace is not None]


def _place(options: StudyOptions) -> tuple[object, ...]:
    """Where trials run. A server has its own speed, wherever its study was started."""
    given = sorted(url.rstrip("/") for url in options.servers)
    return tuple(given) if given else (options.engine, options.machine)
