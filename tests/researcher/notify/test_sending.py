"""A study that notifies people: each event once, through outages and restarts, without secrets and without answers to tasks."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from foundation.clock import ManualClock
from researcher.cli.status import status_json
from researcher.cli.worker import Worker, work_on
from researcher.conduct import Conduct, Outcome
from researcher.executor.errors import NoServersLeft
from researcher.gates import answer_gate
from researcher.home import Home
from researcher.models import Answer, Notice, NoticeKind, TrialRecord
from researcher.notify.sink import NotifySink, Post, sinks_of
from researcher.notify.watching import STALLED_S, Watch
from researcher.notify.words import (
    Subject,
    conclusion_notice,
    digest_notice,
    failure_notice,
    gate_notice,
    stalled_notice,
)
from researcher.schedule.daemon import Carrier
from researcher.schedule.timetable import Timetable
from researcher.store.errors import OverBudget
from researcher.store.store import Store
from researcher.study.plan import Plan
from tests.contracts.notifier_contract import PNG, a_notice
from tests.fakes.notices import SECRET, FakeNotifier, Webhook, webhook
from tests.fakes.quiet import Quiet
from tests.fakes.shown_study import finish
from tests.fakes.study import study_plan

pytestmark = pytest.mark.anyio
ANSWER = "forty-two, says the client with sk-1234567890abcdef"
DAY_S = 86_400.0


class _Finishing:
    """Finishes every trial that it is given, or has it fail with what its client said."""

    def __init__(self, store: Store, *, fails: bool = False) -> None:
        self._store = store
        self._fails = fails

    async def run_trials(
        self, study_id: str, plan: Plan, trials: Sequence[TrialRecord], _: object
    ) -> list[TrialRecord]:
        for trial in trials:
            if self._fails:
                self._store.trials.fail(study_id, trial.key, ANSWER)
            else:
                finish(self._store, study_id, trial, (0.3 if trial.arm == "lr=base" else 0.6) + 0.01 * trial.seed)
        return []

    def halt(self, wish: str) -> None: ...


class _House:
    """A home, a clock, and a service that a study's file names."""

    def __init__(self, folder: Path, hook: Webhook) -> None:
        self.clock, self.hook = ManualClock(), hook
        self.store = Store.open(f"sqlite:///{folder / 'r.db'}", clock=self.clock)
        self.home = Home(folder, self.store)
        self.environ = {"RESEARCHER_NOTIFY_TEAM": hook.url}

    def study(self, **options: Any) -> str:
        spec = {"notify": ["TEAM"]}
        found = self.store.studies.create(
            "Does it learn faster?", {"request": {"spec": spec, "author": "file"}, **options}
        )
        self.store.plans.save(found, study_plan())
        return found

    def sinks(self) -> list[NotifySink]:
        return sinks_of(self.store, ["TEAM"], self.environ, self.clock)

    async def conduct(self, study: str, *, fails: bool = False) -> Outcome:
        executor: Any = _Finishing(self.store, fails=fails)
        quiet = Quiet()
        found = Conduct(self.store, executor, quiet, quiet, self.clock, self.home.studies, further=self.sinks())
        return await found.carry_out(study)

    @property
    def titles(self) -> list[str]:
        return [each["title"] for each in self.hook.posts]


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[_House]:
    monkeypatch.setenv("RESEARCHER_HOME", str(tmp_path))
    monkeypatch.delenv("RESEARCHER_DATABASE_URL", raising=False)
    with webhook() as hook:
        found = _House(tmp_path, hook)
        monkeypatch.setenv("RESEARCHER_NOTIFY_TEAM", hook.url)
        yield found
        found.store.close()


def _is_clean(house: _House) -> None:
    """No secret and no answer is in a notice, in SQL, or in a file."""
    said = json.dumps(house.hook.posts)
    assert "forty-two" not in said
    assert "sk-" not in said
    for file in house.home.root.rglob("*"):
        assert file.is_dir() or SECRET.encode() not in file.read_bytes(), file


async def test_a_study_with_a_gate_asks_once_and_tells_its_answer_once(house: _House) -> None:
    study = house.study(approve="stage")
    await house.conduct(study)
    await house.conduct(study)  # resumed by somebody before there is an answer
    assert house.titles == [f"{study} waits for your decision"]
    assert f"researcher approve {study}" in house.hook.posts[0]["message"]
    answer_gate(house.store, study, Answer(verdict="approve"))
    await house.conduct(study)
    assert house.titles[1:] == [f"{study} is done"]
    said = house.hook.posts[1]["message"]
    assert "Yes: " in said
    assert str(house.home.studies / study / "report.md") in said
    assert {each["type"] for each in house.hook.posts} == {"warning", "success"}
    _is_clean(house)


