"""A person plays the world: user and tools. The model plays the agent; all that it says is sampled, and gets the person's reward."""

from __future__ import annotations

from typing import Any

from swarm.client.join.model import Model, message_of, shown
from swarm.client.join.person import reward_of
from swarm.client.join.sitting import Sitting
from swarm.client.tasks import Task


async def talk(sitting: Sitting, task: Task) -> None:
    """One episode: the task's query (if any) opens it, an empty line ends it. `metadata.tools` are offered to the model.

    Raises: TooLate, PersonLeft, ModelRefused; the episode is then aborted.
    """
    try:
        async with sitting.episode(task) as episode, Model(episode) as model:
            sitting.person.show(f"\n=== task {task.id}")
            reward, turns = await sitting.in_time(_talked(sitting, task, model))
            episode.end(reward=reward, metrics={"turns": float(turns)}, metadata={"played": "the world"})
    except BaseException:
        sitting.tally.given_up += 1
        raise
    sitting.tally.ended += 1
    sitting.tally.rewards.append(reward)


async def _talked(sitting: Sitting, task: Task, model: Model) -> tuple[float, int]:
    """The reward, and how often the model spoke."""
    person, turns = sitting.person, 0
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
