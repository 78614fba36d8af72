"""`researcher start` and `draft` from a study file and from options: one spec, whichever way it comes."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from jsonschema_rs import is_valid

from researcher.campaign.goal import CampaignGoal, goal_in
from researcher.cli import OUT_OF_BUDGET, USAGE, resume
from researcher.cli.request import without_engine
from researcher.main import main
from researcher.models import Finding, StudyStatus
from researcher.ownership import owned_now
from researcher.refusals import SpecRefused
from researcher.store.findings import Findings
from researcher.store.store import Store
from researcher.study.draft import options_of
from researcher.study.plan import Plan
from researcher.study.spec import StudySpec
from tests.fakes.specs import planned, spec

FILE = """\
question: Is it better?
instrument: arithmetic
compare:
  learning_rate: {baseline: 1e-5, levels: [4e-5]}
claim: increase
"""
TOPIC = "Does GRPO learn one-digit sums faster with a learning rate of 4e-5 than with 1e-5?"
Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RESEARCHER_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("RESEARCHER_DATABASE_URL", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "study.yaml").write_text(FILE)
    return tmp_path / "study.yaml"


def shown(capsys: Capture, *words: str) -> dict[str, Any]:
    assert main(["start", *words, "--dry-run", "--json"]) == 0
    return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]


def test_a_file_is_planned_as_it_stands_and_a_dry_run_records_nothing(file: Path, home: Path, capsys: Capture) -> None:
    found = shown(capsys, str(file))
    document = ["hash", "spec", "author", "sources", "because", "uncovered", "price"]
    assert list(found) == [*document, "engine", "same_spec", "campaign", "calibration", "plan"]
    assert Plan.model_validate(found["plan"]) == planned()
    assert found["hash"] == planned().digest()
    assert (found["author"], found["sources"]["claim"], found["spec"]["instrument"]) == ("file", "file", "arithmetic")
    assert found["price"]["trials"] == [6, 10]
    assert not home.exists()


def test_options_edit_a_file_and_make_the_same_plan_alone(file: Path, capsys: Capture) -> None:
    edits = ("--seeds", "3..4", "--set", "digits=2", "--budget", "2h", "--window", "22:00-07:00")
    edited = shown(capsys, str(file), *edits)
    alone = shown(
        capsys, "--instrument", "arithmetic", "--vary", "learning_rate=1e-5,4e-5", "--claim", "increase", *edits
    )
    assert edited["plan"]["stages"] == alone["plan"]["stages"]
    assert edited["plan"]["arms"] == alone["plan"]["arms"]
    assert (edited["sources"]["seeds.max"], edited["sources"]["claim"]) == ("flag", "file")
    assert set(alone["sources"].values()) == {"flag"}
    assert alone["author"] == "options"
    assert edited["spec"]["schedule"] == {"windows": ["22:00-07:00"]}
    assert edited["spec"]["budget"] == {"wall": "2h"}


def test_a_draft_of_options_is_a_file_that_makes_the_same_plan(tmp_path: Path, capsys: Capture) -> None:
    asked = ("--instrument", "arithmetic", "--vary", "kl=0,0.1", "--vary", "group_size=4,8", "--claim", "increase")
    alone = shown(capsys, *asked)
    assert alone["spec"]["design"] == "factorial"
    made = tmp_path / "made.yaml"
    assert main(["draft", *asked, "-o", str(made)]) == 0
    assert "# from an option" in made.read_text()
    assert f"`researcher start {made}` runs it" in capsys.readouterr().out
    assert shown(capsys, str(made))["hash"] == alone["hash"]
    assert main(["draft", *asked, "-o", str(made)]) == USAGE
    assert "--force overwrites it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("learning_rate:", "learning_rat:", "study.yaml:4: compare.learning_rat: "),
        ("claim: increase", "claim: up", "study.yaml:5: claim: "),
        (
            "claim: increase",
            "budget: {wall: 1m}",
            "study.yaml:5: budget.wall: 6 trials take about 6 min, but the budget is 1 min",
        ),
        ("arithmetic", "arithmetik", "arithmetic"),
        ("claim", "clam", "study.yaml:5: clam: unknown field (did you mean 'claim'?)"),
    ],
)
def test_a_wrong_setting_is_one_line_with_its_place_in_the_file(
    old: str, new: str, says: str, file: Path, capsys: Capture
) -> None:
    file.write_text(FILE.replace(old, new))
    assert main(["start", str(file), "--dry-run"]) in (USAGE, 4)
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1


def test_all_mistakes_of_a_file_are_named_at_once_with_their_lines(file: Path, capsys: Capture) -> None:
    file.write_text(
        "question: Is it better?\ninstrument: arithmetic\ncompare:\n  learning_rat: {baseline: 1e-5, levels: [4e-5]}\n"
        "  kl: {levels: [-1, 0.1]}\ndesign: factorial\nmetric: acuracy\nset: {group_siz: 4, epochs: none}\n"
        "schedule: {windows: [night]}\nnotify: [SLACK]\n"
    )
    everything = {4: "compare.learning_rat", 5: "compare.kl", 7: "metric", 8: "set.group_siz", 9: "schedule.windows"}
    for more in ("", "claim: up\nsteps: ten\n"):
        file.write_text(file.read_text() + more)
        assert main(["start", str(file), "--dry-run"]) == USAGE
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        found = everything | ({11: "claim", 12: "steps"} if more else {10: "notify"}) | {8: "set.epochs"}
        assert all(f"study.yaml:{line}: {field}" in said for line, field in found.items()), said
        assert "study.yaml:8: set.group_siz" in said


def test_earlier_findings_are_read_once_for_a_topic(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    Store.open().close()
    reads: list[int] = []
    everything = Findings.all

    def counted(self: Findings) -> list[Finding]:
        reads.append(1)
        return everything(self)

    monkeypatch.setattr(Findings, "all", counted)
    shown(
        capsys,
        "--planner",
        "builtin",
        "--topic",
        "Does GRPO learn sums faster with a learning rate of 4e-5 than with 1e-5?",
    )
    assert len(reads) == 1


def test_the_first_level_is_the_baseline_and_the_plan_says_so(file: Path, capsys: Capture) -> None:
    file.write_text(FILE.replace("{baseline: 1e-5, levels: [4e-5]}", "{levels: [1e-5, 4e-5]}"))
    plan = shown(capsys, str(file))["plan"]
    (asked,) = plan["hypotheses"]
    assert (asked["baseline"], asked["treatment"]) == ("learning_rate=1e-5", "learning_rate=4e-5")
    assert "No baseline is named for learning_rate: it is the first level, 1e-5." in plan["assumptions"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "no study requested: give a study file, --topic TEXT, or --instrument NAME --vary FACTOR=A,B"),
        (["--vary", "kl=0,0.1"], "also need --instrument NAME; choose one of: arithmetic"),
        (["study.yaml", "--topic", "x"], "a study file and --topic both state the question"),
        (["nope.yaml"], "nope.yaml cannot be read: No such file or directory"),
        (["--instrument", "new", "--vary", "kl=0,0.1"], "--instrument new needs --topic"),
        (
            ["study.yaml", "--seeds", "many"],
            "--seeds 'many' is not a number of seeds; write a number such as 3, or a range",
        ),
        (["study.yaml", "--window", "night"], "night"),
    ],
)
@pytest.mark.usefixtures("file")
def test_what_asks_for_no_study_says_what_to_give(words: list[str], says: str, capsys: Capture) -> None:
    assert main(["start", *words]) == USAGE
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1
    assert Store.open().studies.all() == []


def test_the_schema_is_that_of_the_spec(capsys: Capture) -> None:
    assert main(["schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert list(schema["properties"]) == list(StudySpec.model_fields)
    assert schema["additionalProperties"] is False


@pytest.mark.parametrize(
    "fields",
    [
        {"compare": {"learning_rate": {"levels": [1e-5, 4e-5]}}, "margin": 0.2},
        {"compare": {"group_size": {"levels": [8]}}, "claim": "decrease", "metric": "wall_s"},
        {"arms": {"plain": {}, "clipped": {"clip_high": 0.28, "kl": 0.1}}, "set": {"digits": 2}, "steps": 4},
        {
            "compare": {"learning_rate": {"baseline": 1e-5, "levels": [4e-5]}, "advantage_norm": {"levels": ["none"]}},
            "design": "factorial",
            "looks": 2,
        },
    ],
    ids=["no baseline", "one level", "arms", "factorial"],
)
def test_the_options_of_a_spec_make_its_plan_again(fields: dict[str, Any], capsys: Capture) -> None:
    plan = planned(**fields)
    asked = spec(**fields)
    again = Plan.model_validate(shown(capsys, *options_of(asked, plan.arms[0].levels))["plan"])
    said = {"question": plan.question, "assumptions": plan.assumptions}  # options always name the baseline
    assert again.model_copy(update=said) == plan


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        (FILE + "budget: {wall: 10s}\n", 4, "study.yaml:6: budget.wall: 6 trials take about"),
        (FILE + 'schedule: {windows: ["25:00-07:00"]}\n', 2, "study.yaml:6: schedule.windows: "),
        (FILE.replace("arithmetic", "arithmetics"), 2, "study.yaml:2: instrument: no instrument is called"),
        (FILE + "5: 6\n", 2, "study.yaml:6: 5 is not a string"),
        (FILE + f"steps: {'9' * 5000}\n", 2, "study.yaml:6: this is not YAML: a number with 5000 digits"),
        (FILE + "set: &a {deep: *a}\n", 2, "study.yaml:6: *a repeats an earlier value"),
        (FILE + f"set: {'[' * 3000}{']' * 3000}\n", 2, "nested too deeply"),
    ],
    ids=["budget", "window", "instrument", "key", "number", "alias", "depth"],
)
def test_what_is_wrong_in_a_file_is_said_with_its_line(
    file: Path, text: str, code: int, says: str, capsys: Capture
) -> None:
    file.write_text(text)
    for command in (["start", str(file), "--dry-run"], ["draft", str(file)]):
        assert main(command) == code
        assert says in capsys.readouterr().err


def test_the_schema_of_goal_files_has_every_field_of_a_goal(capsys: Capture) -> None:
    assert main(["schema", "--campaign"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema["properties"].keys() == CampaignGoal.model_fields.keys()
    assert schema["title"] == "Goal file"


@pytest.mark.parametrize(
    ("fields", "holds"),
    [
        ({}, True),
        ({"factors": ["kl", "temperature"]}, True),
        ({"factors": []}, True),
        ({"factors": {"kl": [0.1], "temperature": []}}, True),
        ({"factors": [{"kl": [0.1]}]}, False),
        ({"factors": {"kl": 0.1}}, False),
        ({"factors": {"kl": {"levels": [0.1]}}}, False),
        ({"factors": "kl"}, False),
        ({"factors": None}, False),
        ({"factor": ["kl"]}, False),
        ({"set": {"digits": 1}, "steps": 6, "budget": {"wall": "2h", "tokens": "50M", "money": 5}}, True),
        ({"schedule": {"windows": ["22:00-07:00"], "days": 3}, "approve": "study", "notify": ["SLACK"]}, True),
        ({"objective": {"metric": "auc_reward", "direction": "increase", "margin": 0.05}}, True),
        ({"objective": {"margin": 0}}, False),
    ],
)
def test_the_schema_of_goal_files_takes_what_a_goal_takes(fields: dict[str, Any], holds: bool, capsys: Capture) -> None:
    goal = {"goal": "better", "instruments": ["arithmetic"], "budget": {"trials": 20}, **fields}
    assert main(["schema", "--campaign"]) == 0
    assert is_valid(json.loads(capsys.readouterr().out), goal) is holds
    with nullcontext() if holds else pytest.raises(SpecRefused):
        goal_in(goal)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--budget", "2m"], "start: --budget: 4 trials take about 4 min, but the budget is 2 min"),
        (["--set", "digits=99"], "start: --set: digits"),
        (["--seeds", "9..8"], "start: --seeds: "),
        (["--vary", "learning_rat=1,2"], "start: --vary: "),
        (["--budget", "2"], "'2' has no unit: write 2s, 2m or 2h (in files, a bare number means seconds)"),
    ],
)
def test_what_is_wrong_in_an_option_is_said_without_a_line_of_the_file(
    file: Path, options: list[str], says: str, capsys: Capture
) -> None:
    file.write_text(FILE + "budget: {wall: 3h}\nset: {kl: 0}\nseeds: {min: 2}\n")
    assert main(["start", str(file), *options, "--dry-run"]) in (USAGE, OUT_OF_BUDGET)
    said = capsys.readouterr().err
    assert says in said
    assert "study.yaml" not in said


def test_a_budget_that_is_too_small_ends_alike_for_a_topic_and_for_a_file(file: Path, capsys: Capture) -> None:
    topic = ["--planner", "builtin", "--topic", TOPIC]
    for asked in ([str(file)], topic):
        for command in (["start", "--dry-run"], ["draft"]):
            assert main([*command, *asked, "--budget", "3m"]) == OUT_OF_BUDGET
            assert "but the budget is 3 min" in capsys.readouterr().err
    assert (
        main(["draft", "--planner", "builtin", "--topic", f"{TOPIC[:-1]} in a blue moon?", "--budget", "3m"]) == USAGE
    )


def test_a_topic_that_asks_for_the_echo_engine_says_that_it_is_an_option(tmp_path: Path, capsys: Capture) -> None:
    asked = ["--planner", "builtin", "--topic", f"{TOPIC} Two seeds, and use the echo engine."]
    made = tmp_path / "made.yaml"
    assert main(["draft", *asked, "-o", str(made)]) == 0
    assert f"`researcher start {made} --engine echo` runs it" in capsys.readouterr().out
    assert "echo engine is chosen when the study is started" in " ".join(made.read_text().split("\n# "))
    assert main(["start", *asked, "--dry-run"]) == USAGE
    assert "choose it with --engine echo" in capsys.readouterr().err
    assert main(["start", *asked, "--engine", "echo", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "engine      echo: no model is trained" in said
    assert "the price below is for real trials" in said
    assert "echo" not in said.split("\n", 2)[1]


@pytest.mark.parametrize(
    ("topic", "without"),
    [
        ("Compare lr. Two seeds, and use the echo engine.", "Compare lr. Two seeds."),
        ("Compare lr. Use the echo engine. Two seeds.", "Compare lr. Two seeds."),
        ("Use the echo engine: compare lr 0.1 and 0.2.", "compare lr 0.1 and 0.2."),
        ("Use the echo engine!\n\nCompare lr", "Compare lr"),
        ("Compare lr\nPlease run it on the echo engine", "Compare lr"),
        ("Compare lr on the echo-engine, two seeds", "Compare lr, two seeds"),
        ("Compare lr with two seeds and use the echo engine", "Compare lr with two seeds"),
        ("Which lr learns faster? Run this with the echo engine; two hours.", "Which lr learns faster? two hours."),
        ("Compare lr (using the echo engine).", "Compare lr."),
        ("Compare lr --engine echo", "Compare lr"),
        (
            "Is 1e-4 better than 1e-5? Compare it to 1e-6 rather. On the echo engine, please use two seeds.",
            "Is 1e-4 better than 1e-5? Compare it to 1e-6 rather. please use two seeds.",
        ),
        ("See whether 4e-5 is better than 1e-5 on the echo engine.", "See whether 4e-5 is better than 1e-5."),
    ],
)
def test_whole_phrases_that_ask_for_the_echo_engine_are_left_out(topic: str, without: str) -> None:
    assert without_engine(topic) == without


@pytest.mark.parametrize(
    "topic",
    [
        "Do not use the echo engine. Compare lr",
        "Don't run it on the echo engine.",
        "Compare lr, and never use the echo engine.",
        "Please do not run this\non the echo engine.",
        "How fast is the echo engine?",
        "Does lr matter on the echo engine?",
        "Compare the local engine with the echo engine",
        "Compare the echo engine and the local one",
        "Train on GSM8K rather than on the echo engine",
        "Use the echo engine's latency as a factor",
        "Use the echo engine",
    ],
)
def test_a_topic_about_the_echo_engine_stays_as_it_is(topic: str) -> None:
    assert without_engine(topic) == topic


def test_an_option_of_another_command_is_refused_with_that_commands_name(capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        main(["draft", "--topic", TOPIC, "--engine", "echo"])
    assert "--engine (it is an option of `researcher start`" in capsys.readouterr().err


def test_a_draft_in_a_file_is_not_said_to_be_kept_in_another(tmp_path: Path, capsys: Capture) -> None:
    topic = f"{TOPIC[:-1]} in a blue moon?"
    assert main(["draft", "--planner", "builtin", "--topic", topic, "-o", "made.yaml"]) == USAGE
    said = capsys.readouterr().err
    assert "The draft is in made.yaml" in said
    assert "-o study.yaml" not in said


def test_a_study_with_the_same_spec_is_named_and_one_that_goes_on_is_not_started_twice(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(resume, "ensure_daemon", lambda: None)

    def started(*words: str) -> dict[str, Any]:
        assert main(["start", str(file), "--engine", "echo", "--detach", "--json", *words]) == 0
        return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]

    first = started()
    assert first["same_spec"] == []
    before = {"study": first["study"], "status": "planning"}
    assert shown(capsys, str(file), "--engine", "echo")["same_spec"] == [before]
    assert shown(capsys, str(file))["same_spec"] == []
    assert main(["start", str(file), "--engine", "echo", "--detach"]) == USAGE
    assert f"{first['study']} asks the same question and is planning (no daemon is running" in capsys.readouterr().err
    second = started("--again")
    assert second["same_spec"] == [before]
    store = Store.open()
    for each in (first, second):
        with owned_now(store, each["study"]) as own:
            own.studies.set_status(each["study"], StudyStatus.DONE, "it is over")
    third = started()
    assert [each["status"] for each in third["same_spec"]] == ["done", "done"]
    assert main(["stop", third["study"]]) == 0
    assert main(["start", str(file), "--engine", "echo", "--detach"]) == 0
    assert f"asked before: {first['study']} has the same spec, and is done" in capsys.readouterr().out
    store.close()


def test_a_draft_is_written_only_where_it_can_be_started(tmp_path: Path, capsys: Capture) -> None:
    asked = ["draft", "--instrument", "arithmetic", "--vary", "learning_rate=1e-5,4e-5"]
    for further, says in (
        (["--set", "epochz=2"], "no factor 'epochz'"),
        (["-o", "study.toml"], "drafts are YAML"),
        (["-o", "nowhere/study.yaml"], "there is no folder nowhere"),
    ):
        assert main([*asked, *further]) == USAGE
        assert says in capsys.readouterr().err
    assert not list(tmp_path.glob("study*"))
