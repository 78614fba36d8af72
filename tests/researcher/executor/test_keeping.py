"""Trained models of a study that is over, kept as folders: a real trainer's checkpoints, a tiny model, no vLLM."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from foundation.clock import SystemClock
from researcher.describe import plan_lines
from researcher.design.planning import plan_of
from researcher.executor.processes import Berth
from researcher.home import Home
from researcher.instruments.catalogue import open_instrument
from researcher.kept_models import kept_model
from researcher.main import main
from researcher.models import StudyStatus
from researcher.refusals import SpecRefused
from researcher.store.store import Store
from swarm.models import resolve
from swarm.models.folder import ModelFolder
from swarm.server.storage.store import Store as ServerStore
from tests.fakes.example_plan import ARMS, example_plan
from tests.fakes.specs import spec
from tests.swarm.cli import stored as stored_runs
from tests.swarm.cli.stored import Stored, stored_run
from tests.swarm.server.state import world as worlds

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RESEARCHER_HOME", str(tmp_path))
    monkeypatch.delenv("RESEARCHER_DATABASE_URL", raising=False)
    monkeypatch.setattr(worlds, "PATIENCE_S", stored_runs.LIMIT_S)
    return tmp_path


@pytest.fixture
def study(home: Path) -> Iterator[tuple[Store, str]]:
    store = Store.open()
    study = store.studies.create("a topic", {"keep_models": True})
    store.plans.save(study, example_plan())
    yield store, study
    store.close()


def over(store: Store, study: str, run_id: str) -> None:
    """One trial was tried twice, and done by the second run; another one failed."""
    done, failed = store.trials.ensure(study, "compare", [(ARMS[0], 0), (ARMS[1], 0)])
    for trial, number, run in ((done, 1, "lost"), (done, 2, run_id), (failed, 1, "run-of-the-other")):
        store.trials.record_intent(study, trial.key, number, "http://a", f"{trial.key}#{number}", {})
        partners = {"judge": {"server_url": "http://b", "run_id": run}}
        store.trials.record_submitted(study, trial.key, run, {"partners": partners})
        if run == run_id:
            store.trials.finish(study, trial.key, {"heldout_accuracy": 0.5}, {"reward_mean": [(1, 0.1)]})
        else:
            store.trials.fail_attempt(study, trial.key, "broken")
    store.trials.fail(study, failed.key, "broken")
    store.studies.set_status(study, StudyStatus.DONE, "one stage")


def servers(folder: Path, stored_in: str) -> None:
    """As a study leaves them: one without this run, one with it."""
    for name in ("server", stored_in):
        (folder / name / "process").mkdir(parents=True, exist_ok=True)
        (folder / name / "process" / "lock").touch()
    ServerStore(folder / "server" / "state" / "pool" / "pool.sqlite").close()


def test_models_are_kept_whole_or_their_servers_records_stay(
    home: Path, study: tuple[Store, str], tiny_llama: ModelFolder, capsys: Capture
) -> None:
    store, study_id = study
    folder = home / "studies" / study_id
    stored: Stored = asyncio.run(stored_run(folder / "server-judge" / "state", tiny_llama))
    servers(folder, "server-judge")
    over(store, study_id, stored.run_id)

    file = stored.state_dir / "runs" / stored.run_id / "step-00000004" / "weights.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    assert main(["resume", study_id]) == 1
    said = capsys.readouterr()
    assert len(said.err.splitlines()) == 1
    assert "was not kept" in said.err
    assert "`researcher resume` tries again" in said.err
    assert stored.state_dir.is_dir()
    assert main(["status", study_id]) == 0
    assert "was not kept" in capsys.readouterr().out

    file.write_bytes(whole)
    left = Berth(folder / "server" / "process", SystemClock())  # of a researcher that was killed before it ended it
    left.start(["sleep", "600"], dict(os.environ))
    assert main(["resume", study_id]) == 0
    kept = sorted(path.relative_to(folder / "models") for path in (folder / "models").glob("*/*"))
    place = f"{ARMS[0]}-seed0"
    assert kept == [Path("compare") / place, Path("compare") / f"{place}-judge"]
    assert str(folder / "models") in capsys.readouterr().out
    assert resolve(str(folder / "models" / kept[0])).fingerprint != tiny_llama.fingerprint
    assert not stored.state_dir.exists()
    assert not left.alive()
    assert main(["status", study_id]) == 0
    assert f"2 models are kept in {folder / 'models'}" in capsys.readouterr().out
    assert main(["resume", study_id]) == 0  # nothing is left to do

    start = kept_model(Home(home, store), f"{study_id[:6]}/{place}")
    assert (start.path, start.origin) == (str(folder / "models" / kept[0]), f"{study_id}/{place}")
    assert start.fingerprint == resolve(str(folder / "models" / kept[0])).fingerprint
    plan = plan_of(
        spec(start_from=f"{study_id}/{place}"),
        open_instrument("arithmetic"),
        kept=lambda reference: kept_model(Home(home, store), reference),
    )
    assert plan.model == start
    assert f"starts from {study_id}/{place}" in plan_lines(plan)

    file = home / "study.yaml"
    text = "question: Does it go on?\ninstrument: arithmetic\ncompare: {group_size: {levels: [4, 8]}}\nstart_from: "
    file.write_text(f"{text}{study_id}/{place}\n")
    assert main(["start", str(file), "--dry-run"]) == 0
    assert f"starts from {study_id}/{place}" in capsys.readouterr().out
    file.write_text(f"{text}{study_id}/{ARMS[1]}-seed0\n")
    assert main(["start", str(file), "--dry-run"]) != 0
    assert "study.yaml:4: start_from: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("trial", "why"),
    [
        ("", "write STUDY/TRIAL"),
        (f"{ARMS[0]}-seed0", "was not kept: `researcher resume st-.*` keeps the models"),
        (f"{ARMS[1]}-seed0", "is failed, but only a finished trial has weights"),
        (f"{ARMS[0]}-seed1", f"did you mean {ARMS[0]}-seed0"),
    ],
)
def test_a_study_starts_only_from_weights_that_were_kept(
    home: Path, study: tuple[Store, str], trial: str, why: str
) -> None:
    store, study_id = study
    over(store, study_id, "run")
    with pytest.raises(SpecRefused, match=f"^start_from: .*{why}"):
        kept_model(Home(home, store), f"{study_id}/{trial}")


def test_a_study_that_kept_no_models_says_how_they_are_kept(home: Path, study: tuple[Store, str]) -> None:
    store, _ = study
    other = store.studies.create("a topic", {})
    store.plans.save(other, example_plan(question="another"))
    over(store, other, "run")
    with pytest.raises(SpecRefused, match="started with --keep-models"):
        kept_model(Home(home, store), f"{other}/{ARMS[0]}-seed0")
    with pytest.raises(SpecRefused, match="no study has an id that begins with 'st-zz'"):
        kept_model(Home(home, store), f"st-zz/{ARMS[0]}-seed0")


@pytest.mark.parametrize("other", [("--engine", "echo"), ("--server", "http://127.0.0.1:1")])
def test_keeping_models_is_refused_where_there_will_be_none_to_keep(
    home: Path, capsys: Capture, other: tuple[str, str]
) -> None:
    assert main(["start", "--instrument", "arithmetic", "--vary", "group_size=4,8", "--keep-models", *other]) == 2
    assert "--keep-models" in capsys.readouterr().err
