"""A screen and a trend on the echo engine: from the spec through executor, store, MLflow and web page to a report that recomputes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from researcher.design.planning import plan_of
from researcher.home import Home
from researcher.instruments.catalogue import read_instrument
from researcher.store.mlflow_sink import MlflowSink
from researcher.store.store import Store
from researcher.study.plan import Plan, Verdict
from researcher.study.spec import StudySpec
from swarm.client.tasks import each
from swarm.client.workflow import load_workflow
from tests.fakes.echo_study import carried_out
from tests.fakes.repeat_study import FOLDER
from tests.fakes.web_page import WebPage

pytestmark = [pytest.mark.anyio, pytest.mark.campaign]
RATES = [1e-5, 1e-4, 1e-3]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RESEARCHER_HOME", str(tmp_path))
    for name in ("RESEARCHER_DATABASE_URL", "MLFLOW_TRACKING_URI", "RESEARCHER_UI_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def answer_in(report: str) -> str:
    return report.split("## Answer")[1].split("## Plan")[0]


def planned(design: str, compare: dict[str, Any], **more: Any) -> Plan:
    spec = {"question": "What makes it learn?", "instrument": "repeat", "design": design, "compare": compare, **more}
    return plan_of(StudySpec.model_validate(spec), read_instrument(FOLDER))


@pytest.mark.filterwarnings("ignore")  # MLflow's own deprecations, which are not ours to mend
async def test_a_screen_ends_with_ranked_effects_and_no_verdict(home: Path) -> None:
    url = f"sqlite:///{home}/researcher.db"
    store = Store.open(url)
    compare = {"learning_rate": {"levels": [1e-5, 1e-3]}, "group_size": {"levels": [4, 8]}}
    plan = planned("screen", compare)
    study, report = await carried_out(home, store, plan)
    verdicts = store.verdicts.all(study)
    assert len(store.trials.all(study)) == plan.budget.trials == 8
    assert {record.verdict for record in verdicts} == {Verdict.INCONCLUSIVE}
    assert "it explores and gives no verdict" in answer_in(report)
    assert answer_in(report).index("learning_rate") < answer_in(report).index("group_size")
    assert store.findings.all() == []

    sink = MlflowSink(store, f"sqlite:///{home}/mlflow.db")
    while sink.drain():
        pass
    from mlflow.tracking import MlflowClient

    client = MlflowClient(sink.tracking_uri)
    runs = client.search_runs([each.experiment_id for each in client.search_experiments()])
    tags = [run.data.tags for run in runs if "swarm.arm" in run.data.tags]
    assert len(tags) == 8
    assert {each[f"swarm.verdict.H{number}"] for each in tags for number in (1, 2)} == {"inconclusive"}
    async with WebPage(Home(home, store), url).browser() as browser:
        page = await browser.get(f"/studies/{study}")
    assert "with the other factors fitted (explored)" in page.text
    store.close()


async def test_a_screen_of_bundles_scores_the_held_out_tasks_that_are_its_own(home: Path) -> None:
    url = f"sqlite:///{home}/researcher.db"
    store = Store.open(url)
    arms = {"plain": {}, "slow": {"learning_rate": 1e-5}, "fast-and-few": {"learning_rate": 1e-3, "group_size": 4}}
    spec = {"question": "Which looks best?", "instrument": "repeat", "design": "screen", "arms": arms}
    plan = plan_of(StudySpec.model_validate(spec), read_instrument(FOLDER), heldout_from=8, heldout_tasks=4)
    study, report = await carried_out(home, store, plan)
    verdicts = store.verdicts.all(study)
    assert len(store.trials.all(study)) == plan.budget.trials == 6
    assert {record.verdict for record in verdicts} == {Verdict.INCONCLUSIVE}
    assert {record.effect.method for record in verdicts if record.effect is not None} == {"arm_means"}
    assert "it explores and gives no verdict" in answer_in(report)
    scored = {tuple(trial.evidence.heldout_tasks or ()) for trial in store.trials.all(study) if trial.evidence}
    workflow = load_workflow(FOLDER, "workflow.py")
    names = [task.id async for task in each(workflow.tasks("heldout", 1, 12))]
    assert scored == {tuple(sorted(names[8:]))}
    assert "held-out tasks 9 to 12" in report
    async with WebPage(Home(home, store), url).browser() as browser:
        page = await browser.get(f"/studies/{study}")
    assert "with the spread of all arms (explored)" in page.text
    store.close()


async def test_a_trend_ends_with_a_verdict_on_its_slope(home: Path) -> None:
    url = f"sqlite:///{home}/researcher.db"
    store = Store.open(url)
    plan = planned("trend", {"learning_rate": {"levels": RATES}}, claim="increase")
    study, report = await carried_out(home, store, plan)
    [record] = store.verdicts.all(study)
    assert record.verdict is Verdict.SUPPORTED
    assert record.effect is not None
    assert record.effect.method == "slope"
    assert "Yes: `auc_reward` rises with `learning_rate`: by +" in answer_in(report)
    assert "from 1e-05 to 0.001, on a log scale" in answer_in(report)
    [found] = store.findings.all()
    assert found.scope["fitted_over"] == [{"learning_rate": 1e-4}]
    async with WebPage(Home(home, store), url).browser() as browser:
        page = await browser.get(f"/studies/{study}")
    assert "along the fitted line from learning_rate=1e-5 to learning_rate=0.001" in page.text
    store.close()
