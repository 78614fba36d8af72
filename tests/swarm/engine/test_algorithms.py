"""Each algorithm on random rewards and log-probabilities with ragged masks: against its formula written out, and against verl.

verl is compared where it is installed; the plain formulas stand by themselves.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from swarm.engine.algorithms import algorithm_of
from swarm.engine.algorithms.facts import TokenFacts
from swarm.engine.algorithms.rewards import Trajectory
from swarm.protocol.algorithms import ALGORITHMS, AlgorithmSpec
from tests.swarm.engine.verl.platform_environment import ENVIRONMENT

SEEDS = range(4)
GROUPS, SIZE, WIDTH = 3, 4, 9


class Batch:
    """Random answers in groups, padded to one width. Suffixes: B answers, T tokens."""

    def __init__(self, seed: int, spread: float = 0.4) -> None:
        make = torch.Generator().manual_seed(seed)
        count = GROUPS * SIZE
        self.lengths_B = torch.randint(1, WIDTH + 1, (count,), generator=make)
        self.mask_BT = (torch.arange(WIDTH)[None] < self.lengths_B[:, None]).float()
        self.group_B = [index // SIZE for index in range(count)]
        self.reward_B = torch.randn(count, generator=make).double()
        self.reward_B[:SIZE] = 1.0  # a group without differences
        draw = lambda scale: torch.randn(count, WIDTH, generator=make) * scale  # noqa: E731
        self.old_BT = -draw(1.0).abs() - 0.1
        self.logp_BT = self.old_BT + draw(spread)
        self.recorded_BT = self.old_BT + draw(spread)
        self.start_BT = self.old_BT + draw(spread)
        self.value_BT = draw(1.0)
        self.entropy_BT = draw(1.0).abs()

    def trajectories(self, kl: float = 0.0) -> list[Trajectory]:
        penalty_BT = kl * (self.old_BT - self.start_BT).double()
        return [
            Trajectory(
                group=self.group_B[index],
                reward=float(self.reward_B[index]),
                tokens=size,
                penalties=penalty_BT[index, :size].tolist() if kl else (),
                values=self.value_BT[index, :size].tolist(),
            )
            for index, size in enumerate(self.lengths_B.tolist())
        ]

    def token_rewards(self, kl: float = 0.0) -> Tensor:
        """[B, T]: the outcome at each answer's last token, and the penalties."""
        rewards_BT = -kl * (self.old_BT - self.start_BT).double() * self.mask_BT
        rewards_BT[torch.arange(len(self.reward_B)), self.lengths_B - 1] += self.reward_B
        return rewards_BT

    def facts(self, advantage_BT: Tensor, loss_agg: str, loss_length: int) -> TokenFacts:
        kept = self.mask_BT.bool()
        count_B = self.lengths_B.float()
        weight_B = {
            "token": torch.ones_like(count_B) / count_B.sum(),
            "call": 1 / (count_B * len(count_B)),
            "episode": 1 / (count_B * len(count_B)),
            "constant": torch.ones_like(count_B) / (len(count_B) * loss_length),
        }[loss_agg]
        gap_B = ((self.logp_BT - self.old_BT) * self.mask_BT).sum(1) / count_B
        rollout_B = ((self.old_BT - self.recorded_BT) * self.mask_BT).sum(1)
        wide = lambda values_B: values_B[:, None].expand_as(self.mask_BT)[kept]  # noqa: E731
        return TokenFacts(
            advantage_U=advantage_BT[kept],
            weight_U=wide(weight_B),
            recorded_U=self.recorded_BT[kept],
            old_U=self.old_BT[kept],
            start_U=self.start_BT[kept],
            call_gap_U=wide(gap_B),
            rollout_gap_U=wide(rollout_B),
        )


