"""A person plays the agent: the model drafts each turn in the recorded episode, and the person accepts it, edits it or replaces it.

Accepted drafts consist of sampled tokens and get the episode's reward. Refused drafts are sampled too, and get their own, lower
reward. Text that the person wrote was not sampled and is never trained on. To tell these apart, each draft has its own agent name.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from subprocess import CalledProcessError
from typing import Any, cast

from swarm.client.episode import Episode
from swarm.client.join.endpoint import PersonEndpoint
from swarm.client.join.model import Model, ModelRefused, ask_once, message_of, shown, text_of
from swarm.client.join.person import Person, choose, reward_of
from swarm.client.join.session import Session
from swarm.client.losses import cause_of
from swarm.client.rollouts import end_with
from swarm.client.tasks import Rollout, Task, rolled_out
from swarm.protocol.episodes import POLICY_MODEL, Cause
from swarm.protocol.errors import SwarmError

_QUESTION = "[Enter] accept, [e]dit, [w]rite another, [m]ore: draft again, [q]uit: "
_CALL = "/call "


@dataclass(slots=True, kw_only=True)
class Draft:
    """One answer that the model sampled.

    Args:
        name: the draft's agent name on the server.
        agent: the agent name that the rollout uses.
        answer: the draft itself, if the person accepted it unchanged.
        accepted: whether the draft was accepted and delivered; an undelivered draft had no effect.
    """

    name: str
    agent: str | None
    answer: dict[str, Any] | None = None
    accepted: bool = False


@dataclass(slots=True, kw_only=True)
class PlayedTurns:
    """The turns of one episode. If `by_hand` is true, the person writes every answer and the model is never called."""

    person: Person
    model: Model
    by_hand: bool = False
    drafts: list[Draft] = field(default_factory=list)
    written: list[str] = field(default_factory=list)
    number: int = 0
    seen: list[Any] = field(default_factory=list)
    attention: asyncio.Lock = field(default_factory=asyncio.Lock)
    fault: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Receives an error when the person leaves or their terminal fails."""

    async def answer(self, body: dict[str, Any], agent: str | None) -> dict[str, Any]:
        """Answer an agent's request, one at a time; parallel requests wait for the person. See `endpoint.Answer`."""
        async with self.attention:
            self.number += 1
            try:
                self._show(body, agent)
                if self.by_hand:
                    return self._made(await self.person.ask("your answer: "))
                return await self._drafted({**body, "stream": False, "stream_options": None}, agent)
            except ModelRefused:
                raise
            except (SwarmError, OSError, CalledProcessError) as error:
                if not self.fault.done():
                    self.fault.set_exception(error)
                raise ModelRefused(503, {"error": {"message": str(error), "type": "person_left"}}) from error

    def delivered(self, answer: dict[str, Any]) -> None:
        """Mark the draft with this answer as accepted. See `endpoint.Delivered`."""
        for draft in self.drafts:
            draft.accepted |= draft.answer is answer

    def _show(self, body: dict[str, Any], agent: str | None) -> None:
        self.person.show(f"\n--- turn {self.number}{f', agent {agent}' if agent else ''}")
        for message in body["messages"]:
            if message not in self.seen:
                self.seen.append(message)
                self.person.show(shown(message))
        for tool in body.get("tools") or ():
            function = tool.get("function", {})
            schema = json.dumps(function.get("parameters", {}).get("properties", {}))
            self.person.show(f"  tool {function.get('name')}: {function.get('description', '')} {schema}")

    async def _drafted(self, body: dict[str, Any], agent: str | None) -> dict[str, Any]:
        body = {name: value for name, value in body.items() if value is not None}
        for attempt in range(1, 1000):
            name = f"{agent or POLICY_MODEL}/turn-{self.number}" + (f".{attempt}" if attempt > 1 else "")
            answer = await self.model.chat(body, agent=name)
            draft = Draft(name=name, agent=agent)
            self.drafts.append(draft)
            text = text_of(message_of(answer))
            self.person.show("\n".join(["the model's draft:", *(f"    {line}" for line in text.split("\n"))]))
            key = await choose(self.person, _QUESTION, " ewm")
            if key == "m":
                continue
            wanted = text
            if key == "e":
                wanted = await self.person.edit(text)
            elif key == "w":
                wanted = await self.person.ask("your answer: ")
            if wanted == text:
                draft.answer = answer
                self.seen.append(message_of(answer))
                return answer
            return self._made(wanted, answer)
        raise RuntimeError("the person refused 999 drafts of one turn")

    def _made(self, text: str, draft: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return a chat completion with the person's text. Text of the form `/call NAME {json}` becomes a tool call."""
        self.written.append(text)
        message: dict[str, Any] = {"role": "assistant", "content": text}
        finish = "stop"
        if text.startswith(_CALL):
            name, _, arguments = text.removeprefix(_CALL).strip().partition(" ")
            function = {"name": name, "arguments": arguments.strip() or "{}"}
            call = {"id": f"call_{self.number:08d}", "type": "function", "function": function}
            message, finish = {"role": "assistant", "content": None, "tool_calls": [call]}, "tool_calls"
        self.seen.append(message)
        base = {
            "id": f"chatcmpl-person-{self.number}",
            "object": "chat.completion",
            "created": 0,
            "model": POLICY_MODEL,
        }
        choice = {"index": 0, "message": message, "finish_reason": finish, "logprobs": None}
        usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        return {**base, "usage": usage, **(draft or {}), "choices": [choice]}

    def agent_rewards(self, reward: float, given: Mapping[str, float], refused_reward: float) -> dict[str, float]:
        """Return rewards by agent name: `given`, plus one for each draft.

        An accepted draft gets the reward of the agent whose turn it was, or `reward` if that agent has none. A refused draft gets
        `refused_reward`.
        """
        own = {draft.name: given.get(draft.agent or "", reward) for draft in self.drafts if draft.accepted}
        return {**given, **own, **{draft.name: refused_reward for draft in self.drafts if not draft.accepted}}


class PlayedEpisode:
    """An episode whose agent talks to a person.

    It has the endpoint's address instead of the server's, and holds back its result until the drafts' rewards are known. All else is
    delegated to the wrapped episode.
    """

    def __init__(self, episode: Episode, endpoint: PersonEndpoint) -> None:
        self._episode = episode
        self.base_url = endpoint.base_url
        self.api_key = endpoint.api_key
        self.result: dict[str, Any] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._episode, name)

    @property
    def ended(self) -> bool:
        return self.result is not None

    def end(self, *, reward: float, **result: Any) -> _Kept:
        """Store the result. Unlike with `Episode.end`, awaiting the return value sends nothing yet."""
        if self.result is not None:
            raise RuntimeError(f"episode {self._episode.id} has already ended; call `end` only once")
        self.result = {"reward": reward, **result}
        return _Kept()


