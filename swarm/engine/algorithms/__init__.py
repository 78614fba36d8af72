"""The algorithms, one file each, with source and equation: how rewards become advantages, and how a token is priced.

A file is called as `swarm.protocol.algorithms` registers its algorithm. At run time these files import no torch: engines without
it price numbers of their own. Only `own` and `functions` do, for functions of users, and are imported where a run has some.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from swarm.engine.algorithms.base import Algorithm
from swarm.engine.algorithms.rewards import Episodes
from swarm.protocol.algorithms import AlgorithmSpec


def algorithm_of(spec: AlgorithmSpec) -> Algorithm:
    """The algorithm that the spec names, with its fields."""
    own = spec.own_functions
    kind: type[Algorithm] = _own().OwnAdvantage if "name" in own else _built_in(spec.name)
    return (_own().with_own_loss(kind) if "loss" in own else kind)(spec)


def over_numbers(
    algorithm: Algorithm,
    facts: Mapping[str, Sequence[float]],
    calls: Sequence[tuple[str, int]],
    episodes: Episodes,
) -> dict[str, list[float]]:
    """`Algorithm.over_update` for an engine without tensors: what it adds to the facts, by name.

    facts: those of the tokens, and as `logp_N` their log-probabilities now. Raises: TrainingRefused.
    """
    found: dict[str, list[float]] = _own().over_numbers(algorithm, facts, calls, episodes)
    return found


def _own() -> Any:
    """The module `own`, which imports torch."""
    return import_module(f"{__name__}.own")


def _built_in(name: str) -> type[Algorithm]:
    """The one class in the file of this name."""
    module = import_module(f"{__name__}.{name}")
    classes = [each for each in vars(module).values() if isinstance(each, type) and issubclass(each, Algorithm)]
    (own,) = (each for each in classes if each.__module__ == module.__name__)
    return own
