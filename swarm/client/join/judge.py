"""A person judges: the model answers one task twice, in two episodes of one group, and the better answer gets the reward."""

from __future__ import annotations

import asyncio
import math
from contextlib import AsyncExitStack
from typing import Any

from swarm.client.episode import Episode
from swarm.client.errors import WorkflowFault
from swarm.client.join.model import ask_once, message_of, shown
from swarm.client.join.person import choose
from swarm.client.join.sitting import Sitting
from swarm.client.tasks import Outcome, Rollout, Task, rolled_out
from swarm.protocol.episodes import Cause, EpisodeTrace, RecordedCall

BETTER, WORSE, TIE = 1.0, 0.0, 0.5
_QUESTION = "Which is better? [a] [b] [t]ie [n]either [s]kip [q]uit: "


async def judge(sitting: Sitting, task: Task, rollout: Rollout = ask_once) -> None:
    """One pair. Which of the two is shown first is random. Raises: TooLate, PersonLeft; both episodes are then aborted."""
    pair: tuple[Episode, ...] = ()
    try:
        async with AsyncExitStack() as stack:
            pair = await sitting.pair(task, stack)
            await sitting.in_time(_judged(sitting, task, rollout, pair))
    finally:
        ended = [episode for episode in pair if episode.receipt is not None]
        sitting.tally.ended += len(ended)
        sitting.tally.given_up += len(pair) - len(ended)
        sitting.tally.rewards += [episode.reward for episode in ended if episode.reward is not None]


async def _judged(sitting: Sitting, task: Task, rollout: Rollout, pair: tuple[Episode, ...]) -> None:
    outcomes = await asyncio.gather(*(_played(rollout, episode, task) for episode in pair))
    traces = [await sitting.swarm.trace(episode.id) for episode in pair]
    order = sitting.order(*(episode.id for episode in pair))
    person = sitting.person
    person.show(f"\n=== task {task.id}\n{task.query}")
    for letter, index in zip("ab", order, strict=True):
        person.show(f"\n--- {letter}\n{transcript(traces[index])}")
    verdict = await choose(person, _QUESTION, "abtns")
    if verdict == "s":
        for episode in pair:
            episode.abort("the judge skipped this pair", cause=Cause.PERSON)
        return
    rewards = {"t": (TIE, TIE), "n": (WORSE, WORSE), "a": (BETTER, WORSE), "b": (WORSE, BETTER)}[verdict]
    for place, index in enumerate(order):
        mate, own = pair[1 - index], outcomes[index].reward
        pair[index].end(
            reward=rewards[place],
            success=rewards[place] == BETTER if verdict in "abn" else None,
            metrics={"judged": 1.0} | ({"own_reward": own} if math.isfinite(own) else {}),
            metadata={"judge": sitting.swarm.client_id, "verdict": verdict, "place": "ab"[place], "against": mate.id},
        )


async def _played(rollout: Rollout, episode: Episode, task: Task) -> Outcome:
    """The rollout's own outcome, which counts for nothing here. Raises: WorkflowFault when it ends the episode itself."""
    outcome = await rolled_out(rollout, episode, task)
    if episode.ended or outcome is None:
        raise WorkflowFault("this rollout ends its episode itself; a judge needs one that returns its outcome")
    return outcome if isinstance(outcome, Outcome) else Outcome(reward=float(outcome))


def transcript(trace: EpisodeTrace) -> str:
    """What the model said, with what it was told in between; each message once."""
    lines: list[str] = []
    seen: list[object] = []
    for call in trace.calls:
        messages = [*_told(call), message_of(call.answer)] if call.answer else []
        lines += [shown(message) for message in messages if message not in seen]
        seen += messages
    return "\n".join(lines) or "(no calls)"


def _told(call: RecordedCall) -> list[dict[str, Any]]:
    """A request's messages, or its prompt as one."""
    if call.dialect != "completions":
        return list(call.request.get("messages") or ())
    prompt = call.request["prompt"]
    return [{"role": "prompt", "content": prompt if isinstance(prompt, str) else f"({len(prompt)} token ids)"}]
