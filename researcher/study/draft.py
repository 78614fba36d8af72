"""An unfinished study spec, which command-line options can edit and which can be written as a study file.

A draft knows the source of each setting and the parts of the topic that it leaves out.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from foundation.commandline import UsageError
from foundation.strict import StrictModel
from researcher.instruments.instrument import Scalar
from researcher.instruments.levels import level_text, number_text
from researcher.study.file import scalar
from researcher.study.spec import StudySpec

Source = Literal["topic", "planner", "default", "file", "flag"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A study spec that may be incomplete.

    Args:
        fields: a `StudySpec` as plain data, possibly incomplete.
        sources: source of each setting, by dotted path (`seeds.min`, `compare.learning_rate`).
        author: `builtin`, an LLM's name, `file` or `flags`.
        because: reason for choosing this study, in a sentence or two.
        uncovered: parts of the topic that the spec does not cover, one entry each.
    """

    fields: dict[str, Any]
    sources: dict[str, Source] = field(default_factory=dict)
    author: str
    because: str = ""
    uncovered: tuple[str, ...] = ()


# -- options of the command line -----------------------------------------------------------------------------------------

_SEEDS = re.compile(r"(\d{1,9})(?:\.\.(\d{1,9}))?", re.ASCII)
_WHOLE = ("compare", "arms", "model", "secondary", "evaluate_on")
"""Fields that an option replaces as a whole. In other mappings, an option only replaces the keys that it sets."""


def edited(draft: Draft, edits: Mapping[str, Any]) -> Draft:
    """Return the draft with these fields replaced. Entries of `set`, `seeds`, `budget` and `schedule` are merged."""
    fields = dict(draft.fields)
    for name, value in edits.items():
        adds = name not in _WHOLE and isinstance(value, Mapping) and isinstance(fields.get(name), Mapping)
        fields[name] = {**fields[name], **value} if adds else value
    if "arms" in edits:
        fields.pop("compare", None)
    elif "compare" in edits:
        fields.pop("arms", None)
    replaced = {name for name, value in edits.items() if name in _WHOLE or not isinstance(value, Mapping)}
    gone = replaced | ({"compare", "arms"} - fields.keys())
    sources = {path: source for path, source in draft.sources.items() if path.partition(".")[0] not in gone}
    kept = {name: value for name, value in edits.items() if name in fields}
    return replace(draft, fields=fields, sources=sources | marked(kept, "flag"))


def paths_of(fields: Mapping[str, Any]) -> list[str]:
    """Return the dotted paths whose sources a draft records: each field, or each key of a field that is a mapping."""
    found: list[str] = []
    for name, value in fields.items():
        found += [f"{name}.{key}" for key in value] if isinstance(value, Mapping) else [name]
    return found


def marked(fields: Mapping[str, Any], source: Source) -> dict[str, Source]:
    """Return this source for every path of the fields."""
    return dict.fromkeys(paths_of(fields), source)


def options_of(spec: StudySpec, first: Mapping[str, Scalar]) -> list[str]:
    """Return the options of `researcher start` that produce this spec, except its question.

    `first` are the levels of the plan's first arm, which are the baselines.
    """
    words = ["--instrument", spec.instrument]
    words += [word for model in spec.models for word in ("--model", model)]
    for name, each in spec.compare.items():
        others = [level for level in each.levels if each.baseline is not None or level != first[name]]
        levels = (first[name] if each.baseline is None else each.baseline, *others)
        words += ["--vary", f"{name}={','.join(map(level_text, levels))}"]
    for name, settings in spec.arms.items():
        words += ["--arm", f"{name}:{','.join(f'{factor}={level_text(level)}' for factor, level in settings.items())}"]
    words += [word for name, level in spec.set.items() for word in ("--set", f"{name}={level_text(level)}")]
    words += [word for name in spec.secondary for word in ("--secondary", name)]
    words += [word for name in spec.evaluate_on for word in ("--evaluate-on", name)]
    for name in ("design", "metric", "claim", "margin", "steps", "heldout_every", "looks", "fine"):
        value = getattr(spec, name)
        if value is not None and value != StudySpec.model_fields[name].default:
            words += [f"--{name.replace('_', '-')}", str(value)]
    return words


