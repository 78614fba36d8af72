"""Weights on their way from the trainer to inference, through a room that others may remove; neither child is started."""

from __future__ import annotations

import shutil
from collections.abc import Awaitable, Iterator
from pathlib import Path

import pytest

from foundation.clock import SystemClock
from swarm.engine.local.engine import LocalEngine
from swarm.engine.local.weight_slots import checksum_of
from swarm.engine.sampling.server import ServedAdapter
from swarm.engine.seam import EngineError
from swarm.models.folder import ModelFolder
from swarm.protocol.episodes import WeightsVersion

pytestmark = pytest.mark.anyio

VERSION = WeightsVersion(run_id="run-1", step=1)


def written(file: Path) -> str:
    file.write_bytes(b"weights")
    return checksum_of(file)


@pytest.fixture
def published() -> list[Path]:
    return []


@pytest.fixture
def engine(
    tiny_llama: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, published: list[Path]
) -> Iterator[LocalEngine]:
    made = LocalEngine(tiny_llama, logs=tmp_path, clock=SystemClock())

    async def export(file: Path) -> tuple[int, str]:
        return 1, written(file)

    async def publish(
        weights_dir: Path, version: WeightsVersion, *, approval: Awaitable[None], adapter: ServedAdapter | None
    ) -> None:
        await approval
        published.append(weights_dir)

    monkeypatch.setattr(made.trainer, "export", export)
    monkeypatch.setattr(made.inference, "publish", publish)
    made._slots.open()
    yield made
    made._slots.close()


async def test_a_room_that_somebody_removed_is_made_anew(
    engine: LocalEngine, published: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    await engine.serve(VERSION)
    shutil.rmtree(published[0].parent)
    for _ in range(2):
        await engine.serve(VERSION)
    assert published[1].parent == published[2].parent != published[0].parent
    assert published[1] != published[2]
    assert all((slot / "config.json").is_file() for slot in published[1:])
    assert caplog.text.count("RemoveIPC") == 1


async def test_weights_that_are_gone_before_they_are_looked_at_are_an_error_of_the_engine(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lost(file: Path) -> tuple[int, str]:
        return 1, "0"

    monkeypatch.setattr(engine.trainer, "export", lost)
    with pytest.raises(EngineError, match="cannot read the weights"):
        await engine.serve(VERSION)


async def test_the_folder_that_was_given_names_what_is_hosted(engine: LocalEngine, tiny_llama: ModelFolder) -> None:
    assert engine.info.is_named(str(tiny_llama.path))
    assert not engine.info.is_named(str(tiny_llama.path.parent))
