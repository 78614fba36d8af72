"""What every copy of the records must do. Subclass, and give the fixtures `store`, `sink`, `away` (the same kind, where nothing can be written) and `copied`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from researcher.models import SampledEpisode, StudyStatus, VerdictRecord
from researcher.store.outbox import Message
from researcher.store.sink import CopyFailed, CopySink
from researcher.store.store import Store
from researcher.study.plan import Verdict
from tests.fakes.example_plan import ARMS, SEAL, plan_of_arms
from tests.fakes.sampled import an_episode

CURVE = [(1, 0.125), (2, 0.5)]


@dataclass
class CopiedTrial:
    """What a reader of the copy finds of one trial."""

    arm: str
    seed: str
    curve: list[tuple[int, float]] = field(default_factory=list)
    finals: dict[str, float] = field(default_factory=dict)


SERIES = {"reward_mean": CURVE, "eval_reward_after": [(0, 1.0), (1, 0.0)]}


def a_study(
    store: Store,
    series: dict[str, list[tuple[int, float]]] | None = None,
    episodes: list[SampledEpisode] | None = None,
    arms: tuple[str, str] = ARMS,
) -> tuple[str, str, str]:
    """A study with one trial done and one failed."""
    study = store.studies.create("Does it work?", {})
    store.plans.save(study, plan_of_arms(*arms))
    store.plans.set_stage_status(study, "compare", "running")
    done, failed = (trial.key for trial in store.trials.ensure(study, "compare", [(arm, 0) for arm in arms]))
    for key in (done, failed):
        store.trials.record_intent(study, key, 1, "http://a", f"{study}/{key}#1", {"seed": 0})
        store.trials.record_submitted(study, key, "run-1", {"code_version": "c0de"})
    store.trials.finish(study, done, {"heldout_accuracy": 0.5}, series or SERIES, None, episodes or [an_episode()])
    store.trials.fail_attempt(study, failed, "no reason")
    store.trials.fail(study, failed, "gave up")
    return study, done, failed


def send_without_marking(store: Store, sink: CopySink, study: str) -> None:
    """All that waits is sent, and waits as before: killed between sending and marking."""
    with pytest.MonkeyPatch.context() as killed:
        killed.setattr(store.outbox, "mark_sent", lambda *_: None)
        sink.drain(study)


class SinkContract:
    def copied(self, sink: CopySink, store: Store, study: str) -> list[CopiedTrial]:
        """Every trial in the copy, in the order of arms."""
        raise NotImplementedError

    def test_trials_are_copied_with_their_curves_once(self, store: Store, sink: CopySink) -> None:
        study, _, _ = a_study(store)
        assert sink.drain(study) > 0
        assert sink.drain(study) == 0
        assert store.outbox.state(sink.name, study) == (0, None)
        done, failed = self.copied(sink, store, study)
        assert (done.arm, done.seed, done.curve) == (ARMS[0], "0", CURVE)
        assert done.finals == {"heldout_accuracy": 0.5}
        assert (failed.arm, failed.curve, failed.finals) == (ARMS[1], [], {})

    def test_sending_everything_again_leaves_one_of_each(self, store: Store, sink: CopySink) -> None:
        study, _, _ = a_study(store)
        send_without_marking(store, sink, study)
        before = self.copied(sink, store, study)
        assert sink.drain(study) > 0
        assert self.copied(sink, store, study) == before

    @pytest.mark.parametrize(
        "arms",
        [("answer=yes?", "answer=yes!"), (f"prompt={'Think it over. ' * 30}", f"prompt={'Think it over ' * 30}")],
    )
    def test_arms_of_any_name_are_copied_each_for_itself(
        self, store: Store, sink: CopySink, arms: tuple[str, str]
    ) -> None:
        study, _, _ = a_study(store, arms=arms)
        send_without_marking(store, sink, study)
        copied = self.copied(sink, store, study)
        assert sorted(trial.curve for trial in copied) == [[], CURVE]
        sink.drain(study)
        assert store.outbox.state(sink.name, study) == (0, None)
        assert self.copied(sink, store, study) == copied

    def test_an_outage_loses_nothing_and_concerns_this_sink_alone(
        self, store: Store, sink: CopySink, away: CopySink
    ) -> None:
        study, _, _ = a_study(store)
        for _ in range(2):
            assert away.drain(study) == 0
        waiting, error = store.outbox.state(sink.name, study)
        assert waiting == len(store.outbox.unsent("another")) > 0
        assert error
        assert store.outbox.state("another", study) == (waiting, None)
        assert sink.drain(study) == waiting
        assert len(self.copied(sink, store, study)) == 2

    def test_a_study_that_cannot_be_copied_holds_up_no_other(
        self, store: Store, sink: CopySink, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first, second = a_study(store)[0], a_study(store)[0]
        send = sink._send

        def fail(message: Message) -> None:
            if message.study_id == first:
                raise CopyFailed("not this one")
            send(message)

        monkeypatch.setattr(sink, "_send", fail)
        assert sink.drain() > 0
        assert store.outbox.state(sink.name, second) == (0, None)
        assert store.outbox.state(sink.name, first)[1] == "not this one"

    def test_whatever_goes_wrong_in_a_copy_waits_and_ends_nothing(
        self, store: Store, sink: CopySink, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        study, _, _ = a_study(store)

        def fail(*_: object) -> None:
            raise KeyError("a fault of the copy's own library, with sk-ant-REDACTED")

        with monkeypatch.context() as broken:
            broken.setattr(sink, "_send", fail)
            assert sink.drain(study) == 0
        waiting, error = store.outbox.state(sink.name, study)
        assert waiting > 0
        assert "KeyError" in str(error)
        assert "sk-abc" not in str(error)
        assert sink.drain(study) == waiting

    def test_verdict_and_report_follow_later(self, store: Store, sink: CopySink, tmp_path: Path) -> None:
        study, _, _ = a_study(store)
        sink.drain(study)
        report = tmp_path / "report.md"
        report.write_text("# Yes")
        verdict = VerdictRecord(hypothesis="H1", verdict=Verdict.SUPPORTED, reason="clear", effect=None)
        store.verdicts.record(study, "compare", verdict)
        store.reports.record(study, {"markdown": str(report)}, SEAL)
        store.studies.set_status(study, StudyStatus.DONE)
        assert sink.drain(study) == 3
        assert store.outbox.state(sink.name, study) == (0, None)
        assert len(self.copied(sink, store, study)) == 2

    def test_it_says_where_the_copy_is(self, sink: CopySink) -> None:
        assert sink.place()
