"""`swarm algorithm check`, and runs with functions of one's own from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.swarm.cli.conftest import Swarm
from tests.swarm.engine.own_functions import SOURCE


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(SOURCE)
    return tmp_path / "mine.py"


def test_every_function_that_its_name_tells_is_checked(swarm: Swarm, mine: Path) -> None:
    code, output, _ = swarm("algorithm", "check", str(mine), "--json")
    found = [json.loads(line) for line in output.splitlines()]
    assert code == 0
    assert {each["function"]: each["role"] for each in found} == {
        "mine.py:advantage": "advantage",
        "mine.py:loss": "loss",
        "mine.py:coupled_loss": "loss",
        "mine.py:correction": "importance_correction",
    }
    assert all(each["passed"] for each in found)
    code, output, _ = swarm("algorithm", "check", f"{mine}:loss")
    assert (code, len(output.splitlines())) == (0, 7)


def test_a_failed_check_is_exit_code_one_and_a_strange_file_two(swarm: Swarm, mine: Path) -> None:
    mine.write_text("def f(t):\n    return t.logp_N.exp().mean() + t.logp_N\n")
    code, output, _ = swarm("algorithm", "check", f"{mine}:f", "--as", "loss")
    assert code == 1
    assert "mask           FAILED  the values of untrained tokens change other tokens' results" in output
    for given, said in (
        (f"{mine}:f", "give --as"),
        (str(mine), "which functions"),
        (f"{mine}:nix", "give --as"),
        (f"{mine.parent / 'none.py'}", "cannot read"),
        ("loss", "neither FILE.py"),
    ):
        code, _, errors = swarm("algorithm", "check", given)
        assert (code, said in errors) == (2, True), errors


def test_a_server_without_allow_algorithms_refuses_the_run_and_says_what_to_do(
    swarm: Swarm, server: object, mine: Path
) -> None:
    code, _, errors = swarm("run", "start", "--set", f"algorithm.loss={mine}:loss")
    assert code == 2
    assert "algorithm.loss: this server does not execute users' functions" in errors
    assert "swarm serve --allow-algorithms" in errors
    code, _, errors = swarm("run", "start", "--set", f"algorithm.loss={mine}:los")
    assert (code, "did you mean 'loss'" in errors) == (2, True)
