"""Users' functions, whose source is part of a run's spec: their arguments, and how we call them.

Each takes only `Tokens` and returns one number per token. Its source is executed afresh for every call, so that it keeps no state
between calls and a replay repeats the run. Tensor suffixes: N tokens, calls concatenated; E episodes of the batch, with
one entry per agent; X any.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from swarm.engine.algorithms.facts import TokenFacts
from swarm.engine.algorithms.rewards import Episodes
from swarm.engine.seam import TrainingRefused
from swarm.protocol.algorithms import AlgorithmSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """The sampled tokens that are trained together, on the CPU. Log-probabilities are after temperature.

    An advantage function gets the whole batch; a loss or an importance correction gets one update (a minibatch). Where mask_N is False,
    the token is not trained: it must not affect the results of other tokens, and its own result is ignored.
    """

    logp_N: Tensor
    """Log-probability under the current weights. A loss gets its gradient through it. Before a step's first update it equals
    old_logp_N."""
    old_logp_N: Tensor
    """Log-probability computed by the trainer with the weights before the step."""
    sampled_logp_N: Tensor
    """Log-probability recorded by the sampler."""
    entropy_N: Tensor
    """Entropy of the distribution that the token was sampled from, under the weights before the step, in nats."""
    mask_N: Tensor
    """bool: whether the token is trained. Engines pass only trained tokens; `swarm algorithm check` also passes others."""
    advantage_N: Tensor
    """Advantages; 0 when the function itself computes the advantage."""
    call_N: Tensor
    """int64: index of the call that sampled the token."""
    episode_N: Tensor
    """int64: index of the token's episode among the E episodes."""
    reward_E: Tensor
    """Reward after shaping; for an advantage function, minus the penalty of `kl_in: reward`."""
    group_E: Tensor
    """int64: index of the episode's group. A group is all episodes of one task by one agent."""
    settings: AlgorithmSpec
    """The fields of the run's algorithm: clip_low, clip_high, importance_limit and so on."""

    @property
    def group_N(self) -> Tensor:
        """The group of each token's episode."""
        return self.group_E[self.episode_N]


def mean_by(value_X: Tensor, index_X: Tensor, mask_X: Tensor | None = None) -> Tensor:
    """Return for each entry the mean over all entries with the same index.

    With a mask, only entries where it is True count; the mean is 0 if there are none. `mean_by(t.reward_E, t.group_E)` is each
    episode's group mean, `mean_by(t.logp_N, t.call_N, t.mask_N)` each token's mean over its call.
    """
    counted_X = torch.ones_like(value_X) if mask_X is None else mask_X.to(value_X.dtype)
    size = int(index_X.max()) + 1 if len(index_X) else 0
    zeros_I = torch.zeros(size, dtype=value_X.dtype, device=value_X.device)
    sum_I, count_I = (zeros_I.index_add(0, index_X, each) for each in (value_X * counted_X, counted_X))
    return (sum_I / count_I.clamp(min=1.0))[index_X]


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """All tokens of one update. `facts` must have `old_U` and `entropy_U`. `calls` has each call's id and its number of sampled
    tokens."""

    logp_N: Tensor
    facts: TokenFacts
    calls: Sequence[tuple[str, int]]
    episodes: Episodes

    def tokens(self, settings: AlgorithmSpec, logp_N: Tensor) -> Tokens:
        """Return the argument of a user's function. Gradients flow through `logp_N`, the current log-probabilities."""
        facts = self.facts
        if facts.old_U is None or facts.entropy_U is None:
            raise ValueError(
                "a user's function needs old_U and entropy_U, the log-probabilities and entropies before the step"
            )
        sizes = torch.tensor([size for _, size in self.calls])
        entries = torch.tensor([self.episodes.of_call[name] for name, _ in self.calls])
        return Tokens(
            logp_N=logp_N,
            old_logp_N=facts.old_U,
            sampled_logp_N=facts.recorded_U,
            entropy_N=facts.entropy_U,
            mask_N=torch.ones_like(logp_N, dtype=torch.bool),
            advantage_N=facts.advantage_U,
            call_N=torch.arange(len(sizes)).repeat_interleave(sizes),
            episode_N=entries.repeat_interleave(sizes),
            reward_E=torch.tensor(self.episodes.rewards, dtype=logp_N.dtype),
            group_E=torch.tensor(self.episodes.groups),
            settings=settings,
        )


class OwnFunction:
    """One function from the spec's sources. `field` is the algorithm's field that names it."""

    def __init__(self, spec: AlgorithmSpec, field: str) -> None:
        self.file, self.name = spec.own_functions[field]
        self._text = spec.sources[self.file]

    def __call__(self, tokens: Tokens) -> Tensor:
        """Return one number per token, [N], in the dtype of the log-probabilities; 0 where the mask is False. Raises:
        TrainingRefused."""
        module = ModuleType(f"own function {self.file}")
        sys.modules[module.__name__] = module  # dataclasses look it up there
        try:
            exec(compile(self._text, self.file, "exec", dont_inherit=True), module.__dict__)
            answer = getattr(module, self.name)(tokens)
        except (Exception, SystemExit) as error:  # an error in a user's code ends the run, but not the trainer
            raise self._refused(f"raised {type(error).__name__}: {error}{self._line(error)}") from error
        finally:
            sys.modules.pop(module.__name__, None)
        if not isinstance(answer, torch.Tensor):
            raise self._refused(f"returned {type(answer).__name__}, not a tensor with one number per token")
        if answer.shape != tokens.logp_N.shape:
            shapes = f"shape {list(answer.shape)}, not {list(tokens.logp_N.shape)}"
            raise self._refused(f"returned {shapes}: return one number per token, not a sum")
        answer = torch.where(tokens.mask_N, answer.to(tokens.logp_N.dtype), 0.0)
        if not bool(answer.isfinite().all()):
            raise self._refused("returned numbers that are not finite; bound its divisors and exponents")
        return answer

    def _line(self, error: BaseException) -> str:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == self.file]
        return f" (line {lines[-1]})" if lines else ""

    def _refused(self, what: str) -> TrainingRefused:
        return TrainingRefused(f"{self.file}:{self.name} {what}; try it with `swarm algorithm check`")
