"""Test a user's function on random tokens, in calls of different lengths, before a run relies on it.

Tensor suffixes: N tokens, E episodes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from swarm.engine.algorithms.functions import OwnFunction, Tokens
from swarm.engine.seam import TrainingRefused
from swarm.protocol.algorithms import AlgorithmSpec

_STEP = 1e-6
"""Step size of finite differences, in double precision."""
_CLOSE = 1e-5
"""Maximum error of a gradient, relative to the largest finite difference."""
_SAME = 1e-8
_FAR = 100.0
"""An extreme log-ratio, such as long runs do produce."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Result of one check. passed: None if the check does not apply."""

    check: str
    passed: bool | None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class _Token:
    """A random token. `key` identifies it after tokens are reordered. `gap` is the current minus the old log-probability, `mismatch`
    the old minus the sampled one."""

    key: int
    old: float
    gap: float
    mismatch: float
    entropy: float
    advantage: float
    trained: bool = True


@dataclass(frozen=True, slots=True)
class _Episode:
    reward: float
    calls: list[list[_Token]]


_Groups = list[list[_Episode]]


def check_function(spec: AlgorithmSpec, field: str, *, detached: bool = False, seed: int = 0) -> list[Check]:
    """Run all checks on the function that `field` of the spec names. `detached` skips comparing the loss's gradient with finite
    differences."""
    function, chance = OwnFunction(spec, field), random.Random(seed)
    groups = _groups(chance)
    found = [_runs(function, spec, chance)]
    if not found[0].passed:
        return found
    found += [
        _deterministic(function, spec, groups),
        _order(function, spec, groups, chance),
        *_padding(function, spec, groups, chance),
    ]
    if field != "loss":
        untouched = "does not apply: the trainer treats the function's results as constants"
        return [
            *found,
            Check(check="gradient", passed=None, detail=untouched),
            _extremes(function, spec, groups, loss=False),
        ]
    gradient = Check(check="gradient", passed=None, detail="skipped (--detached)")
    return [
        *found,
        gradient if detached else _gradient(function, spec, groups),
        _extremes(function, spec, groups, loss=True),
    ]


# -- checks -------------------------------------------------------------------------------------------------------------------


def _runs(function: OwnFunction, spec: AlgorithmSpec, chance: random.Random) -> Check:
    """Check that the function runs on batches of several shapes, including a single token and equal rewards."""
    token = _token(chance, 0)
    shapes = [*(_groups(chance) for _ in range(3)), [[_Episode(1.0, [[token]])]], [[_Episode(0.5, [[token]])] * 2]]
    try:
        for groups in shapes:
            for dtype in (torch.float32, torch.float64):
                function(_tokens(groups, spec, dtype)[0])
    except TrainingRefused as error:
        return Check(check="runs", passed=False, detail=str(error))
    return Check(
        check="runs",
        passed=True,
        detail="returns one finite number per token, even for a single token and for equal rewards",
    )


def _deterministic(function: OwnFunction, spec: AlgorithmSpec, groups: _Groups) -> Check:
    tokens, _ = _tokens(groups, spec)
    torch.manual_seed(0)
    first = function(tokens)
    torch.manual_seed(1)
    same = torch.equal(first, function(tokens))
    return Check(
        check="deterministic",
        passed=same,
        detail="" if same else "the same tokens gave different numbers: a replay would differ",
    )


def _order(function: OwnFunction, spec: AlgorithmSpec, groups: _Groups, chance: random.Random) -> Check:
    mixed = [chance.sample(group, len(group)) for group in chance.sample(groups, len(groups))]
    far = _distance(_answers(function, groups, spec), _answers(function, mixed, spec))
    why = "the result depends on the order of episodes and groups, which is arbitrary"
    return Check(check="order", passed=far <= _SAME, detail="" if far <= _SAME else f"{why} (by up to {far:.2g})")


def _padding(function: OwnFunction, spec: AlgorithmSpec, groups: _Groups, chance: random.Random) -> Iterator[Check]:
    """Check that neither the presence nor the values of untrained tokens change the result."""
    bare = _answers(function, groups, spec)
    padded = [_answers(function, _with_padding(groups, random.Random(chance.random())), spec) for _ in range(2)]
    far = _distance(padded[0], padded[1])
    why = "the values of untrained tokens change other tokens' results: leave out tokens where mask_N is False"
    yield Check(check="mask", passed=far <= _SAME, detail="" if far <= _SAME else f"{why} (by up to {far:.2g})")
    far = _distance(bare, padded[0])
    why = "untrained tokens affect the result: leave out tokens where mask_N is False"
    yield Check(check="padding", passed=far <= _SAME, detail="" if far <= _SAME else f"{why} (by up to {far:.2g})")


