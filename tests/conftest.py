"""Fixtures that every test may use."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Generator, Iterator

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from foundation.machine import REPRODUCIBLE_SUMS

os.environ |= REPRODUCIBLE_SUMS  # as the trainer's process has it, before anything is multiplied

settings.register_profile("any_machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any_machine")  # how fast a busy machine is decides no test

pytest_plugins = [
    "tests.echo_fixture",
    "tests.models_fixture",
    "tests.ray_fixture",
    "tests.reader_fixture",
    "tests.tiny_llama",
    "tests.vllm_fixture",
]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def root_logger_says_warnings() -> Iterator[None]:
    """Whatever a test or what it imports makes of the root logger (verl's server sets it to errors alone): the next one hears warnings."""
    logging.root.setLevel(logging.WARNING)
    yield
    logging.root.setLevel(logging.WARNING)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What a test said may hold half a character, which no worker of pytest-xdist can tell."""
    report = yield
    report.sections = [
        (name, text.encode(errors="backslashreplace").decode(errors="replace")) for name, text in report.sections
    ]
    return report


_ENGINES = (
    "tests/conformance/test_conformance.py",
    "tests/faults/test_hung.py",
    "tests/faults/test_replicas.py",
    "tests/swarm/engine/local/test_engine.py",
    "tests/swarm/engine/local/test_inference_vllm.py",
    "tests/swarm/engine/local/test_restricted_vllm.py",
    "tests/swarm/engine/verl/",
    "tests/swarm/server/gateway/test_dialects_vllm.py",
    "tests/swarm/server/gateway/test_masks_vllm.py",
    "tests/swarm/server/gateway/test_token_exact.py",
)
"""Files and folders whose tests boot vLLM: one after the other, because memory has room for one, and five of them share theirs."""
_RAY = ("tests/e2e/test_ray_studies.py", "tests/researcher/executor/test_ray_jobs.py")
"""Files with tests on the one Ray cluster, which comes last: it idles at a tenth of a core, and nothing else has to run beside it."""
_LONG_S = {
    "tests/bench/test_gpu_check.py": 40,
    "tests/conformance/test_coding_agents.py": 25,
    "tests/e2e/test_repairs.py": 25,
    "tests/e2e/test_studies.py": 55,
    "tests/researcher/campaign/test_loop.py": 25,
    "tests/researcher/executor/test_keeping.py": 20,
    "tests/researcher/executor/test_kills.py": 35,
    "tests/researcher/executor/test_trials.py": 140,
    "tests/researcher/repair/test_repairs.py": 45,
    "tests/researcher/repair/test_writing.py": 65,
    "tests/researcher/report/test_from_sql.py": 25,
    "tests/researcher/web/test_browser.py": 70,
    "tests/swarm/cli/test_episode_run.py": 25,
    "tests/swarm/cli/test_stored_runs.py": 60,
    "tests/swarm/client/test_against_echo.py": 20,
    "tests/swarm/client/test_team.py": 40,
    "tests/swarm/engine/local/test_device_transfer.py": 35,
    "tests/swarm/engine/local/test_parameters.py": 20,
    "tests/swarm/engine/local/test_session.py": 30,
    "tests/swarm/engine/local/test_trainer.py": 50,
    "tests/swarm/engine/memory/test_training.py": 25,
    "tests/swarm/server/gateway/test_failed_calls.py": 30,
    "tests/swarm/server/test_process.py": 20,
}
"""Files that take 20 seconds and more on two cores, about how long: they come before all shorter ones, so that no process ends with one."""


def _lane(nodeid: str) -> str:
    file = nodeid.partition("::")[0]
    return "engines" if file.startswith(_ENGINES) else "ray" if file in _RAY else file


def _place(item: pytest.Item) -> float:
    """Lower comes first; equal ones keep their order."""
    lane = _lane(item.nodeid)
    return {"engines": -math.inf, "ray": math.inf}.get(lane, -_LONG_S.get(lane, 0))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_place)


class Lanes(LoadScopeScheduling):  # type: ignore[misc]
    """What boots an engine goes to one process, and all other files, one by one, to whichever is free."""

    def _split_scope(self, nodeid: str) -> str:
        return _lane(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Lanes:
    return Lanes(config, log)
