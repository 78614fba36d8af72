"""A study is priced by what trials took before on the same servers, and by no others."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from researcher.models import StudyOptions
from researcher.paces import paces_on
from researcher.store.store import Store
from tests.fakes.specs import planned

HERE = {"machine": socket.gethostname(), "engine": "local"}


def store_with_a_trial(folder: Path, **options: Any) -> Store:
    """A store with one study, and one trial of it that was done."""
    store = Store.open(f"sqlite:///{folder}/researcher.db")
    plan = planned()
    study = store.studies.create(plan.question, StudyOptions.model_validate(options))
    store.plans.save(study, plan)
    (trial,) = store.trials.ensure(study, plan.stages[0].id, [(plan.arms[0].name, 0)])
    store.trials.record_intent(study, trial.key, 1, "http://127.0.0.1:1", "key", {})
    store.trials.record_submitted(study, trial.key, "run", {})
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
