"""A checkpoint that one rank of verl wrote, and the local engine's trainer that goes on from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from foundation.clock import SystemClock
from swarm.engine.local import checkpoints as of_any_engine
from swarm.engine.local.forward import Policy
from swarm.engine.local.learner import Learner
from swarm.engine.training.checkpoints import TrainerState, folder_of
from swarm.engine.verl import checkpoints
from swarm.protocol.runspec import LoraSpec
from tests.swarm.engine.batches import branching_batch


def write_checkpoint(
    learner: Any, directory: Path, parameters: Literal["full"] | LoraSpec, *, fingerprint: str = "f" * 64
) -> None:
    """Of the rank, after one step."""
    made = branching_batch(parameters=parameters)
    learner.learn(made)
    state = TrainerState(run_id="run-1", branch=0, step=1, fingerprint=fingerprint, spec=made.spec, random_state="00")
    save = lambda folder: learner._cluster.all_ranks("save_checkpoint", str(folder))  # noqa: E731
    checkpoints.write(directory, state, save, ranks=1, keep=2)


def assert_goes_on(learner: Any, policy: Policy, directory: Path, parameters: Literal["full"] | LoraSpec) -> None:
    """The checkpoint holds what the policy trains, and its next step is the rank's."""
    found = of_any_engine.read(directory, 1)
    assert found.weights.keys() == policy.trained.keys()
    local = Learner(policy, SystemClock())
    local.begin_run()
    with torch.no_grad():
        for name, weight in policy.trained.items():
            weight.copy_(found.weights[name])
    local.restore(found.moments)
    assert local.optimizer.state().keys() == found.moments.keys()
    second = branching_batch(parameters=parameters)
    ours, theirs = (each.learn(second).metrics for each in (learner, local))
    for name in ("loss", "grad_norm", "weights_change", "entropy"):
        assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-5), name


def assert_takes_over(learner: Any, policy: Policy, directory: Path, parameters: Literal["full"] | LoraSpec) -> None:
    """The rank goes on from the local engine's checkpoint, and its next step is the local engine's."""
    local = Learner(policy, SystemClock())
    local.begin_run()
    made = branching_batch(parameters=parameters)
    local.learn(made)
    state = TrainerState(run_id="run-1", branch=0, step=1, fingerprint="f" * 64, spec=made.spec, random_state="00")
    weights = {name: weight.detach() for name, weight in policy.trained.items()}
    of_any_engine.write(
        directory, of_any_engine.Checkpoint(state=state, weights=weights, moments=local.state()), keep=2
    )
    learner._cluster.all_ranks("take_over", str(folder_of(directory, 1)))
    ours, theirs = (each.learn(made).metrics for each in (learner, local))
    for name in ("loss", "grad_norm", "weights_change", "entropy"):
        assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-5), name
