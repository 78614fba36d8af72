"""One decision as a LangGraph graph: propose → judge → propose again with the problems, or choose.

If the strategist holds a conversation, it checkpoints that itself. The caller writes the result to SQL in one transaction,
so a decision that was interrupted is made again from the same input.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from langgraph.graph import START, StateGraph

from researcher.campaign.judging import StudyPlanner, all_problems, chosen, judged
from researcher.campaign.proposals import Judged, Proposal
from researcher.campaign.seen import Seen
from researcher.campaign.strategist import Strategist

ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class Decided:
    """The chosen step, and every judged proposal. If `step` is None, no proposal was sound, and `problems` says why."""

    step: Judged | None
    judgements: tuple[Judged, ...]
    problems: tuple[str, ...]


class _State(TypedDict, total=False):
    attempt: int
    problems: tuple[str, ...]
    proposals: Sequence[Proposal]
    judgements: tuple[Judged, ...]
    step: Judged | None


async def decide(seen: Seen, strategist: Strategist, planner: StudyPlanner, *, writes: bool = False) -> Decided:
    """Make one decision. `writes` says whether an LLM can write instruments. Raises: NoProposal."""

    async def propose(state: _State) -> _State:
        asked = seen.model_copy(update={"problems": state.get("problems", ())})
        return {"proposals": await strategist.propose(asked), "attempt": state.get("attempt", 0) + 1}

    async def judge(state: _State) -> _State:
        # in a thread, because a rehearsal may take minutes, and the owner has to renew its lease meanwhile
        found = await asyncio.to_thread(
            lambda: tuple(judged(each, seen, planner, writes=writes) for each in state["proposals"])
        )
        problems = all_problems(found) or ("propose at least one step",)
        return {"judgements": found, "problems": problems, "step": chosen(found)}

    def after(state: _State) -> Literal["propose", "__end__"]:
        return "propose" if state["step"] is None and state["attempt"] < ATTEMPTS else "__end__"

    nodes: Any = StateGraph(_State)
    nodes.add_node("propose", propose)
    nodes.add_node("judge", judge)
    nodes.add_edge(START, "propose")
    nodes.add_edge("propose", "judge")
    nodes.add_conditional_edges("judge", after)
    state = await nodes.compile().ainvoke(_State())
    return Decided(state["step"], state["judgements"], state["problems"])
