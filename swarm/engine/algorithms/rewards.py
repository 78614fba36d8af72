"""Baselines and returns: group-relative, leave-one-out, whitened, discounted, and generalised advantage estimates."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from statistics import fmean, pstdev

_STD_FLOOR = 1e-6
_VARIANCE_FLOOR = 1e-8


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One agent's part of one episode: its trained tokens, calls concatenated, and the final reward.

    group: the same for all trajectories that are compared with each other.
    penalties: deduction from the reward for each token.
    values: the critic's estimate before each token.
    recorded, logps: log-probabilities by the sampler, and by the trainer before the step.
    entropies: entropy of each token's distribution before the step.
    calls: number of tokens of each call. All other sequences have one entry per token, or are empty.
    """

    group: Hashable
    reward: float
    tokens: int
    penalties: Sequence[float] = ()
    values: Sequence[float] = ()
    recorded: Sequence[float] = ()
    logps: Sequence[float] = ()
    entropies: Sequence[float] = ()
    calls: Sequence[int] = ()

    @property
    def net(self) -> Trajectory:
        """A copy of this trajectory without penalties: their sum is subtracted from the reward."""
        return replace(self, reward=self.reward - math.fsum(self.penalties), penalties=())

    @property
    def token_rewards(self) -> list[float]:
        """Reward of each token: minus its penalty; the last token also gets the trajectory's reward."""
        earned = [-penalty for penalty in self.penalties] or [0.0] * self.tokens
        if earned:
            earned[-1] += self.reward
        return earned


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """Advantage of each token of a trajectory. `targets` has the critic's target before each token, if there is a critic."""

    advantages: Sequence[float]
    targets: Sequence[float] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Episodes:
    """The episodes of a batch, with one entry for each agent in them. `of_call` maps each trainable call's id to its entry."""

    rewards: Sequence[float]
    groups: Sequence[int]
    of_call: Mapping[str, int]


def within_groups(
    trajectories: Sequence[Trajectory], relative: Callable[[Sequence[float]], Sequence[float]]
) -> list[float]:
    """Apply `relative` to each group's rewards; return the results in the trajectories' order."""
    members: dict[Hashable, list[int]] = {}
    for index, trajectory in enumerate(trajectories):
        members.setdefault(trajectory.group, []).append(index)
    result = [0.0] * len(trajectories)
    for indices in members.values():
        for index, value in zip(indices, relative([trajectories[i].reward for i in indices]), strict=True):
            result[index] = value
    return result


def group_relative(rewards: Sequence[float], norm: str) -> list[float]:
    """Subtract the mean from the rewards; with norm "std", also divide by their standard deviation.

    All zero when the rewards are equal. Source: Shao et al. 2024, DeepSeekMath (arXiv 2402.03300), section 4.1.2.
    """
    if max(rewards) == min(rewards):
        return [0.0] * len(rewards)
    mean = fmean(rewards)
    scale = pstdev(rewards) + _STD_FLOOR if norm == "std" else 1.0
    return [(reward - mean) / scale for reward in rewards]


def leave_one_out(rewards: Sequence[float]) -> list[float]:
    """Subtract from each reward the mean of the others; a single reward becomes 0. Source: Ahmadian et al. 2024 (arXiv 2402.14740),
    section 2.3."""
    count = len(rewards)
    if count == 1 or max(rewards) == min(rewards):
        return [0.0] * count
    return [(reward - fmean(rewards)) * count / (count - 1) for reward in rewards]


def whitened(values: Sequence[float], counts: Sequence[int], norm: str = "std") -> list[float]:
    """Shift the values to zero mean and, with norm "std", scale them to unit variance (unbiased). `counts` says how many tokens have
    each value.

    A value with count 0 becomes 0. All values become 0 if those with a count are equal, or if there are fewer than two tokens.
    """
    total = sum(counts)
    counted = [value for value, count in zip(values, counts, strict=True) if count]
    if total < 2 or max(counted) == min(counted):
        return [0.0] * len(values)
    mean = math.fsum(value * count for value, count in zip(values, counts, strict=True)) / total
    scale = 1.0
    if norm == "std":
        squares = math.fsum(count * (value - mean) ** 2 for value, count in zip(values, counts, strict=True))
        scale = math.sqrt(squares / (total - 1) + _VARIANCE_FLOOR)
    return [(value - mean) / scale if count else 0.0 for value, count in zip(values, counts, strict=True)]


def whitened_tokens(sequences: Sequence[Sequence[float]], norm: str = "std") -> list[list[float]]:
    """Apply `whitened` over the tokens of all sequences."""
    flat = list(chain.from_iterable(sequences))
    rest = iter(whitened(flat, [1] * len(flat), norm))
    return [[next(rest) for _ in sequence] for sequence in sequences]


def discounted(rewards: Sequence[float], gamma: float) -> list[float]:
    """Return the discounted return from each token onward."""
    result, ahead = [0.0] * len(rewards), 0.0
    for at in reversed(range(len(rewards))):
        result[at] = ahead = rewards[at] + gamma * ahead
    return result


def generalised(rewards: Sequence[float], values: Sequence[float], gamma: float, lam: float) -> list[float]:
    """Return generalised advantage estimates; nothing follows the last token.

    delta_t = r_t + gamma V_{t+1} - V_t, A_t = delta_t + gamma lambda A_{t+1}. Source: Schulman et al. 2016 (arXiv
    1506.02438), eq. 16.
    """
    result = [0.0] * len(rewards)
    advantage = value_ahead = 0.0
    for at in reversed(range(len(rewards))):
        delta = rewards[at] + gamma * value_ahead - values[at]
        result[at] = advantage = delta + gamma * lam * advantage
        value_ahead = values[at]
    return result
