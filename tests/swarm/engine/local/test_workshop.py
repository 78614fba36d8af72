"""The run that is open in the trainer, and its checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from foundation.clock import SystemClock
from swarm.engine.local import checkpoints
from swarm.engine.local.forward import Policy
from swarm.engine.local.wire import OpenRun
from swarm.engine.local.workshop import Workshop
from swarm.engine.seam import EngineError
from swarm.models.folder import ModelFolder
from tests.swarm.engine.batches import branching_batch


def test_going_back_with_another_model_hosted_is_refused_and_loses_no_checkpoint(
    tiny_llama: ModelFolder, tmp_path: Path
) -> None:
    batches = [branching_batch(step=step) for step in (1, 2)]

    def opened(fingerprint: str, branch: int, at_step: int | None) -> Workshop:
        shop = Workshop(Policy.load(tiny_llama.path), fingerprint, SystemClock())
        wanted = OpenRun(run_id="run", branch=branch, spec=batches[0].spec, directory=tmp_path, at_step=at_step)
        shop.open_run(wanted)
        return shop

    shop = opened(tiny_llama.fingerprint, 0, None)
    for batch in batches:
        shop.train(batch)
        shop.checkpoint()
    with pytest.raises(EngineError, match="serve the model that the run was started with"):
        opened("0" * 64, 1, 1)
    assert checkpoints.steps(tmp_path) == [1, 2]
    opened(tiny_llama.fingerprint, 1, 1)
    assert checkpoints.steps(tmp_path) == [1]
