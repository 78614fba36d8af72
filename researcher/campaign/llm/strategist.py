"""`LlmStrategist` asks an LLM for the next step of a campaign. The answer is only a proposal, which code judges like any other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from foundation.clock import Clock
from researcher.campaign.judging import StudyPlanner
from researcher.campaign.llm.tools import Evidence, NextStep
from researcher.campaign.proposals import Proposal
from researcher.campaign.seen import Left, Seen
from researcher.campaign.strategist import IdeasSpent, StrategistAway, StrategistFailed
from researcher.llm.asking import Asker, Purse
from researcher.llm.conversation import Conversation, Standing, asked_of, spent_answer
from researcher.llm.endpoint import Endpoint, LlmSettings, LlmSpent, LlmUnusable
from researcher.models import LlmCall

T = TypeVar("T")


class LlmStrategist:
    """Proposes steps by asking an LLM.

    Args:
        checkpoints: URL of a database in which each decision's conversation is saved, so that no answer is paid for twice. None saves
            nothing.
        keep: records each new call for the decision with this input.
        kept: returns those that were recorded, also by a process that was killed.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        settings: LlmSettings,
        clock: Clock,
        *,
        planner: StudyPlanner,
        evidence: Evidence,
        checkpoints: str | None,
        tell: Callable[[str], None] = lambda _: None,
        keep: Callable[[Seen, LlmCall], None] = lambda seen, call: None,
        kept: Callable[[Seen], list[LlmCall]] = lambda seen: [],
    ) -> None:
        self._endpoint = endpoint
        self._settings = settings
        self._clock = clock
        self._planner = planner
        self._evidence = evidence
        self._checkpoints = checkpoints
        self._tell = tell
        self._keep = keep
        self._kept = kept
        self._recorded: list[LlmCall] = []
        """Calls for the current decision's input that were recorded before. Some may be in no saved conversation."""
        self._calls: dict[str, list[LlmCall]] = {}
        """LLM calls of the current decision, by conversation thread. Each attempt has its own thread."""
        self._earlier: dict[str, Conversation] = {}
        """Conversations of this process, by thread."""

    @property
    def name(self) -> str:
        return self._settings.model

    async def propose(self, seen: Seen) -> Sequence[Proposal]:
        """Ask the LLM for proposals. The same input is answered from the saved conversation, without asking again.

        Raises: NoProposal.
        """
        thread = f"campaign/{seen.campaign}/{seen.seq}/{seen.digest()[:16]}"
        await self._forget_before(f"campaign/{seen.campaign}/{seen.seq}/")
        subject = NextStep(seen, self._planner, self._evidence)
        conversation = Conversation(subject, self._checkpoints, thread, purpose=f"decision {seen.seq}")
        self._earlier[thread] = conversation
        self._recorded = await _apart(lambda: self._kept(seen))
        at = await _apart(conversation.begin)
        calls = self._calls[thread] = [LlmCall.model_validate(each) for each in at.calls]
        try:
            at = await self._to_the_end(conversation, at, calls, seen)
        except LlmSpent as error:
            raise self._spent(error, seen) from error
        except LlmUnusable as error:
            raise StrategistAway(
                f"the LLM {self.name} cannot be asked: {error}; then run `researcher campaign resume`"
            ) from error
        problems = self._unusable(at)
        if problems:
            await _apart(conversation.forget)
            raise StrategistFailed(f"the LLM {self.name} gave no readable proposal: {problems}")
        assert at.outcome is not None
        return [Proposal.model_validate(each) for each in at.outcome["proposals"]]

    def calls(self) -> list[LlmCall]:
        """Return the calls since this was last called, including those of a process that was killed before the decision was written."""
        found = self._paid()
        self._calls, self._recorded = {}, []
        return found

    def _paid(self) -> list[LlmCall]:
        """Return all calls for the current decision, starting with those that are in no conversation."""
        found = [call for calls in self._calls.values() for call in calls]
        return [*(call for call in self._recorded if call not in found), *found]

    async def _to_the_end(self, conversation: Conversation, at: Standing, calls: list[LlmCall], seen: Seen) -> Standing:
        """Ask the LLM until the conversation has an outcome or is given up. Raises: LlmUnusable, LlmSpent."""
        purse = Purse.of(self._paid())

        def keep(call: LlmCall) -> None:
            _add(calls, call)
            self._keep(seen, calls[-1])

        asker = Asker(
            self._endpoint,
            within(self._settings, seen.left),
            self._clock,
            keep=keep,
            tell=self._tell,
            purse=purse,
        )
        while at.outcome is None and not at.spent_answer and not at.given_up:
            said = await asked_of(asker, at)
            kept = [call.model_dump(mode="json") for call in calls]
            given = {**said, "tokens": purse.tokens, "cost": purse.cost, "calls": kept}
            at = await _apart(lambda given=given: conversation.give(given))  # type: ignore[misc]
        return at

    def _spent(self, error: LlmSpent, seen: Seen) -> IdeasSpent | StrategistAway:
        """Return the error for a spent limit, which is either the campaign's budget or the limit of one decision."""
        left, own = (
            (seen.left.llm_tokens, self._settings.max_tokens)
            if error.kind == "tokens"
            else (seen.left.money, self._settings.max_cost)
        )
        if left is not None and (own is None or left <= own):
            what = "LLM tokens" if error.kind == "tokens" else "money"
            return IdeasSpent(
                f"The budget's {what} for the LLM {self.name} are spent ({left:g} left, and the next question could take more): the "
                "report says what was found by then."
            )
        return StrategistAway(f"this decision has reached its own limit on the LLM {self.name}: {error}")

    def _unusable(self, at: Standing) -> str:
        """Say why there are no proposals; empty if there are some."""
        if at.spent_answer:
            return spent_answer(self._settings)
        if at.given_up or at.outcome is None:
            return at.given_up
        return "; ".join(at.outcome.get("problems", ()))[:1000]

    async def _forget_before(self, now: str) -> None:
        """Delete the conversations of earlier decisions, which are already recorded with every call."""
        for thread in [each for each in self._earlier if not each.startswith(now)]:
            await _apart(self._earlier.pop(thread).forget)


def within(settings: LlmSettings, left: Left, paid: Purse | None = None) -> LlmSettings:
    """Return the settings, limited to what is left of the campaign's budget.

    `paid` is spending that the budget has already subtracted and that will be counted again, so the limits are raised by it.
    """
    paid = paid or Purse()
    if left.llm_tokens is not None:
        settings = settings.changed(max_tokens=min(settings.max_tokens, int(left.llm_tokens) + paid.tokens))
    if left.money is not None:
        cost = left.money + paid.cost
        settings = settings.changed(max_cost=cost if settings.max_cost is None else min(settings.max_cost, cost))
    return settings


def _add(calls: list[LlmCall], call: LlmCall) -> None:
    """Append a call. If it repeats the last request after an outage, leave its request out."""
    repeated = bool(calls) and calls[-1].answer is None and _asked_last(calls) == call.request
    calls.append(call.model_copy(update={"request": {}}) if repeated else call)


def _asked_last(calls: Sequence[LlmCall]) -> dict[str, Any]:
    return next((call.request for call in reversed(calls) if call.request), {})


async def _apart(work: Callable[[], T]) -> T:
    """Run `work` in a thread, because planning takes a while.

    That also keeps it outside the decision's graph: a graph within a graph would share its state.
    """
    return await asyncio.get_running_loop().run_in_executor(None, work)
