"""The training algorithms, one per file, each with its source and equations: how rewards become advantages, and what each token's loss
is.

Each file is named as `swarm.protocol.algorithms` registers its algorithm. Engines without torch can use these files, because they
import no torch at run time. The exceptions are `own` and `functions`, which are imported only for runs with users' functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from swarm.engine.algorithms.base import Algorithm
from swarm.engine.algorithms.rewards import Episodes
from swarm.protocol.algorithms import AlgorithmSpec


def algorithm_of(spec: AlgorithmSpec) -> Algorithm:
    """Return the algorithm named in the spec, set up with the spec's fields."""
    own = spec.own_functions
    kind: type[Algorithm] = _own().OwnAdvantage if "name" in own else _built_in(spec.name)
    return (_own().with_own_loss(kind) if "loss" in own else kind)(spec)


def over_numbers(
    algorithm: Algorithm,
    facts: Mapping[str, Sequence[float]],
    calls: Sequence[tuple[str, int]],
    episodes: Episodes,
) -> dict[str, list[float]]:
    """Run `Algorithm.over_update` for engines without tensors; return the added facts by name.

    `facts` maps names to the facts of all tokens, including the current log-probabilities, `logp_N`. Raises: TrainingRefused.
    """
    found: dict[str, list[float]] = _own().over_numbers(algorithm, facts, calls, episodes)
    return found


def _own() -> Any:
    """Return the module `own`, which imports torch."""
    return import_module(f"{__name__}.own")


def _built_in(name: str) -> type[Algorithm]:
    """Return the only algorithm class that the module of this name defines."""
    module = import_module(f"{__name__}.{name}")
    classes = [each for each in vars(module).values() if isinstance(each, type) and issubclass(each, Algorithm)]
    (own,) = (each for each in classes if each.__module__ == module.__name__)
    return own
