"""The public surface of `swarm.client`: names, signatures and fields. People's agents are written against it.

When a change is meant: `python -m tests.swarm.client.test_public_surface > tests/swarm/client/public_surface.txt`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

from pydantic import BaseModel

import swarm.client
import swarm.client.sync
from swarm.protocol.episodes import EpisodeOptions, RolloutOptions
from swarm.protocol.summary import LedgerFields

PINNED = Path(__file__).with_name("public_surface.txt")


def surface() -> Iterator[str]:
    for module in (swarm.client, swarm.client.sync):
        for name in sorted(module.__all__):
            yield from described(f"{module.__name__}.{name}", getattr(module, name))
    for keywords in (EpisodeOptions, RolloutOptions, LedgerFields):
        for name, kind in keywords.__annotations__.items():
            yield f"{keywords.__name__}: {name}: {kind.__forward_arg__}"


def described(path: str, value: Any) -> Iterator[str]:
    if not inspect.isclass(value):
        yield f"{path}{inspect.signature(value)}" if inspect.isfunction(value) else path
    elif issubclass(value, Enum):
        yield f"{path}: {', '.join(str(member) for member in value)}"
    elif issubclass(value, BaseModel):
        yield f"{path}: {', '.join(value.model_fields)}"
    elif issubclass(value, Exception):
        yield f"{path}({value.__bases__[0].__name__})"
    else:
        yield f"{path}{str(inspect.signature(value)).replace(' -> None', '')}"
        for name in sorted(vars(value)):
            member = vars(value)[name]
            if inspect.isfunction(member) and not name.startswith("_"):
                yield f"{path}.{name}{inspect.signature(member)}"
            elif isinstance(member, property):
                yield f"{path}.{name}: {inspect.signature(member.fget).return_annotation}"  # type: ignore[arg-type]


def test_the_public_surface_is_as_pinned() -> None:
    assert list(surface()) == PINNED.read_text(encoding="utf-8").splitlines()


def test_the_synchronous_twin_has_the_same_methods() -> None:
    own, twin = (
        {name for name in vars(one.SwarmClient) if not name.startswith("_")}
        for one in (swarm.client, swarm.client.sync)
    )
    assert twin == own | {"client_id"}


if __name__ == "__main__":
    print("\n".join(surface()))