class _Kept:
    """What `PlayedEpisode.end` returns: the result will be sent later, together with the drafts' rewards."""

    def __await__(self) -> Generator[Any, None, None]:
        return
        yield


async def play(
    session: Session,
    task: Task,
    rollout: Rollout = ask_once,
    *,
    by_hand: bool = False,
    ask_reward: bool = False,
    refused_reward: float = 0.0,
) -> None:
    """Play one episode.

    Args:
        session: the person's session.
        task: the task to play.
        rollout: the agent's code, whose model calls the person answers.
        by_hand: the person writes every answer, and the model is never called.
        ask_reward: ask the person for the reward instead of using the rollout's.
        refused_reward: reward of drafts that the person refused.
    Raises: TooLate, PersonLeft, and any error from the rollout; the episode is then aborted.
    """
    try:
        async with session.episode(task) as episode, Model(episode) as model:
            turns = PlayedTurns(person=session.person, model=model, by_hand=by_hand)
            session.person.show(f"\n=== task {task.id}\n{task.query}")
            result = await session.in_time(_played(session, episode, task, rollout, turns, ask_reward))
            _end(episode, result, turns, refused_reward)
    except BaseException:
        session.tally.given_up += 1
        raise
    session.tally.ended += 1
    session.tally.rewards.append(float(result["reward"]))


async def _played(
    session: Session, episode: Episode, task: Task, rollout: Rollout, turns: PlayedTurns, ask_reward: bool
) -> dict[str, Any]:
    """Run the rollout and return the episode's result, which has not been sent yet."""
    async with PersonEndpoint(turns.answer, session.swarm.ids, turns.delivered) as endpoint:
        played = PlayedEpisode(episode, endpoint)
        playing = asyncio.ensure_future(rolled_out(rollout, cast(Episode, played), task))
        try:
            first: set[asyncio.Future[Any]] = {playing, turns.fault}
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if turns.fault.done():
                turns.fault.result()
            end_with(cast(Episode, played), await playing)
        except Exception as error:
            cause = cause_of(error, [endpoint.base_url])
            if cause in (Cause.SERVER, Cause.NETWORK):  # the endpoint passed the model's failure on to the agent
                episode.abort(f"{type(error).__name__}: {error}", cause=cause)
            raise
        finally:
            playing.cancel()
            await asyncio.gather(playing, return_exceptions=True)
    assert played.result is not None
    if ask_reward:
        played.result["reward"] = await reward_of(session.person, "reward: ")
    return played.result


def _end(episode: Episode, result: dict[str, Any], turns: PlayedTurns, refused_reward: float) -> None:
    rewards = turns.agent_rewards(result["reward"], result.get("agent_rewards") or {}, refused_reward)
    accepted = sum(draft.accepted for draft in turns.drafts)
    counts = {"accepted": float(accepted), "refused": float(len(turns.drafts) - accepted)}
    episode.end(
        reward=result["reward"],
        success=result.get("success"),
        agent_rewards=rewards or None,
        metrics={**(result.get("metrics") or {}), **counts},
        metadata={
            **(result.get("metadata") or {}),
            "played": "by hand" if turns.by_hand else "drafts",
            "written": turns.written,
        },
        despite=result.get("despite"),
        by_hand=turns.by_hand,
    )
