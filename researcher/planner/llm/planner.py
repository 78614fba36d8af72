"""`LlmPlanner`: asks, checks, tells the LLM what was wrong, asks again; three attempts, then the built-in planner, labelled.

The LLM chooses; arms, seeds, stages, branches, margins and budget are built by the same code as the built-in planner's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from foundation.clock import Clock
from researcher.analysis.knowledge import known_to, told_of
from researcher.models import Instrument, Plan
from researcher.planner import balance
from researcher.planner.choosing import asked_for, choose, model_and_rest
from researcher.planner.design import checked, design, fitted
from researcher.planner.llm.asking import Asker, Keep, Tell
from researcher.planner.llm.choice import ChoiceWrong, reading_of, schema
from researcher.planner.llm.endpoint import Endpoint, LlmRefused, LlmUnusable
from researcher.planner.llm.ladder import LADDER, Malformed, Unreadable, choice_in
from researcher.planner.llm.settings import LlmSettings
from researcher.planner.llm.templates import filled
from researcher.planner.matching import with_steps
from researcher.planner.reading import Reading
from researcher.planner.refusals import PlanningRefused
from researcher.planner.seam import Planner, PlanRequest
from researcher.planner.sources import pinned
from researcher.planner.wording import tokens
from researcher.planner.written import not_in_topic

ATTEMPTS = 3
_PROMPTS = Path(__file__).parent / "prompts"
_KNOWN = 50
"""Findings that fit into a prompt."""
_LONGEST = 700
"""Characters of one finding there: an imported one may say much."""


class LlmPlanner:
    """fallback: plans where the LLM gives no valid choice. keep, tell: as for `Asker`."""

    def __init__(
        self,
        endpoint: Endpoint,
        settings: LlmSettings,
        clock: Clock,
        fallback: Planner,
        *,
        keep: Keep = lambda _: None,
        tell: Tell = lambda _: None,
    ) -> None:
        self._endpoint = endpoint
        self._settings = settings
        self._clock = clock
        self._fallback = fallback
        self._keep = keep
        self._tell = tell

    @property
    def name(self) -> str:
        return self._settings.model

    async def plan(self, request: PlanRequest) -> Plan:
        """Raises: PlanningRefused when neither the LLM nor the built-in planner can plan it, or, where the LLM was asked
        for by name, when it cannot be reached at all."""
        if _in_sequence(request):
            laid_out = await self._fallback.plan(request)
            note = "The topic asks for two comparisons in sequence: what goes on is a rule of code's, planned by the built-in planner."
            return laid_out.model_copy(update={"assumptions": (*laid_out.assumptions, note)})
        asker = Asker(self._endpoint, self._settings, self._clock, keep=self._keep, tell=self._tell)
        try:
            plan, why = await self._asked(request, asker)
        except LlmUnusable as error:
            if request.options.planner == "llm":
                raise PlanningRefused(
                    f"the planner LLM {self.name} cannot be used: {error}; or plan with --planner builtin"
                ) from error
            plan, why = None, str(error)
        return plan if plan is not None else await self._built_in(request, why)

    async def _asked(self, request: PlanRequest, asker: Asker) -> tuple[Plan | None, str]:
        """A plan, or why there is none after all attempts."""
        folders = asked_for(request)
        wanted = schema(folders)
        messages = self._messages(request, wanted)
        rung, wrong = 0, ""
        for attempt in range(1, ATTEMPTS + 1):
            raw, rung, refusal = await self._answer(asker, messages, rung, wanted, attempt)
            if raw is None:
                return None, refusal
            try:
                choice = choice_in(raw, LADDER[rung])
                folder, reading = reading_of(choice, folders)
                _check_written(request.topic, folder.instrument, reading)
                reading = _balanced(request.topic, folder.instrument, pinned(reading))
                model, _ = model_and_rest(request)
                draft = design(request.topic, model or folder.instrument.model, folder, reading, request.options)
                plan = checked(fitted(draft, folder.instrument, request.options))
            except (Unreadable, Malformed, ChoiceWrong, PlanningRefused) as error:
                wrong = str(error)
                rung = min(rung + isinstance(error, Unreadable), len(LADDER) - 1)
                messages = [*messages, *_told(raw, wrong)]
            else:
                return plan.model_copy(update={"planner": self.name, "known": known_to(plan, request.known)}), ""
        return None, f"no valid plan in {ATTEMPTS} attempts; the last: {wrong}"

    async def _answer(
        self, asker: Asker, messages: list[dict[str, str]], rung: int, wanted: dict[str, Any], attempt: int
    ) -> tuple[dict[str, Any] | None, int, str]:
        """An answer on this rung, or on the next that the endpoint takes; and why not, where it takes none."""
        refusal = ""
        for number in range(rung, len(LADDER)):
            request = {
                "model": self.name,
                "messages": messages,
                "max_completion_tokens": self._settings.answer_tokens,
                **LADDER[number].form(wanted),
            }
            try:
                return await asker.ask(f"plan, attempt {attempt}, {LADDER[number].name}", request), number, ""
            except LlmRefused as error:
                refusal = f"the endpoint refuses the request in every form; the last: {error}"
        return None, rung, refusal

    def _messages(self, request: PlanRequest, wanted: dict[str, Any]) -> list[dict[str, str]]:
        question = filled(
            _PROMPTS,
            "question.md.jinja",
            instruments=[with_steps(folder.instrument) for folder in asked_for(request)],
            known=[json.dumps(told_of(each)[:_LONGEST], ensure_ascii=False) for each in request.known[-_KNOWN:]],
            schema=json.dumps(wanted),
            topic=json.dumps(request.topic, ensure_ascii=False),
        )
        system = (_PROMPTS / "system.md").read_text(encoding="utf-8")
        return [{"role": "system", "content": system}, {"role": "user", "content": question}]

    async def _built_in(self, request: PlanRequest, why: str) -> Plan:
        """Labelled: the plan says `builtin`, and why."""
        self._tell(f"the planner LLM {self.name} gave no plan ({why}); planning with the built-in planner")
        plan = await self._fallback.plan(request)
        note = f"The planner LLM {self.name} gave no valid plan: planned by the built-in planner."
        return plan.model_copy(update={"assumptions": (*plan.assumptions, note)})


def _in_sequence(request: PlanRequest) -> bool:
    """Whether the built-in planner reads the topic as one factor and then another; what it cannot read is the LLM's."""
    try:
        _, topic = model_and_rest(request)
        _, reading = choose(topic, request)
    except PlanningRefused:
        return False
    return reading.following is not None


