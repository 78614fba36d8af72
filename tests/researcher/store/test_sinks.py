"""Every copy of the records keeps the same promises; TensorBoard is the real one, W&B a fake of its module, and MLflow has its own file."""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from researcher.cli import FAILED
from researcher.main import main
from researcher.models import Attrition, EpisodeAttempts, TrialEvidence
from researcher.store.errors import SinkMissing
from researcher.store.sink import CopySink, losses_of, points_of
from researcher.store.sinks import check_installed, open_sink
from researcher.store.store import Store
from researcher.store.tensorboard_sink import TensorboardSink, default_folder
from researcher.store.wandb_sink import WandbSink
from swarm.protocol.episodes import Cause
from tests.contracts.sink_contract import CopiedTrial, SinkContract, a_study, send_without_marking
from tests.fakes.fake_wandb import FakeWandb
from tests.fakes.study import done_trial, study_plan


class TestTensorboard(SinkContract):
    @pytest.fixture
    def sink(self, store: Store, tmp_path: Path) -> CopySink:
        return TensorboardSink(store, tmp_path / "tb")

    @pytest.fixture
    def away(self, store: Store, tmp_path: Path) -> CopySink:
        (tmp_path / "file").write_text("in the way")
        return TensorboardSink(store, tmp_path / "file" / "tb")

    def copied(self, sink: CopySink, store: Store, study: str) -> list[CopiedTrial]:
        assert isinstance(sink, TensorboardSink)
        found = []
        for folder in sorted((sink.folder / study / "compare").glob("*/seed-*")):
            [file] = folder.iterdir()
            points = scalars_of(file)
            finals = {k.removeprefix("final."): v[0][1] for k, v in points.items() if k.startswith("final.")}
            seed = folder.name.removeprefix("seed-")
            found.append(CopiedTrial(folder.parent.name, seed, points.get("reward_mean", []), finals))
        return found

    def test_levels_and_texts_are_where_tensorboard_looks_for_them(self, store: Store, tmp_path: Path) -> None:
        study, done, _ = a_study(store)
        sink = TensorboardSink(store, tmp_path / "tb")
        sink.drain(study)
        [file] = (sink.folder / study / "compare" / "learning_rate=1e-05" / "seed-0").iterdir()
        hparams = [value for value in values_of(file) if value.metadata.plugin_data.plugin_name == "hparams"]
        assert done.encode() in hparams[0].metadata.plugin_data.content
        assert b"learning_rate" in hparams[0].metadata.plugin_data.content
        [page] = (sink.folder / study).glob("events.*")
        [text] = values_of(page)
        assert (text.tag, text.metadata.plugin_data.plugin_name) == ("study", "text")
        assert b"Does it work?" in text.tensor.string_val[0]


