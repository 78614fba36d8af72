"""Programs that know nothing of training are trained from a shell by two environment variables."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench.serving import ServerProcess
from swarm.client.sync import SwarmClient
from swarm.protocol.runspec import RunSpec
from tests.swarm.cli.conftest import Swarm, black_box, spec

AGENT = """
import json, os, sys, urllib.request
body = {"model": "policy", "messages": [{"role": "user", "content": sys.argv[-1]}]}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"})
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
print(json.load(opener.open(request))["choices"][0]["message"]["content"])
"""


def test_the_shell_example_trains_a_program_to_the_end_of_the_run(server: ServerProcess, tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "tasks.tsv").write_text("t-1\tred\tRepeat red\nt-2\tblue\tRepeat blue\n")
    with SwarmClient(server.url) as client:
        run_id = client.start_run(
            RunSpec.model_validate({"batch": {"tasks": 1, "group_size": 2}, "limits": {"steps": 2}, "max_staleness": 0})
        ).run_id
        done = black_box(tmp_path / "tasks.tsv", sys.executable, tmp_path / "agent.py")
        assert done.returncode == 0, done.stderr
        assert "the run is over" in done.stderr
        run = client.run(run_id)
        assert (run.status, run.step) == ("complete", 2)
        entries = list(client.ledger(run_id=run_id))
    assert {entry.reward for entry in entries if entry.reward is not None} <= {0.0, 1.0}
    assert all(entry.calls == 1 for entry in entries if entry.state in ("in_step", "trained"))


def test_the_shell_example_takes_every_line_of_its_tasks(tmp_path: Path) -> None:
    """With a swarm command that has no group free twice, and then no run."""
    (tmp_path / "swarm.sh").write_text('echo "$4" >> claimed; test $(wc -l < claimed) -lt 3 && exit 4; exit 3\n')
    (tmp_path / "tasks.tsv").write_text("t-1\tred\tRepeat red\nt-2\tblue\tRepeat blue")
    done = black_box(tmp_path / "tasks.tsv", "true", cwd=tmp_path, SWARM="sh swarm.sh", GROUP="1")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "claimed").read_text().split() == ["t-1", "t-2", "t-1"]


def test_the_shell_example_refuses_to_go_through_no_tasks_for_ever(tmp_path: Path) -> None:
    (tmp_path / "empty.tsv").touch()
    for name in ("empty.tsv", "missing.tsv"):
        done = black_box(tmp_path / name, "true", SWARM="false")
        assert (done.returncode, done.stderr) == (2, f"no tasks in {tmp_path}/{name}\n")


def test_scripts_branch_on_exit_codes(server: ServerProcess, swarm: Swarm, tmp_path: Path) -> None:
    with SwarmClient(server.url) as client:
        run_id = client.start_run(spec(max_staleness=0)).run_id
    grant = tmp_path / "grant.json"
    grant.write_text(swarm("episode", "claim", "--task", "t", "--max-episode-s", "500")[1])
    held = json.loads(grant.read_text())
    renewed = json.loads(swarm("episode", "renew", str(grant))[1])
    assert renewed["episode_id"] == held["episode_id"]
    assert renewed["expires_at"] >= held["expires_at"]
    assert swarm("episode", "claim", "--task", "u", "--wait-s", "0")[0] == 4, "all groups are open"
    large = json.loads(grant.read_text()) | {"metadata": {"transcript": "x" * 2**22}}
    (tmp_path / "large.json").write_text(json.dumps(large))
    code, _, err = swarm("episode", "end", str(tmp_path / "large.json"), "--reward", "1")
    assert (code, "larger than 4 MiB" in err) == (1, True)
    code, out, err = swarm(
        "episode", "end", str(grant), "--reward", "1", "--agent-reward", "a=0.5", "--metadata", '{"k": [1]}'
    )
    assert (code, json.loads(out)["status"]) == (0, "pooled"), err
    assert swarm("episode", "renew", str(grant))[0] == 5
    with SwarmClient(server.url) as client:
        entry = client.entry(held["episode_id"])
        assert (entry.agent_rewards, entry.metadata) == ({"a": 0.5}, {"k": [1]})
        client.stop_run(run_id)
        for status in client.statuses(wait_s=5.0):
            if status.run_id is None:
                break
    code, _, err = swarm("episode", "claim", "--task", "t", "--run-id", run_id, "--json")
    assert (code, json.loads(err)["code"]) == (3, "over_limit")


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize(
    "option",
    [
        ["--metric", "x"],
        ["--agent-reward", "=1"],
        ["--metadata", "[]"],
        ["--metadata", "{"],
        ["--metadata", '{"a": NaN}'],
        ["--metadata", '{"a": [1e999]}'],
    ],
)
def test_results_that_cannot_be_read_are_refused(option: list[str], swarm: Swarm, tmp_path: Path) -> None:
    (tmp_path / "g.json").write_text('{"episode_id": "e", "lease": "l"}')
    code, _, err = swarm("episode", "end", str(tmp_path / "g.json"), "--reward", "1", *option)
    assert (code, err.count("\n")) == (2, 1)


def test_an_abort_states_its_cause(server: ServerProcess, swarm: Swarm, tmp_path: Path) -> None:
    with SwarmClient(server.url) as client:
        client.start_run(spec())
    grant = tmp_path / "grant.json"
    for cause, stated in (("grader", ["--cause", "grader"]), ("rollout", [])):
        grant.write_text(swarm("episode", "claim", "--task", "t")[1])
        code, out, err = swarm("episode", "abort", str(grant), "--reason", "no", *stated)
        assert (code, json.loads(out)["cause"]) == (0, cause), err
    code, _, err = swarm("episode", "abort", str(grant), "--reason", "no", "--cause", "grade")
    assert (code, "did you mean grader?" in err) == (2, True)
