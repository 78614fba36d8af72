"""The LLM's tools: read-only look-ups, and three endings of which it calls exactly one. Also what it is shown of instruments."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from researcher.analysis.knowledge import spread, told_of
from researcher.design.pricing import price_of
from researcher.instruments.catalogue import InstrumentFolder
from researcher.instruments.declaration import shared_factors, shared_metrics
from researcher.instruments.instrument import STUDY_MODEL, STUDY_STEPS, Factor, Instrument
from researcher.instruments.levels import level_text
from researcher.llm.templates import filled
from researcher.models import Finding
from researcher.planner.outcome import TopicRequest
from researcher.planner.proposals import judged
from researcher.planner.replies import Call
from researcher.study.plan import Plan
from researcher.study.spec import StudySpec, duration_text

PROMPTS = Path(__file__).parent / "prompts"
MOST_FINDINGS, _MOST_CHOICES = 12, 12
_LONGEST, _LONGEST_FINDING, LONGEST_LIST = 12_000, 700, 6_000
"""Characters of a look-up's result, of one finding in it, of the list of instruments in the first prompt."""
_DOCS = re.compile(r" \(docs/[^)]*\)")
_UNUSED = ("title", "default", "description", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength",
    "minItems", "maxItems")  # fmt: skip


# -- what the LLM may call ----------------------------------------------------------------------------------------------


def tool_schemas() -> list[dict[str, Any]]:
    text, texts = {"type": "string"}, {"type": "array", "items": {"type": "string"}}
    proposal = {"spec": spec_schema(), "because": text, "uncovered": texts, "from_topic": texts}
    return [
        _tool("instruments", "All instruments, one line each.", {}),
        _tool("instrument", "One instrument: what it does, defaults, factors with bounds, metrics with margins.", {"name": text}),
        _tool("findings", "Earlier findings that hold these words (instrument, factor, metric, model); newest first.", {"query": text}),
        _tool("price", "Check a spec: its problems, or else trials, hours, detectable effect.", {"spec": {"type": "object"}}),
        _tool("propose", "End with a study. because: why this study, in a sentence or two.", proposal),
        _tool("ask", "End with a question to a person.", {"question": text}),
        _tool("decline", "End without a study. nearest: topics that could be studied instead.", {"reason": text, "nearest": texts}),
    ]  # fmt: skip


def spec_schema() -> dict[str, Any]:
    """`StudySpec` as LLMs are given it: no references, no bounds (they are checked), and no question, which is the topic."""
    whole = StudySpec.model_json_schema()
    plain: dict[str, Any] = _plain(whole, whole.pop("$defs"))
    del plain["properties"]["question"]
    return plain | {"required": ["instrument"]}


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


def _tool(name: str, description: str, properties: dict[str, Any]) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


# -- what look-ups say --------------------------------------------------------------------------------------------------


def look_up(call: Call, request: TopicRequest) -> str:
    """The result of a look-up, or what is wrong with the call. Changes nothing."""
    known: dict[str, Callable[[dict[str, Any]], str]] = {
        "instruments": lambda _: instrument_list(request.instruments),
        "instrument": lambda given: _described(str(given.get("name", "")), request.instruments),
        "findings": lambda given: findings_text(request, str(given.get("query", ""))) or "no finding holds these words",
        "price": lambda given: _priced(given.get("spec"), request),
    }
    if call.name not in known:
        return f"there is no tool {call.name!r}; there are: {', '.join(known)}, propose, ask, decline"
    if call.arguments is None:
        return call.problem
    text = known[call.name](call.arguments)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}\n… cut off"


def findings_text(request: TopicRequest, query: str = "", most: int = MOST_FINDINGS) -> str:
    """One line each; those that hold more of the words first, then the newest."""
    words = set(re.findall(r"[\w.-]+", query.casefold().replace("_", " ")))
    lines = {finding.id: _finding_line(finding) for finding in request.known}

    def hits(finding: Finding) -> int:
        plain = f"{lines[finding.id]} {finding.factor} {finding.question}".casefold().replace("_", " ")
        return sum(word in plain for word in words)

    ranked = sorted(request.known, key=lambda each: (-hits(each), -each.at, each.id))
    found = [lines[each.id][:_LONGEST_FINDING] for each in ranked if not words or hits(each)]
    more = [f"… {len(found) - most} more: ask with other words"] if len(found) > most else []
    return "\n".join([*(f"- {line}" for line in found[:most]), *more])


def _finding_line(finding: Finding) -> str:
    sd = None if finding.effect is None else spread(finding.effect)
    return told_of(finding) + ("" if sd is None else f", sd between seeds about {sd:.2g}")


def _priced(given: Any, request: TopicRequest) -> str:
    verdict = judged(given, request)
    if verdict.plan is None or verdict.folder is None:
        return "This spec has problems:\n" + "\n".join(f"- {problem}" for problem in verdict.problems)
    plan, instrument = verdict.plan, verdict.folder.instrument
    price = price_of(plan, instrument, servers=request.servers)
    lines = [
        f"It can be planned: {_span(*price.trials)} trials, {_span(*(_hours(each) for each in price.wall_s))} of wall time "
        f"({plan.trial_s_source}) on {request.servers} server{'s' if request.servers > 1 else ''}, {duration_text(plan.budget.wall_s)} allowed.",
        _power(plan, price.seeds_needed),
    ]
    return "\n".join([*lines, *(f"Note: {note}" for note in plan.assumptions)])


