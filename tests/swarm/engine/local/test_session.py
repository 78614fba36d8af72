"""The run that is open in the trainer, and its checkpoints."""

from __future__ import annotations

import itertools
import math
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from foundation.clock import SystemClock
from swarm.engine.local.checkpoints import hash_tensors
from swarm.engine.local.forward import Policy
from swarm.engine.local.learner import Learner
from swarm.engine.local.session import LocalSession
from swarm.engine.seam import EngineError, TrainingRefused
from swarm.engine.training import checkpoints
from swarm.engine.training.channel import (
    Command,
    Export,
    Fingerprint,
    OpenRun,
    Reply,
    Request,
    RunClosed,
    Send,
    Train,
    WriteCheckpoint,
)
from swarm.models.folder import ModelFolder
from tests.swarm.engine.batches import batch, branching_batch, conversation, group

LORA = {"rank": 4, "alpha": 8.0}
LEARNER, SESSION = "swarm.engine.local.learner.Learner", "swarm.engine.local.session"
OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory"),
    RuntimeError("CUDA error: out of memory"),  # page-locked memory
    RuntimeError("DefaultCPUAllocator: can't allocate memory: 8 bytes"),
]


def failing_with(error: BaseException) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


def test_going_back_with_another_model_hosted_is_refused_and_loses_no_checkpoint(
    tiny_llama: ModelFolder, tmp_path: Path
) -> None:
    batches = [branching_batch(step=step) for step in (1, 2)]

    def opened(fingerprint: str, branch: int, at_step: int | None) -> LocalSession:
        session = LocalSession(Policy.load(tiny_llama.path), fingerprint, SystemClock())
        wanted = OpenRun(run_id="run", branch=branch, spec=batches[0].spec, directory=tmp_path, at_step=at_step)
        session.open_run(wanted)
        return session

    session = opened(tiny_llama.fingerprint, 0, None)
    for made in batches:
        session.train(made)
        session.checkpoint()
    with pytest.raises(EngineError, match="serve the model that the run was started with"):
        opened("0" * 64, 1, 1)
    assert checkpoints.steps(tmp_path) == [1, 2]
    opened(tiny_llama.fingerprint, 1, 1)
    assert checkpoints.steps(tmp_path) == [1]


