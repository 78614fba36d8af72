"""Reads runs from a server's state directory, so that `swarm chat` and `swarm models export` need no server.

Users name a checkpoint as `RUN`, `RUN@STEP` or `RUN@best`.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from foundation.commandline import UsageError
from foundation.paths import user_data_dir
from swarm.cli.models import document
from swarm.engine.training import checkpoints
from swarm.models import resolve
from swarm.models.folder import ModelFolder
from swarm.protocol.errors import ErrorCode, SwarmError
from swarm.protocol.runspec import AS_STORED, RunSpec
from swarm.server.state.rows import RunRow
from swarm.server.state.runs import best_of
from swarm.server.state_dir import HOSTED
from swarm.server.storage.reader import Reader

if TYPE_CHECKING:
    from swarm.engine.local.checkpoints import Checkpoint
    from swarm.engine.local.trained_model import Chat


_ANOTHER = "if `swarm serve` was given a --state-dir, pass the same one here"


class NoSuchRun(SwarmError):
    """This machine has no such run, or no such checkpoint of the run."""

    code = ErrorCode.NOT_FOUND


class NoWeights(SwarmError):
    """The run used the echo engine, which has no model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRun:
    """A run and the model that it started from. `specs` holds its specs by config version."""

    state_dir: Path
    row: RunRow
    specs: dict[int, RunSpec]
    model: ModelFolder

    @property
    def spec(self) -> RunSpec:
        """The newest spec."""
        return self.specs[max(self.specs)]

    @property
    def checkpoints_dir(self) -> Path:
        return self.state_dir / "runs" / self.row.run_id

    def reader(self) -> Reader:
        """Open a reader for the server's records. The caller must close it."""
        return _reader(self.state_dir)

    def step_called(self, wanted: str | None) -> int:
        """Return the step that `wanted` means: a number, `best`, or None for the newest checkpoint. Raises: NoSuchRun, UsageError."""
        kept = [0, *checkpoints.steps(self.checkpoints_dir)]
        if wanted is None:
            if self.row.checkpoints and len(kept) == 1:
                raise NoSuchRun(f"the checkpoints of {self.row.run_id} are gone from {self.checkpoints_dir}")
            return kept[-1]
        if wanted == "best":
            return self._best()
        if not wanted.isdecimal():
            raise UsageError(f"a step is a number or 'best', got {wanted!r}")
        if int(wanted) not in kept:
            raise NoSuchRun(f"{self.row.run_id} has no checkpoint of step {wanted}; it has {', '.join(map(str, kept))}")
        return int(wanted)

    def _best(self) -> int:
        reader = self.reader()
        try:
            best = best_of(self.row.checkpoints, reader.held_out(self.row.run_id))
        finally:
            reader.close()
        if best is None:
            raise NoSuchRun(
                f"no checkpoint of {self.row.run_id} has been evaluated, so none is known to be the best; omit @best to use the newest"
            )
        return best.step

    def checkpoint(self, step: int) -> Checkpoint | None:
        """Read and verify a checkpoint. Return None for step 0, which is the hosted model itself. Raises: EngineError."""
        from swarm.engine.local.checkpoints import read

        return read(self.checkpoints_dir, step) if step else None


def split(text: str) -> tuple[str, str | None]:
    """Split `RUN` or `RUN@STEP` into the run and the step, which is None if not given."""
    run, at, step = text.partition("@")
    return run, step if at else None


def find(args: argparse.Namespace, run: str | None) -> StoredRun:
    """Return the run with this id. None or `latest` means the newest run, and requires that only one server has runs.

    Raises: NoSuchRun, UsageError.
    """
    found: list[tuple[Path, RunRow]] = []
    for state_dir in _state_dirs(args):
        reader = _reader(state_dir)
        try:
            row = reader.snapshot().run if run in (None, "latest") else reader.run(str(run))
        finally:
            reader.close()
        if row is not None:
            found.append((state_dir, row))
    if not found:
        raise NoSuchRun(f"no run {run or 'at all'} in {', '.join(map(str, _state_dirs(args)))}; {_ANOTHER}")
    if len(found) > 1:
        raise UsageError(f"several servers have a run {run or 'latest'}; choose a server with --state-dir")
    ((state_dir, row),) = found
    reader = _reader(state_dir)
    try:
        specs = {
            config.config_version: RunSpec.model_validate(config.spec, context=AS_STORED)
            for config in reader.configs(row.run_id)
        }
    finally:
        reader.close()
    return StoredRun(state_dir=state_dir, row=row, specs=specs, model=_model(args, state_dir))


