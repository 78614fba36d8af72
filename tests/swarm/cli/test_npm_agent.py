"""A real command-line agent from npm, unchanged, is trained from a shell (docs/black-box.md)."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from bench.serving import ServerProcess
from swarm.client.sync import SwarmClient
from swarm.protocol.runspec import RunSpec
from tests.conformance.environments import cache_dir
from tests.swarm.cli.conftest import EXAMPLES, black_box

PACKAGE = "@mariozechner/pi-coding-agent@0.73.1"


@pytest.fixture(scope="module")
def pi() -> Path:
    """The agent's program, installed once for this machine."""
    if shutil.which("npm") is None or shutil.which("node") is None:
        pytest.skip("needs node and npm")
    folder = cache_dir() / PACKAGE.rpartition("/")[2]
    program = folder / "node_modules" / ".bin" / "pi"
    if not program.exists():
        folder.mkdir(parents=True, exist_ok=True)
        command = ["npm", "install", "--prefix", str(folder), "--no-audit", "--no-fund", "--ignore-scripts", PACKAGE]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"npm could not install {PACKAGE}: {done.stderr[-300:]}")
    works = subprocess.run([str(program), "--version"], capture_output=True, text=True, check=False)
    if works.returncode:
        pytest.skip(f"this node cannot run {PACKAGE}: {works.stderr[-300:]}")
    return program


@pytest.mark.campaign
def test_a_coding_agent_from_npm_is_trained_unchanged(server: ServerProcess, pi: Path, tmp_path: Path) -> None:
    (tmp_path / "tasks.tsv").write_text("t-1\tblue\tWhich colour has the sky?\n")
    spec = {"batch": {"tasks": 1, "group_size": 2}, "limits": {"steps": 1}, "max_staleness": 0}
    with SwarmClient(server.url) as client:
        run_id = client.start_run(RunSpec.model_validate(spec)).run_id
        options = f"--env PI --read {pi.parents[2]}"
        done = black_box(tmp_path / "tasks.tsv", "sh", EXAMPLES / "pi_agent.sh", PI=str(pi), OPTIONS=options)
        assert done.returncode == 0, done.stderr
        run = client.run(run_id)
        assert (run.status, run.step) == ("complete", 1), done.stderr
        rewarded = [entry for entry in client.ledger(run_id=run_id) if entry.reward is not None]
        assert len(rewarded) == 2
        [call] = client.trace(rewarded[0].episode_id).calls
    assert "pi, a coding agent harness" in str(call.request["messages"][0])
    assert [tool["function"]["name"] for tool in call.request["tools"]] == ["read", "ls"]
    assert len(call.logprobs) == len(call.sampled_ids) > 0
