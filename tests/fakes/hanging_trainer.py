"""A trainer's process without torch, which stops itself where a test wants it to; and an engine that trains with it.

    python -m tests.fakes.hanging_trainer --socket FD --hang FILE

FILE names a command (or `boot`); the next time it comes the file is removed and the process stops, as by SIGSTOP.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import struct
import sys
from pathlib import Path

from foundation.clock import Clock
from swarm.engine.local.trainer import LocalTrainer
from swarm.engine.seam import RunContext, StepOutcome, TrainBatch
from swarm.engine.training.channel import (
    READY,
    Export,
    OpenRun,
    Reply,
    Train,
    WriteCheckpoint,
    frame,
    received,
)
from swarm.engine.training.supervisor import BackOff, ChildCommand
from swarm.models.folder import ModelFolder
from swarm.protocol.episodes import WeightsVersion
from tests.fakes.engine import FaultyEngine

Made = list[list[str]]
"""Per step, the episodes that it was made of."""


def model_folder(path: Path) -> ModelFolder:
    """A model of eight weights."""
    header = json.dumps({"w": {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32]}}).encode()
    path.mkdir(parents=True)
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(32))
    (path / "config.json").write_text(json.dumps({"hidden_size": 4}))
    return ModelFolder(path=path, name="eight", fingerprint="0" * 64)


class HangingTrainer(LocalTrainer):
    """hang: what the child shall stop itself at, once."""

    def __init__(self, folder: Path, clock: Clock, engine: FaultyEngine) -> None:
        self.hang = folder / "hang"
        super().__init__(
            model_folder(folder / "model"),
            log_path=folder / "trainer.log",
            clock=clock,
            on_health=engine.tell,
            back_off=BackOff(first_s=0.01),
        )

    def _command(self, descriptor: int) -> ChildCommand:
        argv = [sys.executable, "-m", "tests.fakes.hanging_trainer"]
        argv += ["--socket", str(descriptor), "--hang", str(self.hang)]
        env = dict(os.environ) | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        return ChildCommand(name="trainer", argv=argv, env=env, log_path=self._log_path, pass_fds=(descriptor,))


class HangingEngine(FaultyEngine):
    """Samples like the echo engine; every step is made by a child that may hang."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        super().__init__()
        self._folder = folder
        self.trainer = HangingTrainer(folder, clock, self)

    async def boot(self) -> None:
        await self.trainer.boot()
        await super().boot()

    async def open_run(self, run: RunContext, *, at_step: int | None = None) -> int:
        assert await self.trainer.open_run(run, at_step) == await super().open_run(run, at_step=at_step)
        return await self._exported()

    async def train(self, batch: TrainBatch) -> StepOutcome:
        await self.trainer.train(batch)
        return await super().train(batch)

    async def checkpoint(self, *, best: int | None = None) -> int:
        await self.trainer.checkpoint(best)
        return await super().checkpoint(best=best)

    async def serve(self, version: WeightsVersion) -> None:
        await self._exported()
        await super().serve(version)

    async def _exported(self) -> int:
        return (await self.trainer.export(self._folder / "served"))[0]

    def trained(self) -> Made:
        """What the weights are made of that were served last."""
        made: Made = json.loads((self._folder / "served").read_text())
        return made


def main() -> None:
    """Serve until the socket is closed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", type=int, required=True)
    parser.add_argument("--hang", type=Path, required=True)
    args = parser.parse_args()
    made: Made = []
    kept = Path()
    with socket.socket(fileno=args.socket) as connection:
        _stop_at("boot", args.hang)
        connection.sendall(frame(Reply(number=READY)))
        while (request := received(connection)) is not None:
            command = request.command
            _stop_at(command.command, args.hang)
            match command:
                case OpenRun():
                    kept = command.directory / "made.json"
                    made = json.loads(kept.read_text()) if kept.exists() and command.at_step != 0 else []
                case Train():
                    made.append([one.episode_id for group in command.batch.groups for one in group.episodes])
                case WriteCheckpoint():
                    kept.write_text(json.dumps(made))
                case Export():
                    command.file.write_text(json.dumps(made))
            outcome = StepOutcome(step=len(made), metrics={}) if isinstance(command, Train) else None
            connection.sendall(frame(Reply(number=request.number, step=len(made), outcome=outcome, checksum="0")))


def _stop_at(name: str, hang: Path) -> None:
    if hang.exists() and hang.read_text() == name:
        hang.unlink()
        os.kill(os.getpid(), signal.SIGSTOP)


if __name__ == "__main__":
    main()
