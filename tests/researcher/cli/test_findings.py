"""`researcher findings` between two homes: what one group found, another plans with."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from researcher.analysis.knowledge import findings_of
from researcher.cli import USAGE
from researcher.main import main
from researcher.models import Effect, VerdictRecord
from researcher.store.store import Store
from researcher.study.plan import Plan, Verdict

ASKED = ["start", "--instrument", "arithmetic", "--vary", "learning_rate=1e-5,1e-4", "--claim", "increase"]


class Homes:
    """Two data directories; commands run in the one that was entered."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self._monkeypatch = monkeypatch
        monkeypatch.delenv("RESEARCHER_DATABASE_URL", raising=False)
        monkeypatch.delenv("RESEARCHER_GROUP", raising=False)

    def enter(self, name: str) -> None:
        self._monkeypatch.setenv("RESEARCHER_HOME", str(self.folder / name))


@pytest.fixture
def homes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Homes:
    return Homes(tmp_path, monkeypatch)


def dry_run(capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, Any]:
    """What it prints."""
    assert main([*ASKED, "--dry-run", "--json", *more]) == 0
    return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]


def the_plan(capsys: pytest.CaptureFixture[str], *more: str) -> Plan:
    return Plan.model_validate(dry_run(capsys, *more)["plan"])


def a_study(capsys: pytest.CaptureFixture[str], verdict: Verdict, diff: float, at: float = 1.0, *more: str) -> str:
    """A finished study in this home, with that finding."""
    shown = dry_run(capsys, *more)
    plan = Plan.model_validate(shown["plan"])
    effect = Effect(
        hypothesis="H1", metric=plan.hypotheses[0].metric, n_baseline=3, n_treatment=3, mean_baseline=0.1,
        mean_treatment=0.1 + diff, diff=diff, low=diff - 0.01, high=diff + 0.01, level=0.95, method="welch",
        p_value=0.01, p_adjusted=0.01,
    )  # fmt: skip
    store = Store.open()
    request = {name: shown[name] for name in ("spec", "author", "sources", "because", "uncovered")}
    study = store.studies.create(plan.question, {"request": request})
    store.plans.save(study, plan)
    record = VerdictRecord(hypothesis="H1", verdict=verdict, reason="", effect=effect)
    store.findings.save(study, findings_of(study, plan, [record], at))
    store.close()
    return study


def listed(capsys: pytest.CaptureFixture[str]) -> dict[str, list[dict[str, object]]]:
    assert main(["findings", "--json"]) == 0
    return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]


