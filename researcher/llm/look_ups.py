"""Answers look-ups (instruments, findings, the power of a plan) in words for an LLM. Changes nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from researcher.analysis.knowledge import spread, told_of
from researcher.instruments.catalogue import InstrumentFolder
from researcher.instruments.declaration import shared_factors, shared_metrics
from researcher.instruments.instrument import STUDY_MODEL, STUDY_STEPS, Factor, Instrument
from researcher.instruments.levels import level_text
from researcher.llm.replies import Call
from researcher.llm.templates import filled
from researcher.models import Finding
from researcher.study.plan import Plan

MOST_FINDINGS = 12
_PROMPTS = Path(__file__).parent / "prompts"
_MOST_CHOICES = 12
LONGEST, LONGEST_LIST = 12_000, 6_000
"""Maximum characters of a look-up's result, and of the instrument list in a first prompt."""
_LONGEST_FINDING = 700
_DOCS = re.compile(r" \(docs/[^)]*\)")


def looked_up(
    call: Call, known: Mapping[str, Callable[[dict[str, Any]], str]], endings: Sequence[str], longest: int = LONGEST
) -> str:
    """Return the result of a look-up, or the problem with the call. `known` maps tool names to the functions that answer."""
    if call.name not in known:
        return f"there is no tool {call.name!r}; there are: {', '.join([*known, *endings])}"
    if call.arguments is None:
        return call.problem
    text = known[call.name](call.arguments)
    return text if len(text) <= longest else f"{text[:longest]}\n… cut off"


def findings_text(known: Sequence[Finding], query: str = "", most: int = MOST_FINDINGS) -> str:
    """Return one line per finding, sorted by the number of query words it contains, then newest first."""
    words = set(re.findall(r"[\w.-]+", query.casefold().replace("_", " ")))
    lines = {finding.id: _finding_line(finding) for finding in known}

    def hits(finding: Finding) -> int:
        plain = f"{lines[finding.id]} {finding.factor} {finding.question}".casefold().replace("_", " ")
        return sum(word in plain for word in words)

    ranked = sorted(known, key=lambda each: (-hits(each), -each.at, each.id))
    found = [lines[each.id][:_LONGEST_FINDING] for each in ranked if not words or hits(each)]
    more = [f"… {len(found) - most} more: ask with other words"] if len(found) > most else []
    return "\n".join([*(f"- {line}" for line in found[:most]), *more])


def _finding_line(finding: Finding) -> str:
    sd = None if finding.effect is None else spread(finding.effect)
    return told_of(finding) + ("" if sd is None else f", sd between seeds about {sd:.2g}")


def power_text(plan: Plan, needed: int | None, sigma: float | None = None) -> str:
    """Describe the seeds, the planned effect, and the effect that these seeds can detect.

    `sigma` is the standard deviation between seeds; None: the metric's stated value.
    """
    seeds, metric = plan.stages[-1], plan.metric(plan.hypotheses[0].metric) if plan.hypotheses else plan.metrics[0]
    text = f"{span(seeds.seeds, seeds.max_seeds)} seeds per arm; planned effect {plan.planned_effect:g} {metric.name}."
    sigma = metric.sigma if sigma is None else sigma
    if sigma is None:
        return f"{text} The noise of {metric.name} is not known before the study measures it."
    # Imported here: statsmodels takes a second to load.
    from researcher.analysis.power import detectable_effect

    least = detectable_effect(max(2, seeds.max_seeds), sigma=sigma, alpha=plan.hypotheses[0].alpha, power=plan.power)
    enough = "" if needed is None else f"; about {needed} seeds per arm show the planned effect"
    return (
        f"{text} Detectable effect at {seeds.max_seeds} seeds, by a σ of {sigma:g} between them: {least:.3g}{enough}."
    )


def span(low: Any, high: Any) -> str:
    """Format a range: `3`, or `3 to 8`."""
    return f"{low}" if low == high else f"{low} to {high}"


def hours(seconds: float) -> str:
    """Format a duration: `1.5 h`, `20 min`."""
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds / 60:.0f} min"


def shared_words() -> dict[str, Any]:
    """Return the factors and metrics that all instruments share, for the template of the first prompt."""
    factors = [each for each in shared_factors() if _is_varied(each)]
    words = {"bounds": _bounds, "plain": _plain_text, "first_sentence": _first_sentence}
    return {"factors": factors, "metrics": shared_metrics(), **words}


def instrument_list(folders: Sequence[InstrumentFolder], longest: int = LONGEST) -> str:
    """Return one line per instrument, up to `longest` characters."""
    common = {each.name for each in shared_metrics()}
    lines: list[str] = []
    for each in (folder.instrument for folder in folders):
        own, _ = _own_and_shared(each)
        measured = [metric.name for metric in each.metrics if metric.name not in common]
        names = (("factors", [*map(_bounds, own)]), ("metrics", measured))
        also = "".join(f"; {what} {', '.join(found)}" for what, found in names if found)
        general = "general; " if each.general else ""
        usual = f"{each.defaults.steps} steps, about {hours(each.defaults.trial_s)} a trial, decides by {each.defaults.metric}"
        lines.append(f"- {each.name} ({general}{usual}{also}): {each.title}")
        if sum(map(len, lines)) > longest:
            return "\n".join([*lines[:-1], f"… {len(folders) - len(lines) + 1} more: call `instruments`"])
    return "\n".join(lines)


def described(instrument: Instrument) -> str:
    """Describe an instrument: tasks, defaults, factors with bounds, metrics with margins."""
    (own, shared), usual = _own_and_shared(instrument), instrument.defaults
    text = filled(
        _PROMPTS,
        "instrument.md.jinja",
        it=instrument,
        own=own,
        shared=shared,
        seeds=span(usual.seeds, usual.max_seeds),
        trial=hours(usual.trial_s),
        shown=_MOST_CHOICES,
        bounds=_bounds,
        default=_default,
        level=level_text,
        plain=_plain_text,
    )
    return text.rstrip("\n")


def _is_varied(factor: Factor) -> bool:
    """Return whether `compare`, `arms` and `set` may name the factor. Models and steps have their own fields."""
    return factor.target not in (STUDY_MODEL, STUDY_STEPS)


def _own_and_shared(instrument: Instrument) -> tuple[list[Factor], list[Factor]]:
    """Split the factors into the instrument's own and the shared ones. A shared factor with changed bounds counts as the
    instrument's own.
    """
    common = {_bounds(each) for each in shared_factors()}
    varied = [each for each in instrument.factors if _is_varied(each)]
    return [each for each in varied if _bounds(each) not in common], [e for e in varied if _bounds(e) in common]


def _plain_text(description: str) -> str:
    """Remove links to documentation, which the LLM cannot read, from a description."""
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
