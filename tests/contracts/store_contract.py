"""What every database behind the store must do. Subclass, and give a `url` fixture of an empty database."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import create_engine

from foundation.clock import ManualClock
from foundation.ids import SeededIds
from researcher.analysis.knowledge import findings_of
from researcher.models import (
    PERSON,
    Answer,
    Attrition,
    Claim,
    DecisionRecord,
    Effect,
    EpisodeAttempts,
    Finding,
    LlmCall,
    RepairRecord,
    StudyOptions,
    StudyRecord,
    StudyStatus,
    TrialEvidence,
    TrialStatus,
    VerdictRecord,
)
from researcher.store.errors import (
    Ambiguous,
    DatabaseRefused,
    FindingConflict,
    LeaseHeld,
    LeaseSuperseded,
    NotFound,
    OverBudget,
    PlanFrozen,
    PlanTampered,
    WrongState,
)
from researcher.store.store import Store
from researcher.study.plan import Verdict
from swarm.protocol.episodes import Cause
from tests.fakes.example_plan import ARMS, SEAL, example_plan
from tests.fakes.sampled import an_episode

EFFECT = Effect(
    hypothesis="H1",
    metric="heldout_accuracy",
    n_baseline=3,
    n_treatment=3,
    mean_baseline=0.2,
    mean_treatment=0.5,
    diff=0.3,
    low=0.2,
    high=0.4,
    level=0.95,
    method="welch",
    p_value=0.001,
    p_adjusted=0.001,
)


def decide(store: Store, campaign_id: str, seq: int) -> None:
    """A campaign's decision, which begins a study."""
    decision = DecisionRecord(
        seq=seq, saw_digest="0", saw={}, strategist="builtin", proposals=[], action="explore", because="a look"
    )
    study = StudyRecord(
        id="", topic="t", options=StudyOptions(), status=StudyStatus.PLANNING, created_at=0, updated_at=0,
        campaign_id=campaign_id,
    )  # fmt: skip
    store.campaigns.decide(campaign_id, decision, (), study)


