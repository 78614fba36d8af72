"""Export, chat and replay over the state directory that a server left: a real trainer, a tiny model, no vLLM."""

from __future__ import annotations

import asyncio
import io
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from swarm.engine.local import checkpoints
from swarm.engine.local.trained_model import trained_weights
from swarm.engine.seam import EngineError
from swarm.engine.training.checkpoints import steps
from swarm.main import main
from swarm.models import resolve
from swarm.models.folder import ModelFolder
from tests.swarm.cli import stored as stored_runs
from tests.swarm.cli.stored import Stored, stored_run
from tests.swarm.engine.own_functions import own
from tests.swarm.server.state import world as worlds

Capture = pytest.CaptureFixture[str]
LORA: dict[str, Any] = {"parameters": {"rank": 4, "alpha": 8.0, "targets": ["q_proj", "v_proj"]}}


@pytest.fixture(scope="module", autouse=True)
def _patient() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(worlds, "PATIENCE_S", stored_runs.LIMIT_S)
        yield


@pytest.fixture(scope="module")
def stored(_patient: None, tiny_llama: ModelFolder, tmp_path_factory: pytest.TempPathFactory) -> Stored:
    """Evaluated best at step 2 of 4; a checkpoint every step, one of them kept beside the best."""
    evals = {1: 0.2, 2: 0.9, 3: 0.4, 4: 0.3}
    keep: dict[str, Any] = {"checkpoint": {"every_steps": 1, "keep": 1}}
    return asyncio.run(stored_run(tmp_path_factory.mktemp("stored") / "state", tiny_llama, evals=evals, **keep))


@pytest.fixture(scope="module")
def adapted(_patient: None, tiny_llama: ModelFolder, tmp_path_factory: pytest.TempPathFactory) -> Stored:
    return asyncio.run(stored_run(tmp_path_factory.mktemp("adapted") / "state", tiny_llama, **LORA))


def said(capsys: Capture, *arguments: str, code: int = 0) -> str:
    assert main(arguments) == code, capsys.readouterr()
    return capsys.readouterr().out


def asks(stored: Stored, step: object, *arguments: str) -> list[str]:
    return [f"{stored.run_id}@{step}", "--state-dir", str(stored.state_dir), *arguments]


