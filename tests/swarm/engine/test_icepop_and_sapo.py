"""IcePop and SAPO against their papers' formulas, token by token, on random ragged answers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.engine.algorithms import algorithm_of
from swarm.engine.algorithms.facts import TokenFacts
from swarm.protocol.algorithms import AlgorithmSpec

Answer = list[tuple[float, float, float]]
"""Per token: log-probability now, log-ratio of now to before, log-ratio of before to sampled."""
TOKEN = st.tuples(st.floats(-8, -0.01), st.floats(-3, 3), st.floats(-3, 3))
ANSWERS = st.lists(st.tuples(st.floats(-2, 2), st.lists(TOKEN, min_size=1, max_size=6)), min_size=1, max_size=5)


def ours(spec: AlgorithmSpec, answers: list[tuple[float, Answer]]) -> tuple[float, list[float]]:
    """Loss, averaged inside each answer, then over answers; and its gradient by the log-probabilities now."""
    rows = [(advantage, *token, len(answer)) for advantage, answer in answers for token in answer]
    advantage_U, logp_U, gap_U, mismatch_U, size_U = torch.tensor(rows, dtype=torch.float64).T
    logp_U = logp_U.clone().requires_grad_()
    old_U = (logp_U - gap_U).detach()
    facts = TokenFacts(
        advantage_U=advantage_U, weight_U=1 / (size_U * len(answers)), recorded_U=old_U - mismatch_U, old_U=old_U
    )
    loss = algorithm_of(spec).loss(logp_U, torch.zeros_like(old_U), facts)
    loss.backward()
    assert logp_U.grad is not None
    return float(loss.detach()), logp_U.grad.tolist()


def icepop(advantage: float, gap: float, mismatch: float) -> tuple[float, float]:
    """Objective and its derivative: M(k) min(r A, clip(r, 0.8, 1.2) A), k kept within [0.5, 5]."""
    ratio, k = math.exp(gap), math.exp(mismatch)
    weight = k if 0.5 <= k <= 5.0 else 0.0
    clipped = min(max(ratio, 0.8), 1.2)
    own = ratio * advantage <= clipped * advantage
    return weight * min(ratio * advantage, clipped * advantage), weight * ratio * advantage * own


def sapo(advantage: float, gap: float, mismatch: float) -> tuple[float, float]:
    """Objective and its derivative: f(r) A, f(x) = 4 / tau sigmoid(tau (x - 1)); f'(x) = 4 p (1 - p)."""
    ratio, tau = math.exp(gap), 1.0 if advantage > 0 else 1.05
    gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
    return 4 / tau * gate * advantage, 4 * gate * (1 - gate) * ratio * advantage


@pytest.mark.parametrize(("name", "formula"), [("icepop", icepop), ("sapo", sapo)])
@given(answers=ANSWERS)
@settings(max_examples=60, deadline=None)
def test_loss_and_gradient_are_the_papers(name: str, formula: Any, answers: list[tuple[float, Answer]]) -> None:
    loss, gradient = ours(AlgorithmSpec(name=name), answers)
    priced = [
        [value / len(answer) / len(answers) for value in formula(advantage, gap, mismatch)]
        for advantage, answer in answers
        for _, gap, mismatch in answer
    ]
    gains, slopes = zip(*priced, strict=True)
    assert loss == pytest.approx(-sum(gains), rel=1e-9, abs=1e-9)
    assert gradient == pytest.approx([-slope for slope in slopes], rel=1e-6, abs=1e-9)


def test_where_trainer_and_sampler_agree_icepop_is_grpo_and_sapo_begins_as_the_policy_gradient() -> None:
    answers = [(1.0, [(-1.0, 0.0, 0.0), (-2.0, 0.0, 0.0)]), (-1.0, [(-0.5, 0.0, 0.0)])]
    plain = ours(AlgorithmSpec(name="grpo"), answers)
    assert ours(AlgorithmSpec(name="icepop"), answers) == plain
    assert ours(AlgorithmSpec(name="sapo"), answers)[1] == pytest.approx(plain[1])