def events_of(file: Path) -> list[Any]:
    """The file, read by TensorBoard's own reader."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    return list(EventFileLoader(str(file)).Load())


def values_of(file: Path) -> list[Any]:
    return [value for event in events_of(file) for value in event.summary.value]


def scalars_of(file: Path) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for event in events_of(file):
        for value in event.summary.value:
            if value.metadata.plugin_data.plugin_name == "scalars":
                found[value.tag].append((event.step, value.tensor.float_val[0]))
    return found


class TestWandb(SinkContract):
    @pytest.fixture(autouse=True)
    def wandb(self, monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
        self.fake = fake = FakeWandb()
        monkeypatch.setitem(sys.modules, "wandb", fake)
        return fake

    @pytest.fixture
    def sink(self, store: Store, tmp_path: Path, wandb: FakeWandb) -> CopySink:
        return _Mending(store, tmp_path / "wb", wandb)

    @pytest.fixture
    def away(self, store: Store, tmp_path: Path, wandb: FakeWandb) -> CopySink:
        wandb.broken = True
        return WandbSink(store, tmp_path / "wb", {})

    def copied(self, sink: CopySink, store: Store, study: str) -> list[CopiedTrial]:
        runs = [run for run in self.fake.runs if run.fields["job_type"] == "compare" and run.fields["group"] == study]
        return [
            CopiedTrial(
                run.fields["config"]["arm"],
                str(run.fields["config"]["seed"]),
                [(row["step"], row["reward_mean"]) for row in run.rows if "reward_mean" in row],
                {name.removeprefix("final."): value for name, value in run.summary.items()},
            )
            for run in sorted(runs, key=lambda run: str(run.fields["config"]["arm"]))
        ]

    def test_evaluations_have_an_axis_of_their_own_and_nothing_of_this_machine_is_collected(
        self, store: Store, sink: CopySink
    ) -> None:
        study, _, _ = a_study(store)
        sink.drain(study)
        done = next(run for run in self.fake.runs if run.rows)
        assert done.axes == {"*": "step", "eval_*": "episode"}
        assert {"episode": 1, "eval_reward_after": 0.0} in done.rows
        assert (done.fields["mode"], done.fields["settings"].fields["x_disable_meta"]) == ("offline", True)
        assert {run.exit_code for run in self.fake.runs} == {0, 1}

    def test_a_run_that_is_sent_again_online_goes_on_behind_the_rows_that_it_has(
        self, store: Store, tmp_path: Path
    ) -> None:
        study, _, _ = a_study(store)
        sink = WandbSink(store, tmp_path, {"WANDB_MODE": "online"})
        send_without_marking(store, sink, study)
        done = next(run for run in self.fake.runs if run.rows)
        whole = list(done.rows)
        del done.rows[-1:]  # as after a crash while it was sent
        for _ in range(2):
            send_without_marking(store, sink, study)
            assert done.rows == whole
        assert len(self.fake.runs) == 3

    def test_an_error_is_recorded_without_secrets(self, store: Store, away: CopySink) -> None:
        study, _, _ = a_study(store)
        away.drain(study)
        assert "sk-" not in str(store.outbox.state("wandb", study)[1])

    def test_where_runs_go(self, store: Store, tmp_path: Path) -> None:
        assert WandbSink(store, tmp_path, {}).mode == "offline"
        assert WandbSink(store, tmp_path, {"WANDB_API_KEY": "k"}).mode == "online"
        assert WandbSink(store, tmp_path, {"WANDB_API_KEY": "k", "WANDB_MODE": "offline"}).mode == "offline"


class _Mending(WandbSink):
    """After the outage: the network is back when this one drains."""

    def __init__(self, store: Store, folder: Path, fake: FakeWandb) -> None:
        super().__init__(store, folder, {})
        self._fake = fake

    def drain(self, study_id: str | None = None) -> int:
        self._fake.broken = False
        return super().drain(study_id)


def test_a_sink_whose_package_is_absent_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, store: Store, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SinkMissing, match=r"pip install 'swarm-researcher\[wandb\]'"):
        check_installed(["wandb"])
    study, _, _ = a_study(store)
    assert WandbSink(store, tmp_path, {}).drain(study) == 0
    assert "wandb cannot be imported" in str(store.outbox.state("wandb", study)[1])
    with pytest.raises(SinkMissing, match="there is no sink 'floppy'"):
        open_sink(store, "floppy")


def test_start_refuses_a_sink_that_is_not_installed_before_anything_is_planned(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RESEARCHER_HOME", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["start", "study.yaml", "--sink", "tensorboard", "--dry-run"]) == FAILED
    assert "swarm-researcher[tensorboard]" in capsys.readouterr().err


def test_copy_sends_what_waits_and_says_where(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RESEARCHER_HOME", str(tmp_path))
    monkeypatch.delenv("RESEARCHER_DATABASE_URL", raising=False)
    monkeypatch.delenv("RESEARCHER_TENSORBOARD_DIR", raising=False)
    store = Store.open()
    study, _, _ = a_study(store)
    assert main(["copy", study, "--sink", "tensorboard"]) == 0
    said = capsys.readouterr().out
    assert "tensorboard" in said
    assert str(default_folder()) in said
    assert store.outbox.state("tensorboard", study) == (0, None)
    assert store.outbox.state("mlflow", study)[0] > 0
    store.close()


def test_copies_say_how_many_attempts_each_cause_lost_and_nothing_where_nobody_counted() -> None:
    plan = study_plan()
    counts = EpisodeAttempts(attempts=20, lost={Cause.ROLLOUT: 3}, set_aside=1)
    found = Attrition(train=counts, eval=EpisodeAttempts(attempts=5, lost={Cause.ROLLOUT: 1}))
    trial = done_trial(plan, "lr=base", 0, 0.3, evidence=TrialEvidence(attrition=found))
    said = {name: value for name, value, _, _ in points_of(trial, 0.0)}
    assert {name: said[name] for name in ("attempts", "lost_rollout", "lost_grader", "tasks_set_aside")} == {
        "attempts": 25.0, "lost_rollout": 4.0, "lost_grader": 0.0, "tasks_set_aside": 1.0,
    }  # fmt: skip
    assert losses_of(done_trial(plan, "lr=base", 0, 0.3)) == {}