def _gradient(function: OwnFunction, spec: AlgorithmSpec, groups: _Groups) -> Check:
    """Check the gradient of a randomly weighted sum over tokens, which includes effects of one token on another."""
    tokens, _ = _tokens(_with_padding(groups, random.Random(0)), spec)
    weight_N = torch.rand(tokens.logp_N.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.5
    logp_N = tokens.logp_N.clone().requires_grad_()
    loss_N = function(replace(tokens, logp_N=logp_N))
    if not loss_N.requires_grad:
        return Check(
            check="gradient", passed=False, detail="the loss does not depend on logp_N: it would train nothing"
        )
    (slope_N,) = torch.autograd.grad((loss_N * weight_N).sum(), logp_N)
    difference_N = torch.zeros_like(slope_N)
    for at in range(len(slope_N)):
        both = []
        for step in (_STEP, -_STEP):
            moved_N = tokens.logp_N.clone()
            moved_N[at] += step
            both.append(float((function(replace(tokens, logp_N=moved_N)) * weight_N).sum()))
        difference_N[at] = (both[0] - both[1]) / (2 * _STEP)
    far_N = (slope_N - difference_N).abs() / max(float(difference_N.abs().max()), 1e-3)
    wrong = int((far_N > _CLOSE).sum())
    if not wrong:
        return Check(check="gradient", passed=True, detail=f"finite differences within {float(far_N.max()):.1g}")
    why = "if the loss detaches part of itself on purpose, pass --detached"
    return Check(
        check="gradient",
        passed=False,
        detail=f"differs from finite differences at {wrong} of {len(far_N)} tokens, by up to {float(far_N.max()):.2g}; {why}",
    )


def _extremes(function: OwnFunction, spec: AlgorithmSpec, groups: _Groups, *, loss: bool) -> Check:
    """Check the function on log-ratios whose exponential overflows single precision."""
    far = [
        [
            _Episode(
                episode.reward,
                [
                    [
                        replace(token, gap=sign * _FAR, mismatch=sign * _FAR)
                        for sign, token in zip(_SIGNS, call, strict=False)
                    ]
                    for call in episode.calls
                ],
            )
            for episode in group
        ]
        for group in groups
    ]
    tokens, _ = _tokens(far, spec, torch.float32)
    logp_N = tokens.logp_N.clone().requires_grad_(loss)
    advice = "clamp log-ratios before exponentiating them, e.g. `(a - b).clamp(max=30.0).exp()`"
    try:
        answer_N = function(replace(tokens, logp_N=logp_N))
    except TrainingRefused:
        return Check(
            check="extremes", passed=False, detail=f"the result is not finite where a log-ratio is {_FAR:g}: {advice}"
        )
    if loss and answer_N.requires_grad:
        (slope_N,) = torch.autograd.grad(answer_N.sum(), logp_N)
        if not bool(slope_N.isfinite().all()):
            return Check(
                check="extremes",
                passed=False,
                detail=f"the gradient is not finite where a log-ratio is {_FAR:g}: {advice}",
            )
    return Check(check="extremes", passed=True)


# -- random tokens ------------------------------------------------------------------------------------------------------------

_SIGNS = (1.0, -1.0, 1.0, -1.0, 1.0, -1.0)


def _token(chance: random.Random, key: int, *, trained: bool = True) -> _Token:
    draw = chance.gauss
    return _Token(key, -abs(draw(0, 1)) - 0.05, draw(0, 0.3), draw(0, 0.3), abs(draw(0, 1)), draw(0, 1), trained)


def _groups(chance: random.Random) -> _Groups:
    keys = iter(range(1_000_000))
    return [
        [
            _Episode(
                chance.choice((0.0, 1.0, chance.gauss(0, 1))),
                [
                    [_token(chance, next(keys)) for _ in range(chance.randint(1, 4))]
                    for _ in range(chance.randint(1, 2))
                ],
            )
            for _ in range(chance.randint(2, 4))
        ]
        for _ in range(3)
    ]


def _with_padding(groups: _Groups, chance: random.Random) -> _Groups:
    """Add two untrained tokens after each call."""
    return [
        [
            _Episode(
                episode.reward,
                [[*call, *(_token(chance, -1, trained=False) for _ in range(2))] for call in episode.calls],
            )
            for episode in group
        ]
        for group in groups
    ]


def _answers(function: OwnFunction, groups: _Groups, spec: AlgorithmSpec) -> dict[int, float]:
    """Return the function's result for each trained token, by key."""
    tokens, keys = _tokens(groups, spec)
    said = function(tokens).detach().tolist()
    return {key: value for key, value, trained in zip(keys, said, tokens.mask_N.tolist(), strict=True) if trained}


def _distance(one: dict[int, float], other: dict[int, float]) -> float:
    size = max([1.0, *map(abs, one.values())])
    return max((abs(value - other[key]) / size for key, value in one.items()), default=0.0)


def _tokens(groups: _Groups, spec: AlgorithmSpec, dtype: torch.dtype = torch.float64) -> tuple[Tokens, list[int]]:
    """Return the function's argument, and each token's key."""
    episodes = [(number, episode) for number, group in enumerate(groups) for episode in group]
    calls = [(at, call) for at, (_, episode) in enumerate(episodes) for call in episode.calls]
    placed = [(number, at, token) for number, (at, call) in enumerate(calls) for token in call]

    def column(values: Iterator[float]) -> Tensor:
        return torch.tensor(list(values), dtype=dtype)

    made = Tokens(
        logp_N=column(token.old + token.gap for _, _, token in placed),
        old_logp_N=column(token.old for _, _, token in placed),
        sampled_logp_N=column(token.old - token.mismatch for _, _, token in placed),
        entropy_N=column(token.entropy for _, _, token in placed),
        mask_N=torch.tensor([token.trained for _, _, token in placed]),
        advantage_N=column(token.advantage for _, _, token in placed),
        call_N=torch.tensor([number for number, _, _ in placed]),
        episode_N=torch.tensor([at for _, at, _ in placed]),
        reward_E=column(episode.reward for _, episode in episodes),
        group_E=torch.tensor([number for number, _ in episodes]),
        settings=spec,
    )
    return made, [token.key for _, _, token in placed]
