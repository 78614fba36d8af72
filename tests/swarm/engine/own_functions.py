"""A user's file: functions that do what built-in algorithms do, and one that couples all tokens of an update."""

SOURCE = """
import torch
from swarm.engine.algorithms.functions import Tokens, mean_by


def advantage(t: Tokens):
    return (t.reward_E - mean_by(t.reward_E, t.group_E))[t.episode_N]


def loss(t: Tokens):
    ratio = (t.logp_N - t.old_logp_N).clamp(max=30.0).exp()
    low, high = 1 - t.settings.clip_low, 1 + t.settings.clip_high
    return -torch.minimum(ratio * t.advantage_N, ratio.clamp(low, high) * t.advantage_N)


def coupled_loss(t: Tokens):
    gap = t.logp_N - t.old_logp_N
    by_call, by_group = mean_by(gap, t.call_N, t.mask_N), mean_by(t.logp_N, t.group_N, t.mask_N)
    return -(by_call.clamp(max=30.0).exp() * t.advantage_N) + 0.1 * by_group.square() - 0.01 * t.entropy_N * t.logp_N


def correction(t: Tokens):
    ratio = (t.old_logp_N - t.sampled_logp_N).clamp(max=30.0).exp()
    return ratio * (ratio <= t.settings.importance_limit)
"""


def own(**fields: str) -> dict[str, object]:
    """An algorithm whose fields name functions of the file."""
    return {**fields, "sources": {"mine.py": SOURCE}}
