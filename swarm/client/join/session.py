"""A person's session with one run: claims episodes for the person, limits how long others wait, and offers activities.

A person can judge answers (`judge`) or play the model's user and tools (`talk`). `swarm.client.join.play` has the third activity.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, TypeVar

from foundation.ids import derived_seed
from swarm.client.client import SwarmClient
from swarm.client.episode import Episode
from swarm.client.errors import Draining, WorkflowFault
from swarm.client.join.model import Model, ask_once, message_of, shown
from swarm.client.join.person import Person, choose, reward_of
from swarm.client.tasks import Outcome, Rollout, Task, rolled_out
from swarm.protocol.episodes import Cause, EpisodeKind, EpisodeTrace, RecordedCall
from swarm.protocol.errors import SwarmError

T = TypeVar("T")
PAIR_CLAIMS = 4
"""Maximum number of claims per try. It is enough to get two slots of one group if nobody else claims meanwhile."""
PAIR_TRIES = 8
MATE_S = 5.0
"""How long a try waits for the second slot of a group, in seconds. Otherwise two clients with one slot each would wait for each other
until their leases expire."""
PAUSES_S = (0.2, 3.0)
"""Range of the random pause between two tries, in seconds, so that two competing clients do not retry at the same time."""


class TooLate(SwarmError):
    """The person took longer than the episode may last. The episode was aborted, and its slot is offered again."""

    cause = Cause.LIMIT


@dataclass(slots=True, kw_only=True)
class Tally:
    """Counts and rewards of a session's episodes."""

    ended: int = 0
    given_up: int = 0
    rewards: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """Claims episodes for one person.

    Args:
        swarm: the client that claims episodes.
        person: who answers.
        run_id: the run to take part in.
        max_episode_s: time limit per episode. It also limits how long a training step or other clients may wait for the person.
        idle_limit_s: how soon the server notices that the person's machine is gone. While it is up, the client renews the lease.
        wait_s: how long one claim waits for a free slot.
        mix: the task family to claim for.
        kind: whether to play training or evaluation episodes.
        tally: counts the session's episodes.
    """

    swarm: SwarmClient
    person: Person
    run_id: str
    max_episode_s: float = 300.0
    idle_limit_s: float = 30.0
    wait_s: float = 30.0
    mix: str | None = None
    kind: EpisodeKind = "train"
    tally: Tally = field(default_factory=Tally)

    def episode(self, task: Task) -> Episode:
        return self.swarm.episode(
            task_id=task.id,
            run_id=self.run_id,
            mix=self.mix,
            kind=self.kind,
            idle_limit_s=self.idle_limit_s,
            max_episode_s=self.max_episode_s,
            wait_s=self.wait_s,
        )

    async def pair(self, task: Task, stack: AsyncExitStack) -> tuple[Episode, Episode]:
        """Claim two episodes of one group. When `stack` closes, those that have not ended are given back.

        Raises: TooLate if other clients keep taking the slots.
        """
        for _ in range(PAIR_TRIES):
            async with AsyncExitStack() as claimed:
                found = await self._pair(task, claimed)
                if found is not None:
                    await stack.enter_async_context(claimed.pop_all())
                    return found
            await self.swarm.clock.sleep(random.uniform(*PAUSES_S))
        raise TooLate(f"other clients keep taking the slots of task {task.id}; try again")

    async def _pair(self, task: Task, claimed: AsyncExitStack) -> tuple[Episode, Episode] | None:
        """Try once to claim a pair. Return None if that failed; its episodes are then given back when `claimed` closes.

        Raises: TooLate if the server starts no new groups for now.
        """
        held: dict[str | None, Episode] = {}
        for _ in range(PAIR_CLAIMS):
            try:
                async with asyncio.timeout(MATE_S if held else None):
                    episode = await claimed.enter_async_context(self.episode(task))
            except TimeoutError:
                break
            except Draining as error:
                raise TooLate(f"other clients are playing task {task.id}: {error}") from error
            mate = held.pop(episode.grant.group_id, None)
            if mate is not None:
                for spare in held.values():
                    spare.abort("its group had only one slot left; a pair needs two", cause=Cause.PERSON)
                return mate, episode
            held[episode.grant.group_id] = episode
        for spare in held.values():
            spare.abort("no group had two free slots", cause=Cause.PERSON)
        return None

    async def in_time(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work` and return its result. Raises: TooLate if it takes longer than max_episode_s; the work is then cancelled."""
        playing = asyncio.ensure_future(work)
        limit = asyncio.ensure_future(self.swarm.clock.sleep(self.max_episode_s))
        try:
            await asyncio.wait({playing, limit}, return_when=asyncio.FIRST_COMPLETED)
            if playing.done():
                return playing.result()
            raise TooLate(f"the person took longer than {self.max_episode_s:g} s (--max-episode-s)")
        finally:
            limit.cancel()
            playing.cancel()
            await asyncio.gather(playing, return_exceptions=True)

    def order(self, *ids: str) -> list[int]:
        """Return the indices of `ids` in a pseudo-random order that depends only on the ids."""
        return random.Random(derived_seed(*ids)).sample(range(len(ids)), len(ids))


# -- a person judges ------------------------------------------------------------------------------------------------------

BETTER, WORSE, TIE = 1.0, 0.0, 0.5
_QUESTION = "Which is better? [a] [b] [t]ie [n]either [s]kip [q]uit: "


async def judge(session: Session, task: Task, rollout: Rollout = ask_once) -> None:
    """Let the model answer one task in two episodes of one group, and reward the answer that the person prefers.

    The two answers are shown in random order. Raises: TooLate, PersonLeft; both episodes are then aborted.
    """
    pair: tuple[Episode, ...] = ()
    try:
        async with AsyncExitStack() as stack:
            pair = await session.pair(task, stack)
            await session.in_time(_judged(session, task, rollout, pair))
    finally:
        ended = [episode for episode in pair if episode.receipt is not None]
        session.tally.ended += len(ended)
        session.tally.given_up += len(pair) - len(ended)
        session.tally.rewards += [episode.reward for episode in ended if episode.reward is not None]


async def _judged(session: Session, task: Task, rollout: Rollout, pair: tuple[Episode, ...]) -> None:
    outcomes = await asyncio.gather(*(_played(rollout, episode, task) for episode in pair))
    traces = [await session.swarm.trace(episode.id) for episode in pair]
    order = session.order(*(episode.id for episode in pair))
    person = session.person
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
            metadata={"judge": session.swarm.client_id, "verdict": verdict, "place": "ab"[place], "against": mate.id},
            despite=outcomes[index].despite,
        )


async def _played(rollout: Rollout, episode: Episode, task: Task) -> Outcome:
    """Run the rollout and return its outcome; only the person's verdict will count.

    Raises: WorkflowFault if the rollout ends the episode itself.
    """
    outcome = await rolled_out(rollout, episode, task)
    if episode.ended or outcome is None:
        raise WorkflowFault(
            "this rollout ends its own episode; judging needs a rollout that returns its outcome instead"
        )
    return outcome if isinstance(outcome, Outcome) else Outcome(reward=float(outcome))


def transcript(trace: EpisodeTrace) -> str:
    """Format the conversation as text, with each message and each of the model's answers shown once."""
    lines: list[str] = []
    seen: list[object] = []
    for call in trace.calls:
        messages = [*_asked(call), message_of(call.answer)] if call.answer else []
        lines += [shown(message) for message in messages if message not in seen]
        seen += messages
    return "\n".join(lines) or "(no calls)"


def _asked(call: RecordedCall) -> list[dict[str, Any]]:
    """Return a request's messages, or its plain prompt as one message."""
    if call.dialect != "completions":
        return list(call.request.get("messages") or ())
    prompt = call.request["prompt"]
    return [{"role": "prompt", "content": prompt if isinstance(prompt, str) else f"({len(prompt)} token ids)"}]


# -- a person plays the world ---------------------------------------------------------------------------------------------


async def talk(session: Session, task: Task) -> None:
    """Play one episode in which the person plays the user and the tools. The person's reward applies to all of the model's answers.

    The task's query, if it has one, is the first message; an empty line ends the conversation. The model may call the tools in the
    task's `metadata["tools"]`.

    Raises: TooLate, PersonLeft, ModelRefused; the episode is then aborted.
    """
    try:
        async with session.episode(task) as episode, Model(episode) as model:
            session.person.show(f"\n=== task {task.id}")
            reward, turns = await session.in_time(_talked(session, task, model))
            episode.end(reward=reward, metrics={"turns": float(turns)}, metadata={"played": "the world"})
    except BaseException:
        session.tally.given_up += 1
        raise
    session.tally.ended += 1
    session.tally.rewards.append(reward)


async def _talked(session: Session, task: Task, model: Model) -> tuple[float, int]:
    """Hold the conversation. Returns the reward and the number of answers by the model."""
    person, turns = session.person, 0
    tools = {"tools": task.metadata["tools"]} if task.metadata.get("tools") else {}
    words = task.query or await person.ask("you: ")
    messages: list[dict[str, Any]] = [{"role": "user", "content": words}] if words else []
    while messages:
        answer = message_of(await model.chat({"messages": messages, **tools}))
        turns += 1
        person.show(shown(answer))
        messages.append(answer)
        for call in answer.get("tool_calls") or ():
            result = await person.ask(f"result of {call['function']['name']}: ")
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        if messages[-1]["role"] == "tool":
            continue
        words = await person.ask("you (an empty line ends it): ")
        if not words:
            break
        messages.append({"role": "user", "content": words})
    return await reward_of(person, "reward: "), turns
