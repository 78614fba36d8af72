"""A study whose factor is a function of a file: from the study file to a report that recomputes, and what a plan holds of it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from foundation.commandline import UsageError
from researcher.cli.servers import check_servers
from researcher.design.planning import plan_of
from researcher.instruments.catalogue import read_instrument
from researcher.refusals import SpecRefused
from researcher.store.store import Store
from researcher.study.file import checked_spec, read_data_file
from researcher.study.plan import Plan
from swarm.protocol.runspec import RunSpec
from tests.fakes.echo_study import carried_out
from tests.fakes.repeat_study import FOLDER
from tests.swarm.engine.own_functions import SOURCE

TOKEN = "swt_only-for-this-test"
STUDY = """
question: Does my advantage learn as well as GRPO's?
instrument: repeat
design: screen
steps: 2
arms:
  grpo: {}
  mine: {algorithm: "mine.py:advantage", importance_correction: "mine.py:correction"}
"""


def planned(folder: Path, source: str = SOURCE, **changes: Any) -> Plan:
    """The study file's plan; the file with the functions lies beside it."""
    (folder / "mine.py").write_text(source)
    (folder / "study.yaml").write_text(STUDY)
    fields, _ = read_data_file(folder / "study.yaml", "a study file")
    spec, refused = checked_spec(fields | changes)
    assert spec is not None
    assert refused == []
    return plan_of(spec, read_instrument(FOLDER))


def test_a_plan_holds_the_text_and_its_hash_changes_with_it(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    (file,) = plan.sources
    assert plan.sources[file] == SOURCE
    assert plan.arm("mine").levels["algorithm"] == f"{file}:advantage"
    run = RunSpec.model_validate(plan.run_fields(plan.levels_of(plan.arm("mine"))))
    assert run.algorithm.sources == plan.sources
    assert RunSpec.model_validate(plan.run_fields(plan.levels_of(plan.arm("grpo")))).algorithm.sources == {}
    assert Plan.model_validate_json(plan.canonical()) == plan
    edited = planned(tmp_path, SOURCE + "# edited\n")
    assert edited.digest() != plan.digest()
    assert edited.arm("mine").levels != plan.arm("mine").levels
    assert any(f"holds the text of {file}" in said for said in plan.assumptions)


@pytest.mark.parametrize(
    ("level", "said"),
    [
        ("mine.py:advntage", "did you mean 'advantage'"),
        ("none.py:advantage", "cannot read"),
        ("grop", "must be one of"),
    ],
)
def test_a_function_that_is_not_there_is_refused_before_anything_is_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: str, said: str
) -> None:
    (tmp_path / "mine.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    spec, _ = checked_spec({"question": "?", "instrument": "repeat", "compare": {"algorithm": {"levels": [level]}}})
    assert spec is not None
    with pytest.raises(SpecRefused, match=said):
        plan_of(spec, read_instrument(FOLDER))


def test_servers_that_start_here_need_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SWARM_ADMIN_TOKEN", raising=False)
    with pytest.raises(UsageError, match="set SWARM_ADMIN_TOKEN"):
        check_servers(planned(tmp_path), [])


@pytest.mark.anyio
async def test_a_study_of_an_own_algorithm_concludes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARM_ADMIN_TOKEN", TOKEN)
    plan = planned(tmp_path)
    (tmp_path / "mine.py").unlink()  # the plan holds all of it
    store = Store.open(f"sqlite:///{tmp_path}/r.db")
    study, report = await carried_out(tmp_path, store, plan, "--allow-algorithms")
    trials = store.trials.all(study)
    specs = {trial.arm: trial.evidence.spec or {} for trial in trials if trial.evidence is not None}
    assert specs["mine"]["algorithm"]["sources"] == plan.sources
    assert f"{next(iter(plan.sources))}:advantage" in report
    store.close()
    shutil.rmtree(tmp_path / "server")
