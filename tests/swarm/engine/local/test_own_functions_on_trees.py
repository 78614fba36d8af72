"""Functions of a user's own in the local trainer: what they say is exact however the tree is cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from swarm.engine.algorithms.facts import TokenFacts
from swarm.engine.algorithms.functions import Update
from swarm.engine.seam import TrainBatch
from swarm.engine.training.selection import branches, episodes_of, select
from swarm.models.folder import ModelFolder
from tests.swarm.engine.batches import branching_batch
from tests.swarm.engine.local.test_algorithms_on_trees import load
from tests.swarm.engine.local.test_learner import FREE, distance, gradient, learner_of, weights_of
from tests.swarm.engine.own_functions import SOURCE, own
from tests.swarm.engine.plain_grpo import distribution

ALL_OWN = own(name="mine.py:advantage", loss="mine.py:loss", importance_correction="mine.py:correction")


def test_functions_that_do_what_is_built_in_train_the_same(tiny_llama: ModelFolder) -> None:
    optimizer = FREE | {"learning_rate": 3e-4, "minibatches": 2}
    built_in = {"name": "grpo", "advantage_norm": "none", "importance_correction": "masked"}
    found = []
    for algorithm in (ALL_OWN, built_in):
        learner = learner_of(tiny_llama)
        outcome = learner.learn(branching_batch(algorithm=algorithm | {"kl": 0.2}, optimizer=optimizer))
        found.append((gradient(learner), outcome.metrics["loss"]))
    assert distance(found[0][0], found[1][0]) < 1e-3  # of the last update, at weights that moved meanwhile
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-4, abs=1e-6)


def test_a_loss_that_couples_all_tokens_has_its_whole_gradient(tiny_llama: ModelFolder) -> None:
    """The trainer computes the tree in pieces of six tokens; here all calls are one graph."""
    learner = learner_of(tiny_llama)
    learner.policy.segment_tokens = 6
    learner.learn(branching_batch(optimizer=FREE))
    weights = weights_of(learner)
    batch = branching_batch(step=2, algorithm=own(loss="mine.py:coupled_loss"), optimizer=FREE)
    loss = learner.learn(batch).metrics["loss"]
    model = load(tiny_llama.path, weights)
    plain = whole_update(model, batch)
    plain.backward()
    expected = {name: weight.grad for name, weight in model.named_parameters()}
    assert loss == pytest.approx(float(plain.detach()), rel=1e-4)
    assert distance(gradient(learner), expected) < 5e-5


def whole_update(model: torch.nn.Module, batch: TrainBatch) -> torch.Tensor:
    """The loss of all calls in one graph."""
    spec = batch.spec.algorithm
    made = branches(select(batch).trained, spec)
    said = [distribution(model, branch.call) for branch in made]
    logp_N, entropy_N = (torch.cat(parts) for parts in zip(*said, strict=True))
    sizes = [len(branch.call.sampled_ids) for branch in made]
    spread = lambda values: torch.tensor(values).repeat_interleave(torch.tensor(sizes))  # noqa: E731
    facts = TokenFacts(
        advantage_U=spread([branch.advantage for branch in made]),
        weight_U=spread([branch.weight for branch in made]),
        recorded_U=torch.cat([torch.tensor(branch.call.logprobs) for branch in made]),
        old_U=logp_N.detach(),
        entropy_U=entropy_N.detach(),
    )
    calls = [(branch.call.call_id, size) for branch, size in zip(made, sizes, strict=True)]
    update = Update(logp_N=logp_N, facts=facts, calls=calls, episodes=episodes_of(batch))
    module: dict[str, Any] = {}
    exec(SOURCE, module)
    loss_N = module["coupled_loss"](update.tokens(spec, logp_N))
    return (loss_N * facts.weight_U).sum()
