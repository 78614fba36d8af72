"""Checks an LLM's final answer: its form, the instrument, design and price, and the topic's bounds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, ValidationError

from foundation.nearest import nearest
from foundation.strict import StrictModel, explain
from researcher.design.planning import plan_of
from researcher.instruments.catalogue import InstrumentFolder
from researcher.llm.replies import Call, pruned
from researcher.planner.bounds import invented, lost
from researcher.planner.outcome import Asked, Declined, NeedsEdit, Outcome, Proposed, TopicRequest
from researcher.refusals import PlanningRefused
from researcher.study.draft import Draft, Source, edited, paths_of
from researcher.study.plan import Plan
from researcher.study.spec import StudySpec

_Text = Annotated[str, Field(min_length=1, max_length=4000)]
_Texts = Annotated[tuple[_Text, ...], Field(max_length=50)]


class _Propose(StrictModel):
    spec: dict[str, Any]
    because: _Text
    uncovered: _Texts = ()
    from_topic: _Texts = ()


class _Ask(StrictModel):
    question: _Text


class _Decline(StrictModel):
    reason: _Text
    nearest: _Texts = ()


_FORMS: dict[str, type[StrictModel]] = {"propose": _Propose, "ask": _Ask, "decline": _Decline}


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A checked spec. `fields` include those that a person fixed. `plan` is None if there are problems."""

    fields: dict[str, Any]
    problems: tuple[str, ...] = ()
    spec: StudySpec | None = None
    folder: InstrumentFolder | None = None
    plan: Plan | None = None


def ended(call: Call, request: TopicRequest, author: str, last: Draft) -> Outcome:
    """Turn an ending call into an outcome, or into NeedsEdit if the LLM still has problems to fix.

    `author` is the LLM's name, recorded in the draft. `last` is the draft to return if this answer is unreadable.
    """
    if call.arguments is None:
        return NeedsEdit(draft=last, problems=(call.problem,))
    form = _FORMS[call.name]
    given = {name: each for name, each in pruned(call.arguments).items() if name in form.model_fields}
    for name in ("uncovered", "from_topic", "nearest"):
        if isinstance(given.get(name), str):
            given[name] = [given[name]]
    try:
        made = form.model_validate(given)
    except ValidationError as error:
        return NeedsEdit(draft=last, problems=_explained(error, form))
    if isinstance(made, _Ask):
        return Asked(question=made.question)
    if isinstance(made, _Decline):
        return Declined(reason=made.reason, nearest=made.nearest)
    assert isinstance(made, _Propose)
    return _proposed(made, request, author)


def judged(given: Any, request: TopicRequest) -> Judged:
    """Merge the spec with the fields that a person fixed, plan it, and collect its problems.

    Reads files in the spec only after checking that a person named them.
    """
    fields = _with_given(pruned(given) if isinstance(given, dict) else {}, request)
    if not isinstance(given, dict):
        return Judged(fields=fields, problems=("spec: must be an object with the fields of a study spec",))
    try:
        spec = StudySpec.model_validate(fields)
    except ValidationError as error:
        return Judged(fields=fields, problems=_explained(error, StudySpec))
    fixed = "instrument" in request.given and len(request.instruments) == 1  # an option may give the folder's path
    folder = next((each for each in request.instruments if fixed or each.instrument.name == spec.instrument), None)
    plan, problems = None, list[str]()
    if folder is None:
        names = [each.instrument.name for each in request.instruments]
        guess = nearest(spec.instrument, names)
        hint = f"did you mean {guess!r}?" if guess else f"there are: {', '.join(names)}"
        problems = [f"instrument: no instrument is called {spec.instrument!r}; {hint}"]
    else:
        problems = invented(spec, folder.instrument, _said(request))
    if folder is not None and not problems:
        try:
            plan = plan_of(
                spec, folder, known=request.known, paces=request.paces, servers=request.servers, kept=request.kept
            )
        except PlanningRefused as error:
            problems = [str(error)]
    return Judged(fields=spec.document(), problems=tuple(problems), spec=spec, folder=folder, plan=plan)


def bare_draft(request: TopicRequest, author: str) -> Draft:
    """Return the draft to use when an LLM proposed nothing readable."""
    fields = _with_given({}, request)
    return Draft(fields=fields, sources=_sources(fields, request, ()), author=author, uncovered=(request.topic,))


def _proposed(made: _Propose, request: TopicRequest, author: str) -> Proposed | NeedsEdit:
    verdict = judged(made.spec, request)
    problems, overruled = verdict.problems, list[str]()
    if verdict.spec is not None:
        factors = () if verdict.folder is None else verdict.folder.instrument.factors
        topic = "\n".join([request.topic, *request.answers])
        bounds, overruled = lost(topic, verdict.spec, made.uncovered, given=request.given, factors=factors)
        problems = (*problems, *bounds)
    draft = Draft(
        fields=verdict.fields,
        sources=_sources(verdict.fields, request, made.from_topic),
        author=author,
        because=made.because,
        uncovered=(*made.uncovered, *overruled),
    )
    return NeedsEdit(draft=draft, problems=problems) if problems else Proposed(draft=draft)


def _explained(error: ValidationError, form: type[StrictModel]) -> tuple[str, ...]:
    return tuple(str(problem) for problem in explain(error, form))


def _with_given(fields: dict[str, Any], request: TopicRequest) -> dict[str, Any]:
    """Return the fields with the topic as the question and with the fields that a person fixed."""
    return edited(Draft(fields={**fields, "question": request.topic}, author=""), request.given).fields


def _said(request: TopicRequest) -> str:
    """Return everything that people wrote."""
    return "\n".join([request.topic, *request.answers, json.dumps(request.given, ensure_ascii=False, default=str)])


def _sources(fields: dict[str, Any], request: TopicRequest, from_topic: Sequence[str]) -> dict[str, Source]:
    fixed = paths_of(request.given)
    found: dict[str, Source] = {}
    for path in paths_of(fields):
        stated = path == "question" or any(_covers(each, path) for each in from_topic)
        found[path] = "flag" if any(_covers(each, path) for each in fixed) else "topic" if stated else "planner"
    return found


def _covers(stated: str, path: str) -> bool:
    """Return whether `stated` covers the path: `seeds` covers `seeds.min`, `compare.lr.levels` covers `compare.lr`."""
    return stated == path or path.startswith(f"{stated}.") or stated.startswith((f"{path}.", f"{path}["))
