"""`LlmPlanner`: asks, checks, tells the LLM what was wrong, asks again; three attempts, then the built-in planner, labelled.

The LLM chooses; arms, seeds, stages, branches, margins and budget are built by the same code as the built-in planner's.
"""

from __future__ import annotations

from typing import Any

from foundation.clock import Clock
from researcher.llm.asking import Asker, Keep, Purse, Tell
from researcher.llm.endpoint import Endpoint, LlmRefused, LlmUnusable
from researcher.llm.settings import LlmSettings
from researcher.planner.choosing import choose, model_and_rest
from researcher.planner.llm.graph import Conversation, Question, Reply
from researcher.planner.seam import Planner, PlanRequest
from researcher.refusals import PlanningRefused
from researcher.study.plan import Plan


class LlmPlanner:
    """fallback: plans where the LLM gives no valid choice. keep, tell: as for `Asker`.

    spent: what the study has spent before it is planned.
    checkpoints, thread: a database URL in which the graph keeps its place, and the place's name; by default nothing is kept.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        settings: LlmSettings,
        clock: Clock,
        fallback: Planner,
        *,
        keep: Keep = lambda _: None,
        tell: Tell = lambda _: None,
        spent: Purse | None = None,
        checkpoints: str | None = None,
        thread: str = "plan",
    ) -> None:
        self._endpoint = endpoint
        self._settings = settings
        self._clock = clock
        self._fallback = fallback
        self._keep = keep
        self._tell = tell
        self._spent = spent or Purse()
        self._checkpoints = checkpoints
        self._thread = thread

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
        try:
            plan, why = await self._asked(request)
        except LlmUnusable as error:
            if request.options.planner == "llm":
                raise PlanningRefused(
                    f"the planner LLM {self.name} cannot be used: {error}; or plan with --planner builtin"
                ) from error
            plan, why = None, str(error)
        return plan if plan is not None else await self._built_in(request, why)

    async def _asked(self, request: PlanRequest) -> tuple[Plan | None, str]:
        """A plan, or why there is none after all attempts. Raises: LlmUnusable."""
        conversation = Conversation(request, self.name, self._checkpoints, self._thread)
        at = conversation.begin()
        purse = Purse(self._spent.tokens + at.tokens, self._spent.cost + at.cost)
        asker = Asker(self._endpoint, self._settings, self._clock, keep=self._keep, tell=self._tell, purse=purse)
        while at.question is not None:
            at = conversation.give(await self._reply(asker, at.question))
        return at.plan, at.given_up

    async def _reply(self, asker: Asker, question: Question) -> Reply:
        limits = {"model": self.name, "max_completion_tokens": self._settings.answer_tokens}
        try:
            raw = await asker.ask(question.purpose, {**limits, **question.request})
        except LlmRefused as error:
            return self._told(asker.purse, refused=str(error))
        return self._told(asker.purse, raw=raw)

    def _told(self, purse: Purse, *, raw: dict[str, Any] | None = None, refused: str = "") -> Reply:
        """The conversation keeps what it spent itself."""
        spent = self._spent
        return Reply(raw=raw, refused=refused, tokens=purse.tokens - spent.tokens, cost=purse.cost - spent.cost)

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
