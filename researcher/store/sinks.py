"""The available sinks: MLflow always, others on request by name."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence

from researcher.store.errors import SinkMissing
from researcher.store.mlflow_sink import MlflowSink
from researcher.store.sink import CopySink
from researcher.store.store import Store
from researcher.store.tensorboard_sink import TensorboardSink
from researcher.store.wandb_sink import WandbSink

_KINDS: dict[str, Callable[[Store], CopySink]] = {
    MlflowSink.name: MlflowSink,
    TensorboardSink.name: TensorboardSink,
    WandbSink.name: WandbSink,
}
OPTIONAL = (TensorboardSink.name, WandbSink.name)
"""Optional sinks. The extra and its package have the same name as the sink."""


def open_sink(store: Store, name: str) -> CopySink:
    """Open the sink with this name. Raises: SinkMissing for an unknown name."""
    if name not in _KINDS:
        raise SinkMissing(f"there is no sink {name!r}; the sinks are {', '.join(_KINDS)}")
    return _KINDS[name](store)


def check_installed(names: Sequence[str]) -> None:
    """Check that the packages of these sinks are installed. Raises: SinkMissing, which names the extra to install."""
    for name in names:
        if name in OPTIONAL and importlib.util.find_spec(name) is None:
            raise SinkMissing(
                f"--sink {name} needs the package {name}, which is not installed: pip install 'swarm-researcher[{name}]'"
            )
