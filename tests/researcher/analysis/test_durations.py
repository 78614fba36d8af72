"""How long a trial took is the time in which something worked on it."""

from __future__ import annotations

import pytest

from researcher.analysis.durations import at_first_attempt_s, rests, took_s
from researcher.models import Event, TrialRecord, TrialStatus

BEGAN = 1000.0


def journal(*lines: tuple[float, str], rested_s: float | None = None) -> list[Event]:
    """Lines about the trial, each with its seconds after the trial's begin. rested_s: of every `trial_paused`."""
    detail = {"trial": "t"}
    return [
        Event(
            seq=seq,
            study_id="st",
            at=BEGAN + at,
            kind=kind,
            detail=detail | ({} if rested_s is None or kind != "trial_paused" else {"rested_s": rested_s}),
        )
        for seq, (at, kind) in enumerate(lines)
    ]


def a_trial(ended: float | None, status: TrialStatus = TrialStatus.DONE, attempt: int = 1) -> TrialRecord:
    return TrialRecord(
        key="t", study_id="st", stage="s", arm="a", seed=0, status=status, attempt=attempt, started_at=BEGAN,
        ended_at=None if ended is None else BEGAN + ended,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("lines", "rested_s", "took"),
    [
        ([], None, 1000.0),
        ([(100, "trial_paused"), (700, "trial_continued")], None, 400.0),
        (
            [(100, "trial_paused"), (300, "trial_continued"), (400, "trial_paused"), (900, "trial_continued")],
            None,
            300.0,
        ),
        ([(100, "trial_paused"), (300, "trial_paused"), (900, "trial_continued")], None, 200.0),
        ([(700, "trial_paused"), (710, "trial_continued")], 600.0, 390.0),
        ([(500, "trial_paused"), (510, "trial_continued"), (950, "trial_paused")], 400.0, 140.0),
        ([(100, "trial_paused"), (600, "attempt_withdrawn"), (800, "trial_begun")], None, 300.0),
        ([(100, "attempt_failed"), (150, "trial_begun"), (300, "attempt_failed"), (500, "trial_begun")], None, 750.0),
        ([(100, "trial_paused")], None, 100.0),
    ],
    ids=[
        "undisturbed",
        "paused",
        "paused twice",
        "a pause that was told twice",
        "interrupted, found later",
        "interrupted twice, whole when it was found again",
        "paused, then begun anew",
        "tried three times",
        "whole when it was taken up again",
    ],
)
def test_a_trial_took_the_time_between_its_begin_and_its_end_without_its_rests(
    lines: list[tuple[float, str]], rested_s: float | None, took: float
) -> None:
    events = journal((0, "trial_begun"), *lines, (1000, "trial_done"), rested_s=rested_s)
    assert took_s(a_trial(1000), rests(events)) == pytest.approx(took)
    [(_, pace)] = at_first_attempt_s([a_trial(1000)], events)
    assert pace == pytest.approx(took)


def test_a_trial_that_has_not_ended_took_no_time_yet() -> None:
    assert took_s(a_trial(None, TrialStatus.PAUSED), rests(journal((0, "trial_begun"), (5, "trial_paused")))) is None


@pytest.mark.parametrize(
    "trial", [a_trial(9, attempt=2), a_trial(9, TrialStatus.FAILED), a_trial(None, TrialStatus.RUNNING), a_trial(-9)]
)
def test_only_a_trial_that_was_done_at_its_first_attempt_after_some_time_shows_the_pace_of_one(
    trial: TrialRecord,
) -> None:
    assert at_first_attempt_s([trial], []) == []