async def test_a_study_that_fails_says_so_without_its_clients_words(house: _House) -> None:
    study = house.study()
    await house.conduct(study, fails=True)
    assert house.titles == [f"{study} needs attention"]
    assert "trials failed" in house.hook.posts[0]["message"]
    _is_clean(house)


async def test_a_study_whose_budget_is_spent_says_so(house: _House) -> None:
    study = house.study()
    house.store.budgets.set(study, "wall_s", 1.0)
    house.store.budgets.spend(study, "wall_s", "before", 1e9)
    with pytest.raises(OverBudget):
        await house.conduct(study)
    assert house.titles == [f"{study} needs attention"]


async def test_a_worker_that_cannot_go_on_says_so_at_once_and_once_a_day(
    house: _House, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(worker: Worker) -> Outcome:
        raise NoServersLeft(f"http://a:1 said {ANSWER}")

    monkeypatch.setattr(Worker, "_work", work)
    study = house.study()
    house.clock.advance(0.6 * DAY_S)  # to noon, UTC
    for told in (1, 1, 2):
        with pytest.raises(NoServersLeft):
            await work_on(house.home, study, Quiet(), wait=False, clock=house.clock, copy=lambda _: Quiet())
        assert len(house.hook.posts) == told
        house.clock.advance(DAY_S * 0.4)
    assert "no server is left" in house.hook.posts[0]["message"]
    _is_clean(house)


async def test_a_plans_gate_is_told_of_although_no_trial_has_begun(house: _House) -> None:
    study = house.study(approve="plan")
    await work_on(house.home, study, Quiet(), wait=False, clock=house.clock, copy=lambda _: Quiet())
    assert house.titles == [f"{study} waits for your decision"]
    assert f"researcher show {study}" in house.hook.posts[0]["message"]


def _watch(house: _House, study: str) -> Watch:
    return Watch(house.store, house.store.studies.get(study), house.home.studies / study, house.clock)


def _drain(house: _House) -> None:
    for sink in house.sinks():
        sink.drain()


def test_a_standstill_is_told_once_and_again_after_it_moved(house: _House) -> None:
    study = house.study()
    watch = _watch(house, study)
    for moves, told in ((False, 1), (False, 1), (True, 1), (False, 2)):
        house.clock.advance(STALLED_S / 2 if moves else STALLED_S + 1)
        if moves:
            [trial] = house.store.trials.ensure(study, "floor", [("lr=base", 0)])
            finish(house.store, study, trial, 0.3)
        watch.look()
        _drain(house)
        assert len(house.hook.posts) == told
    assert set(house.titles) == {f"{study} has stalled"}


def test_each_day_has_one_digest_with_its_curves_whoever_looks(house: _House) -> None:
    study = house.study()
    house.store.budgets.set(study, "trials", 12)
    house.store.budgets.set(study, "wall_s", 7200)
    house.store.budgets.spend(study, "wall_s", "now", 3600)
    for day in (1, 2, 3):
        house.clock.advance(DAY_S)
        for trial in house.store.trials.ensure(study, "floor", [("lr=base", day)]):
            finish(house.store, study, trial, 0.3)
        for _ in range(2):
            watch = _watch(house, study)  # as after a restart
            watch.look()
            watch.look()
        _drain(house)
        assert house.titles == [f"{study}, day {number}" for number in range(1, day + 1)]
    last = house.hook.posts[-1]
    assert "3 trials so far: 3 done, 0 failed" in last["message"]
    assert "1 ended in the last day: 1 of lr=base." in last["message"]
    assert "Left of the budget: 1 h 00 min of 2 h 00 min wall time." in last["message"]
    [attached] = last["attachments"]
    assert base64.b64decode(attached["base64"]).startswith(PNG)


def test_what_is_recorded_in_an_outage_arrives_once_in_its_order_after_restarts(house: _House) -> None:
    study = house.study()
    sent = [a_notice(kind).model_copy(update={"subject_id": study}) for kind in NoticeKind]
    house.hook.status = 503
    for notice in sent:
        assert house.store.notices.record(notice, ["TEAM"])
        assert not house.store.notices.record(notice, ["TEAM"])
        _drain(house)
    assert house.hook.posts == []
    assert house.store.notices.state("TEAM", study) == (len(sent), "the service answered with HTTP 503")
    house.hook.status = 200
    for _ in range(3):
        _drain(house)
    assert house.titles == [notice.title for notice in sent]
    _is_clean(house)


def test_a_service_that_is_away_is_asked_ever_more_seldom(house: _House) -> None:
    study, away = house.study(), FakeNotifier(away=True)
    house.store.notices.record(a_notice().model_copy(update={"subject_id": study}), ["TEAM"])
    asked: list[float] = []
    take: Callable[[Notice], None] = away.send

    def send(notice: Notice) -> None:
        asked.append(house.clock.monotonic())
        take(notice)

    away.send = send  # type: ignore[method-assign]
    sink = NotifySink(house.store, "TEAM", away, house.clock)
    for _ in range(360):
        sink.drain(study)
        house.clock.advance(10)
    assert asked[:4] == [0, 10, 30, 70]
    assert asked[-1] - asked[-2] == 600
    away.away = False
    house.clock.advance(600)
    assert sink.drain(study) == 1


def test_the_daemon_sends_what_a_dead_worker_left_and_leaves_names_that_it_does_not_know(house: _House) -> None:
    study = house.study()
    notice = a_notice().model_copy(update={"subject_id": study})
    house.store.notices.record(notice, ["TEAM", "ELSEWHERE"])
    post = Post(house.store, house.environ, house.clock)
    house.hook.status = 500
    assert post.deliver()  # so that a daemon stays for it
    house.clock.advance(2 * DAY_S)
    assert not post.deliver()  # but not for ever
    house.hook.status = 200
    house.clock.advance(DAY_S)
    assert not post.deliver()
    assert house.titles == [notice.title]
    assert house.store.notices.state("ELSEWHERE", study) == (1, None)


def test_status_says_which_notices_wait_and_why(house: _House) -> None:
    study = house.study()
    house.store.notices.record(a_notice().model_copy(update={"subject_id": study}), ["TEAM"])
    shown = status_json(house.home, house.store.studies.get(study))
    assert shown["notices_waiting"] == {"TEAM": 1}
    _drain(house)
    assert status_json(house.home, house.store.studies.get(study))["notices_waiting"] == {}


def test_a_worker_that_keeps_dying_is_told_of_once(house: _House) -> None:
    study = house.study()
    table = Timetable.of((), None, house.clock.now(), zone="UTC")
    house.store.studies.save_schedule(study, {"timetable": table.model_dump(mode="json"), "carried": True})
    carrier = Carrier(house.store, lambda _: None, house.clock)
    for _ in range(60):
        carrier.look()
        house.clock.advance(60)
    _drain(house)
    assert house.titles == [f"{study} needs attention"]


def test_a_campaign_tells_people_like_a_study(house: _House) -> None:
    subject = Subject.of_campaign("ca-1", "Find what makes it learn fastest")
    told = [
        gate_notice(subject, "decision/3", "It asks whether to confirm.", "`researcher campaign approve ca-1`"),
        failure_notice(subject, "Its strategist cannot be reached.", house.clock.now()),
        stalled_notice(subject, 0.0, 7200.0),
        digest_notice(subject, 1, ["2 studies ran."]),
        conclusion_notice(subject, "Yes: a beats b. It rises. And more.", Path("/r/report.md")),
    ]
    for notice in told:
        assert house.store.notices.record(notice, ["TEAM"])
        assert not house.store.notices.record(notice, ["TEAM"])
    assert Post(house.store, house.environ, house.clock).deliver() is False
    assert house.titles == [notice.title for notice in told]
    assert "researcher campaign resume ca-1" in house.hook.posts[1]["message"]
    assert house.hook.posts[-1]["message"].endswith("Yes: a beats b. It rises.\nReport: /r/report.md")
    assert house.store.notices.of("ca-1") == told


def test_no_other_copy_takes_notices_and_a_study_without_services_records_none(house: _House) -> None:
    study = house.study()
    house.store.notices.record(a_notice().model_copy(update={"subject_id": study}), ["TEAM"])
    kinds = {message.kind for message in house.store.outbox.unsent("mlflow", study)}
    assert kinds == {"study"}
    silent = house.store.studies.create("Does it?", {})
    house.store.studies.set_status(silent, house.store.studies.get(silent).status, "why", a_notice())
    assert house.store.notices.of(silent) == []