def logits(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = _loaded(folder)(torch.tensor([[1, 30, 31, 32]])).logits.float()
    return found


def _loaded(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto")


# -- checkpoints ----------------------------------------------------------------------------------------------------------


def test_the_best_by_held_out_reward_is_never_deleted_by_the_keep_rule(stored: Stored) -> None:
    assert steps(stored.state_dir / "runs" / stored.run_id) == [2, 4]


# -- export ---------------------------------------------------------------------------------------------------------------


def test_an_exported_checkpoint_is_a_model_that_transformers_loads(
    stored: Stored, tmp_path: Path, capsys: Capture
) -> None:
    facts = json.loads(said(capsys, "models", "export", *asks(stored, 4, "--to", str(tmp_path / "out"), "--json")))
    assert facts["step"] == 4
    assert resolve(facts["path"]).fingerprint == facts["fingerprint"] != stored.model.fingerprint
    trained = checkpoints.read(stored.state_dir / "runs" / stored.run_id, 4).weights
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == load_file(stored.model.path / "model.safetensors").keys()
    assert all(torch.equal(written[name], trained[name]) for name in written)  # a run in float32: not rounded
    assert not torch.equal(logits(tmp_path / "out"), logits(stored.model.path))
    assert _loaded(tmp_path / "out").dtype is torch.float32


def test_a_run_in_bfloat16_is_exported_in_the_hosted_types(adapted: Stored) -> None:
    checkpoint = checkpoints.read(adapted.state_dir / "runs" / adapted.run_id, 4)
    state = checkpoint.state.model_copy(update={"spec": checkpoint.state.spec.model_copy(update={"dtype": "bfloat16"})})
    hosted = load_file(adapted.model.path / "model.safetensors")
    written = trained_weights(adapted.model, replace(checkpoint, state=state))
    assert {name: one.dtype for name, one in written.items()} == {name: one.dtype for name, one in hosted.items()}


def test_best_and_newest_and_zero_name_checkpoints(stored: Stored, tmp_path: Path, capsys: Capture) -> None:
    for name, step in (("best", 2), (4, 4), (0, 0)):
        facts = json.loads(
            said(capsys, "models", "export", *asks(stored, name, "--to", str(tmp_path / str(name)), "--json"))
        )
        assert facts["step"] == step
    assert torch.equal(logits(tmp_path / "0"), logits(stored.model.path))


def test_the_hosted_model_is_not_taken_for_a_run_whose_checkpoints_are_gone(
    stored: Stored, tmp_path: Path, capsys: Capture
) -> None:
    there, aside = stored.state_dir / "runs" / stored.run_id, tmp_path / "aside"
    there.rename(aside)
    try:
        given = [stored.run_id, "--state-dir", str(stored.state_dir), "--to", str(tmp_path / "new")]
        assert main(["models", "export", *given]) == 1
        assert main(["replay", *given[:3], "--steps", "1"]) == 0
    finally:
        aside.rename(there)
    assert f"the checkpoints of {stored.run_id} are gone" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["@3", "--to", "new"], "has no checkpoint of step 3; it has 0, 2, 4"),
        (["@4", "--to", "."], "already exists"),
        (["@4", "--to", "new", "--adapter"], "it has no adapter"),
        (["x@4", "--to", "new"], "no run"),
    ],
)
def test_what_cannot_be_exported_is_said_in_one_line(
    stored: Stored, tmp_path: Path, capsys: Capture, arguments: list[str], text: str
) -> None:
    (tmp_path / "file").write_text("")
    run, _, to, *rest = arguments
    given = [f"{stored.run_id}{run}", "--state-dir", str(stored.state_dir), "--to", str(tmp_path / to), *rest]
    assert main(["models", "export", *given]) == 1
    error = capsys.readouterr().err
    assert text in error
    assert len(error.splitlines()) == 1
    assert os.listdir(tmp_path) == ["file"]


def test_a_checkpoint_that_changed_on_the_disk_is_refused(adapted: Stored, tmp_path: Path, capsys: Capture) -> None:
    file = adapted.state_dir / "runs" / adapted.run_id / "step-00000002" / "weights.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    try:
        said(capsys, "models", "export", *asks(adapted, 2, "--to", str(tmp_path / "out")), code=1)
    finally:
        file.write_bytes(whole)
    assert not (tmp_path / "out").exists()