class StoreContract:
    @pytest.fixture
    def clock(self) -> ManualClock:
        return ManualClock()

    @pytest.fixture
    def store(self, url: str, clock: ManualClock) -> Iterator[Store]:
        store = Store.open(url, clock=clock, ids=SeededIds(1))
        yield store
        store.close()

    @pytest.fixture
    def study(self, store: Store) -> str:
        study_id = store.studies.create("a topic", {"seeds": 3})
        store.plans.save(study_id, example_plan())
        return study_id

    @pytest.fixture
    def key(self, store: Store, study: str) -> str:
        return store.trials.ensure(study, "compare", [(ARMS[0], 0)])[0].key

    def sql(self, url: str, statement: str) -> None:
        """What a person does by hand."""
        engine = create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
        with engine.begin() as connection:
            connection.exec_driver_sql(statement)
        engine.dispose()

    # -- studies ------------------------------------------------------------------------------------------------------

    def test_a_study_is_found_by_id_prefix_and_as_the_latest(self, store: Store, clock: ManualClock) -> None:
        with pytest.raises(NotFound, match="no studies yet"):
            store.studies.resolve("latest")
        first = store.studies.create("one", {})
        clock.advance(1)
        second = store.studies.create("two", StudyOptions(max_parallel=2))
        assert store.studies.resolve("latest") == second
        assert store.studies.resolve(first) == first
        assert store.studies.resolve(first.removeprefix("st-")[:8]) == first
        assert [study.id for study in store.studies.all()] == [second, first]
        assert store.studies.get(second).options == StudyOptions(max_parallel=2)
        with pytest.raises(Ambiguous):
            store.studies.resolve("st-")
        with pytest.raises(NotFound, match="researcher list"):
            store.studies.resolve("zzz")

    def test_a_status_and_requests_are_kept(self, store: Store, study: str, clock: ManualClock) -> None:
        clock.advance(5)
        store.studies.request_stop(study)
        store.studies.set_status(study, StudyStatus.STOPPED, "asked to")
        record = store.studies.get(study)
        assert (record.status, record.reason, record.stop_requested) == (StudyStatus.STOPPED, "asked to", True)
        assert record.ended_at == clock.now()
        store.studies.clear_requests(study)
        store.studies.set_status(study, StudyStatus.RUNNING)
        record = store.studies.get(study)
        assert (record.stop_requested, record.pause_requested, record.ended_at) == (False, False, None)

    # -- plans --------------------------------------------------------------------------------------------------------

    def test_a_plan_is_frozen_and_comes_back_equal(self, store: Store, study: str) -> None:
        plan = example_plan()
        assert store.plans.save(study, plan) == plan.digest()
        assert store.plans.get(study) == plan
        with pytest.raises(PlanFrozen, match="version 2"):
            store.plans.save(study, example_plan(steps=7))
        with pytest.raises(PlanFrozen):
            store.plans.save(study, example_plan(steps=7, version=3))
        store.plans.save(study, example_plan(steps=7, version=2))
        assert (
            store.plans.get(study).steps,
            store.plans.get(study, 1).steps,
            store.studies.get(study).plan_version,
        ) == (7, 6, 2)

    def test_the_first_plan_of_a_study_may_be_an_amended_one(self, store: Store) -> None:
        study = store.studies.create("again", {})
        store.plans.save(study, example_plan(version=2))
        assert (store.plans.get(study), store.studies.get(study).plan_version) == (example_plan(version=2), 2)
        assert store.plans.stage_status(study) == {"compare": "planned"}
        with pytest.raises(PlanFrozen, match="version 3, not 1"):
            store.plans.save(study, example_plan())

    def test_a_plan_changed_by_hand_is_noticed(self, store: Store, study: str, url: str) -> None:
        self.sql(url, "UPDATE plans SET canonical = replace(canonical, '\"steps\":6', '\"steps\":60')")
        with pytest.raises(PlanTampered):
            store.plans.get(study)

    def test_stages_come_from_the_plan_and_keep_their_status(self, store: Store, study: str) -> None:
        assert store.plans.stage_status(study) == {"compare": "planned"}
        store.plans.set_stage_status(study, "compare", "running")
        assert store.plans.stage_status(study) == {"compare": "running"}
        store.plans.set_stage_status(study, "compare", "done")
        assert store.plans.stage_status(study) == {"compare": "done"}
        with pytest.raises(NotFound):
            store.plans.set_stage_status(study, "confirm", "running")

    # -- trials -------------------------------------------------------------------------------------------------------

    def test_trials_are_made_once_whoever_asks(self, store: Store, study: str) -> None:
        pairs = [(arm, seed) for seed in range(2) for arm in ARMS]
        made = store.trials.ensure(study, "compare", pairs)
        again = store.trials.ensure(study, "later", [*pairs, (ARMS[0], 2)])
        assert again[:4] == made
        assert [trial.stage for trial in again] == ["compare"] * 4 + ["later"]
        assert [(trial.arm, trial.seed) for trial in store.trials.all(study)] == [*pairs, (ARMS[0], 2)]

    def test_two_studies_may_run_the_same_plan(self, store: Store, study: str, key: str) -> None:
        other = store.studies.create("the same again", {})
        store.plans.save(other, example_plan())
        twin = store.trials.ensure(other, "compare", [(ARMS[0], 0)])[0]
        assert twin.key == key
        store.trials.record_intent(study, key, 1, "http://a", f"{study}/{key}#1", {})
        assert store.trials.get(other, key).status == TrialStatus.PLANNED

    def test_a_trial_goes_from_intent_to_its_numbers(
        self, store: Store, study: str, key: str, clock: ManualClock
    ) -> None:
        store.trials.record_intent(study, key, 1, "http://a", "k#1", {"seed": 0})
        assert store.trials.get(study, key).status == TrialStatus.SUBMITTED
        store.trials.record_submitted(study, key, "run-1", {"trial_key": key})
        store.trials.record_client(study, key, 4711, 12.5)
        clock.advance(3)
        store.trials.record_progress(study, key, 1, [("reward_mean", 1, 0.25)])
        store.trials.record_progress(study, key, 2, [("reward_mean", 1, 0.25), ("reward_mean", 2, 0.5)])
        running = store.trials.get(study, key)
        assert (running.status, running.series) == (TrialStatus.RUNNING, {"reward_mean": [(1, 0.25), (2, 0.5)]})
        attempt = store.trials.attempts(study, key)[0]
        assert (attempt.run_id, attempt.client_pid, attempt.client_started, attempt.step) == ("run-1", 4711, 12.5, 2)
        assert attempt.heartbeat_at == clock.now()
        series = {"reward_mean": [(1, 0.25), (2, 0.5)], "eval_reward_after": [(0, 1.0), (1, 0.0)]}
        evidence = TrialEvidence(spec={"seed": 0}, train_tasks=["t-1"])
        store.trials.finish(study, key, {"heldout_accuracy": 0.5}, series, evidence)
        done = store.trials.get(study, key)
        assert (done.status, done.finals, done.series) == (TrialStatus.DONE, {"heldout_accuracy": 0.5}, series)
        assert (done.ended_at, done.evidence) == (clock.now(), evidence)
        data = store.study_data(study)
        assert (data.plan, data.plan_hash, data.trials) == (example_plan(), example_plan().digest(), (done,))
        with pytest.raises(WrongState):
            store.trials.finish(study, key, {}, {})

    def test_a_finished_trial_keeps_its_lost_attempts_by_arm_kind_and_cause(
        self, store: Store, study: str, key: str
    ) -> None:
        counts = EpisodeAttempts(attempts=12, lost={Cause.ROLLOUT: 3, Cause.SERVER: 1}, set_aside=1)
        found = Attrition(train=counts, first={Cause.ROLLOUT: "KeyError: 'grüße'"})
        store.trials.record_intent(study, key, 1, "http://a", "k#1", {})
        store.trials.finish(study, key, {"a": 1.0}, {}, TrialEvidence(attrition=found))
        trial = store.trials.get(study, key)
        assert trial.evidence == TrialEvidence(attrition=found)
        rows = {("train", "none"): 8, ("train", "rollout"): 3, ("train", "server"): 1, ("eval", "none"): 0}
        assert store.trials.attrition(study) == {key: {(trial.arm, *row): count for row, count in rows.items()}}
        assert store.study_data(study).attrition == store.trials.attrition(study)

    def test_a_finished_trial_keeps_a_sample_of_its_episodes(self, store: Store, study: str, key: str) -> None:
        episodes = [an_episode("ep-2", prompt="grüße ☃"), an_episode("ep-1")]
        store.trials.record_intent(study, key, 1, "http://a", "k#1", {})
        store.trials.finish(study, key, {"a": 1.0}, {}, None, episodes)
        assert store.trials.sampled_episodes(study, key) == episodes

    def test_while_a_trial_trains_its_newest_sample_takes_the_place_of_the_last(
        self, store: Store, study: str, key: str
    ) -> None:
        store.trials.record_intent(study, key, 1, "http://a", "k#1", {})
        store.trials.record_progress(study, key, 1, [], [an_episode("ep-1"), an_episode("ep-2")])
        store.trials.record_progress(study, key, 2, [("heldout_reward", 0, 0.1), ("heldout_reward", 2, 0.5)])
        newest = [an_episode("ep-1"), an_episode("ep-3")]
        again = [("heldout_reward", 0, 0.1), ("heldout_reward", 2, 0.5), ("heldout_reward", 4, 0.75)]
        for _ in range(2):  # as after a restart
            store.trials.record_progress(study, key, 4, again, newest)
        assert store.trials.sampled_episodes(study, key) == newest
        assert store.trials.get(study, key).series == {"heldout_reward": [(0, 0.1), (2, 0.5), (4, 0.75)]}
        store.trials.finish(study, key, {"a": 1.0}, {}, None, [an_episode("ep-9")])
        assert store.trials.sampled_episodes(study, key) == [an_episode("ep-9")]

    def test_a_paused_attempt_goes_on_as_the_same_one_and_the_journal_says_where(
        self, store: Store, study: str, key: str
    ) -> None:
        store.trials.record_intent(study, key, 1, "http://a", "k#1", {})
        store.trials.record_submitted(study, key, "run-1", {})
        store.trials.pause_attempt(study, key, "its window closed")
        store.trials.record_progress(study, key, 2, [("reward_mean", 1, 0.25), ("reward_mean", 2, 0.5)])
        store.trials.record_rest(study, key, "its window closed")
        paused = store.trials.get(study, key)
        assert (paused.status, paused.reason, paused.status.ended) == (TrialStatus.PAUSED, "its window closed", False)
        with pytest.raises(WrongState):
            store.trials.record_intent(study, key, 2, "http://a", "k#2", {})
        store.trials.continue_attempt(study, key, 2)
        store.trials.record_progress(study, key, 3, [("reward_mean", 2, 0.5), ("reward_mean", 3, 0.75)])
        running = store.trials.get(study, key)
        assert (running.status, running.attempt, running.reason) == (TrialStatus.RUNNING, 1, None)
        assert running.series == {"reward_mean": [(1, 0.25), (2, 0.5), (3, 0.75)]}
        told = [(event.kind, event.detail.get("step")) for event in store.journal.events(study)]
        assert told == [("trial_begun", None), ("trial_paused", 2), ("trial_continued", 2)]
        store.trials.pause_attempt(study, key, "again")
        assert not store.trials.rests(study, key), "it has not come to rest yet"
        store.trials.record_rest(study, key, "again")
        assert store.trials.rests(study, key)
        store.trials.withdraw_attempt(study, key, "its server is gone")
        assert store.trials.get(study, key).status == TrialStatus.PLANNED

    def test_a_number_that_is_not_finite_is_refused_and_nothing_is_written(
        self, store: Store, study: str, key: str
    ) -> None:
        store.trials.record_intent(study, key, 1, "http://a", "k#1", {})
        with pytest.raises(ValueError, match="not finite"):
            store.trials.finish(study, key, {"a": 1.0, "b": float("nan")}, {})
        assert store.trials.get(study, key).status == TrialStatus.SUBMITTED

    def test_a_failed_attempt_is_followed_by_the_next_and_the_trial_may_be_given_up(
        self, store: Store, study: str, key: str
    ) -> None:
        store.trials.record_intent(study, key, 1, "http://a", "k#1", {})
        with pytest.raises(WrongState):
            store.trials.record_intent(study, key, 2, "http://b", "k#2", {})
        store.trials.record_progress(study, key, 1, [("reward_mean", 1, 0.9)])
        store.trials.fail_attempt(study, key, "the client died")
        with pytest.raises(WrongState):
            store.trials.record_intent(study, key, 3, "http://b", "k#3", {})
        store.trials.record_intent(study, key, 2, "http://b", "k#2", {})
        assert store.trials.get(study, key).series == {}
        store.trials.fail_attempt(study, key, "again")
        store.trials.fail(study, key, "tried 2 times")
        failed = store.trials.get(study, key)
        assert (failed.status, failed.reason, failed.attempt) == (TrialStatus.FAILED, "tried 2 times", 2)
        assert [attempt.outcome for attempt in store.trials.attempts(study, key)] == ["failed", "failed"]

    def test_words_that_no_database_takes_as_they_are_are_kept_all_the_same(
        self, store: Store, study: str, key: str
    ) -> None:
        said = "Segfault\0\ud83d in \N{SNOWMAN}"
        store.trials.record_intent(study, key, 1, "http://a", "k#1", {})
        store.trials.fail_attempt(study, key, said)
        store.journal.record(study, "client_failed", {"why": said})
        kept = "Segfault\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER} in \N{SNOWMAN}"
        assert store.trials.attempts(study, key)[0].reason == store.trials.get(study, key).reason == kept
        assert store.journal.events(study, "client_failed")[0].detail == {"why": said}

    def test_a_withdrawn_attempt_is_followed_by_the_next_like_a_failed_one(
        self, store: Store, study: str, key: str
    ) -> None:
        store.trials.record_intent(study, key, 1, "http://a", "k#1", {})
        store.trials.withdraw_attempt(study, key, "a person stopped it")
        assert store.trials.get(study, key).status == TrialStatus.PLANNED
        store.trials.record_intent(study, key, 2, "http://a", "k#2", {})
        assert [attempt.outcome for attempt in store.trials.attempts(study, key)] == ["withdrawn", "open"]

    def test_what_a_watcher_needs_is_read_at_once_and_without_the_rest(
        self, store: Store, study: str, key: str
    ) -> None:
        store.trials.record_intent(study, key, 1, "http://a", "k#1", {})
        store.trials.fail_attempt(study, key, "no reason")
        store.trials.record_intent(study, key, 2, "http://b", "k#2", {})
        store.trials.finish(study, key, {"final": 0.5}, {"reward_mean": [(1, 0.1)], "loss": [(1, 2.0)]})
        (trial,) = store.trials.all(study, series=("reward_mean",))
        assert (trial.series, trial.finals) == ({"reward_mean": [(1, 0.1)]}, {"final": 0.5})
        (bare,) = store.trials.all(study, series=())
        assert (bare.series, bare.finals) == ({}, {"final": 0.5})
        assert store.trials.attempts_of_study(study) == {key: store.trials.attempts(study, key)}

    def test_a_person_can_change_one_number_by_hand(self, store: Store, study: str, key: str, url: str) -> None:
        store.trials.record_intent(study, key, 1, "http://a", "k#1", {})
        store.trials.finish(study, key, {"heldout_accuracy": 0.5}, {})
        self.sql(url, "UPDATE trial_metrics SET value = 0.75 WHERE name = 'heldout_accuracy' AND step IS NULL")
        assert store.trials.get(study, key).finals == {"heldout_accuracy": 0.75}

    # -- conclusions --------------------------------------------------------------------------------------------------

    def test_verdicts_claims_and_findings_come_back(self, store: Store, study: str) -> None:
        first = VerdictRecord(hypothesis="H1", verdict=Verdict.INCONCLUSIVE, reason="wide", effect=None)
        last = VerdictRecord(hypothesis="H1", verdict=Verdict.SUPPORTED, reason="clear", effect=EFFECT)
        store.verdicts.record(study, "compare", first)
        store.verdicts.record(study, "confirm", last)
        store.verdicts.record(study, "confirm", last)
        assert store.verdicts.all(study) == [last]
        assert store.verdicts.all(study, "compare") == [first]
        broken = first.model_copy(update={"verdict": Verdict.INVALID, "sentinels": ("collapse", "attrition")})
        for again in (broken, first):
            store.verdicts.record(study, "compare", again)
            assert store.verdicts.all(study, "compare") == [again]
        claims = [
            Claim(name="c1", expression="effect(H1).diff", value=0.3, text="+0.30"),
            Claim(name="c2", expression="verdict(H1)", value="supported", text="supported"),
            Claim(name="c3", expression="steps(H1)", value=None, text="never"),
        ]
        store.reports.save_claims(study, [claims[0]])
        store.reports.save_claims(study, claims)
        assert store.reports.claims(study) == claims
        finding = Finding(
            id="fi-1",
            study_id=study,
            plan_hash="h",
            instrument="repeat",
            model="echo",
            factor="learning_rate",
            metric="heldout_accuracy",
            statement="s",
            verdict=Verdict.SUPPORTED,
            effect=EFFECT,
            at=1.0,
        )
        store.findings.save(study, [finding])
        store.findings.save(study, [finding])
        assert (
            store.findings.all()
            == store.findings.all(instrument="repeat")
            == store.findings.all(study_id=study)
            == [finding]
        )
        assert store.findings.all(instrument="other") == []

    def test_imported_findings_stand_beside_our_own_and_no_study_replaces_them(self, store: Store, study: str) -> None:
        record = VerdictRecord(hypothesis="H1", verdict=Verdict.SUPPORTED, reason="", effect=EFFECT)
        own = findings_of(study, example_plan(), [record], 1.0)
        theirs = [
            each.model_copy(update={"origin": "Group 7", "imported_at": 9.0})
            for each in findings_of("st-elsewhere", example_plan(), [record], 2.0)
        ]
        store.findings.save(study, own)
        assert store.findings.take(theirs) == 1
        assert store.findings.take([each.model_copy(update={"imported_at": 10.0}) for each in theirs]) == 0
        assert store.findings.all() == [*own, *theirs]
        store.findings.save(study, [])
        assert store.findings.all() == theirs
        told = [each.model_copy(update={"seeds": (0, 1)}) for each in theirs]
        assert store.findings.take(told) == 1  # a file of the first schema was here, which has no seeds
        assert store.findings.take(theirs) == 0
        assert store.findings.all() == told
        with pytest.raises(ValueError, match="need an origin"):
            store.findings.take(own)

    def test_findings_are_imported_all_or_none(self, store: Store, study: str) -> None:
        record = VerdictRecord(hypothesis="H1", verdict=Verdict.SUPPORTED, reason="", effect=EFFECT)
        mark = {"origin": "Group 7", "imported_at": 9.0}
        first, second = (findings_of(name, example_plan(), [record], 2.0)[0].model_copy(update=mark) for name in "ab")
        store.findings.take([first])
        changed = first.model_copy(update={"margin": 0.5})
        with pytest.raises(FindingConflict) as refused:
            store.findings.take([second, changed])
        assert list(refused.value.problems) == ["a/H1"]
        with pytest.raises(FindingConflict, match="came from 'Group 7' before"):
            store.findings.take([changed.model_copy(update={"origin": "Group 8"})], replace=True)
        with pytest.raises(FindingConflict, match="a study in this database"):
            store.findings.take([second.model_copy(update={"study_id": study})])
        assert store.findings.all() == [first]
        assert store.findings.take([second, changed], replace=True) == 2
        assert store.findings.all() == [changed, second]

    def test_the_journal_is_read_from_where_one_stopped(self, store: Store, study: str) -> None:
        numbers = [store.journal.record(study, "note", {"n": n}) for n in range(3)]
        assert [event.detail["n"] for event in store.journal.events(study, after=numbers[0])] == [1, 2]
        store.reports.record(study, {"markdown": "report.md"}, SEAL)
        assert store.journal.events(study, after=numbers[-1])[0].kind == "report"

    def test_a_report_is_kept_with_its_seal(self, store: Store, study: str) -> None:
        assert (store.reports.files(study), store.reports.seal(study)) == ({}, None)
        store.reports.record(study, {"markdown": "report.md"}, SEAL)
        assert (store.reports.files(study), store.reports.seal(study)) == ({"markdown": "report.md"}, SEAL)

    def test_repairs_are_lines_of_the_journal_and_come_with_the_studys_data(self, store: Store, study: str) -> None:
        record = RepairRecord(
            trial="p/a/0",
            attempt=1,
            old="0" * 64,
            new="1" * 64,
            files=("workflow.py",),
            diff="-a\n+ü",
            failed="KeyError",
            reason="misspelt",
            by=PERSON,
            rehearsed="no",
        )
        kept = store.journal.record_repair(study, record)
        assert kept == record.model_copy(update={"at": kept.at})
        assert store.journal.repairs(study) == [kept]
        assert [event.kind for event in store.journal.events(study)] == ["repaired"]
        store.plans.save(study, example_plan())
        assert store.study_data(study).repairs == (kept,)

    def test_a_study_moves_to_other_servers_and_says_so_once(self, store: Store) -> None:
        study = store.studies.create("a topic", {"servers": ["http://a"], "engine": "local"})
        for _ in range(2):
            store.studies.move(study, ["http://b", "http://c"])
        assert store.studies.get(study).options == StudyOptions(servers=("http://b", "http://c"))
        [event] = store.journal.events(study, "moved")
        assert event.detail == {"before": ["http://a"], "after": ["http://b", "http://c"]}

    def test_llm_calls_and_schedules_are_kept(self, store: Store, study: str) -> None:
        call = LlmCall(purpose="plan", model="m", request={"q": 1}, answer={"a": "ü"}, at=2.0)
        store.journal.record_llm_call(study, call)
        assert store.journal.llm_calls(study) == [call]
        assert store.studies.schedule(study) is None
        store.studies.save_schedule(study, {"window": "22:00-07:00"})
        store.studies.save_schedule(study, {"window": "23:00-07:00"})
        assert store.studies.schedule(study) == {"window": "23:00-07:00"}

    # -- ownership ----------------------------------------------------------------------------------------------------

    def test_one_owner_at_a_time_until_its_time_is_out(self, store: Store, study: str, clock: ManualClock) -> None:
        token = store.leases.acquire(study, "host/1", 60)
        with pytest.raises(LeaseHeld, match="process 1 on host is working on"):
            store.leases.acquire(study, "host/2", 60)
        clock.advance(59)
        store.leases.renew(study, token, 60)
        clock.advance(59)
        with pytest.raises(LeaseHeld):
            store.leases.acquire(study, "host/2", 60)
        clock.advance(1)
        assert store.leases.acquire(study, "host/2", 60) == token + 1
        with pytest.raises(LeaseSuperseded):
            store.leases.renew(study, token, 60)
        store.leases.release(study, token)
        lease = store.leases.holder(study)
        assert lease is not None
        assert (lease.owner, lease.token) == ("host/2", token + 1)

    def test_the_lease_of_an_owner_known_to_be_dead_is_taken_at_once(self, store: Store, study: str) -> None:
        token = store.leases.acquire(study, "host/1", 600)
        assert store.leases.acquire(study, "host/2", 600, dead_owner="host/1") == token + 1
        store.leases.release(study, token + 1)
        assert store.leases.holder(study) is None
        assert store.leases.acquire(study, "host/3", 600) == token + 2

    def test_every_write_of_a_superseded_owner_is_refused_and_changes_nothing(
        self, store: Store, study: str, key: str
    ) -> None:
        old = store.fenced(study, store.leases.acquire(study, "host/1", 60))
        old.trials.record_intent(study, key, 1, "http://a", "k#1", {})
        new = store.fenced(study, store.leases.acquire(study, "host/2", 60, dead_owner="host/1"))
        before = (new.trials.all(study), new.journal.events(study), new.studies.get(study))
        verdict = VerdictRecord(hypothesis="H1", verdict=Verdict.SUPPORTED, reason="", effect=None)
        for stale in (old, store):
            writes: tuple[Callable[[Store], object], ...] = (
                lambda s: s.journal.record(study, "x"),
                lambda s: s.trials.finish(study, key, {"a": 1.0}, {}),
                lambda s: s.trials.fail_attempt(study, key, "x"),
                lambda s: s.trials.record_progress(study, key, 9),
                lambda s: s.trials.pause_attempt(study, key, "x"),
                lambda s: s.trials.continue_attempt(study, key, 9),
                lambda s: s.trials.record_submitted(study, key, "run-9", {}),
                lambda s: s.trials.ensure(study, "compare", [(ARMS[1], 9)]),
                lambda s: s.plans.save(study, example_plan(version=2)),
                lambda s: s.studies.set_status(study, StudyStatus.DONE),
                lambda s: s.verdicts.record(study, "compare", verdict),
                lambda s: s.reports.save_claims(study, []),
                lambda s: s.budgets.set(study, "trials", 1),
            )
            for write in writes:
                with pytest.raises(LeaseSuperseded):
                    write(stale)
        assert (new.trials.all(study), new.journal.events(study), new.studies.get(study)) == before
        store.studies.request_stop(study)  # anyone may ask
        assert new.studies.get(study).stop_requested
        new.journal.record(study, "still mine")

    def test_a_question_waits_until_somebody_answers_and_the_first_answer_counts(
        self, store: Store, study: str
    ) -> None:
        assert store.gates.open(study) is None
        with pytest.raises(WrongState):
            store.gates.give(study, "plan/1", Answer(verdict="approve"))
        owner = store.fenced(study, store.leases.acquire(study, "host/1", 60))
        assert owner.gates.ask(study, "plan/1", {"hash": "abc"}) is None
        assert owner.gates.ask(study, "plan/1", {"hash": "abc"}) is None
        assert len(store.journal.events(study, "asked")) == 1
        no = Answer(verdict="reject", words="too dear", by="ada")
        assert store.gates.give(study, "plan/1", no) == no
        assert store.gates.give(study, "plan/1", Answer(verdict="approve")) == no
        gate = store.gates.open(study)
        assert gate is not None
        assert (gate.name, gate.question, gate.answer) == ("plan/1", {"hash": "abc"}, no)
        assert owner.gates.ask(study, "plan/1", {"hash": "abc"}) == no
        assert store.gates.open(study) is None  # it was met
        assert owner.gates.ask(study, "plan/1", {"hash": "abc"}) == no
        assert owner.gates.ask(study, "stage/1/compare", {}) is None
        with pytest.raises(WrongState):
            store.gates.give(study, "plan/1", no)

    def test_of_many_who_answer_at_once_one_counts(self, store: Store, url: str, study: str) -> None:
        store.gates.ask(study, "plan/1", {})

        def give(number: int) -> str:
            other = Store.open(url)
            try:
                return other.gates.give(study, "plan/1", Answer(verdict="approve", by=str(number))).by
            finally:
                other.close()

        with ThreadPoolExecutor(4) as threads:
            assert len(set(threads.map(give, range(8)))) == 1

    # -- campaigns ----------------------------------------------------------------------------------------------------

    @pytest.fixture
    def campaign(self, store: Store) -> str:
        """With one decision, whose study has not begun."""
        campaign_id = store.campaigns.create({}, {}, StudyOptions(), {"carried": False})
        decide(store, campaign_id, 1)
        return campaign_id

    def test_of_two_people_who_veto_a_study_at_once_the_first_one_counts(
        self, store: Store, url: str, campaign: str
    ) -> None:
        both = threading.Barrier(4)

        def veto(number: int) -> bool:
            other = Store.open(url)
            try:
                both.wait(60)
                other.campaigns.veto(campaign, "no", str(number), decision=1)
            except WrongState:
                return False
            finally:
                other.close()
            return True

        with ThreadPoolExecutor(4) as threads:
            assert sum(threads.map(veto, range(4))) == 1
        assert len(store.campaigns.events(campaign, "vetoed")) == 1

    def test_an_answer_to_an_earlier_decision_is_refused(self, store: Store, campaign: str) -> None:
        decide(store, campaign, 2)
        with pytest.raises(WrongState, match="an earlier decision"):
            store.campaigns.veto(campaign, "no", "ada", decision=1)
        with pytest.raises(WrongState, match="an earlier decision"):
            store.campaigns.answer(campaign, "approved", lambda events: {}, decision=1)
        assert store.campaigns.events(campaign) == []
        assert store.campaigns.veto(campaign, "no", "ada", decision=2).seq == 2

    def test_nothing_is_decided_while_somebody_answers(self, store: Store, url: str, campaign: str) -> None:
        """Else the answer would be about what nobody was shown."""
        order: list[str] = []

        def decide_too() -> None:
            other = Store.open(url)
            try:
                decide(other, campaign, 2)
                order.append("decided")
            finally:
                other.close()

        deciding = threading.Thread(target=decide_too)

        def said(events: object) -> dict[str, str]:
            deciding.start()
            deciding.join(0.5)
            order.append("answered")
            return {"words": "yes"}

        store.campaigns.answer(campaign, "approved", said, decision=1)
        deciding.join(60)
        assert order == ["answered", "decided"]

    def test_lines_are_found_by_their_kind_and_what_they_say(self, store: Store, study: str) -> None:
        for number, trial in enumerate(("a", "b", "a")):
            store.journal.record(study, "client_failed", {"trial": trial, "n": number})
        assert [event.detail["n"] for event in store.journal.events(study, "client_failed", trial="a")] == [0, 2]
        assert [event.detail["n"] for event in store.journal.events(study, "client_failed", "other")] == [0, 1, 2]
        last = store.journal.last(study, "client_failed", trial="b")
        assert last is not None
        assert last.detail["n"] == 1
        assert store.journal.last(study, "client_failed", trial="c") is None
        for _ in range(2):
            store.journal.record_once(study, "decision", {"after": "floor"})
        assert len(store.journal.events(study, "decision")) == 1

    def test_of_many_that_want_a_study_at_once_one_gets_it(self, store: Store, study: str) -> None:
        def attempt(n: int) -> bool:
            try:
                store.leases.acquire(study, f"host/{n}", 60)
            except LeaseHeld:
                return False
            return True

        with ThreadPoolExecutor(8) as threads:
            assert sum(threads.map(attempt, range(16))) == 1

    def test_servers_are_leased_likewise(self, store: Store) -> None:
        token = store.leases.acquire_server("http://a:1/", "study-1", 60)
        with pytest.raises(LeaseHeld):
            store.leases.acquire_server("http://a:1", "study-2", 60)
        store.leases.renew_server("http://a:1", token, 60)
        store.leases.release_server("http://a:1", token)
        assert store.leases.server_holder("http://a:1") is None

    def test_budgets_are_reserved_before_they_are_spent(self, store: Store, study: str) -> None:
        with pytest.raises(NotFound):
            store.budgets.reserve(study, "trials", "a", 1)
        store.budgets.set(study, "trials", 2)
        store.budgets.reserve(study, "trials", "a", 1)
        store.budgets.reserve(study, "trials", "a", 1)
        store.budgets.reserve(study, "trials", "b", 1)
        with pytest.raises(OverBudget, match="0 left"):
            store.budgets.reserve(study, "trials", "c", 1)
        store.budgets.spend(study, "trials", "a", 1)
        store.budgets.spend(study, "trials", "b", 0)
        state = store.budgets.all(study)[0]
        assert (state.kind, state.limit, state.reserved, state.spent) == ("trials", 2, 0, 1)
        store.budgets.reserve(study, "trials", "c", 1)

    # -- outbox -------------------------------------------------------------------------------------------------------

    def test_what_changed_waits_in_the_outbox_until_it_is_sent(self, store: Store, study: str, key: str) -> None:
        store.trials.record_intent(study, key, 1, "http://a", "k#1", {})
        store.trials.finish(study, key, {"a": 1.0}, {})
        waiting = store.outbox.unsent("mlflow", study)
        assert [message.kind for message in waiting] == ["study", "study", "trial"]
        store.outbox.mark_unsent("mlflow", waiting[0].seq, "no route")
        assert store.outbox.state("mlflow", study) == (3, "no route")
        for message in waiting:
            store.outbox.mark_sent("mlflow", message.seq)
        assert store.outbox.state("mlflow", study) == (0, None)

    def test_what_one_sink_took_still_waits_for_another(self, store: Store, study: str) -> None:
        first, last = store.outbox.unsent("mlflow", study)
        store.outbox.mark_sent("mlflow", first.seq)
        store.outbox.mark_unsent("tensorboard", first.seq, "disk full")
        assert store.outbox.unsent("mlflow", study) == [last]
        assert store.outbox.unsent("tensorboard", study) == store.outbox.unsent("wandb") == [first, last]
        assert store.outbox.state("mlflow", study) == (1, None)
        assert store.outbox.state("tensorboard", study) == (2, "disk full")

    def test_two_that_copy_at_once_may_mark_the_same_messages(self, store: Store, url: str, study: str) -> None:
        for number in range(40):
            store.studies.set_status(study, StudyStatus.RUNNING, str(number))
        waiting = store.outbox.unsent("mlflow", study)

        def mark(_: int) -> None:
            other = Store.open(url)
            for message in waiting:
                other.outbox.mark_unsent("mlflow", message.seq, "no route")
                other.outbox.mark_sent("mlflow", message.seq)
            other.close()

        with ThreadPoolExecutor(4) as threads:
            list(threads.map(mark, range(4)))
        assert store.outbox.state("mlflow", study) == (0, None)

    def test_one_copies_a_study_to_a_sink_at_a_time(self, store: Store, url: str, study: str) -> None:
        other, entered = Store.open(url), threading.Event()

        def copy() -> None:
            with other.outbox.turn("mlflow", study):
                entered.set()

        with ThreadPoolExecutor(1) as thread:
            with (
                store.outbox.turn("mlflow", study),
                store.outbox.turn("wandb", study),
                store.outbox.turn("mlflow", "st-another"),
            ):
                second = thread.submit(copy)
                assert not entered.wait(0.3)
            second.result(timeout=60)
        assert entered.is_set()
        other.close()

    def test_turns_that_many_want_are_had_one_after_another_and_leave_nothing_behind(
        self, store: Store, url: str, study: str, tmp_path: Path
    ) -> None:
        inside = list[int]()

        def copy(_: int) -> None:
            other = Store.open(url)
            for _ in range(25):
                with other.outbox.turn("mlflow", study):
                    inside.append(1)
                    other.studies.get(study)
                    assert len(inside) == 1
                    inside.clear()
            other.close()

        with ThreadPoolExecutor(4) as threads:
            list(threads.map(copy, range(4)))
        assert not list(tmp_path.rglob("*.lock"))

    # -- the database itself ------------------------------------------------------------------------------------------

    def test_a_database_made_by_newer_code_is_refused(self, store: Store, url: str) -> None:
        self.sql(url, "UPDATE alembic_version SET version_num = '9999'")
        with pytest.raises(DatabaseRefused, match="newer"):
            Store.open(url)

    def test_many_processes_may_open_an_empty_database_at_once(self, url: str) -> None:
        def open_and_close(_: int) -> None:
            Store.open(url).close()

        with ThreadPoolExecutor(6) as threads:
            list(threads.map(open_and_close, range(6)))
        store = Store.open(url)
        assert store.studies.all() == []
        store.close()