def vary_of(texts: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Parse `compare` from `--vary FACTOR=A,B`: the first level is the baseline; a single level is compared with the default.

    Raises: UsageError.
    """
    found: dict[str, dict[str, Any]] = {}
    for text in texts:
        name, levels = _assignment("--vary", text, "FACTOR=A,B")
        values = [scalar(part.strip()) for part in levels.split(",")]
        if "" in values:
            raise UsageError(f"--vary {text!r} has an empty level; write --vary FACTOR=A,B")
        if name in found:
            raise UsageError(f"--vary {name} is given twice; put all its levels into one option: --vary {name}=A,B,C")
        found[name] = {"baseline": values[0], "levels": values[1:]} if values[1:] else {"levels": values}
    return found


def arms_of(texts: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Parse `arms` from `--arm NAME:F=V,F=V`; `--arm NAME:` leaves all factors at their defaults. Raises: UsageError."""
    found: dict[str, dict[str, Any]] = {}
    for text in texts:
        name, colon, settings = text.partition(":")
        if not colon or not name or name in found:
            why = "is given twice" if name in found else "has no name" if colon else "has no colon"
            raise UsageError(f"--arm {text!r} {why}; write --arm NAME:FACTOR=LEVEL,FACTOR=LEVEL")
        found[name] = settings_of("--arm", [part for part in settings.split(",") if part.strip()])
    return found


def settings_of(option: str, texts: Sequence[str]) -> dict[str, Any]:
    """Parse each `FACTOR=LEVEL`. Raises: UsageError."""
    found: dict[str, Any] = {}
    for text in texts:
        name, value = _assignment(option, text, "FACTOR=LEVEL")
        if name in found:
            raise UsageError(f"{option} sets {name} twice; set it once")
        found[name] = scalar(value)
    return found


def seeds_of(text: str) -> dict[str, int]:
    """Parse `3` or `3..8`. Raises: UsageError."""
    found = _SEEDS.fullmatch(text.strip())
    if found is None:
        raise UsageError(
            f"--seeds {text!r} is not a number of seeds; write a number such as 3, or a range such as 3..8"
        )
    return {"min": int(found[1]), "max": int(found[2] or found[1])}


def _assignment(option: str, text: str, form: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip() or not value.strip():
        raise UsageError(f"{option} {text!r} is not valid; write {option} {form}")
    return name.strip(), value.strip()


# -- as a study file -----------------------------------------------------------------------------------------------------

_WIDTH, _COMMENT_AT = 100, 56
_PLAIN_MARKS = frozenset(" -_./@+=()")
_UNPRINTABLE = re.compile(r"[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")
"""Characters that JSON does not escape, but that YAML treats as line breaks or rejects."""
_FROM = {
    "topic": "from the topic",
    "planner": "chosen by the planner",
    "default": "the instrument's default",
    "file": "from the file",
    "flag": "from an option",
}


def study_text(draft: Draft, problems: tuple[str, ...] = ()) -> str:
    """Return the text of a study file that reads back as the draft's fields. `problems` are for a person to solve, one comment
    each.
    """
    heading = f"Study file, written by {draft.author}. Run it: researcher start FILE"
    return file_text(draft, StudySpec, heading, problems)


def file_text(draft: Draft, model: type[StrictModel], heading: str, problems: tuple[str, ...]) -> str:
    """Return the text of a file that reads back as the draft's fields, for any `model`.

    `heading` is the first line, a comment. `problems` are for a person to solve, one comment each.
    """
    lines = [*_comment(heading)]
    if draft.because:
        lines += _comment(draft.because)
    for each in draft.uncovered:
        lines += _comment(f"Not covered: {each}")
    for each in problems:
        lines += _comment(f"To be settled: {each}")
    order = [name for name in model.model_fields if name in draft.fields]
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
    """Return the text without quotes if YAML reads it back as the same text, else quoted."""
    bare = value and value[0].isalnum() and value[-1] != " " and all(c.isalnum() or c in _PLAIN_MARKS for c in value)
    if bare and scalar(value) == value and value.lower() != "null":
        return value
    return _UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(value, ensure_ascii=False))


def _comment(text: str) -> list[str]:
    return [f"# {line}" for part in text.splitlines() for line in textwrap.wrap(part, _WIDTH - 2)]
