"""An unfinished study spec, with the source of each setting and what of the topic it leaves out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Source = Literal["topic", "planner", "default", "file", "flag"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """fields: a `StudySpec` as plain data, perhaps not whole. sources: by dotted path (`seeds.min`, `compare.learning_rate`).

    author: `builtin`, an LLM's name, `file` or `flags`. because: why it is this study, in a sentence or two.
    uncovered: what the topic asks and the spec does not cover, one entry for each part.
    """

    fields: dict[str, Any]
    sources: dict[str, Source] = field(default_factory=dict)
    author: str
    because: str = ""
    uncovered: tuple[str, ...] = ()
