"""Tasks from data sets: lines that are wrong are named, splits cannot leak, rewards by name, episodes against the echo engine."""

from __future__ import annotations

import hashlib
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.serving import ServerProcess
from studies.dataset import workflow
from studies.dataset.mathematics import value_of
from studies.dataset.rewards import REWARDS, score
from studies.dataset.source import BadSource
from tests.studies.declarations import assert_declaration_fits_the_code, declared
from tests.studies.playing import played, take, trained

pytestmark = pytest.mark.anyio


def written(file: Path, *records: object) -> str:
    file.write_text("".join(f"{each if isinstance(each, str) else json.dumps(each)}\n" for each in records))
    return str(file)


@pytest.fixture
def data(tmp_path: Path) -> str:
    sums = [{"question": f"What is {a}+{a}?", "answer": 2 * a} for a in range(40)]
    return written(tmp_path / "train.jsonl", *sums, sums[0])


def test_its_description_fits_the_code() -> None:
    assert_declaration_fits_the_code("dataset")


def test_every_reward_of_the_description_is_there() -> None:
    folder, _ = declared("dataset")
    (reward,) = (factor for factor in folder.instrument.factors if factor.name == "reward")
    assert list(reward.choices) == ["exact", "number", "contains", "regex", "math"]
    assert set(reward.choices) == set(REWARDS)


@pytest.mark.parametrize("share", [0.01, 0.25, 0.9])
def test_no_question_is_both_trained_and_held_out(data: str, share: float) -> None:
    train = {task.query for task in take(workflow.tasks("train", 0, None, data=data, heldout_share=share), 500)}
    held_out = [task.query for task in workflow.tasks("heldout", 0, None, data=data, heldout_share=share)]
    assert train.isdisjoint(held_out)
    assert len(set(held_out)) == len(held_out) == max(1, int(40 * share))
    assert len(train) + len(held_out) == 40


def test_rows_that_differ_in_outer_white_space_are_one_question(tmp_path: Path) -> None:
    rows = [{"question": f"What is {a}+{a}?{end}", "answer": 2 * a} for a in range(20) for end in ("", " ", "\n")]
    file = written(tmp_path / "t.jsonl", *rows)
    for instruction in ("", "Answer."):
        given: dict[str, Any] = {"data": file, "instruction": instruction}
        train = {task.id for task in take(workflow.tasks("train", 0, None, **given), 200)}
        assert train.isdisjoint(task.id for task in workflow.tasks("heldout", 0, None, **given))


def test_numbers_of_json_are_expected_as_people_write_them(tmp_path: Path) -> None:
    file = written(tmp_path / "t.jsonl", *({"question": f"q{n}", "answer": 0.00005} for n in range(4)))
    (task,) = workflow.tasks("train", 0, 1, data=file)
    assert task.metadata["expected"] == "0.00005"


def test_streams_depend_on_their_seeds_alone(data: str) -> None:
    once = take(workflow.tasks("train", 1, None, data=data), 50)
    assert once == take(workflow.tasks("train", 1, 50, data=data), 100)
    assert once != take(workflow.tasks("train", 2, None, data=data), 50)
    held_out = list(workflow.tasks("heldout", 1, 8, data=data))
    assert held_out == list(workflow.tasks("heldout", 2, 8, data=data))
    assert held_out != list(workflow.tasks("heldout", 1, 8, data=data, heldout_seed=1))


def test_columns_and_an_instruction_are_named_by_parameters(tmp_path: Path) -> None:
    file = written(tmp_path / "t.jsonl", *({"prompt": f"Q{i}", "target": f"A{i}", "id": i} for i in range(4)))
    named: dict[str, Any] = {"question_column": "prompt", "answer_column": "target", "instruction": "Be brief."}
    (task, *_) = workflow.tasks("train", 0, 3, data=file, **named)
    assert task.query.endswith("Be brief.")
    assert task.metadata["expected"] == f"A{task.query[1]}"


LONG = "9" * 5000
GOOD = {"question": "1+1?", "answer": "2"}


