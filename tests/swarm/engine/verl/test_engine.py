"""The whole verl engine on the processor: two ranks, one replica over both, one engine for all tests of this module."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from foundation.clock import SystemClock
from swarm.engine.seam import EngineError, RunContext
from swarm.engine.verl.engine import VerlEngine, VerlLayout
from swarm.models.folder import ModelFolder
from swarm.protocol.episodes import WeightsVersion
from swarm.protocol.runspec import RunSpec
from tests.contracts.engine_contract import EngineContract, batch_of, chat, request

pytestmark = [
    pytest.mark.slow,
    pytest.mark.anyio,
    pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="needs verl: `make verl`"),
]

MEAN_TOLERANCE = 0.1
"""Two bfloat16 implementations of one small random model."""


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def engine(
    anyio_backend: str, cpu_platform: None, tiny_llama: ModelFolder, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[VerlEngine]:
    layout = VerlLayout(
        max_model_len=512,
        ranks_per_node=2,
        tensor_parallel=2,
        max_num_seqs=16,
        sampling_memory=0.05,
        kv_cache_bytes=64 << 20,
        tokens_per_rank=2048,
    )
    made = VerlEngine(tiny_llama, layout, logs=tmp_path_factory.mktemp("verl") / "logs", clock=SystemClock())
    try:
        await made.boot()
        yield made
    finally:
        await made.shutdown()


@pytest.fixture
def run_spec() -> RunSpec:
    return RunSpec.model_validate({"batch": {"group_size": 4}, "optimizer": {"learning_rate": 1e-3}})


class TestVerlEngine(EngineContract):
    """What every engine keeps."""


async def test_recorded_log_probabilities_are_the_ranks_before_and_after_a_step(
    engine: VerlEngine, run_spec: RunSpec, tmp_path: Path
) -> None:
    await engine.open_run(RunContext(run_id="run-same", branch=0, spec=run_spec, directory=tmp_path))
    for step in (1, 2):
        outcome = await engine.train(await batch_of(engine, run_spec, step))
        assert outcome.metrics["logprob_mismatch_mean"] < MEAN_TOLERANCE
        await engine.serve(WeightsVersion(run_id="run-same", branch=0, step=step))


async def test_a_replica_answers_nobody_without_its_key(engine: VerlEngine, run_spec: RunSpec, tmp_path: Path) -> None:
    await engine.open_run(RunContext(run_id="run-key", branch=0, spec=run_spec, directory=tmp_path))
    url = engine.sampling._replicas[0].client.url
    async with httpx.AsyncClient(base_url=url, trust_env=False) as stranger:
        asked = await stranger.post("/v1/chat/completions", json={**chat("Say red"), "model": "tiny-llama"})
        called = await stranger.post("/collective_rpc", json={"method": "weights_digest"})
    assert (asked.status_code, called.status_code) == (401, 404)


async def test_what_the_ranks_cannot_do_is_refused_when_the_run_is_opened(
    engine: VerlEngine, run_spec: RunSpec, tmp_path: Path
) -> None:
    for fields, said in (
        ({"dtype": "float32"}, "--verl-dtype"),
        ({"parameters": {"rank": 4}}, "'full'"),
        ({"optimizer": {"name": "adafactor"}}, "'adamw'"),
        ({"algorithm": {"name": "ppo"}}, "trains no critic"),
    ):
        spec = RunSpec.model_validate(run_spec.model_dump() | fields)
        with pytest.raises(EngineError, match=said):
            await engine.open_run(RunContext(run_id="run-other", branch=0, spec=spec, directory=tmp_path))


async def test_a_checkpoint_is_whole_or_passed_over(engine: VerlEngine, run_spec: RunSpec, tmp_path: Path) -> None:
    run = RunContext(run_id="run-kept", branch=0, spec=run_spec, directory=tmp_path)
    await engine.open_run(run)
    for step in (1, 2):
        await engine.train(await batch_of(engine, run_spec, step))
        assert await engine.checkpoint() == step
    broken = tmp_path / "step-00000002" / "model_world_size_2_rank_1.pt"
    broken.write_bytes(broken.read_bytes()[:-1] + b"x")
    assert await engine.open_run(run) == 1
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".unfinished-")]


async def test_weights_of_another_step_are_not_served(engine: VerlEngine, run_spec: RunSpec, tmp_path: Path) -> None:
    await engine.open_run(RunContext(run_id="run-step", branch=0, spec=run_spec, directory=tmp_path))
    with pytest.raises(EngineError, match="the trainer stands at step 0"):
        await engine.serve(WeightsVersion(run_id="run-step", branch=0, step=2))
    assert (await engine.sample(request(chat("Say red")))).choices[0].versions[0].version.step == 0