def _balanced(topic: str, instrument: Instrument, reading: Reading) -> Reading:
    """A balance is a rule of code's: the LLM chooses its levels and its metric."""
    if reading.crossed or not balance.is_asked(tokens(topic)):
        return reading
    return balance.balanced(reading, instrument)


def _check_written(topic: str, instrument: Instrument, reading: Reading) -> None:
    """Raises: ChoiceWrong for a file, data set or text that the topic does not hold: no LLM may name one; and where data are missing."""
    varied = [(reading.factor, level) for level in reading.levels]
    varied += [(each.factor, level) for each in reading.crossed for level in each.levels]
    levels = [*varied, *reading.settings]
    for factor in instrument.factors:
        if factor.type == "data" and not factor.default and factor.name not in {each.name for each, _ in levels}:
            raise ChoiceWrong(f"{instrument.name} needs its {factor.name}, as the topic names it, among the settings")
    invented = not_in_topic(topic, instrument, levels)
    if invented:
        raise ChoiceWrong(
            f"{', '.join(map(repr, invented))} does not stand in the topic as it is; texts and data are its author's to name"
        )


def _told(raw: dict[str, Any], wrong: str) -> list[dict[str, str]]:
    """What the LLM said, and what was wrong with it, verbatim."""
    said = json.dumps(raw.get("choices", raw), ensure_ascii=False)[:4000]
    told = f"That cannot be planned: {wrong}\nAnswer again with one whole JSON object by the schema, and nothing else."
    return [{"role": "assistant", "content": said}, {"role": "user", "content": told}]
