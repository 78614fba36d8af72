"""DAPO: GRPO with a higher upper clip, batches of groups whose rewards differ, a loss over tokens, and soft overlong punishment.

Clip-higher: clip(r_t, 1 - 0.2, 1 + 0.28). Token-level loss: mean over all trained tokens. Dynamic sampling: the batch rule
`informative_tasks`, which is the default for this algorithm. Overlong shaping adds R(y) to the reward. With limit L and buffer C,
R(y) = 0 for |y| <= L - C, and max(-1, ((L - C) - |y|) / C) for longer answers. Source: Yu et al. 2025 (arXiv 2503.14476),
eq. 8 to 13.
"""

from __future__ import annotations

from swarm.engine.algorithms.grpo import Grpo


class Dapo(Grpo):
    """Implements overlong shaping; the other three parts are default settings."""

    def shaped(self, reward: float, longest: int, limit: int) -> float:
        buffer = self.spec.overlong_buffer * limit
        over = longest - (limit - buffer)
        if buffer <= 0 or over <= 0:
            return reward
        return reward - self.spec.overlong_penalty * min(over / buffer, 1.0)
