"""The algorithms, one file each, with source and equation: how rewards become advantages, and how a token is priced.

A file is called as `swarm.protocol.algorithms` registers its algorithm. At run time these files import no torch: engines without
it price numbers of their own.
"""

from __future__ import annotations

from importlib import import_module

from swarm.engine.algorithms.base import Algorithm
from swarm.engine.algorithms.own import OwnAdvantage, with_own_loss
from swarm.protocol.algorithms import AlgorithmSpec


def algorithm_of(spec: AlgorithmSpec) -> Algorithm:
    """The algorithm that the spec names, with its fields."""
    own = spec.own_functions
    kind = OwnAdvantage if "name" in own else _built_in(spec.name)
    return with_own_loss(kind)(spec) if "loss" in own else kind(spec)


def _built_in(name: str) -> type[Algorithm]:
    """The one class in the file of this name."""
    module = import_module(f"{__name__}.{name}")
    classes = [each for each in vars(module).values() if isinstance(each, type) and issubclass(each, Algorithm)]
    (own,) = (each for each in classes if each.__module__ == module.__name__)
    return own
