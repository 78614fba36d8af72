"""Every algorithm on the prefix tree against the same algorithm call by call, and the critic's life."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from foundation.clock import SystemClock
from swarm.engine.algorithms import algorithm_of
from swarm.engine.algorithms.facts import TokenFacts
from swarm.engine.local.forward import Policy
from swarm.engine.local.head import Critic
from swarm.engine.local.learner import Learner
from swarm.engine.local.session import LocalSession
from swarm.engine.seam import TrainBatch
from swarm.engine.training.channel import OpenRun
from swarm.engine.training.selection import CallNotes, branches, credit, select
from swarm.models.folder import ModelFolder
from swarm.protocol.algorithms import ALGORITHMS
from tests.swarm.engine.batches import branching_batch
from tests.swarm.engine.local.test_learner import FREE, distance, gradient, learner_of, weights_of
from tests.swarm.engine.plain_grpo import distribution


def load(path: Path, weights: dict[str, Tensor] | None = None) -> torch.nn.Module:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    if weights is not None:
        model.load_state_dict(weights, strict=False)
        model.tie_weights()
    return model


def call_by_call(
    path: Path, batch: TrainBatch, now: dict[str, Tensor], before: dict[str, Tensor]
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradient at the weights `now`, in a step that began at `before`. Its critic says 0 of every state."""
    spec = batch.spec.algorithm
    algorithm = algorithm_of(spec)
    model, old_model, start_model = load(path, now), load(path, before), load(path)
    made = branches(select(batch).trained, spec)
    old, start = {}, {}
    with torch.no_grad():
        for branch in made:
            old[branch.call.call_id] = distribution(old_model, branch.call)[0]
            start[branch.call.call_id] = distribution(start_model, branch.call)[0]
    notes = {
        name: CallNotes(
            penalties=(spec.kl * (old[name] - start[name])).tolist() if algorithm.penalises else (),
            values=[0.0] * len(old[name]) if algorithm.has_critic else (),
        )
        for name in old
    }
    earned = credit(batch, notes) if algorithm.credits_tokens else {}
    total = torch.zeros(())
    for branch in made:
        name, size = branch.call.call_id, len(branch.call.sampled_ids)
        logp_S, entropy_S = distribution(model, branch.call)
        advantages = list(earned[name].advantages) if earned else [branch.advantage] * size
        recorded_S = torch.tensor(branch.call.logprobs)
        facts = TokenFacts(
            advantage_U=torch.tensor(advantages),
            weight_U=torch.full((size,), branch.weight),
            recorded_U=recorded_S,
            old_U=old[name],
            start_U=start[name],
            call_gap_U=(logp_S.detach() - old[name]).mean().expand(size),
            rollout_gap_U=(old[name] - recorded_S).sum().expand(size),
        )
        total = total + algorithm.loss(logp_S, entropy_S, facts)
    total.backward()
    return float(total.detach()), {name: weight.grad.clone() for name, weight in model.named_parameters()}


CASES: list[dict[str, Any]] = [
    *({"name": name, "kl": 0.2, "entropy": 0.01} for name in sorted(ALGORITHMS)),
    {"name": "grpo", "importance_correction": "truncated_call"},
    {"name": "rloo", "kl": 0.2, "kl_in": "reward"},
    {"name": "reinforce_pp", "gamma": 0.9, "baseline": "group"},
]


@pytest.mark.parametrize("algorithm", CASES, ids=str)
def test_a_second_step_on_the_tree_is_that_of_call_by_call_training(
    tiny_llama: ModelFolder, algorithm: dict[str, Any]
) -> None:
    learner = learner_of(tiny_llama)
    learner.policy.segment_tokens = 6
    learner.learn(branching_batch(optimizer=FREE))
    before = weights_of(learner)
    made = branching_batch(step=2, algorithm=algorithm, optimizer=FREE)
    outcome = learner.learn(made)
    loss, expected = call_by_call(tiny_llama.path, made, before, before)
    assert outcome.metrics["loss"] == pytest.approx(loss, rel=1e-4, abs=1e-5)
    assert distance(gradient(learner), expected) < 5e-5


@pytest.mark.parametrize("name", ["gspo", "cispo", "ppo"])
def test_a_second_epoch_prices_against_the_weights_before_the_step(tiny_llama: ModelFolder, name: str) -> None:
    fields = {"algorithm": {"name": name, "clip_low": 0.3, "clip_high": 0.3}}
    rate = FREE | {"learning_rate": 3e-4}
    once = learner_of(tiny_llama)
    once.policy.segment_tokens = 6
    before = weights_of(once)
    once.learn(branching_batch(optimizer=rate, **fields))
    made = branching_batch(optimizer=rate | {"epochs": 2}, **fields)
    learner = learner_of(tiny_llama)
    learner.policy.segment_tokens = 6
    learner.learn(made)
    _, expected = call_by_call(tiny_llama.path, made, weights_of(once), before)
    assert distance(gradient(learner), expected) < 1e-3


