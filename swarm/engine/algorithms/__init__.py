"""The algorithms, one file each, with source and equation: how rewards become advantages, and how a token is priced.

At run time these files import no torch: engines without it use the advantages alone.
"""

from __future__ import annotations

from swarm.engine.algorithms.base import Algorithm
from swarm.engine.algorithms.cispo import Cispo
from swarm.engine.algorithms.dapo import Dapo
from swarm.engine.algorithms.dr_grpo import DrGrpo
from swarm.engine.algorithms.grpo import Grpo
from swarm.engine.algorithms.gspo import Gspo
from swarm.engine.algorithms.ppo import Ppo
from swarm.engine.algorithms.reinforce_pp import ReinforcePlusPlus
from swarm.engine.algorithms.rloo import Rloo
from swarm.protocol.algorithms import AlgorithmSpec

_BY_NAME: dict[str, type[Algorithm]] = {
    "grpo": Grpo,
    "dr_grpo": DrGrpo,
    "rloo": Rloo,
    "reinforce_pp": ReinforcePlusPlus,
    "ppo": Ppo,
    "dapo": Dapo,
    "gspo": Gspo,
    "cispo": Cispo,
}


def algorithm_of(spec: AlgorithmSpec) -> Algorithm:
    """The algorithm that the spec names, with its fields."""
    return _BY_NAME[spec.name](spec)
