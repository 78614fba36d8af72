"""A draft as a study file in YAML, with comments that say where each setting came from."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from researcher.instruments.levels import number_text
from researcher.study.draft import Draft
from researcher.study.file import scalar
from researcher.study.spec import StudySpec

_WIDTH, _COMMENT_AT = 100, 56
_PLAIN_MARKS = frozenset(" -_./@+=()")
_UNPRINTABLE = re.compile(r"[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")
"""Characters that JSON leaves as they are, but YAML treats as line breaks or refuses."""
_FROM = {
    "topic": "from the topic",
    "planner": "chosen by the planner",
    "default": "the instrument's default",
    "file": "from the file",
    "flag": "from an option",
}


def study_text(draft: Draft, problems: tuple[str, ...] = ()) -> str:
    """The file's text; reading it gives the draft's fields again. problems: what a person has to settle, one comment each."""
    lines = [*_comment(f"Study file, written by {draft.author}. Run it: researcher start FILE")]
    if draft.because:
        lines += _comment(draft.because)
    for each in draft.uncovered:
        lines += _comment(f"Not covered: {each}")
    for each in problems:
        lines += _comment(f"To be settled: {each}")
    order = [name for name in StudySpec.model_fields if name in draft.fields]
    order += [name for name in draft.fields if name not in order]
    for name in order:
        lines += _setting(name, draft.fields[name], draft)
    return "\n".join(lines) + "\n"


def _setting(name: str, value: Any, draft: Draft) -> Iterator[str]:
    inner = {path: source for path, source in draft.sources.items() if path.startswith(f"{name}.")}
    if isinstance(value, Mapping) and value and (len(set(inner.values())) > 1 or len(value) > 1):
        yield f"{name}:"
        for key, each in value.items():
            path = f"{name}.{key}"
            yield _with_source(f"  {_text(key)}: {_flow(each)}", draft.sources.get(path, draft.sources.get(name)))
    else:
        source = draft.sources.get(name, next(iter(inner.values()), None))
        yield _with_source(f"{name}: {_flow(value)}", source)


def _with_source(line: str, source: str | None) -> str:
    return line if source is None else f"{line.ljust(_COMMENT_AT)}  # {_FROM[source]}"


def _flow(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_text(key)}: {_flow(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_flow, value)) + "]"
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    if isinstance(value, int):
        return str(value)
    return number_text(value) if isinstance(value, float) else _text(str(value))


def _text(value: str) -> str:
    """Bare where it is read as the same text, else in quotes."""
    bare = value and value[0].isalnum() and value[-1] != " " and all(c.isalnum() or c in _PLAIN_MARKS for c in value)
    if bare and scalar(value) == value and value.lower() != "null":
        return value
    return _UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(value, ensure_ascii=False))


def _comment(text: str) -> list[str]:
    return [f"# {line}" for part in text.splitlines() for line in textwrap.wrap(part, _WIDTH - 2)]