def _state_dirs(args: argparse.Namespace) -> list[Path]:

    if args.state_dir is not None:
        given = Path(args.state_dir).expanduser().resolve()
        if not _pool(given).is_file():
            raise NoSuchRun(f"{given} is not the state directory of a server: it contains no {_pool(given).name}")
        return [given]
    servers = user_data_dir() / "servers"
    found = sorted(path.parent.parent for path in servers.glob("*/pool/pool.sqlite"))
    if not found:
        raise NoSuchRun(f"there are no server records in {servers}; {_ANOTHER}")
    return found


def _pool(state_dir: Path) -> Path:
    return state_dir / "pool" / "pool.sqlite"


def _reader(state_dir: Path) -> Reader:
    return Reader(_pool(state_dir))


def _model(args: argparse.Namespace, state_dir: Path) -> ModelFolder:
    """Return the model that the server hosted, or the one given with --model. Raises: ModelUnavailable, NoSuchRun, NoWeights."""
    try:
        hosted = json.loads((state_dir / HOSTED).read_bytes())["path"]
    except FileNotFoundError as error:
        if args.model is None:
            text = f"{state_dir} does not record the hosted model: its server is too old, or used the echo engine; give --model"
            raise NoSuchRun(text) from error
    else:
        if hosted is None:
            raise NoWeights(f"the server of {state_dir} used the echo engine, which has no weights")
    return resolve(args.model or hosted)


# -- commands -------------------------------------------------------------------------------------------------------------


def chat_with(args: argparse.Namespace) -> int:
    """Print one answer, or hold a conversation until the person ends it."""
    if args.json and args.once is None:
        raise UsageError("--json requires --once")
    run_id, wanted = split(args.run_at)
    run = find(args, run_id)
    step = run.step_called(wanted)
    from swarm.engine.local.trained_model import Chat

    chat = Chat.with_checkpoint(
        run.model,
        run.checkpoint(step),
        system=args.system,
        temperature=run.spec.sampling.temperature if args.temperature is None else args.temperature,
        max_tokens=args.max_tokens or run.spec.sampling.max_tokens,
        seed=args.seed,
    )
    if args.once is None:
        return _converse(chat, f"{run.row.run_id}@{step}")
    if args.json:
        answer = "".join(chat.answer(args.once))
        print(json.dumps({"run_id": run.row.run_id, "step": step, "answer": answer}))
    else:
        _say(chat, args.once)
    return 0


def _converse(chat: Chat, name: str) -> int:
    prompt = "> " if sys.stdin.isatty() else ""
    print(f"{name}; an empty line ends the conversation", file=sys.stderr)
    while True:
        try:
            said = input(prompt).strip()
        except EOFError:
            return 0
        if not said:
            return 0
        _say(chat, said)


def _say(chat: Chat, said: str) -> None:
    """Print the answer while it is being generated."""
    for piece in chat.answer(said):
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")


def export_run(args: argparse.Namespace) -> int:
    """Write a checkpoint as a folder that transformers and vLLM can load."""
    run_id, wanted = split(args.run_at)
    run = find(args, run_id)
    step = run.step_called(wanted)
    checkpoint, to = run.checkpoint(step), args.to.expanduser().resolve()
    from swarm.engine.local import trained_model

    try:
        if not args.adapter:
            made = trained_model.export_model(run.model, checkpoint, to)
        elif checkpoint is None:
            raise UsageError(f"{run.row.run_id}@0 is the hosted model, which has no adapter; omit --adapter")
        else:
            made = trained_model.export_adapter(run.model, checkpoint, to)
    except OSError as error:
        raise StorageFault(f"cannot write {to}: {error.strerror or error}") from error
    facts = document(made) | {"run_id": run.row.run_id, "step": step}
    print(json.dumps(facts) if args.json else made.path)
    return 0


class StorageFault(SwarmError):
    """A folder cannot be written."""
