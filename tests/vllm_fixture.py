"""Real vLLM with the real small model, booted once for all tests that need it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import pytest

from foundation.clock import SystemClock
from swarm.engine.local.inference import VllmInference
from swarm.engine.sampling.server import VllmSettings

Result = TypeVar("Result")


class LoopThread:
    """An event loop of its own that outlives each test's: what is booted in it serves them all."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Result], limit_s: float = 600.0) -> Result:
        future: Future[Result] = asyncio.run_coroutine_threadsafe(work, self.loop)
        return future.result(limit_s)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


@pytest.fixture(scope="session")
def vllm_loop() -> Iterator[LoopThread]:
    thread = LoopThread()
    yield thread
    thread.close()


@pytest.fixture(scope="session")
def vllm(vllm_loop: LoopThread, smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmInference]:
    """Booted inference; call it inside `vllm_loop` alone."""
    log_path = tmp_path_factory.mktemp("vllm") / "inference.log"
    settings = VllmSettings(model_dir=smollm2, model_name="smollm2", log_path=log_path, max_model_len=2048)

    async def made() -> VllmInference:
        inference = VllmInference(settings, clock=SystemClock())
        await inference.boot()
        return inference

    inference = vllm_loop.run(made())
    yield inference
    vllm_loop.run(inference.shutdown())
