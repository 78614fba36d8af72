"""A study is priced by what trials took before on the same servers, and by no others."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from foundation.clock import ManualClock
from researcher.models import StudyOptions
from researcher.paces import paces_on
from researcher.store.store import Store
from tests.fakes.specs import planned

HERE = {"machine": socket.gethostname(), "engine": "local"}


WORK_S, NIGHT_S = 60.0, 36_000.0


def store_with_a_trial(folder: Path, nights: int = 0, **options: Any) -> Store:
    """A store with one study, and one trial of it that was done after a minute of work and some nights at rest."""
    clock = ManualClock()
    store = Store.open(f"sqlite:///{folder}/researcher.db", clock=clock)
    plan = planned()
    study = store.studies.create(plan.question, StudyOptions.model_validate(options))
    store.plans.save(study, plan)
    (trial,) = store.trials.ensure(study, plan.stages[0].id, [(plan.arms[0].name, 0)])
    store.trials.record_intent(study, trial.key, 1, "http://127.0.0.1:1", "key", {})
    store.trials.record_submitted(study, trial.key, "run", {})
    clock.advance(WORK_S)
    for night in range(nights):
        since = (
            None if night % 2 else clock.now()
        )  # an interruption is recorded when it is over, a pause when it begins
        if since is None:
            store.trials.record_rest(study, trial.key, "its window closed")
        clock.advance(NIGHT_S)
        if since is not None:
            store.trials.record_rest(study, trial.key, "interrupted", since)
        store.trials.continue_attempt(study, trial.key, 1)
    store.trials.finish(study, trial.key, {}, {})
    return store


@pytest.mark.parametrize(
    ("options", "servers", "engine", "found"),
    [
        (HERE, [], "local", True),
        (HERE, [], "echo", False),
        (HERE | {"machine": "another"}, [], "local", False),
        (HERE, ["http://gpu:8642"], "local", False),
        ({"servers": ["http://gpu:8642/"]}, ["http://gpu:8642"], "local", True),
        ({"servers": ["http://gpu:8642"]}, ["http://other:8642"], "local", False),
        ({"servers": ["http://gpu:8642"]}, [], "local", False),
    ],
)
def test_a_pace_counts_on_the_servers_that_showed_it(
    tmp_path: Path, options: dict[str, Any], servers: list[str], engine: str, found: bool
) -> None:
    store = store_with_a_trial(tmp_path, **options)
    assert bool(paces_on(store, servers, engine)) == found
    store.close()


def test_nights_at_rest_are_no_part_of_a_pace(tmp_path: Path) -> None:
    found = []
    for nights in range(4):
        (folder := tmp_path / str(nights)).mkdir()
        store = store_with_a_trial(folder, nights, **HERE)
        found += [pace.episode_s for pace in paces_on(store, [], "local")]
        store.close()
    assert found == pytest.approx([found[0]] * 4)
