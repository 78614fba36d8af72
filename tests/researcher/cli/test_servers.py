"""Servers that a study starts on this machine: on GPUs, each of several at once has one of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from foundation.commandline import UsageError
from researcher.cli.servers import _local_servers, check_servers
from researcher.executor.errors import NoServersLeft
from researcher.home import Home
from researcher.models import StudyOptions
from researcher.store.store import Store
from researcher.study.plan import PlanRole
from tests.fakes.gpus import gpu_machine
from tests.fakes.repeat_study import repeat_plan

TEAM = repeat_plan(roles={"second": PlanRole(model="else")})
ALONE = repeat_plan()


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    home = Home(root=tmp_path, store=Store.open(f"sqlite:///{tmp_path}/r.db"))
    yield home
    home.store.close()


def devices(home: Home, *, engine: str = "local") -> list[list[str]]:
    """The devices that each server of the team is started with."""
    servers = _local_servers(home, "st-1", TEAM, StudyOptions(engine=engine))
    return [[each for each in server.arguments if each.startswith("cuda")] for server in servers]


def test_each_server_of_a_team_has_a_gpu_of_its_own(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu_machine(monkeypatch, tmp_path, 3)
    check_servers(TEAM, [])
    assert devices(home) == [["cuda:0", "cuda:0"], ["cuda:1", "cuda:1"]]
    assert devices(home, engine="echo") == [[], []]
    [alone] = _local_servers(home, "st-1", ALONE, StudyOptions())
    assert "--trainer-device" not in alone.arguments  # the first GPU, as ever


def test_servers_of_a_team_do_not_share_one_gpu(home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu_machine(monkeypatch, tmp_path, 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    with pytest.raises(
        UsageError, match=r"needs 2 servers at the same time .* but only 1 can be used here: use a machine with 2 GPUs"
    ):
        check_servers(TEAM, [])
    with pytest.raises(NoServersLeft, match="`researcher resume st-1`"):
        devices(home)
    check_servers(TEAM, [], engine="echo")
    check_servers(ALONE, [])


def test_servers_of_a_team_share_the_processor(home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu_machine(monkeypatch, tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    check_servers(TEAM, [])
    assert devices(home) == [[], []]
