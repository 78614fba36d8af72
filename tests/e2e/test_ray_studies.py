"""A whole study through the command line whose clients are jobs on a real Ray cluster."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.test_studies import ASKED, FASTER, Machine
from tests.ray_fixture import lacking

pytestmark = [
    pytest.mark.skipif(bool(lacking()), reason=f"needs {', '.join(lacking())}: `make verl`"),
]


@pytest.mark.campaign
def test_a_study_whose_clients_are_ray_jobs_ends_with_a_report_that_recomputes(
    ray_cluster: str, tmp_path: Path
) -> None:
    machine, asked = Machine(tmp_path), (*ASKED, FASTER, "--engine", "echo", "--seeds", "2")
    try:
        done = machine.researcher(*asked, "--clients", f"ray={ray_cluster}")
        assert done.returncode == 0, done.stderr
        assert machine.researcher("verify").returncode == 0
        trials = dict(machine.rows("select key, status from trials"))
        assert list(trials.values()) == ["done"] * 2
        started = [
            json.loads(row[0]) for row in machine.rows("select detail from events where kind = 'client_started'")
        ]
        assert {each["trial"] for each in started} == set(trials)
        assert all(f"at {ray_cluster}" in each["client"] for each in started)
    finally:
        machine.end_leftovers()
