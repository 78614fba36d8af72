"""Models as LLMs are given them: tools, schemas without references and bounds, and answers without what means "not set"."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from researcher.study.spec import StudySpec

_UNUSED = ("title", "default", "description", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength",
    "minItems", "maxItems")  # fmt: skip


def tool(
    name: str, description: str, properties: dict[str, Any], required: Collection[str] | None = None
) -> dict[str, Any]:
    """An OpenAI function tool. required: all properties unless stated."""
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties if required is None else required),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def spec_schema(without: Collection[str] = ()) -> dict[str, Any]:
    """`StudySpec` without references, without bounds (they are checked), without the question and the fields named."""
    whole = StudySpec.model_json_schema()
    plain: dict[str, Any] = _plain(whole, whole.pop("$defs"))
    for name in ("question", *without):
        del plain["properties"][name]
    return plain


def _plain(schema: Any, defs: dict[str, Any]) -> Any:
    if isinstance(schema, list):
        return [_plain(each, defs) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _plain(defs[schema["$ref"].rpartition("/")[2]], defs)
    if "anyOf" in schema:
        kinds = [_plain(each, defs) for each in schema["anyOf"] if each.get("type") != "null"]
        names = [each["type"] for each in kinds if len(each) == 1]
        kinds = [each for each in kinds if each != {"type": "integer"} or "number" not in names]
        return kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
    if "properties" in schema:
        fields = {name: _plain(each, defs) for name, each in schema["properties"].items()}
        return {"type": "object", "properties": fields, "additionalProperties": False}
    kept = {name: _plain(each, defs) for name, each in schema.items() if name not in _UNUSED}
    if "patternProperties" in kept:
        kept["additionalProperties"] = next(iter(kept.pop("patternProperties").values()))
    return kept


def pruned(value: Any) -> Any:
    """Without what LLMs write for "not set": null, and empty lists, objects and texts. An empty arm is all defaults, and stays."""
    if not isinstance(value, dict):
        return value
    arms = value.get("arms")
    kept = {name: pruned(each) for name, each in value.items() if name != "arms"}
    if isinstance(arms, dict) and arms:
        kept["arms"] = {name: {} if each is None else each for name, each in arms.items()}
    elif arms:
        kept["arms"] = arms
    return {name: each for name, each in kept.items() if each is not None and each not in ("", [], {}, ())}
