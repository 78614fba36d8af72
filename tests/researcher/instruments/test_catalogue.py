"""Instruments are found, checked and hashed; what is wrong in a declaration is named."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from researcher.instruments.catalogue import as_frozen, available, folder_digest, open_instrument, read_instrument
from researcher.instruments.levels import level_problem
from researcher.refusals import PlanningRefused
from tests.contracts.planner_contract import ROOT
from tests.fakes.specs import planned

KITCHEN = ROOT / "tests" / "instruments" / "kitchen"
OURS = [
    "arithmetic",
    "cocktail",
    "countdown",
    "dataset",
    "frozenlake",
    "guess_number",
    "reasoning_gym",
    "repo_tasks",
    "team",
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(KITCHEN, tmp_path / "kitchen"))


def edit(folder: Path, old: str, new: str) -> None:
    file = folder / "instrument.toml"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


def test_instruments_of_the_clone_and_of_further_folders_are_found(folder: Path) -> None:
    names = [each.instrument.name for each in available({"RESEARCHER_STUDIES": str(folder.parent)})]
    assert names == sorted([*OURS, "kitchen"])
    assert [each.instrument.name for each in available({"RESEARCHER_STUDIES": str(folder)})] == names
    assert [each.instrument.name for each in available({})] == [name for name in names if name != "kitchen"]


def test_an_instrument_is_opened_by_name_or_by_folder(folder: Path) -> None:
    assert open_instrument("arithmetic", {}).path == (ROOT / "studies" / "arithmetic").resolve()
    assert open_instrument(str(folder), {}).instrument.name == "kitchen"
    with pytest.raises(PlanningRefused, match="did you mean 'arithmetic'"):
        open_instrument("arithmetics", {})
    with pytest.raises(PlanningRefused, match=r"contains no instrument\.toml"):
        open_instrument(str(folder.parent), {})


def test_a_declaration_under_its_old_name_still_counts_with_the_digest_that_it_had_and_two_are_refused(
    folder: Path,
) -> None:
    renamed = folder / "study.toml"
    text = (folder / "instrument.toml").read_text()
    (folder / "instrument.toml").rename(renamed)
    found = open_instrument(str(folder), {})
    assert (found.instrument.name, found.code) == ("kitchen", folder_digest(folder))
    assert "kitchen" in [each.instrument.name for each in available({"RESEARCHER_STUDIES": str(folder.parent)})]
    renamed.write_text(text.replace("trial_s", "trial"))
    with pytest.raises(PlanningRefused, match=r"study\.toml: defaults"):
        read_instrument(folder)
    (folder / "instrument.toml").write_text(text)
    with pytest.raises(PlanningRefused, match=r"contains both instrument\.toml and its old form study\.toml"):
        available({"RESEARCHER_STUDIES": str(folder.parent)})


def test_two_instruments_of_one_name_are_refused(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    with pytest.raises(PlanningRefused, match="two instruments are called 'kitchen'"):
        available({"RESEARCHER_STUDIES": str(tmp_path)})


def test_a_folder_that_is_named_twice_counts_once_and_one_that_is_missing_is_named(folder: Path) -> None:
    named = f"{folder.parent}:{folder}:{folder.parent}/../{folder.parent.name}"
    names = [each.instrument.name for each in available({"RESEARCHER_STUDIES": named})]
    assert names == [each.instrument.name for each in available({"RESEARCHER_STUDIES": str(folder)})]
    with pytest.raises(PlanningRefused, match=f"RESEARCHER_STUDIES names {folder.parent}/none, which is not a folder"):
        available({"RESEARCHER_STUDIES": f"{folder.parent}/none"})


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('name = "schedule"\ntarget', 'name = "schedule"\ntarge', "did you mean 'factors.0.target'"),
        ("trial_s = 30.0", "trial = 30.0", "defaults.trial_s"),
        ("trial_s = 30.0", "trial_s = -1.0", "defaults.trial_s: should be greater than 0"),
        ("trial_s = 30.0", "trial_s = 30.0\nheldout_temperature = -1.0", "defaults.heldout_temperature"),
        ('metric = "final_reward"', 'metric = "reward"', "defaults.metric"),
        ('default = "constant"', 'default = "steady"', "one of constant, linear, cosine"),
        ("run.optimizer.warmup", "run.optimizer.warm_up", "did you mean 'optimizer.warmup'"),
        ("run.optimizer.warmup", "optimizer.warmup", "is not one of run.<field>"),
        ("default = 0.01\n", "default = 2.0\n", "from 0 to 1"),
        ('name = "hints"', 'name = "warmup"', "declared 2 times"),
        ("margin = 0.1", "margin = 0.0", "above 0"),
        ('kind = "final_reward"', 'kind = "steps_to_threshold"', "threshold: steps_to_threshold needs one"),
        ('kind = "final_reward"', 'kind = "steps_to_threshold"\nthreshold = 0.5', "direction: steps_to_threshold needs one"),
        ('"final_reward"\nkind = "final_reward"', '"final_reward"\nkind = "wall_s"', "direction: wall_s needs one"),
        ('kind = "final_reward"', 'kind = "final_reward"\nwhen = "gain"', "when: final_reward has none"),
        ('kind = "final_reward"', 'kind = "outcome"', "direction: outcome needs one"),
        ('kind = "final_reward"', 'kind = "outcome"\ndirection = "increase"\nsource = "a b"', "source"),
        ('kind = "final_reward"', 'kind = "final_reward"\nsource = "honest"', "source: final_reward has none"),
        ('kind = "final_reward"', 'kind = "final_reward"\ntrue = true', "true: final_reward cannot be; only outcome"),
        ('kind = "final_reward"', 'kind = "heldout_reward"\nwhen = "training"', "before, after or gain"),
        ('kind = "final_reward"', 'kind = "final_reward"\nthreshold = 0.5', "threshold: final_reward has none"),
        ("trial_s = 30.0", "trial_s = 30.0\n[defaults.task]\nhints = true", "default: it is False, but defaults.task has True"),
        ('model = "tiny', 'reward = [1.0, 0.0]\nmodel = "tiny', "reward: give the lowest reward first"),
        ('name = "hints"', 'name = ["hints"]', "factors.1.name: should be a valid string"),
        ('aliases = ["hint"]', 'aliases = ["Warm-up"]', "'warm-up' is already an alias of"),
        ('aliases = ["wall time"]', 'aliases = ["reward"]', "metrics.wall_s.aliases: 'reward' is already an alias of 'final_reward'"),
        ('workflow = "workflow.py"', 'workflow = "flow.py"', "no file 'flow.py'"),
        ('name = "kitchen"', "name = kitchen", "not valid TOML"),
    ],
)  # fmt: skip
def test_a_wrong_declaration_is_refused_naming_the_field(folder: Path, old: str, new: str, says: str) -> None:
    edit(folder, old, new)
    with pytest.raises(PlanningRefused) as refused:
        read_instrument(folder)
    assert says in str(refused.value)
    assert "instrument.toml" in str(refused.value)


def test_what_is_misspelt_in_the_run_of_all_trials_is_said_once(folder: Path) -> None:
    edit(folder, "[defaults]", "[defaults.run.optimizer]\nlearning_rte = 1e-5\n\n[defaults]")
    with pytest.raises(PlanningRefused) as refused:
        read_instrument(folder)
    assert str(refused.value).count("did you mean 'optimizer.learning_rate'") == 1
    assert "defaults.run: optimizer.learning_rte" in str(refused.value)


def test_the_digest_covers_every_file_but_caches(folder: Path) -> None:
    before = folder_digest(folder)
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "workflow.cpython-311.pyc").write_bytes(b"x")
    (folder / ".hidden").write_text("x")
    assert folder_digest(folder) == before
    (folder / "workflow.py").write_text("# changed\n")
    changed = folder_digest(folder)
    assert changed != before
    (folder / "workflow.py").rename(folder / "other.py")
    assert folder_digest(folder) not in (before, changed)


def test_what_any_run_can_vary_is_a_factor_of_every_instrument_with_the_defaults_of_its_runs(folder: Path) -> None:
    edit(folder, "[[metrics]]", '[[factors]]\nname = "max_tokens"\nhigh = 2048\n\n[[metrics]]')
    edit(folder, "trial_s = 30.0", "trial_s = 30.0\n[defaults.run.batch]\ngroup_size = 4")
    factors = {factor.name: factor for factor in read_instrument(folder).instrument.factors}
    assert (factors["group_size"].default, factors["steps"].default, factors["kl"].default) == (4, 10, 0.0)
    assert (factors["max_tokens"].high, factors["max_tokens"].low) == (2048, 1)


def test_what_is_measured_of_any_run_is_a_metric_of_every_instrument_and_in_its_plans_where_it_names_it(
    folder: Path,
) -> None:
    instrument = read_instrument(folder).instrument
    metrics = {metric.name: metric for metric in instrument.metrics}
    assert {"entropy_final", "seconds_to_threshold", "tokens_sampled", "heldout_accuracy"} <= set(metrics)
    assert (metrics["wall_s"].margin, metrics["wall_s"].direction, metrics["wall_s"].aliases) == (
        5.0,
        "decrease",
        ("wall time",),
    )
    assert metrics["final_reward"].sigma == 0.2
    assert metrics["final_reward"].description.startswith("Mean training reward over the last quarter")
    assert [name for name, metric in metrics.items() if not metric.on_request] == ["final_reward", "wall_s"]
    plan = planned(folder, metric="entropy_final")
    assert [metric.name for metric in plan.metrics] == ["entropy_final", "final_reward", "wall_s"]
    plan = planned(folder, metric="final_reward", secondary=["tokens_sampled"])
    assert [metric.name for metric in plan.metrics] == ["final_reward", "tokens_sampled"]
    assert not any(metric.on_request for metric in plan.metrics)


def test_bounds_are_no_laptops() -> None:
    sizes = {"max_tokens": 131_072, "tasks_per_step": 4096, "group_size": 1024, "steps": 1_000_000}
    for folder in available({}):
        factors = {factor.name: factor for factor in folder.instrument.factors}
        assert [level_problem(factors[name], level) for name, level in sizes.items()] == [None] * len(sizes)
    with pytest.raises(PlanningRefused, match="group_size goes from 2 to 1024; 2000 lies outside"):
        planned(set={"group_size": 2000})
    for name in ("group_size", "temperature"):
        with pytest.raises(PlanningRefused, match=f"{name} takes no number as large as this"):
            planned(set={name: 10**400})


def test_a_word_that_an_instrument_gives_to_a_metric_of_its_own_is_no_longer_that_of_a_shared_one(folder: Path) -> None:
    edit(folder, 'aliases = ["reward"]', 'aliases = ["reward", "Accuracy"]')
    metrics = {metric.name: metric for metric in read_instrument(folder).instrument.metrics}
    assert "accuracy" not in metrics["heldout_accuracy"].aliases
    assert "exact match" in metrics["heldout_accuracy"].aliases
    edit(folder, 'kind = "final_reward"', 'kind = "outcome"\ndirection = "decrease"')
    assert read_instrument(folder).instrument.metrics[0].direction == "decrease"


def test_a_plan_that_knows_an_earlier_declaration_of_the_same_code_goes_on(folder: Path) -> None:
    edit(folder, 'workflow = "workflow.py"', f'workflow = "workflow.py"\nearlier = ["{"a" * 64}"]')
    found = read_instrument(folder)
    assert as_frozen(found, "a" * 64).code == "a" * 64
    assert as_frozen(found, "b" * 64) == found
