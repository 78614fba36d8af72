"""Models on this machine, from a local folder, the hub or a wheel. They are cached and checksummed, and each has a unique name.

Start with `resolve`. This package imports neither torch nor transformers: conversions run in a separate process.
"""

from swarm.models.cache import cached_models, resolve, resolve_to_plan
from swarm.models.folder import CorruptModel, ModelFolder
from swarm.models.sources import ModelUnavailable

__all__ = ["CorruptModel", "ModelFolder", "ModelUnavailable", "cached_models", "resolve", "resolve_to_plan"]
