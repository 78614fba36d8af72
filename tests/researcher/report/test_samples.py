"""Sample answers: the same tasks in all arms, bounded, escaped, and none where none were kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from researcher.models import SampledEpisode, StudyData, TrialStatus
from researcher.report.samples import LONGEST, answer_in, question_in, samples_of
from researcher.report.verify import verify
from researcher.report.writer import write_report
from tests.fakes.concluded_study import supported
from tests.fakes.sampled import an_episode


def episodes(*tasks: str, prompt: str = "2 + 2 = ?", **changes: Any) -> list[SampledEpisode]:
    """Of a trial: an episode of each task before training and after it, and one in training."""
    held_out = [
        an_episode(f"{task}-{step}", prompt=prompt, kind="eval", task_id=task, step=step, **changes)
        for step in (0, 6)
        for task in tasks
    ]
    return [*held_out, an_episode("trained", prompt=prompt)]


def study(*tasks: str, **changes: Any) -> StudyData:
    data = supported()
    return replace(data, samples={trial.key: episodes(*tasks, **changes) for trial in data.trials})


def test_each_arm_shows_what_was_asked_and_said_before_in_and_after_training() -> None:
    data = study("a", "b")
    found = samples_of(data.plan, data.trials, data.samples)
    arms = [arm.name for arm in data.plan.arms]
    times = [("before", "a"), ("before", "b"), ("training", "t-1"), ("after", "a"), ("after", "b")]
    assert [(part.arm, part.when, part.task) for part in found] == [(arm, *time) for arm in arms for time in times]
    assert {(part.question, part.answer, part.reward, part.success) for part in found} == {
        ("2 + 2 = ?", "4", "1", "yes")
    }
    assert {part.seed for part in found} == {0}


def test_interim_evaluations_are_shown_with_their_step_between_training_and_the_end() -> None:
    data = study("a")
    between = [an_episode(f"mid-{step}", kind="eval", task_id="a", step=step) for step in (2, 4)]
    samples = {trial.key: [*data.samples[trial.key], *between] for trial in data.trials}
    found = [part for part in samples_of(data.plan, data.trials, samples) if part.arm == data.plan.arms[0].name]
    times = [("before", 0), ("training", 3), ("interim", 2), ("interim", 4), ("after", 6)]
    assert [(part.when, part.step) for part in found] == times


def test_a_trial_under_way_has_no_answers_after_training() -> None:
    data = study("a")
    trials = [trial.model_copy(update={"status": TrialStatus.RUNNING}) for trial in data.trials]
    assert samples_of(data.plan, trials, data.samples) == []
    shown = samples_of(data.plan, trials, data.samples, (TrialStatus.DONE, TrialStatus.RUNNING))
    assert [part.when for part in shown[:3]] == ["before", "training", "interim"]


def test_tasks_that_all_arms_have_come_before_others() -> None:
    data = supported()
    first, second = (arm.name for arm in data.plan.arms)
    own = {first: ("x", "a", "b"), second: ("a", "b", "y")}
    data = replace(data, samples={trial.key: episodes(*own[trial.arm]) for trial in data.trials})
    shown = samples_of(data.plan, data.trials, data.samples)
    assert {part.task for part in shown if part.when != "training"} == {"a", "b"}


def test_the_report_says_them_escaped_and_bounded_and_verifies(tmp_path: Path) -> None:
    nasty = "<script>alert(1)</script> | *x* " + "y" * 5000
    data = study("a<b>", prompt=nasty, success=None)
    written = write_report(data, tmp_path)
    html, markdown = (Path(written.files[kind]).read_text() for kind in ("html", "markdown"))
    for text in (html, markdown):
        assert "Sample answers" in text
        assert "y" * (LONGEST + 1) not in text
        assert "not said" in text
    assert "<script>alert" not in html
    assert "&lt;script&gt;alert(1)" in html
    assert r"\<script>" in markdown
    assert r"\| \*x\*" in markdown
    assert verify(data, written.claims, written.files, written.seal) == []
    again = write_report(data, tmp_path / "again")
    assert again.seal == written.seal


def test_a_sample_that_was_changed_in_the_report_is_found(tmp_path: Path) -> None:
    data = study("a")
    written = write_report(data, tmp_path)
    file = Path(written.files["markdown"])
    file.write_text(file.read_text().replace("2 + 2 = ?", "3 + 3 = ?", 1))
    assert verify(data, written.claims, written.files, written.seal)


def test_studies_without_samples_have_no_such_section(tmp_path: Path) -> None:
    written = write_report(supported(), tmp_path)
    assert all("Sample answers" not in Path(file).read_text() for file in written.files.values())


@pytest.mark.parametrize(
    ("request_", "asked"),
    [
        ({"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]}, "hi"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "look"}]}]}, "look"),
        ({"prompt": "2 + 2 ="}, "2 + 2 ="),
        ({"input": "say it"}, "say it"),
        ({"cut": '{"messages"'}, ""),
        (None, ""),
    ],
)
def test_a_question_is_found_in_every_dialect(request_: Any, asked: str) -> None:
    assert question_in(request_) == asked


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"choices": [{"message": {"role": "assistant", "content": "ho"}}]}, "ho"),
        ({"choices": [{"index": 0, "text": " 4"}]}, "4"),
        (
            {"content": [{"type": "text", "text": "ho"}, {"type": "tool_use", "name": "look", "input": "x"}]},
            "ho look x",
        ),
        (
            {
                "choices": [
                    {"message": {"content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}}
                ]
            },
            "f {}",
        ),
        ({"output": [{"type": "message", "content": [{"type": "output_text", "text": "ho"}]}]}, "ho"),
        ({}, ""),
    ],
)
def test_an_answer_is_found_in_every_dialect(answer: Any, said: str) -> None:
    assert answer_in(answer).strip() == said
