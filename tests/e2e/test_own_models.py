"""A model of one's own, a folder on this machine, trained on the real engine from the command line to the archive."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest

from bench.serving import ServerProcess
from tests.e2e.test_studies import Machine
from tests.tiny_llama import make_tiny_llama

pytestmark = pytest.mark.campaign

SHORT = ("--steps", "1", "--seeds", "2", "--set", "max_tokens=8", "--set", "group_size=2")
ASKED = ("start", "--instrument", "arithmetic", "--vary", "learning_rate=1e-5,1e-3", *SHORT)


def test_a_folders_model_is_trained_and_named_everywhere_and_a_trial_of_it_is_reproduced(tmp_path: Path) -> None:
    machine, folder = Machine(tmp_path / "home"), tmp_path / "tiny"
    make_tiny_llama(folder)
    done = machine.researcher(*ASKED, "--model", str(folder))
    assert done.returncode == 0, done.stderr
    status = machine.status()
    [model] = status["trains"]
    title = f"tiny@{model['fingerprint'][:12]}"
    assert (model["name"], model["path"]) == ("tiny", str(folder))
    trained = machine.rows("SELECT DISTINCT json_extract(evidence, '$.model.fingerprint') FROM trials")
    assert trained == [(model["fingerprint"],)]
    [report] = machine.home.glob("studies/*/report.md")
    assert f"model `{title}` from the folder `{folder}`" in report.read_text()
    found = json.loads(machine.researcher("findings", "--model", "tiny", "--json").stdout)
    assert title in json.dumps(found)
    with sqlite3.connect(machine.home / "mlflow.db") as mlflow:
        assert mlflow.execute("SELECT DISTINCT value FROM tags WHERE key = 'swarm.model'").fetchall() == [(title,)]

    elsewhere = folder.rename(tmp_path / "moved")
    assert machine.researcher("verify", "latest").returncode == 0
    archive = str(tmp_path / "study.tar.gz")
    assert machine.researcher("export", "latest", "--to", archive).returncode == 0
    refused = machine.researcher("reproduce", archive)
    assert refused.returncode == 1
    assert f"the plan trains {title} from the folder {folder}, which is not on this machine" in refused.stderr
    make_tiny_llama(folder, seed=1)
    refused = machine.researcher("reproduce", archive)
    assert f"{folder} holds different weights" in refused.stderr
    with ServerProcess(tmp_path / "server", engine="local", model=str(elsewhere)) as server:
        again = machine.researcher("reproduce", archive, "--server", server.url, "--json")
    assert again.returncode == 0, again.stderr
    said = json.loads(again.stdout)
    assert said["weights"]["then"] == said["weights"]["now"] == model["fingerprint"][:12]
