"""Adapters from the trainer to vLLM, in place and without merging. A real engine, a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest

from foundation.clock import SystemClock
from swarm.engine.local.engine import LocalEngine
from swarm.engine.local.supervisor import BackOff
from swarm.engine.seam import RunContext
from swarm.models.folder import ModelFolder
from swarm.protocol.episodes import WeightsVersion
from swarm.protocol.runspec import RunSpec
from tests.contracts.engine_contract import batch_of, chat, request

pytestmark = pytest.mark.anyio

LORA = RunSpec.model_validate(
    {
        "parameters": {"rank": 4, "alpha": 16.0},
        "optimizer": {"learning_rate": 0.02},
        "batch": {"group_size": 4},
    }
)


async def test_adapters_are_served_as_they_are_trained_and_hosted_weights_again_after_them(
    tiny_llama: ModelFolder, tmp_path: Path
) -> None:
    engine = LocalEngine(
        tiny_llama,
        logs=tmp_path / "logs",
        clock=SystemClock(),
        max_model_len=512,
        max_num_seqs=8,
        back_off=BackOff(first_s=0.05, failures=3),
    )
    lora = LORA.computed_in(engine.info.dtype)
    try:
        await engine.boot()
        hosted = await engine.sample(request(chat("Say red", seed=3)))
        run = RunContext(run_id="run-lora", branch=0, spec=lora, directory=tmp_path / "lora")
        assert await engine.open_run(run) == 0
        child = engine.inference.process_id
        begun = await engine.sample(request(chat("Say red", seed=3)))
        assert begun.choices[0].logprobs == pytest.approx(hosted.choices[0].logprobs, abs=0.05)
        for step in (1, 2, 3):
            outcome = await engine.train(await batch_of(engine, lora, step))
            assert outcome.metrics["logprob_mismatch_mean"] < 0.03
            await engine.serve(WeightsVersion(run_id=run.run_id, branch=0, step=step))
        assert outcome.metrics["kl_to_start"] > 0.03  # weights that were not served would show
        assert engine.inference.process_id == child
        sampled = await engine.sample(request(chat("Say red", seed=3)))
        assert sampled.choices[0].versions[0].version.step == 3
        assert sampled.answer["model"] == tiny_llama.name

        full = RunContext(run_id="run-full", branch=0, spec=RunSpec(), directory=tmp_path / "full")
        await engine.open_run(full)
        again = await engine.sample(request(chat("Say red", seed=3)))
        assert again.choices[0].logprobs == pytest.approx(hosted.choices[0].logprobs, abs=0.05)
        await engine.train(await batch_of(engine, lora.model_copy(update={"parameters": "full"}), 1))
        child = engine.inference.process_id
        await engine.serve(WeightsVersion(run_id=full.run_id, branch=0, step=1))
        assert engine.inference.process_id == child  # in place: inference holds what was trained
    finally:
        await engine.shutdown()
