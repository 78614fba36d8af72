"""Options of the command line that edit a spec: `--vary lr=1e-5,4e-5`, `--arm NAME:F=V,F=V`, `--set F=V`, `--seeds 3..8`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from foundation.commandline import UsageError
from researcher.instruments.instrument import Scalar
from researcher.instruments.levels import level_text
from researcher.study.draft import Draft, Source
from researcher.study.file import scalar
from researcher.study.spec import StudySpec

_SEEDS = re.compile(r"(\d{1,9})(?:\.\.(\d{1,9}))?", re.ASCII)
_WHOLE = ("compare", "arms", "model", "secondary")
"""Fields that an option replaces; others it adds to."""


def edited(draft: Draft, edits: Mapping[str, Any]) -> Draft:
    """The draft with these fields in place of its own; what is within `set`, `seeds`, `budget` and `schedule` is added to."""
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
    """The dotted paths at which sources are marked: a field, or the keys within one that holds several."""
    found: list[str] = []
    for name, value in fields.items():
        found += [f"{name}.{key}" for key in value] if isinstance(value, Mapping) else [name]
    return found


def marked(fields: Mapping[str, Any], source: Source) -> dict[str, Source]:
    """Every path of these fields, from one source."""
    return dict.fromkeys(paths_of(fields), source)


def options_of(spec: StudySpec, first: Mapping[str, Scalar]) -> list[str]:
    """Options of `researcher start` that give this spec, except its question.

    first: levels of the plan's first arm, which are the baselines.
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
    for name in ("design", "metric", "claim", "margin", "steps", "looks", "fine"):
        value = getattr(spec, name)
        if value is not None and value != StudySpec.model_fields[name].default:
            words += [f"--{name}", str(value)]
    return words


def vary_of(texts: Sequence[str]) -> dict[str, dict[str, Any]]:
    """`compare` of `--vary FACTOR=A,B`: the first level is the baseline; a single one stands against the default.

    Raises: UsageError.
    """
    found: dict[str, dict[str, Any]] = {}
    for text in texts:
        name, levels = _assignment("--vary", text, "FACTOR=A,B")
        values = [scalar(part.strip()) for part in levels.split(",")]
        if "" in values:
            raise UsageError(f"--vary {text!r} has an empty level; write --vary FACTOR=A,B")
        if name in found:
            raise UsageError(f"--vary {name} is given twice; write all its levels in one: --vary {name}=A,B,C")
        found[name] = {"baseline": values[0], "levels": values[1:]} if values[1:] else {"levels": values}
    return found


def arms_of(texts: Sequence[str]) -> dict[str, dict[str, Any]]:
    """`arms` of `--arm NAME:F=V,F=V`; `--arm NAME:` leaves all at the defaults. Raises: UsageError."""
    found: dict[str, dict[str, Any]] = {}
    for text in texts:
        name, colon, settings = text.partition(":")
        if not colon or not name or name in found:
            why = "is given twice" if name in found else "has no name" if colon else "has no colon"
            raise UsageError(f"--arm {text!r} {why}; write --arm NAME:FACTOR=LEVEL,FACTOR=LEVEL")
        found[name] = settings_of("--arm", [part for part in settings.split(",") if part.strip()])
    return found


def settings_of(option: str, texts: Sequence[str]) -> dict[str, Any]:
    """`FACTOR=LEVEL` of each. Raises: UsageError."""
    found: dict[str, Any] = {}
    for text in texts:
        name, value = _assignment(option, text, "FACTOR=LEVEL")
        if name in found:
            raise UsageError(f"{option} sets {name} twice; leave one out")
        found[name] = scalar(value)
    return found


def seeds_of(text: str) -> dict[str, int]:
    """`3` or `3..8`. Raises: UsageError."""
    found = _SEEDS.fullmatch(text.strip())
    if found is None:
        raise UsageError(f"--seeds {text!r} is not a number of seeds; write 3, or 3..8")
    return {"min": int(found[1]), "max": int(found[2] or found[1])}


def _assignment(option: str, text: str, form: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip() or not value.strip():
        raise UsageError(f"{option} {text!r} is not a setting; write {option} {form}")
    return name.strip(), value.strip()