def ours(made: Batch, spec: AlgorithmSpec, advantage_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Loss, and its gradient by the log-probabilities, [B, T]."""
    logp_BT = made.logp_BT.clone().requires_grad_()
    kept = made.mask_BT.bool()
    facts = made.facts(advantage_BT, spec.loss_agg, spec.loss_length)
    loss = algorithm_of(spec).loss(logp_BT[kept], made.entropy_BT[kept], facts)
    loss.backward()
    return loss.detach(), logp_BT.grad


def theirs(made: Batch, loss_of: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    logp_BT = made.logp_BT.clone().requires_grad_()
    loss = loss_of(logp_BT)
    loss.backward()
    return loss.detach(), logp_BT.grad


def padded(rows: list[list[float]]) -> Tensor:
    return torch.tensor([[*row, *[0.0] * (WIDTH - len(row))] for row in rows], dtype=torch.float64)


def advantages(made: Batch, spec: AlgorithmSpec) -> Tensor:
    """As the trainer takes them, [B, T]."""
    algorithm = algorithm_of(spec)
    paths = made.trajectories(spec.kl if algorithm.penalises else 0.0)
    if algorithm.credits_tokens:
        return padded([list(credit.advantages) for credit in algorithm.credit(paths)])
    return padded([[a] * path.tokens for a, path in zip(algorithm.outcomes(paths), paths, strict=True)])


def spec_of(name: str, **fields: Any) -> AlgorithmSpec:
    return AlgorithmSpec.model_validate({"name": name} | fields)


def test_a_group_baseline_finds_no_difference_between_equal_rewards() -> None:
    """The mean of three times 0.1 is not 0.1 in floating point."""
    paths = [Trajectory(group=reward, reward=reward, tokens=2) for reward in (0.1, 0.5) for _ in range(3)]
    algorithm = algorithm_of(spec_of("reinforce_pp", baseline="group"))
    assert algorithm.outcomes(paths) == [0.0] * 6
    assert [list(credit.advantages) for credit in algorithm.credit(paths)] == [[0.0] * 2] * 6


# -- advantages, written out ------------------------------------------------------------------------------------------------


def by_group(made: Batch, formula: Callable[[Tensor], Tensor], reward_B: Tensor | None = None) -> Tensor:
    reward_B = made.reward_B if reward_B is None else reward_B
    return torch.cat([formula(part) for part in reward_B.split(SIZE)])[:, None] * made.mask_BT


def normal(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    kept = values_BT[mask_BT.bool()]
    return (values_BT - kept.mean()) / (kept.var() + 1e-8).sqrt() * mask_BT


def to_go(made: Batch, rewards_BT: Tensor, gamma: float) -> Tensor:
    result_BT = torch.zeros_like(rewards_BT)
    for answer, size in enumerate(made.lengths_B.tolist()):
        for at in range(size):
            result_BT[answer, at] = sum(gamma ** (k - at) * rewards_BT[answer, k] for k in range(at, size))
    return result_BT


def gae(made: Batch, rewards_BT: Tensor, gamma: float, lam: float) -> Tensor:
    result_BT = torch.zeros_like(rewards_BT)
    for answer, size in enumerate(made.lengths_B.tolist()):
        value = [*made.value_BT[answer, :size].double(), 0.0]
        delta = [rewards_BT[answer, at] + gamma * value[at + 1] - value[at] for at in range(size)]
        for at in range(size):
            result_BT[answer, at] = sum((gamma * lam) ** (k - at) * delta[k] for k in range(at, size))
    return result_BT


def std_of_group(part: Tensor) -> Tensor:
    return (part - part.mean()) / (part.std(unbiased=False) + 1e-6)


def centred(part: Tensor) -> Tensor:
    return part - part.mean()


def without_own(part: Tensor) -> Tensor:
    return torch.stack([part[i] - torch.cat([part[:i], part[i + 1 :]]).mean() for i in range(len(part))])


ADVANTAGES: list[tuple[dict[str, Any], Callable[[Batch], Tensor]]] = [
    *(
        ({"name": name}, lambda b: by_group(b, std_of_group))
        for name in ("grpo", "dapo", "gspo", "cispo", "icepop", "sapo")
    ),
    ({"name": "grpo", "advantage_norm": "none"}, lambda b: by_group(b, centred)),
    ({"name": "dr_grpo"}, lambda b: by_group(b, centred)),
    ({"name": "rloo"}, lambda b: by_group(b, without_own)),
    (
        {"name": "rloo", "kl": 0.3, "kl_in": "reward"},
        lambda b: by_group(b, without_own, b.token_rewards(0.3).sum(1)),
    ),
    ({"name": "reinforce_pp"}, lambda b: normal(to_go(b, b.token_rewards(), 1.0), b.mask_BT)),
    (
        {"name": "reinforce_pp", "kl": 0.2, "gamma": 0.9},
        lambda b: normal(to_go(b, b.token_rewards(0.2), 0.9), b.mask_BT),
    ),
    ({"name": "reinforce_pp", "baseline": "group"}, lambda b: normal(by_group(b, centred), b.mask_BT)),
    (
        {"name": "ppo", "gamma": 0.97, "gae_lambda": 0.8, "kl": 0.2},
        lambda b: normal(gae(b, b.token_rewards(0.2), 0.97, 0.8), b.mask_BT),
    ),
    ({"name": "ppo", "advantage_norm": "none"}, lambda b: gae(b, b.token_rewards(), 1.0, 1.0) * b.mask_BT),
]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("fields", "formula"), ADVANTAGES, ids=lambda value: str(value) if isinstance(value, dict) else ""
)
def test_advantages_are_the_formula(fields: dict[str, Any], formula: Callable[[Batch], Tensor], seed: int) -> None:
    made = Batch(seed)
    assert torch.allclose(advantages(made, AlgorithmSpec(**fields)), formula(made).double(), atol=1e-6)


def test_a_critic_is_drawn_to_what_followed() -> None:
    made, algorithm = Batch(1), algorithm_of(spec_of("ppo", gae_lambda=0.5, advantage_norm="none"))
    for path, credit in zip(made.trajectories(), algorithm.credit(made.trajectories()), strict=True):
        expected = torch.tensor(list(credit.advantages)) + torch.tensor(list(path.values))
        assert torch.allclose(torch.tensor(list(credit.targets)), expected)
    monte_carlo = algorithm_of(spec_of("ppo")).credit(made.trajectories())
    for path, credit in zip(made.trajectories(), monte_carlo, strict=True):
        assert list(credit.targets) == pytest.approx([path.reward] * path.tokens)


@pytest.mark.parametrize(("longest", "lost"), [(80, 0.0), (81, 0.05), (90, 0.5), (100, 1.0), (130, 1.0)])
def test_dapo_takes_reward_from_long_answers(longest: int, lost: float) -> None:
    assert algorithm_of(spec_of("dapo")).shaped(1.0, longest, 100) == pytest.approx(1.0 - lost)
    assert algorithm_of(spec_of("dapo", overlong_buffer=0.0)).shaped(1.0, longest, 100) == 1.0
    assert algorithm_of(spec_of("grpo")).shaped(1.0, longest, 100) == 1.0


# -- losses, written out ----------------------------------------------------------------------------------------------------


def aggregated(made: Batch, loss_BT: Tensor, spec: AlgorithmSpec) -> Tensor:
    masked_BT = loss_BT * made.mask_BT
    if spec.loss_agg == "token":
        return masked_BT.sum() / made.mask_BT.sum()
    if spec.loss_agg == "constant":
        return (masked_BT.sum(1) / spec.loss_length).mean()
    return (masked_BT.sum(1) / made.lengths_B).mean()


def plain_loss(made: Batch, spec: AlgorithmSpec, advantage_BT: Tensor, logp_BT: Tensor) -> Tensor:
    ratio_BT = (logp_BT - made.old_BT).exp()
    low, high = 1 - spec.clip_low, 1 + spec.clip_high
    if spec.name == "gspo":  # the sequence's own ratio, with its gradient shared by all of its tokens
        mean_B = ((logp_BT - made.old_BT) * made.mask_BT).sum(1) / made.lengths_B
        ratio_BT = mean_B.exp()[:, None].expand_as(made.mask_BT)
        if spec.importance_correction in (
            "truncated",
            "masked",
        ):  # weights of single tokens leave each its own gradient (eq. 14)
            ratio_BT = ratio_BT.detach() * (logp_BT - logp_BT.detach()).exp()
    if spec.name == "cispo":
        gain_BT = ratio_BT.detach().clamp(low, high) * advantage_BT * logp_BT
    elif spec.name == "sapo":
        tau_BT = torch.where(advantage_BT > 0, spec.tau_positive, spec.tau_negative)
        gain_BT = 4 / tau_BT / (1 + (-tau_BT * (ratio_BT - 1)).exp()) * advantage_BT
    else:
        gain_BT = torch.min(ratio_BT * advantage_BT, ratio_BT.clamp(low, high) * advantage_BT)
    if spec.importance_correction != "none":
        gap_BT = (made.old_BT - made.recorded_BT) * made.mask_BT
        if spec.importance_correction.endswith("_call"):
            gap_BT = gap_BT.sum(1, keepdim=True).expand_as(gap_BT)
        weight_BT = gap_BT.exp()
        if spec.importance_correction.startswith("truncated"):
            weight_BT = weight_BT.clamp(max=spec.importance_limit)
        else:
            out_BT = (weight_BT > spec.importance_limit) | (weight_BT < spec.importance_floor)
            weight_BT = weight_BT.masked_fill(out_BT, 0.0)
        gain_BT = gain_BT * weight_BT
    loss_BT = -gain_BT - spec.entropy * made.entropy_BT
    if spec.kl_in == "loss":
        gap_BT = made.start_BT - logp_BT
        loss_BT = loss_BT + spec.kl * (gap_BT.exp() - 1 - gap_BT)
    return aggregated(made, loss_BT, spec)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", sorted(ALGORITHMS))
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"kl": 0.3, "entropy": 0.1},
        {"importance_correction": "truncated"},
        {"importance_correction": "truncated_call", "importance_limit": 1.5},
        {"importance_correction": "masked", "importance_floor": 0.6, "importance_limit": 1.5},
        {"importance_correction": "masked_call", "importance_limit": 1.5},
        {"clip_low": 0.1, "clip_high": 0.05},
    ],
    ids=str,
)
def test_losses_and_their_gradients_are_the_formula(name: str, fields: dict[str, Any], seed: int) -> None:
    fields = {field: value for field, value in fields.items() if field not in ALGORITHMS[name].lacks}
    made, spec = Batch(seed), spec_of(name, **fields)
    advantage_BT = advantages(made, spec).float()
    loss, grad_BT = ours(made, spec, advantage_BT)
    plain, plain_grad_BT = theirs(made, lambda logp_BT: plain_loss(made, spec, advantage_BT, logp_BT))
    assert float(loss) == pytest.approx(float(plain), rel=1e-4, abs=1e-6)
    assert torch.allclose(grad_BT, plain_grad_BT, rtol=1e-4, atol=1e-6)


def test_without_old_log_probabilities_the_ratio_is_one() -> None:
    made = Batch(0)
    kept = made.mask_BT.bool()
    for name in ALGORITHMS:
        algorithm = algorithm_of(spec_of(name))
        facts = TokenFacts(
            advantage_U=torch.ones(int(kept.sum())),
            weight_U=torch.ones(int(kept.sum())),
            recorded_U=made.recorded_BT[kept],
        )
        assert torch.equal(algorithm.ratio(made.logp_BT[kept], facts), torch.ones(int(kept.sum())))
        assert not algorithm.clipped(made.logp_BT[kept], facts).any()


def test_a_value_out_of_reach_gets_no_gradient() -> None:
    algorithm = algorithm_of(spec_of("ppo", value_clip=0.5))
    value_U = torch.tensor([0.2, 0.9, -0.9], requires_grad=True)
    facts = TokenFacts(
        advantage_U=torch.zeros(3),
        weight_U=torch.full((3,), 1 / 3),
        recorded_U=torch.zeros(3),
        value_U=torch.zeros(3),
        target_U=torch.ones(3),
    )
    loss = algorithm.value_loss(value_U, facts)
    loss.backward()
    assert float(loss.detach()) == pytest.approx((0.8**2 + 0.5**2 + 1.9**2) / 6)
    assert value_U.grad is not None
    assert value_U.grad.tolist() == pytest.approx([-0.8 / 3, 0.0, -1.9 / 3])


# -- against verl -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def core() -> Any:
    """verl's own algorithms. verl learns of its platforms once, when it is first imported in this process."""
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in ENVIRONMENT.items():
                patch.setenv(name, value)
            return importlib.import_module("verl.trainer.ppo.core_algos")
    except ImportError as error:
        pytest.skip(f"verl cannot be imported here, the formulas above stand alone: {error}")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", SEEDS)
def test_advantages_are_those_of_verl(core: Any, seed: int) -> None:
    import numpy as np

    made = Batch(seed)
    index, mask_BT, rewards_BT = np.array(made.group_B), made.mask_BT, made.token_rewards()
    bessel = (SIZE / (SIZE - 1)) ** 0.5  # verl divides by the unbiased deviation
    grpo, _ = core.compute_grpo_outcome_advantage(rewards_BT.clone(), mask_BT, index, epsilon=0.0 + 1e-12)
    centred, _ = core.compute_grpo_outcome_advantage(rewards_BT.clone(), mask_BT, index, norm_adv_by_std_in_grpo=False)
    rloo, _ = core.compute_rloo_outcome_advantage(rewards_BT.clone(), mask_BT, index)
    pairs = [
        (spec_of("grpo"), grpo * bessel),
        (spec_of("icepop"), grpo * bessel),
        (spec_of("sapo"), grpo * bessel),
        (spec_of("dr_grpo"), centred),
        (spec_of("rloo"), rloo),
    ]
    for gamma in (1.0, 0.9):
        whole, _ = core.compute_reinforce_plus_plus_outcome_advantage(
            made.token_rewards(0.2), mask_BT, config=SimpleNamespace(gamma=gamma)
        )
        pairs.append((spec_of("reinforce_pp", kl=0.2, gamma=gamma), whole))
    based, _ = core.compute_reinforce_plus_plus_baseline_outcome_advantage(rewards_BT.clone(), mask_BT, index)
    pairs.append((spec_of("reinforce_pp", baseline="group"), based))
    for gamma, lam in ((1.0, 1.0), (0.97, 0.8)):
        gae_BT, targets_BT = core.compute_gae_advantage_return(
            made.token_rewards(0.2), made.value_BT.double(), mask_BT, gamma, lam
        )
        spec = spec_of("ppo", gamma=gamma, gae_lambda=lam, kl=0.2)
        pairs.append((spec, gae_BT * mask_BT))
        credits = algorithm_of(spec).credit(made.trajectories(0.2))
        ours_BT = padded([list(credit.targets) for credit in credits])
        assert torch.allclose(ours_BT, targets_BT * mask_BT, atol=1e-6)
    for spec, expected_BT in pairs:
        assert torch.allclose(advantages(made, spec), expected_BT.double(), atol=1e-5), spec


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("name", "peer", "agg"),
    [
        *(
            (name, peer, agg)
            for name, peer in (("grpo", "vanilla"), ("gspo", "gspo"), ("cispo", "cispo"))
            for agg in ("token", "call", "constant")
        ),
        ("sapo", "sapo", "call"),  # verl's averages over answers whatever it is asked for
    ],
)
@pytest.mark.parametrize("correction", ["none", "truncated", "truncated_call", "masked", "masked_call"])
def test_losses_are_those_of_verl(core: Any, name: str, peer: str, agg: str, correction: str, seed: int) -> None:
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights
    from verl.workers.config import ActorConfig

    made = Batch(seed)
    clip = {} if name == "sapo" else {"clip_low": 0.2, "clip_high": 0.3}
    bounds = {"importance_floor": 0.7} if correction.startswith("masked") else {}
    spec = spec_of(name, loss_agg=agg, loss_length=WIDTH, importance_correction=correction, **clip, **bounds)
    mode = {"token": "token-mean", "call": "seq-mean-token-mean", "constant": "seq-mean-token-sum-norm"}[agg]
    config = ActorConfig(
        strategy="fsdp",
        clip_ratio_low=0.2,
        clip_ratio_high=0.3,
        clip_ratio_c=1e6,
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
    )
    weights_BT = None
    if correction != "none":
        level = "sequence" if correction.endswith("_call") else "token"
        weights_BT, _ = compute_rollout_correction_weights(
            made.old_BT - made.recorded_BT,
            made.mask_BT,
            rollout_is=level,
            rollout_is_threshold="0.7_2.0" if bounds else 2.0,
        )
    advantage_BT = advantages(made, spec).float()

    def peer_loss(logp_BT: Tensor) -> Tensor:
        loss: Tensor = core.get_policy_loss_fn(peer)(
            made.old_BT, logp_BT, advantage_BT, made.mask_BT, mode, config=config, rollout_is_weights=weights_BT
        )[0]
        return loss

    loss, grad_BT = ours(made, spec, advantage_BT)
    expected, expected_BT = theirs(made, peer_loss)
    assert float(loss) == pytest.approx(float(expected), rel=1e-4, abs=1e-6)
    assert torch.allclose(grad_BT, expected_BT, rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", SEEDS)
def test_penalties_and_values_are_priced_as_in_verl(core: Any, seed: int) -> None:
    made, spec = Batch(seed), spec_of("ppo", value_clip=0.3)
    kept = made.mask_BT.bool()
    target_BT = gae(made, made.token_rewards(), 1.0, 1.0).float() + made.value_BT
    new_BT = made.value_BT + 0.4 * torch.randn(made.value_BT.shape, generator=torch.Generator().manual_seed(seed))
    facts = made.facts(torch.zeros_like(made.mask_BT), "token", 1)
    facts = TokenFacts(
        advantage_U=facts.advantage_U,
        weight_U=facts.weight_U,
        recorded_U=facts.recorded_U,
        value_U=made.value_BT[kept],
        target_U=target_BT[kept],
    )
    expected, _ = core.compute_value_loss(new_BT, target_BT, made.value_BT, made.mask_BT, 0.3)
    assert float(algorithm_of(spec).value_loss(new_BT[kept], facts)) == pytest.approx(float(expected), rel=1e-5)
    from swarm.engine.algorithms.facts import kl_to_start

    assert torch.allclose(
        kl_to_start(made.logp_BT, made.start_BT), core.kl_penalty(made.logp_BT, made.start_BT, "k3"), atol=1e-5
    )