@pytest.mark.parametrize("where", [f"{LEARNER}._accumulate", f"{LEARNER}.rest"])
@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=str)
def test_a_step_without_enough_memory_is_refused_with_what_needs_less(
    error: RuntimeError, where: str, tiny_llama: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = LocalSession(Policy.load(tiny_llama.path), tiny_llama.fingerprint, SystemClock(), turns=True)
    made = branching_batch()
    wanted = OpenRun(run_id="run-1", branch=0, spec=made.spec, directory=tmp_path, at_step=None)
    session.open_run(wanted)
    monkeypatch.setattr(where, failing_with(error))
    reply = session.answer(Request(number=7, command=Train(batch=made)))
    assert reply.failure is not None
    assert (reply.number, reply.failure.kind) == (7, "refused")
    advice = "step 1 ran out of memory: set activation_checkpointing; or train adapters"
    assert reply.failure.text.startswith(advice)
    monkeypatch.undo()
    with pytest.raises(EngineError, match="no run is open"):  # weights may have moved in part
        session.train(made)
    assert session.open_run(wanted) == 0
    assert session.train(made).step == 1


@pytest.mark.parametrize(
    ("name", "where", "doing"),
    [
        ("open_run", "swarm.engine.local.forward.Policy._hold_frozen", "opening the run"),
        ("open_run", f"{LEARNER}.restore", "opening the run"),
        ("checkpoint", f"{LEARNER}.state", "writing a checkpoint"),
        ("export", f"{SESSION}.write_tensors", "bringing the weights to inference"),
        ("send", f"{SESSION}.device_transfer.send", "bringing the weights to inference"),
        ("fingerprint", f"{SESSION}.hash_tensors", "hashing the weights"),
    ],
)
def test_a_request_besides_a_step_without_enough_memory_is_refused_and_the_trainer_lives_on(
    name: str, where: str, doing: str, tiny_llama: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = LocalSession(Policy.load(tiny_llama.path, trained=False), tiny_llama.fingerprint, SystemClock())
    first, second = (branching_batch(step=step, parameters=LORA, dtype="bfloat16") for step in (1, 2))
    wanted = OpenRun(run_id="run", branch=0, spec=first.spec, directory=tmp_path / "run", at_step=None)
    commands: dict[str, Command] = {
        "open_run": wanted,
        "checkpoint": WriteCheckpoint(),
        "export": Export(file=tmp_path / "weights"),
        "send": Send(socket=tmp_path / "socket"),
        "fingerprint": Fingerprint(),
    }
    session.open_run(wanted)
    session.train(first)
    session.checkpoint()
    whole = session.fingerprint()
    monkeypatch.setattr(where, failing_with(OUT_OF_MEMORY[0]))
    failure = session.answer(Request(number=1, command=commands[name])).failure
    assert failure is not None
    assert failure.kind == "engine"
    assert failure.text.startswith(f"{doing} ran out of memory: serve with")
    monkeypatch.undo()
    if name == "open_run":
        with pytest.raises(EngineError, match="no run is open"):
            session.train(second)
        session.open_run(wanted)
    assert session.fingerprint() == whole
    assert session.train(second).step == 2


@pytest.mark.parametrize("then", ["full", LORA], ids=["full", "lora"])
@pytest.mark.parametrize("where", ["peft.tuners.lora.layer.LoraLayer.reset_lora_parameters", "torch.Tensor.clone"])
def test_a_run_opens_as_ever_after_one_whose_adapters_found_too_little_memory(
    where: str, then: Any, tiny_llama: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some layers have adapters, or all do."""

    def opened(session: LocalSession, run_id: str, parameters: Any) -> Reply:
        spec = branching_batch(parameters=parameters).spec
        command = OpenRun(run_id=run_id, branch=0, spec=spec, directory=tmp_path / run_id, at_step=None)
        return session.answer(Request(number=1, command=command))

    session, fresh = (
        LocalSession(Policy.load(tiny_llama.path), tiny_llama.fingerprint, SystemClock()) for _ in range(2)
    )
    with monkeypatch.context() as patched:
        name, _, method = where.rpartition(".")
        owner = pkgutil.resolve_name(name)
        usual, calls = getattr(owner, method), itertools.count()

        def full(*given: Any, **named: Any) -> Any:
            if next(calls) >= 3:
                raise OUT_OF_MEMORY[0]
            return usual(*given, **named)

        patched.setattr(owner, method, full)
        failure = opened(session, "run-1", LORA).failure
    assert failure is not None
    assert failure.text.startswith("opening the run ran out of memory")
    for each in (session, fresh):
        assert opened(each, "run-2", then).failure is None
        each.train(branching_batch(parameters=then))
    assert session.fingerprint() == fresh.fingerprint()


@pytest.mark.parametrize("half_way", [False, True])
def test_a_refused_step_closes_the_run_where_the_weights_had_moved(
    half_way: bool, tiny_llama: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = LocalSession(Policy.load(tiny_llama.path), tiny_llama.fingerprint, SystemClock())
    made, accumulate = branching_batch(optimizer={"minibatches": 2}), Learner._accumulate
    session.open_run(OpenRun(run_id="run-1", branch=0, spec=made.spec, directory=tmp_path, at_step=None))

    def broken(self: Learner, *given: Any, **named: Any) -> float:
        return math.nan if self.half_way == half_way else accumulate(self, *given, **named)

    monkeypatch.setattr(Learner, "_accumulate", broken)
    with pytest.raises(TrainingRefused, match="the loss is nan"):
        session.train(made)
    monkeypatch.undo()
    if half_way:
        with pytest.raises(RunClosed):
            session.train(made)
    else:
        assert session.train(made).step == 1


def test_another_fault_than_a_lack_of_memory_ends_the_trainer(
    tiny_llama: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = LocalSession(Policy.load(tiny_llama.path), tiny_llama.fingerprint, SystemClock())
    made = branching_batch()
    session.open_run(OpenRun(run_id="run-1", branch=0, spec=made.spec, directory=tmp_path, at_step=None))
    monkeypatch.setattr(f"{LEARNER}._accumulate", failing_with(RuntimeError("an illegal memory access")))
    with pytest.raises(RuntimeError, match="illegal"):
        session.answer(Request(number=1, command=Train(batch=made)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("parameters", ["full", LORA], ids=["full", "lora"])
def test_a_checkpoint_makes_the_same_next_step_bit_for_bit(
    tiny_llama: ModelFolder, tmp_path: Path, parameters: Any, dtype: str
) -> None:
    first, second = (branching_batch(step=step, parameters=parameters, dtype=dtype) for step in (1, 2))
    wanted = OpenRun(run_id="run", branch=0, spec=first.spec, directory=tmp_path, at_step=None)
    ongoing, restored = (
        LocalSession(Policy.load(tiny_llama.path, trained=False), tiny_llama.fingerprint, SystemClock())
        for _ in range(2)
    )
    ongoing.open_run(wanted)
    ongoing.train(first)
    ongoing.checkpoint()
    assert restored.open_run(wanted) == 1
    assert restored.fingerprint() == ongoing.fingerprint()
    ours, theirs = ({**session.train(second).metrics, "train_s": 0.0} for session in (ongoing, restored))
    assert ours == theirs
    assert restored.fingerprint() == ongoing.fingerprint()
    moments = [hash_tensors(session._model.state()) for session in (ongoing, restored)]
    assert moments[0] == moments[1]


def test_an_opened_run_of_adapters_holds_the_hosted_matrices_once_before_its_first_step(
    tiny_llama: ModelFolder, tmp_path: Path
) -> None:
    policy = Policy.load(tiny_llama.path, trained=False)
    spec = branching_batch(parameters={"rank": 4, "alpha": 8}, dtype="bfloat16").spec
    session = LocalSession(policy, tiny_llama.fingerprint, SystemClock())
    session.open_run(OpenRun(run_id="run", branch=0, spec=spec, directory=tmp_path, at_step=None))
    frozen = [weight for weight in policy.model.parameters() if weight.ndim > 1 and not weight.requires_grad]
    hosted = {weight.data_ptr() for weight in policy.start.values()}
    assert frozen
    assert all(weight.data_ptr() in hosted for weight in frozen)


class Killed(BaseException):
    """No code of ours runs after it, save what a test does."""


@pytest.mark.parametrize("fault", [Killed(), OSError(28, "No space left on device")])
@pytest.mark.parametrize("at_step", [None, 1])
def test_a_checkpoint_that_was_being_replaced_is_there_still(
    tiny_llama: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: BaseException, at_step: int | None
) -> None:
    made = branching_batch()
    session = LocalSession(Policy.load(tiny_llama.path), tiny_llama.fingerprint, SystemClock())
    wanted = OpenRun(run_id="run", branch=0, spec=made.spec, directory=tmp_path, at_step=None)
    session.open_run(wanted)
    session.train(made)
    session.checkpoint()
    whole, rename = session.fingerprint(), Path.rename

    def interrupted(self: Path, target: Path) -> Path:
        if self.name == ".unfinished-1":
            raise fault
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(type(fault)):
        session.checkpoint()
    monkeypatch.undo()
    assert session.open_run(wanted.model_copy(update={"at_step": at_step})) == 1
    assert session.fingerprint() == whole
    session.checkpoint()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


@pytest.mark.parametrize(("one", "other"), [("full", {"rank": 4, "alpha": 8}), ({"rank": 4, "alpha": 8}, "full")])
def test_a_checkpoint_of_other_parameters_is_refused_with_both(
    tiny_llama: ModelFolder, tmp_path: Path, one: Any, other: Any
) -> None:
    session = LocalSession(Policy.load(tiny_llama.path), tiny_llama.fingerprint, SystemClock())
    first = branching_batch(parameters=one)
    session.open_run(OpenRun(run_id="run", branch=0, spec=first.spec, directory=tmp_path, at_step=None))
    session.train(first)
    session.checkpoint()
    then = branching_batch(parameters=other).spec
    with pytest.raises(EngineError, match="open it with the checkpoint's parameters"):
        session.open_run(OpenRun(run_id="run", branch=0, spec=then, directory=tmp_path, at_step=None))
    assert session.open_run(OpenRun(run_id="run", branch=0, spec=first.spec, directory=tmp_path, at_step=None)) == 1


def test_a_manifest_of_another_shape_is_passed_over(tiny_llama: ModelFolder, tmp_path: Path) -> None:
    session = LocalSession(Policy.load(tiny_llama.path), tiny_llama.fingerprint, SystemClock())
    wanted = OpenRun(run_id="run", branch=0, spec=branching_batch().spec, directory=tmp_path, at_step=None)
    session.open_run(wanted)
    for step in (1, 2):
        session.train(branching_batch(step=step))
        session.checkpoint()
    for text in ("[]", '"', '{"weights.safetensors": null}'):
        (tmp_path / "step-00000002" / "manifest.json").write_text(text)
        assert session.open_run(wanted) == 1


@pytest.mark.parametrize(("one", "other"), [("adamw", "adafactor"), ("adafactor", "adamw")])
def test_an_optimiser_that_was_named_but_has_not_stepped_yet_begins_anew_after_a_restore_too(
    tiny_llama: ModelFolder, tmp_path: Path, one: str, other: str
) -> None:
    fresh = LocalSession(Policy.load(tiny_llama.path), tiny_llama.fingerprint, SystemClock())
    live = LocalSession(Policy.load(tiny_llama.path), tiny_llama.fingerprint, SystemClock())
    first = branching_batch(optimizer={"name": one, "learning_rate": 1e-3})
    then: dict[str, Any] = {"optimizer": {"name": other, "learning_rate": 1e-3}}
    equal = group("a", conversation("a1", 1.0, [[70, 2]]), conversation("a2", 1.0, [[71, 2]]))
    wanted = OpenRun(run_id="run", branch=0, spec=first.spec, directory=tmp_path, at_step=None)
    live.open_run(wanted)
    live.train(first)
    live.train(batch(equal, step=2, **then))
    live.checkpoint()
    assert fresh.open_run(wanted) == 2
    for session in (live, fresh):
        session.train(branching_batch(step=3, **then))
    assert fresh.fingerprint() == live.fingerprint()