def _power(plan: Plan, needed: int | None) -> str:
    seeds, metric = plan.stages[-1], plan.metric(plan.hypotheses[0].metric) if plan.hypotheses else plan.metrics[0]
    text = f"{_span(seeds.seeds, seeds.max_seeds)} seeds per arm; planned effect {plan.planned_effect:g} {metric.name}."
    if metric.sigma is None:
        return f"{text} The noise of {metric.name} is not known before the study measures it."
    # Here and not above: statsmodels takes a second to load.
    from researcher.analysis.power import detectable_effect

    least = detectable_effect(
        max(2, seeds.max_seeds), sigma=metric.sigma, alpha=plan.hypotheses[0].alpha, power=plan.power
    )
    enough = "" if needed is None else f"; about {needed} seeds per arm show the planned effect"
    return f"{text} Detectable effect at {seeds.max_seeds} seeds, by the stated σ of {metric.sigma:g}: {least:.3g}{enough}."


def _span(low: Any, high: Any) -> str:
    return f"{low}" if low == high else f"{low} to {high}"


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds / 60:.0f} min"


# -- instruments in words -----------------------------------------------------------------------------------------------


def shared_words() -> dict[str, Any]:
    """What all instruments share, for the template of the first prompt."""
    factors = [each for each in shared_factors() if _is_varied(each)]
    words = {"bounds": _bounds, "plain": _plain_text, "first_sentence": _first_sentence}
    return {"factors": factors, "metrics": shared_metrics(), **words}


def instrument_list(folders: Sequence[InstrumentFolder], longest: int = _LONGEST) -> str:
    common = {each.name for each in shared_metrics()}
    lines: list[str] = []
    for each in (folder.instrument for folder in folders):
        own, _ = _own_and_shared(each)
        measured = [metric.name for metric in each.metrics if metric.name not in common]
        names = (("factors", [*map(_bounds, own)]), ("metrics", measured))
        also = "".join(f"; {what} {', '.join(found)}" for what, found in names if found)
        general = "general; " if each.general else ""
        usual = f"{each.defaults.steps} steps, about {_hours(each.defaults.trial_s)} a trial, decides by {each.defaults.metric}"
        lines.append(f"- {each.name} ({general}{usual}{also}): {each.title}")
        if sum(map(len, lines)) > longest:
            return "\n".join([*lines[:-1], f"… {len(folders) - len(lines) + 1} more: call `instruments`"])
    return "\n".join(lines)


def _described(name: str, folders: Sequence[InstrumentFolder]) -> str:
    instrument = next((each.instrument for each in folders if each.instrument.name == name), None)
    if instrument is None:
        return f"no instrument is called {name!r}; there are: {', '.join(each.instrument.name for each in folders)}"
    (own, shared), usual = _own_and_shared(instrument), instrument.defaults
    text = filled(
        PROMPTS,
        "instrument.md.jinja",
        it=instrument,
        own=own,
        shared=shared,
        seeds=_span(usual.seeds, usual.max_seeds),
        trial=_hours(usual.trial_s),
        shown=_MOST_CHOICES,
        bounds=_bounds,
        default=_default,
        level=level_text,
        plain=_plain_text,
    )
    return text.rstrip("\n")


def _is_varied(factor: Factor) -> bool:
    """Whether `compare`, `arms` and `set` may name it; models and steps have fields of their own."""
    return factor.target not in (STUDY_MODEL, STUDY_STEPS)


def _own_and_shared(instrument: Instrument) -> tuple[list[Factor], list[Factor]]:
    """Its factors; one of a shared one's name with other bounds is its own."""
    common = {_bounds(each) for each in shared_factors()}
    varied = [each for each in instrument.factors if _is_varied(each)]
    return [each for each in varied if _bounds(each) not in common], [e for e in varied if _bounds(e) in common]


def _plain_text(description: str) -> str:
    """Without pages of the documentation, which the LLM cannot read."""
    return _DOCS.sub("", description)


def _bounds(factor: Factor) -> str:
    if factor.choices:
        shown = [level_text(each) for each in factor.choices[:_MOST_CHOICES]]
        more = [f"… {len(factor.choices) - len(shown)} more"] if len(factor.choices) > len(shown) else []
        return f"{factor.name} {'|'.join([*shown, *more])}"
    low, high = ("" if bound is None else level_text(bound) for bound in (factor.low, factor.high))
    return f"{factor.name} {factor.type}" + (f" {low}..{high}" if low or high else "")


def _default(factor: Factor) -> str:
    return level_text(factor.default) or ("none, name one" if factor.type == "data" else "empty")


def _first_sentence(text: str) -> str:
    return re.split(r"(?<=[.;])\s", text, maxsplit=1)[0].rstrip(";.") + "." if text else ""