@pytest.mark.parametrize(
    ("lines", "reward", "says"),
    [
        ([GOOD, '{"question": "2+2?"'], "exact", "t.jsonl, line 2: is not JSON"),
        ([GOOD, "", '"text"'], "exact", "t.jsonl, line 3: must be a JSON object"),
        (
            [GOOD, {"question": "2+2?", "anwser": "4"}],
            "exact",
            "line 2: there is no column 'answer'; did you mean 'anwser'",
        ),
        ([{"question": " ", "answer": "4"}], "exact", "line 1: 'question' is empty"),
        ([{"question": "2+2?", "answer": None}], "exact", "line 1: 'answer' must be text or a number, not NoneType"),
        ([{"question": "2+2?", "answer": ""}], "exact", "line 1: 'answer' is empty"),
        ([GOOD, {"question": "2+2?", "answer": "four"}], "number", "line 2: 'answer' holds no number"),
        ([GOOD, {"question": "2+2?", "answer": "x ="}], "math", "line 2: 'answer' holds nothing to compare with"),
        ([GOOD, {"question": "2+2?", "answer": r"\boxed{}"}], "math", "line 2: 'answer' holds nothing to compare with"),
        ([GOOD, {"question": "2+2?", "answer": "$ $."}], "math", "line 2: 'answer' holds nothing to compare with"),
        ([GOOD, {"question": "2+2 \ud83d?", "answer": "4"}], "exact", "line 2: 'question' holds half a character"),
        ([GOOD, {"question": "2+2?", "answer": "\ud83d"}], "exact", "line 2: 'answer' holds half a character"),
        (
            [GOOD, {"question": "2+2?", "answer": math.nan}],
            "exact",
            "line 2: 'answer' must be a finite number, not nan",
        ),
        (
            [GOOD, '{"question": "2+2?", "answer": -1e400}'],
            "number",
            "line 2: 'answer' must be a finite number, not -inf",
        ),
        ([GOOD, f'{{"question": "2+2?", "answer": {LONG}}}'], "exact", "line 2: holds a number that is too long"),
        ([GOOD, "[" * 100_000], "exact", "line 2: nests too deep"),
        ([GOOD, {"question": "2+2?", "answer": LONG}], "number", "line 2: 'answer' holds a number that is too long"),
        ([GOOD, {"question": "2+2?", "answer": "(4"}], "regex", "line 2: 'answer' is no pattern"),
        ([], "exact", "holds no rows"),
        ([GOOD], "exact", "too few"),
    ],
)
def test_a_line_that_is_wrong_is_named_with_its_number(
    tmp_path: Path, lines: list[object], reward: str, says: str
) -> None:
    file = written(tmp_path / "t.jsonl", *lines)
    with pytest.raises(BadSource) as bad:
        list(workflow.tasks("train", 0, 3, data=file, reward=reward))
    assert says in str(bad.value)
    assert "\n" not in str(bad.value)


def test_a_line_that_is_no_text_is_named_with_its_number(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_bytes(json.dumps(GOOD).encode() + b'\n{"question": "\xff"}\n')
    with pytest.raises(BadSource, match="line 2: is not text in UTF-8"):
        workflow.tasks("train", 0, 1, data=str(tmp_path / "t.jsonl"))


def test_a_file_that_was_changed_since_it_was_pinned_is_refused(data: str) -> None:
    digest = hashlib.sha256(Path(data).read_bytes()).hexdigest()[:16]
    assert take(workflow.tasks("train", 0, None, data=f"{data}#sha256={digest}"), 1)
    Path(data).write_text(json.dumps(GOOD) + "\n")
    with pytest.raises(BadSource, match="was changed since the plan was made"):
        workflow.tasks("train", 0, 1, data=f"{data}#sha256={digest}")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"data": "nowhere.jsonl"}, "nowhere.jsonl cannot be read"),
        ({}, "no data set is named"),
        ({"data": "x.jsonl", "reward": "exakt"}, "did you mean 'exact'"),
        ({"data": "x.jsonl", "heldout_share": 1.0}, "heldout_share must"),
    ],
)
def test_what_cannot_be_read_is_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises((BadSource, ValueError), match=says):
        workflow.tasks("train", 0, 1, **given)


