"""Prompts as templates with fields."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined


def filled(folder: Path, name: str, /, **fields: Any) -> str:
    """Fill the template of this name in `folder`. Raises: jinja2's UndefinedError for a missing field."""
    return _templates(folder).get_template(name).render(**fields)


@lru_cache(maxsize=8)
def _templates(folder: Path) -> Environment:
    return Environment(
        loader=FileSystemLoader(folder),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,
    )