def test_findings_go_from_one_home_to_another_and_are_planned_with(
    homes: Homes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "found.jsonl"
    homes.enter("theirs")
    theirs = a_study(capsys, Verdict.SUPPORTED, 0.3)
    assert main(["findings", "export", str(file)]) == USAGE
    assert "--by" in capsys.readouterr().err
    assert main(["findings", "export", str(file), "--by", "Group 7"]) == 0
    capsys.readouterr()
    [sent] = listed(capsys)["findings"]

    homes.enter("ours")
    for new in (1, 0):  # taking it twice changes nothing
        assert main(["findings", "import", str(file), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["new"] == new
    [taken] = listed(capsys)["findings"]
    kept = ("origin", "imported_at", "recomputable")
    assert {name: value for name, value in taken.items() if name not in kept} == {
        name: value for name, value in sent.items() if name not in kept
    }
    assert (taken["origin"], taken["recomputable"], sent["recomputable"]) == ("Group 7", False, True)
    assert main(["findings"]) == 0
    said = capsys.readouterr().out
    assert "at 95 % confidence, n = 3 against 3" in said
    assert "by Group 7; cannot be recomputed here" in said

    plan = the_plan(capsys)
    [known] = plan.known
    assert not isinstance(known, str)
    assert (known.id, known.origin, known.same_as) == (f"{theirs}/H1", "Group 7", {"H1": 1})
    assert main([*ASKED, "--dry-run"]) == 0
    assert f"already known: {known.statement}: supported, +0.3" in capsys.readouterr().out


def test_a_contradiction_proposes_a_replication_that_can_be_planned(
    homes: Homes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "found.jsonl"
    homes.enter("theirs")
    a_study(capsys, Verdict.SUPPORTED, 0.3)
    assert main(["findings", "export", str(file), "--by", "Group 7"]) == 0
    homes.enter("ours")
    capsys.readouterr()
    a_study(capsys, Verdict.REFUTED, -0.3, at=2.0)
    assert main(["findings", "import", str(file)]) == 0
    assert "CONTRADICTION" in capsys.readouterr().out
    [found] = listed(capsys)["contradictions"]
    replication = found["replication"]
    assert isinstance(replication, dict)
    words = shlex.split(str(replication["command"]))
    assert words[0] == "researcher"
    assert main([*words[1:], "--dry-run", "--json"]) == 0
    again = Plan.model_validate(json.loads(capsys.readouterr().out)["plan"])
    first = the_plan(capsys)
    assert [arm.levels for arm in again.arms] == [arm.levels for arm in first.arms]
    assert again.stages[-1].seeds == 6
    assert {stage.first_seed for stage in again.stages} == {2000}
    assert len(again.known) == 2


def test_a_replication_does_not_reuse_seeds_that_a_study_was_given(
    homes: Homes, capsys: pytest.CaptureFixture[str]
) -> None:
    homes.enter("ours")
    a_study(capsys, Verdict.SUPPORTED, 0.3)
    a_study(capsys, Verdict.REFUTED, -0.3, 2.0, "--first-seed", "2000")
    [found] = listed(capsys)["contradictions"]
    assert isinstance(found["replication"], dict)
    assert found["replication"]["first_seed"] == 3000


def test_a_wrong_file_changes_nothing_and_names_its_line(
    homes: Homes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "found.jsonl"
    homes.enter("theirs")
    a_study(capsys, Verdict.SUPPORTED, 0.3)
    assert main(["findings", "export", str(file), "--by", "Group 7"]) == 0
    good = file.read_text()
    homes.enter("ours")
    capsys.readouterr()
    file.write_text(good + good.replace('"verdict"', '"verdct"'))
    assert main(["findings", "import", str(file)]) == USAGE
    said = capsys.readouterr().err
    assert "line 2: " in said
    assert "verdct: unknown field (did you mean 'verdict'?)" in said
    assert listed(capsys)["findings"] == []
    file.write_text(good)
    assert main(["findings", "import", str(file)]) == 0
    other = json.loads(good)
    file.write_text(
        json.dumps(other | {"id": "st-new/H1", "study_id": "st-new"}) + "\n" + json.dumps(other | {"margin": 0.5})
    )
    capsys.readouterr()
    assert main(["findings", "import", str(file)]) == USAGE
    said = capsys.readouterr().err
    assert "line 2" in said
    assert "--replace" in said
    assert len(listed(capsys)["findings"]) == 1
    assert main(["findings", "import", str(file), "--replace"]) == 0
    capsys.readouterr()
    assert {each["margin"] for each in listed(capsys)["findings"]} == {0.5, other["margin"]}


def test_our_own_findings_come_back_as_no_news_and_never_as_something_else(
    homes: Homes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "found.jsonl"
    homes.enter("ours")
    a_study(capsys, Verdict.SUPPORTED, 0.3)
    assert main(["findings", "export", str(file), "--by", "us"]) == 0
    assert main(["findings", "import", str(file), "--replace"]) == 0
    assert "0 of them new" in capsys.readouterr().out
    changed = json.loads(file.read_text()) | {"margin": 0.7}
    file.write_text(json.dumps(changed))
    assert main(["findings", "import", str(file), "--replace"]) == USAGE
    assert "our records take precedence" in capsys.readouterr().err
    file.write_text(json.dumps(changed | {"id": f"{changed['study_id']}/H9"}))
    assert main(["findings", "import", str(file)]) == USAGE
    assert "a study in this database" in capsys.readouterr().err


def test_findings_are_chosen_by_instrument_factor_and_model(homes: Homes, capsys: pytest.CaptureFixture[str]) -> None:
    homes.enter("ours")
    assert main(["findings"]) == 0
    assert "no findings yet" in capsys.readouterr().out
    a_study(capsys, Verdict.EQUIVALENT, 0.0)
    for flags, shown in ((["--factor", "learning_rate"], 1), (["--factor", "temperature"], 0), (["--model", "x"], 0)):
        assert main(["findings", "--json", *flags]) == 0
        assert len(json.loads(capsys.readouterr().out)["findings"]) == shown
    assert main(["findings", "--factor", "learning_rat", "--model", "x"]) == 0
    told = capsys.readouterr().out
    assert "no finding matches factor learning_rat (did you mean learning_rate?) and model x (of 1 in all)" in told


@pytest.mark.parametrize("at", [1e18, -1e15])
def test_a_time_that_no_calendar_has_is_refused_and_one_that_is_stored_breaks_no_list(
    homes: Homes, tmp_path: Path, capsys: pytest.CaptureFixture[str], at: float
) -> None:
    homes.enter("ours")
    a_study(capsys, Verdict.SUPPORTED, 0.3)
    file = tmp_path / "findings.jsonl"
    assert main(["findings", "export", str(file), "--by", "Group 7"]) == 0
    file.write_text(json.dumps(json.loads(file.read_text()) | {"at": at}))
    assert main(["findings", "import", str(file)]) == USAGE
    assert "line 1: at" in capsys.readouterr().err
    a_study(capsys, Verdict.SUPPORTED, 0.3, at)
    assert main(["findings"]) == 0
    assert f"{at:g} s after 1970" in capsys.readouterr().out
