"""Arms of a study are told apart by their names."""

from __future__ import annotations

from pathlib import Path

import pytest

from researcher.design.arms import arms_of, hypotheses_of, names_of
from researcher.design.design import checked
from researcher.design.reading import Following, Reading
from researcher.design.succession import stages_of
from researcher.instruments.catalogue import available
from researcher.instruments.instrument import Factor, Metric
from researcher.planner.graph import BuiltinPlanner, PlanOptions, plan_study
from researcher.refusals import PlanningRefused
from researcher.study.plan import Plan
from tests.contracts.planner_contract import request

pytestmark = pytest.mark.anyio

DATA = Factor(name="data", target="task.data", type="data", default="")
SAID = Factor(name="said", target="task.said", type="text", default="")
RATE = Factor(name="rate", target="task.rate", type="float", default=0.0)
METRIC = Metric(name="m", kind="final_reward", margin=0.1)
WITH = "with reward number"


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for number, folder in enumerate("abc"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "train.jsonl").write_text(f'{{"question": "1+{number}?", "answer": "{1 + number}"}}\n')


async def planned(topic: str) -> Plan:
    return await plan_study(topic, PlanOptions(planner="builtin", instrument="dataset"), instruments=available({}))


@pytest.mark.parametrize(
    ("factor", "levels", "names"),
    [
        (DATA, ["/x/a.jsonl#sha256=1", "/y/b.jsonl#sha256=2"], ["data=a.jsonl", "data=b.jsonl"]),
        (DATA, ["/x/a.jsonl#sha256=1", "/y/a.jsonl#sha256=2", "/z/b.jsonl#sha256=3"], ["data=x-a.jsonl", "data=y-a.jsonl", "data=b.jsonl"]),
        (DATA, ["hf:x/gsm8k", "hf:y/gsm8k", "hf:z/gsm8k"], ["data=hf:x-gsm8k", "data=hf:y-gsm8k", "data=hf:z-gsm8k"]),
        (SAID, ["be brief", "be kind"], ["said=be-brief", "said=be-kind"]),
        (RATE, [1e-5, 1e-5], ["rate=1e-5", "rate=1e-5-again"]),
        (RATE, [1e-5, 4e-5, 1e-5, 1e-5], ["rate=1e-5", "rate=4e-5", "rate=1e-5-again", "rate=1e-5-again-2"]),
        (SAID, ["a", "a again", "a"], ["said=a", "said=a-again", "said=a-again-2"]),
    ],
)  # fmt: skip
def test_levels_are_named_apart_and_equal_ones_are_run_again(
    factor: Factor, levels: list[str | float], names: list[str]
) -> None:
    assert list(names_of(factor, levels)) == names


@pytest.mark.parametrize(
    ("factor", "levels"),
    [
        (SAID, ["be brief", "be-brief", "be/brief"]),
        (DATA, ["/1/x/a.jsonl#sha256=1", "/2/x/a.jsonl#sha256=2"]),
        (DATA, ["/1/x/a.jsonl#sha256=1", "/1/y/a.jsonl#sha256=2", "/1/x-a.jsonl#sha256=3"]),
        (RATE, [0.1, 0.1000000000001]),
    ],
)
def test_what_no_folder_tells_apart_a_hash_does(factor: Factor, levels: list[str | float]) -> None:
    names = names_of(factor, levels)
    assert len(set(names)) == len(levels)
    assert names_of(factor, levels[::-1]) == names[::-1]
    assert not any("again" in name for name in names)


@pytest.mark.usefixtures("files")
async def test_files_of_one_name_are_arms_of_their_own() -> None:
    plan = await planned(f"Is accuracy better on a/train.jsonl, b/train.jsonl or c/train.jsonl {WITH}?")
    assert [arm.name for arm in plan.arms] == [f"data={folder}-train.jsonl" for folder in "abc"]
    assert len({str(arm.levels["data"]) for arm in plan.arms}) == 3
    assert [each.sides for each in plan.hypotheses] == [
        {"data=a-train.jsonl", f"data={folder}-train.jsonl"} for folder in "bc"
    ]


@pytest.mark.usefixtures("files")
async def test_one_file_that_is_named_in_two_ways_is_run_again() -> None:
    plan = await planned(f"Is accuracy better on a/train.jsonl or ./a/train.jsonl {WITH}?")
    assert [arm.name for arm in plan.arms] == ["data=train.jsonl", "data=train.jsonl-again"]
    assert any("runs the same as" in line for line in plan.assumptions)


@pytest.mark.usefixtures("files")
async def test_crossed_factors_name_levels_and_sides_apart() -> None:
    asked = "Do data (a/train.jsonl or b/train.jsonl) and learning rate (1e-5 or 4e-5) interact on accuracy"
    plan = await planned(f"{asked}, {WITH}?")
    assert len({arm.name for arm in plan.arms}) == 4
    by_data = next(each for each in plan.hypotheses if each.factor == "data")
    assert (by_data.baseline, by_data.treatment) == ("data=a-train.jsonl", "data=b-train.jsonl")
    assert by_data.statement.startswith("data=b-train.jsonl has")
    assert not set(by_data.baselines) & set(by_data.treatments)


@pytest.mark.parametrize("meanwhile", ["/x/a.jsonl#sha256=1", "/z/a.jsonl#sha256=3"])
def test_a_sequence_keeps_files_of_one_name_apart(meanwhile: str) -> None:
    files = ("/x/a.jsonl#sha256=1", "/y/a.jsonl#sha256=2")
    reading = Reading(
        factor=RATE,
        levels=(0.1, 0.2),
        pairs=(),
        following=Following(factor=DATA, levels=files, meanwhile=meanwhile),
        metric=METRIC,
        direction="increase",
    )
    arms = arms_of(reading)
    assert len({arm.name for arm in arms}) == len(arms) == 2 * len({*files, meanwhile})
    assert len({tuple(arm.levels.values()) for arm in arms}) == len(arms)
    assert all(each.baseline != each.treatment for each in hypotheses_of(reading, arms))
    levels = {arm.name: arm.levels for arm in arms}
    _, first, *second = stages_of(reading, (2, 2))
    assert [levels[name] for name in first.arms] == [{"rate": rate, "data": meanwhile} for rate in (0.1, 0.2)]
    assert [[levels[name] for name in stage.arms] for stage in second] == [
        [{"rate": rate, "data": file} for file in files] for rate in (0.1, 0.2)
    ]


async def test_a_plan_whose_arms_share_a_name_is_refused_and_one_that_is_stored_is_read() -> None:
    plan = await BuiltinPlanner().plan(request())
    one, other = plan.arms
    twice = plan.model_copy(update={"arms": (one, other.model_copy(update={"name": one.name}))})
    assert Plan.model_validate_json(twice.model_dump_json()) == twice
    with pytest.raises(PlanningRefused, match=f"several arms would be called {one.name}"):
        checked(twice)
