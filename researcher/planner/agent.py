"""`LlmPlanner`: drives a planning from request to request until the LLM proposes, asks, declines, or a person has to finish it.

The LLM writes a spec; whether it holds is checked by code, and everything behind it (arms, stages, statistics, price) is code's.
"""

from __future__ import annotations

from researcher.llm.asking import Asker
from researcher.llm.conversation import Conversation, asked_of, spent_answer
from researcher.llm.endpoint import LlmUnusable
from researcher.planner.outcome import Asked, Outcome, TopicRequest
from researcher.planner.subject import Topic, outcome_of
from researcher.refusals import PlanningRefused


class LlmPlanner:
    """checkpoints, thread: a database URL in which the planning keeps its place, and the place's name; by default nothing is kept."""

    def __init__(self, asker: Asker, *, checkpoints: str | None = None, thread: str = "plan") -> None:
        self._asker = asker
        self._spent_before = asker.purse.tokens, asker.purse.cost
        self._checkpoints = checkpoints
        self._thread = thread

    @property
    def name(self) -> str:
        return self._asker.settings.model

    async def propose(self, request: TopicRequest) -> Outcome:
        """After `Asked`, call again with the answer in `request.answers`; planning continues where it was.

        Raises: PlanningRefused when the LLM cannot be asked, or never gives a readable answer.
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
        topic = Topic(request, self.name)
        conversation = Conversation(topic, self._checkpoints, f"ask/{self._thread}", answered=len(request.answers))
        at, purse = conversation.begin(), self._asker.purse
        tokens, cost = self._spent_before
        purse.tokens, purse.cost = max(purse.tokens, tokens + at.tokens), max(purse.cost, cost + at.cost)
        while at.outcome is None:
            if at.spent_answer:
                raise PlanningRefused(f"the planner LLM {spent_answer(self._asker.settings)}")
            if at.given_up:
                raise LlmUnusable(at.given_up)
            if at.request is not None:
                said = await asked_of(self._asker, at)
            elif at.answered < len(request.answers):
                said = {"person": request.answers[at.answered]}
            else:
                return Asked(question=at.asked)
            at = conversation.give(said | {"tokens": purse.tokens - tokens, "cost": purse.cost - cost})
        return outcome_of(at.outcome)