RIGHT_AND_WRONG = [
    ("exact", "4", " 4\n", "The answer is 4"),
    ("number", "2 + 2 makes\n#### 4", "So it is 4.0!", "4 or 5"),
    ("number", "1,200", "$1200", "1,2001"),
    ("number", "0.5", "It is .5", "It is 5"),
    ("number", "1.5e-3", "0.0015", "3"),
    ("math", "x <= 5", "x <= 5", "x >= 5"),
    ("math", "x = 5", "so x = 5", "x != 5"),
    ("contains", "Paris", "It is paris.", "Parisian"),
    ("regex", r"^\d{2}$", "42", "4"),
    ("math", "1/2", r"\boxed{\frac{2}{4}}", "0.51"),
    ("math", "0.25", "x = 25%", "25"),
    ("math", "x^2 + 1", "$x^2+1$", "x^2"),
    ("math", "-3", "- 6/2", "3"),
    ("math", r"\frac{\sqrt{3}}{2}", r"So it is $\boxed{\frac{\sqrt{3}}{2}}$.", r"$\boxed{\frac{\sqrt{2}}{2}}$."),
    ("math", "1/2", r"\boxed{\frac{2^{2}}{2^{3}}}", r"\boxed{\frac{2^{2}}{2^{2}}}"),
    ("math", "4", r"\boxed{2^{\frac{4}{2}}}", r"\boxed{2^{\frac{2}{2}}}"),
    ("math", "3", r"{not \boxed{2}, but \boxed{3}; \boxed{4", r"\boxed{3} or \boxed{2}"),
    ("math", r"\{1, 2\}", r"\boxed{\{1, 2\}}", r"\boxed{\{1, 3\}}"),
    ("math", "5", r"\boxed{\$5}", r"\boxed{\$6}"),
    ("math", r"\$5", "$5", "$6"),
    ("math", r"\$x", "$x$", r"\$y"),
    ("math", r"\frac12", "1/2", "12"),
    ("math", "0.5", r"\boxed{\frac12}", r"\boxed{\frac123}"),
    ("math", "2/3", r"\dfrac{4}6 = \frac 2{3}", r"\frac{}23"),
    ("math", "2", r"so x = \boxed 2.", r"so x = 2 or \boxed 3"),
    ("math", "1,200.5", r"$\boxed1200.5$", r"$\boxed 1200$"),
    ("math", "7", "\\boxed 7\n- done", "\\boxed 7 - 2\n"),
    ("math", "7", "\\boxed 7\n**Check**", r"\boxed 7**2"),
    ("math", "5", r"\boxed 5 - that is it", r"\boxed 5 - x"),
    ("contains", "3", "3, or so", "about 3.14"),
    ("contains", "3", "It is 3.", "-3"),
    ("contains", "3", "The answer is...3", "It is .3"),
    ("contains", "3", "4, 3", "4,3"),
    ("contains", "3", "3 - 5", "2 -3"),
    ("contains", "19", "COVID-19", "= -19"),
    ("contains", "3", "pages 2-3", "(-3)"),
    ("contains", "2", "pages 2–3", "2.3"),
    ("contains", "3", "a-3", "1e-3"),
    ("contains", "3", "x=3", ".3"),
    ("contains", "-3", "It is -3!", "It is -3.5"),
    ("contains", "state-of-the-art", "State-of-the-art.", "state of the art"),
]


@pytest.mark.parametrize(("name", "expected", "right", "wrong"), RIGHT_AND_WRONG)
def test_right_wrong_and_empty_answers_are_worth_less_and_less(
    name: str, expected: str, right: str, wrong: str
) -> None:
    assert [score(name, answer, expected) for answer in (right, wrong, " \n")] == [1.0, 0.1, 0.0]


@pytest.mark.parametrize(
    "text", ["9**9**9", "2^{999}", "1/0", "__import__('os')", "", "x+1", "1" * 300, "((((0.1^64)^64)^64)^64)^64"]
)
def test_what_is_no_arithmetic_or_too_much_of_it_has_no_value(text: str) -> None:
    assert value_of(text) is None


def test_a_data_set_of_the_hub_is_read_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def load_dataset(*names: Any, **options: Any) -> list[dict[str, str]]:
        asked.append((names, options))
        return [{"question": f"Q{i}", "answer": f"#### {i}"} for i in range(8)]

    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    tasks = workflow.tasks(
        "heldout", 0, 9, data="hf:openai/gsm8k@abc", subset="main", source_split="test", reward="number"
    )
    assert len(list(tasks)) == 2
    assert asked == [(("openai/gsm8k", "main"), {"split": "test", "revision": "abc"})]


def test_a_number_of_the_hub_that_is_too_long_is_named_with_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    rows = [GOOD, {"question": "2+2?", "answer": 10**5000}]
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=lambda *names, **options: rows))
    with pytest.raises(BadSource, match="gsm8k train, row 2: 'answer' holds a number that is too long"):
        workflow.tasks("train", 0, 1, data="hf:openai/gsm8k")


def test_a_data_set_that_the_hub_does_not_give_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*names: Any, **options: Any) -> None:
        raise ConnectionError("no way to the hub\nand much more")

    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(BadSource, match=r"cannot be loaded: no way to the hub$"):
        workflow.tasks("train", 0, 1, data="hf:openai/gsm8k")


def test_without_the_package_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BadSource, match=r"datasets, which is not installed here: pip install --no-deps -r .*hub\.txt"):
        workflow.tasks("train", 0, 1, data="hf:openai/gsm8k")


async def test_episodes_are_played_to_their_rewards(tmp_path: Path, echo_server: ServerProcess) -> None:
    """The echo engine repeats the last word, which is right here, or garbles it."""
    file = written(tmp_path / "t.jsonl", *({"question": f"Say word{i}", "answer": f"word{i}"} for i in range(40)))
    _, loaded = declared("dataset")
    report, entries = await played(echo_server.url, loaded, loaded.tasks("heldout", 0, 10, data=file))  # type: ignore[arg-type]
    assert (report.ended, report.crashed) == (10, 0)
    assert {entry.reward for entry in entries} <= {1.0, 0.1}


async def test_a_training_runs_to_its_end(data: str, echo_server: ServerProcess) -> None:
    _, loaded = declared("dataset")
    report = await trained(echo_server.url, loaded, loaded.tasks("train", 0, None, data=data, reward="number"))  # type: ignore[arg-type]
    assert (report.run_over, report.crashed) == (True, 0)
