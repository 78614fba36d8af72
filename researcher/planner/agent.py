"""`LlmPlanner`: drives a planning from request to request until the LLM proposes, asks, declines, or a person has to finish it.

The LLM writes a spec; whether it holds is checked by code, and everything behind it (arms, stages, statistics, price) is code's.
"""

from __future__ import annotations

from typing import Any

from foundation.clock import Clock
from researcher.llm.asking import Asker, Keep, Purse, Tell
from researcher.llm.endpoint import Endpoint, LlmRefused, LlmUnusable
from researcher.llm.settings import LlmSettings
from researcher.planner.graph import Answer, Conversation, Question
from researcher.planner.outcome import Asked, Outcome, TopicRequest
from researcher.refusals import PlanningRefused


class LlmPlanner:
    """keep, tell: as for `Asker`. spent: what the study has spent before it is planned.

    checkpoints, thread: a database URL in which the planning keeps its place, and the place's name; by default nothing is kept.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        settings: LlmSettings,
        clock: Clock,
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
        self._keep = keep
        self._tell = tell
        self._spent = spent or Purse()
        self._checkpoints = checkpoints
        self._thread = thread

    @property
    def name(self) -> str:
        return self._settings.model

    async def propose(self, request: TopicRequest) -> Outcome:
        """After `Asked`, call it again with the answer in `request.answers`: it goes on where it was.

        Raises: PlanningRefused where the LLM cannot be asked, or gives nothing that could be read.
        """
        if not request.instruments:
            raise PlanningRefused("there is no instrument; put one under studies/ or name its folder with --instrument")
        try:
            return await self._outcome(request)
        except LlmUnusable as error:
            raise PlanningRefused(
                f"the planner LLM {self.name} cannot be used: {error}; or plan with --planner builtin"
            ) from error

    async def _outcome(self, request: TopicRequest) -> Outcome:
        """Raises: LlmUnusable, PlanningRefused."""
        conversation = Conversation(request, self.name, self._checkpoints, self._thread)
        at = conversation.begin()
        purse = Purse(self._spent.tokens + at.tokens, self._spent.cost + at.cost)
        asker = Asker(self._endpoint, self._settings, self._clock, keep=self._keep, tell=self._tell, purse=purse)
        while at.outcome is None:
            if at.spent_answer:
                raise PlanningRefused(
                    f"the planner LLM {self.name} used all {self._settings.answer_tokens} tokens of an answer before it said "
                    "anything, as reasoning models do; raise RESEARCHER_LLM_ANSWER_TOKENS"
                )
            if at.given_up:
                raise LlmUnusable(at.given_up)
            if at.question is not None:
                at = conversation.give(await self._answer(asker, at.question))
            elif at.answered < len(request.answers):
                at = conversation.give(self._with_spent(asker.purse, person=request.answers[at.answered]))
            else:
                return Asked(question=at.asked)
        return at.outcome

    async def _answer(self, asker: Asker, question: Question) -> Answer:
        limits = {"model": self.name, "max_completion_tokens": self._settings.answer_tokens}
        try:
            raw = await asker.ask(question.purpose, {**limits, **question.request})
        except LlmRefused as error:
            return self._with_spent(asker.purse, refused=str(error))
        return self._with_spent(asker.purse, raw=raw)

    def _with_spent(self, purse: Purse, **said: Any) -> Answer:
        """The conversation keeps what it spent itself."""
        return Answer(**said, tokens=purse.tokens - self._spent.tokens, cost=purse.cost - self._spent.cost)