def test_only_what_an_algorithm_needs_is_computed(tiny_llama: ModelFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[bool] = []
    hidden = Policy.hidden

    def counted(policy: Policy, *args: Any) -> Tensor:
        reads.append(torch.is_grad_enabled())
        return hidden(policy, *args)

    monkeypatch.setattr(Policy, "hidden", counted)
    for name, extra in (("grpo", 0), ("gspo", 0), ("reinforce_pp", 0), ("ppo", 1)):
        reads.clear()
        learner_of(tiny_llama).learn(branching_batch(algorithm={"name": name}))
        assert (reads.count(True), reads.count(False)) == (1, extra), name  # extra: what the critic values beforehand


# -- the critic -------------------------------------------------------------------------------------------------------------


def test_the_critic_learns_to_foresee_rewards(tiny_llama: ModelFolder) -> None:
    learner = learner_of(tiny_llama)
    fields = {"algorithm": {"name": "ppo", "value_learning_rate": 0.01}, "optimizer": {"learning_rate": 0.0}}
    seen = [learner.learn(branching_batch(step=step, **fields)).metrics for step in range(1, 31)]
    assert seen[0]["value_explained"] == 0.0
    assert seen[-1]["value_loss"] < 0.9 * seen[0]["value_loss"]
    assert seen[-1]["value_explained"] > 0.0


def test_the_critics_loss_reaches_the_body_only_when_asked(tiny_llama: ModelFolder) -> None:
    gradients = []
    for coefficient in (0.0, 0.5):
        learner = learner_of(tiny_llama)
        learner.critic.restore(_critic_state(learner))
        learner.learn(branching_batch(algorithm={"name": "ppo", "value_coef": coefficient}, optimizer=FREE))
        gradients.append(gradient(learner))
    assert distance(gradients[1], gradients[0]) > 1e-3


def _critic_state(learner: Learner) -> dict[str, Tensor]:
    width = learner.policy.output_weight.shape[1]
    critic = Critic(width, torch.device("cpu"))
    critic.values(torch.randn(4, width, generator=torch.Generator().manual_seed(3))).sum().backward()
    critic.step(0.5)
    return critic.state()


def test_a_restored_critic_goes_on_bit_by_bit(tiny_llama: ModelFolder, tmp_path: Path) -> None:
    ppo: dict[str, Any] = {"algorithm": {"name": "ppo", "value_coef": 0.1}, "optimizer": {"learning_rate": 1e-3}}
    batches = [branching_batch(step=step, **ppo) for step in (1, 2, 3)]

    def opened() -> LocalSession:
        session = LocalSession(Policy.load(tiny_llama.path), tiny_llama.fingerprint, SystemClock())
        spec = batches[0].spec
        session.open_run(OpenRun(run_id="run", branch=0, spec=spec, directory=tmp_path / "run", at_step=None))
        return session

    whole = opened()
    for batch in batches[:2]:
        whole.train(batch)
    whole.checkpoint()
    after = whole.train(batches[2]).metrics
    restored = opened()
    again = restored.train(batches[2]).metrics
    assert {name: value for name, value in again.items() if name != "train_s"} == {
        name: value for name, value in after.items() if name != "train_s"
    }
    ours, theirs = whole._learner.state(), restored._learner.state()
    assert ours.keys() == theirs.keys()
    assert "critic/weight/exp_avg" in ours
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_runs_without_a_critic_keep_none_in_their_checkpoints(tiny_llama: ModelFolder) -> None:
    learner = learner_of(tiny_llama)
    learner.learn(branching_batch())
    assert not any(name.startswith("critic/") for name in learner.state())


def test_a_call_left_out_leaves_its_agents_other_calls_their_credit(tiny_llama: ModelFolder) -> None:
    made = branching_batch(algorithm={"name": "ppo"})
    episode = made.groups[0].episodes[0]
    cut = replace(episode, calls=[episode.calls[0], replace(episode.calls[1], reproducible=False)])
    group = replace(made.groups[0], episodes=[cut, *made.groups[0].episodes[1:]])
    outcome = learner_of(tiny_llama).learn(replace(made, groups=[group, *made.groups[1:]]))
    left = len(episode.calls[1].sampled_ids)
    whole = sum(len(call.sampled_ids) for some in made.groups for one in some.episodes for call in one.calls)
    assert outcome.metrics["tokens_trained"] == whole - left
