"""The LLM's tools: read-only look-ups, and three endings of which it calls exactly one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from researcher.design.pricing import price_of
from researcher.instruments.catalogue import InstrumentFolder
from researcher.llm.look_ups import described, findings_text, hours, instrument_list, looked_up, power_text, span
from researcher.llm.replies import Call
from researcher.llm.schemas import spec_schema, tool
from researcher.planner.outcome import TopicRequest
from researcher.planner.proposals import judged
from researcher.study.spec import duration_text

PROMPTS = Path(__file__).parent / "prompts"
ENDINGS = ("propose", "ask", "decline")


def tool_schemas() -> list[dict[str, Any]]:
    text, texts = {"type": "string"}, {"type": "array", "items": {"type": "string"}}
    proposal = {
        "spec": spec_schema() | {"required": ["instrument"]},
        "because": text,
        "uncovered": texts,
        "from_topic": texts,
    }
    return [
        tool("instruments", "All instruments, one line each.", {}),
        tool("instrument", "One instrument: what it does, defaults, factors with bounds, metrics with margins.", {"name": text}),
        tool("findings", "Earlier findings that hold these words (instrument, factor, metric, model); newest first.", {"query": text}),
        tool("price", "Check a spec: its problems, or else trials, hours, detectable effect.", {"spec": {"type": "object"}}),
        tool("propose", "End with a study. because: why this study, in a sentence or two.", proposal),
        tool("ask", "End with a question to a person.", {"question": text}),
        tool("decline", "End without a study. nearest: topics that could be studied instead.", {"reason": text, "nearest": texts}),
    ]  # fmt: skip


def look_up(call: Call, request: TopicRequest) -> str:
    """The result of a look-up, or what is wrong with the call. Changes nothing."""
    known: dict[str, Callable[[dict[str, Any]], str]] = {
        "instruments": lambda _: instrument_list(request.instruments),
        "instrument": lambda given: _described(str(given.get("name", "")), request.instruments),
        "findings": lambda given: (
            findings_text(request.known, str(given.get("query", ""))) or "no finding holds these words"
        ),
        "price": lambda given: _priced(given.get("spec"), request),
    }
    return looked_up(call, known, ENDINGS)


def _described(name: str, folders: Sequence[InstrumentFolder]) -> str:
    instrument = next((each.instrument for each in folders if each.instrument.name == name), None)
    if instrument is None:
        return f"no instrument is called {name!r}; there are: {', '.join(each.instrument.name for each in folders)}"
    return described(instrument)


def _priced(given: Any, request: TopicRequest) -> str:
    verdict = judged(given, request)
    if verdict.plan is None or verdict.folder is None:
        return "This spec has problems:\n" + "\n".join(f"- {problem}" for problem in verdict.problems)
    plan, instrument = verdict.plan, verdict.folder.instrument
    price = price_of(plan, instrument, servers=request.servers)
    lines = [
        f"It can be planned: {span(*price.trials)} trials, {span(*(hours(each) for each in price.wall_s))} of wall time "
        f"({plan.trial_s_source}) on {request.servers} server{'s' if request.servers > 1 else ''}, {duration_text(plan.budget.wall_s)} allowed.",
        power_text(plan, price.seeds_needed),
    ]
    if price.tokens is not None:
        lines.append(
            f"About {span(*(f'{each:.2g}' for each in price.tokens))} tokens of the agents' calls, {plan.budget.tokens} allowed."
        )
    return "\n".join([*lines, *(f"Note: {note}" for note in plan.assumptions)])