def test_adapters_are_exported_merged_or_alone_and_say_the_same(
    adapted: Stored, tmp_path: Path, capsys: Capture
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    said(capsys, "models", "export", *asks(adapted, 4, "--to", str(tmp_path / "merged")))
    said(capsys, "models", "export", *asks(adapted, 4, "--to", str(tmp_path / "adapter"), "--adapter"))
    base = AutoModelForCausalLM.from_pretrained(adapted.model.path, dtype=torch.float32)
    with torch.no_grad():
        plain = base(torch.tensor([[1, 30, 31, 32]])).logits
        alone = PeftModel.from_pretrained(base, tmp_path / "adapter")(torch.tensor([[1, 30, 31, 32]])).logits
    apart = float((alone - plain).norm())
    assert apart > 0
    assert float((alone - logits(tmp_path / "merged")).norm()) < 0.7 * apart  # what is left is the rounding of merging


# -- chat -----------------------------------------------------------------------------------------------------------------


def test_one_answer_is_the_same_each_time_and_differs_between_checkpoints(stored: Stored, capsys: Capture) -> None:
    once = ["--once", "What is 1+2?", "--max-tokens", "10", "--temperature", "0"]
    answers = [said(capsys, "chat", *asks(stored, step, *once)) for step in (4, 4, 0)]
    assert answers[0] == answers[1]
    document = json.loads(said(capsys, "chat", *asks(stored, 4, *once, "--json")))
    assert document == {"run_id": stored.run_id, "step": 4, "answer": answers[0].removesuffix("\n")}


def test_a_conversation_goes_on_until_an_empty_line(
    adapted: Stored, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Name a colour.\nSay it again.\n\nnever read\n"))
    output = said(capsys, "chat", *asks(adapted, 4, "--max-tokens", "4"))
    assert output.count("\n") >= 2


# -- replay ---------------------------------------------------------------------------------------------------------------


def replayed(capsys: Capture, stored: Stored, *arguments: str) -> list[dict[str, Any]]:
    output = said(capsys, "replay", stored.run_id, "--state-dir", str(stored.state_dir), "--check", *arguments)
    return [json.loads(line) for line in output.splitlines()]


@pytest.mark.parametrize("kind", ["stored", "adapted"])
def test_a_replay_makes_the_recorded_weights_again_and_touches_nothing(
    kind: str, request: pytest.FixtureRequest, capsys: Capture
) -> None:
    run: Stored = request.getfixturevalue(kind)
    before = {path: path.stat().st_mtime_ns for path in (run.state_dir / "runs").rglob("*")}
    lines = replayed(capsys, run)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert [line.get("as_recorded") for line in lines] == [None, True, None, True]
    assert all(line["values"]["weights_change"] > 0 for line in lines)
    assert {path: path.stat().st_mtime_ns for path in (run.state_dir / "runs").rglob("*")} == before
    later = replayed(capsys, run, "--from-step", "2", "--steps", "1")
    assert [(line["step"], line["weights"]) for line in later] == [(3, lines[2]["weights"])]


def made_on(device: str | None, stored: Stored, folder: Path) -> Stored:
    """A copy of the run whose checkpoints say that they were made on this device; None: that do not say, as older ones."""
    copied = replace(stored, state_dir=folder / "state")
    shutil.copytree(stored.state_dir, copied.state_dir)
    for file in copied.state_dir.glob("runs/*/step-*/state.json"):
        facts = json.loads(file.read_bytes())
        assert facts.pop("device") == "cpu"
        assert facts.pop("threads") >= 1
        assert facts.pop("reproducible_sums")
        file.write_text(json.dumps(facts if device is None else facts | {"device": device}))
    return copied


def test_weights_of_another_device_are_not_expected_to_be_made_again(
    stored: Stored, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = made_on("cuda", stored, tmp_path)
    monkeypatch.setattr("swarm.engine.machine.why_no_gpu", lambda environ: "none here")
    asked = ["replay", stored.run_id, "--state-dir", str(copied.state_dir)]
    assert main([*asked, "--check"]) == 2
    assert "the checkpoint of step 2 was made on cuda, but this replay trains on cpu" in capsys.readouterr().err
    lines = [json.loads(line) for line in said(capsys, *asked, "--steps", "2").splitlines()]
    assert [line.get("recorded_on") for line in lines] == [None, "cuda"]
    assert [line["step"] for line in replayed(capsys, copied, "--steps", "1")] == [1]  # nothing to compare


def test_a_replay_executes_the_functions_of_the_run_when_it_may_and_uses_as_many_threads(
    tiny_llama: ModelFolder, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "3")
        mine = own(name="mine.py:advantage", loss="mine.py:loss", importance_correction="mine.py:correction")
        run = asyncio.run(stored_run(tmp_path / "state", tiny_llama, algorithm=mine))
    assert main(["replay", run.run_id, "--state-dir", str(run.state_dir)]) == 2
    assert (
        "uses its own algorithm functions, which a replay executes: pass --allow-algorithms" in capsys.readouterr().err
    )
    again = replayed(capsys, run, "--allow-algorithms", "--steps", "2")
    assert [line.get("as_recorded") for line in again] == [None, True]
    newest = next(run.state_dir.glob("runs/*/step-00000004/state.json"))
    newest.write_text(json.dumps(json.loads(newest.read_bytes()) | {"threads": 5}))
    asked = ["replay", run.run_id, "--state-dir", str(run.state_dir), "--allow-algorithms"]
    assert main([*asked, "--check"]) == 2
    assert "step 2 was made on cpu with 3 threads, but this replay trains on cpu with 5" in capsys.readouterr().err
    lines = [json.loads(line) for line in said(capsys, *asked, "--steps", "2").splitlines()]
    assert [line.get("recorded_on") for line in lines] == [None, "cpu with 3 threads"]


def test_a_checkpoint_from_before_sums_were_reproducible_is_not_expected_to_be_made_again(
    stored: Stored, tmp_path: Path, capsys: Capture
) -> None:
    copied = made_on(None, stored, tmp_path)
    asked = ["replay", stored.run_id, "--state-dir", str(copied.state_dir)]
    assert main([*asked, "--check"]) == 2
    assert "the checkpoint of step 2 was made on cpu by an older version" in capsys.readouterr().err
    lines = [json.loads(line) for line in said(capsys, *asked, "--steps", "2").splitlines()]
    assert [line.get("recorded_on") for line in lines] == [None, "cpu by an older version"]


@pytest.mark.parametrize(
    ("recorded", "options", "used"),
    [
        ("cuda", [], "cuda"),
        ("cuda", ["--device", "cpu"], "cpu"),
        (None, [], "cpu"),
        ("cpu", [], "cpu"),
        ("cpu", ["--device", "cuda"], "cuda"),
    ],
)
def test_a_replay_trains_on_what_the_run_was_trained_on_unless_told_otherwise(
    recorded: str | None,
    options: list[str],
    used: str,
    stored: Stored,
    tmp_path: Path,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def begun(*given: object, device: str, **fields: object) -> None:
        raise EngineError(f"a trainer on {device}")

    copied = made_on(recorded, stored, tmp_path)
    monkeypatch.setattr("swarm.engine.machine.why_no_gpu", lambda environ: None)
    monkeypatch.setattr("swarm.cli.replay.LocalTrainer", begun)
    assert main(["replay", stored.run_id, "--state-dir", str(copied.state_dir), *options]) == 1
    assert f"a trainer on {used}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("device", "available", "offloads"), [("cuda", 64, True), ("cuda", 1, False), ("cpu", 64, False)]
)
def test_a_replay_on_a_gpu_offloads_where_the_machine_has_the_memory(
    device: str, available: int, offloads: bool, stored: Stored, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begun(*given: object, offload: bool, **fields: object) -> None:
        raise EngineError(f"offload: {offload}")

    monkeypatch.setattr("swarm.engine.machine.why_no_gpu", lambda environ: None)
    monkeypatch.setattr("swarm.cli.replay.available_memory", lambda: available << 30)
    monkeypatch.setattr("swarm.cli.replay.LocalTrainer", begun)
    assert main(["replay", stored.run_id, "--state-dir", str(stored.state_dir), "--device", device]) == 1
    assert f"offload: {offloads}" in capsys.readouterr().err


# -- recovery -------------------------------------------------------------------------------------------------------------


EVERYWHERE = [
    {"train": 0.0},
    {"train": 0.03, "checkpoint": 0.005},
    {"serve": 0.002},
    {"train": 0.06, "checkpoint": 0.0},
]
"""Seconds into each part of a step at which the trainer is killed, a step each."""


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("kind", "fields", "kills"),
    [
        ("stored", {}, EVERYWHERE),
        ("adapted", LORA, [{}, {"train": 0.03, "checkpoint": 0.005}]),
    ],
    ids=["full", "lora"],
)
def test_weights_after_kills_at_any_moment_of_the_update_are_bit_equal_to_an_uninterrupted_runs(
    kind: str,
    fields: dict[str, Any],
    kills: list[dict[str, float]],
    request: pytest.FixtureRequest,
    tiny_llama: ModelFolder,
    tmp_path: Path,
) -> None:
    unharmed: Stored = request.getfixturevalue(kind)
    killed = asyncio.run(stored_run(tmp_path / "state", tiny_llama, kills=kills, **fields))
    assert sorted(killed.killed) == sorted(moment for step in kills for moment in step)
    for step in (2, 4):
        expected, found = (
            checkpoints.fingerprint(run.state_dir / "runs" / run.run_id, step) for run in (unharmed, killed)
        )
        assert expected is not None
        assert found == expected
