"""A server that hosts another model than the study trains: refused by name when a study starts, and when it goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.serving import ServerProcess
from researcher.cli import USAGE
from researcher.main import main
from researcher.store.store import Store
from tests.fakes.repeat_study import FOLDER, repeat_plan


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RESEARCHER_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("RESEARCHER_DATABASE_URL", raising=False)
    return tmp_path / "home"


def test_no_study_starts_on_a_server_of_another_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["start", "--instrument", str(FOLDER), "--vary", "learning_rate=1e-5,1e-3", "--model", "smollm2-81m"]
    with ServerProcess(tmp_path / "a", "--model", "smollm2-135m") as server:
        assert main([*asked, "--server", server.url]) == USAGE
        said = capsys.readouterr().err
    assert f"the plan trains smollm2-81m ({server.url} hosts smollm2-135m)" in said
    assert "`swarm serve --model smollm2-81m --engine echo`" in said
    assert Store.open().studies.all() == []


@pytest.mark.parametrize(
    ("seen", "hosts", "says"),
    [
        (None, "else", "the plan trains echo"),
        ("a" * 64, "echo", "hosts other weights than this study trains as echo"),
    ],
)
def test_no_study_goes_on_with_a_server_of_other_weights(
    seen: str | None, hosts: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = Store.open()
    study = store.studies.create("a topic", {"servers": [], "instrument": str(FOLDER)})
    store.plans.save(study, repeat_plan())
    if seen is not None:
        store.journal.record(study, "weights", {"model": "echo", "fingerprint": seen, "hosted": "echo"})
    with ServerProcess(tmp_path / "a", "--model", hosts) as server:
        assert main(["resume", study, "--server", server.url]) == USAGE
        assert says in capsys.readouterr().err
    assert store.studies.get(study).options.servers == ()
    store.close()
