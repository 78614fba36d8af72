"""Answers with several tool calls, through the SDK of each dialect: in which order and how results come back, and what forks then.

Causes are those of docs/reference/forks.md.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest

from swarm.protocol.episodes import RecordedCall
from tests.fakes.parallel_tools import ParallelTools
from tests.swarm.server.gateway.conftest import Episode, Served, served_by
from tests.vllm_fixture import LoopThread

ALL_THREE = ("say", "look", "say")
"""What an answer calls that has to call `say`: two tools, one of them twice."""
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"word": {"type": "string"}},
    "required": ["word"],
    "additionalProperties": False,
}
FUNCTIONS: list[dict[str, Any]] = [{"name": name, "parameters": PARAMETERS, "strict": True} for name in ("say", "look")]
Part = dict[str, Any]


class Talk(ABC):
    """A conversation through one SDK. sent: what the next request sends; said: the last answer, as its parts."""

    def __init__(self, episode: Episode, *, stream: bool) -> None:
        self.episode = episode
        self.stream = stream
        self.sent: list[Part] = [{"role": "user", "content": "Repeat red"}]
        self.said: list[Part] = []

    def turn(self, tool: str | None = None) -> list[str]:
        """Ask, and go on from the answer: the ids of its calls. tool: what it has to call."""
        self.ask(tool)
        self.sent += self.said
        return self.called

    @abstractmethod
    def ask(self, tool: str | None = None) -> None:
        """Ask, and keep the answer without running its tools."""

    @property
    @abstractmethod
    def called(self) -> list[str]:
        """Ids of the tool calls in the kept answer."""

    @abstractmethod
    def give(self, *call_ids: str) -> None:
        """Results of these calls, in this order."""

    @abstractmethod
    def apart(self, call_ids: Sequence[str]) -> None:
        """Write the kept answer into the messages as turns of one call each, each followed by its result."""


class Chat(Talk):
    """Chat completions."""

    def ask(self, tool: str | None = None) -> None:
        asked: Any = {"model": "policy", "messages": self.sent, "max_tokens": 90}
        asked["tools"] = [{"type": "function", "function": each} for each in FUNCTIONS]
        if tool:
            asked["tool_choice"] = {"type": "function", "function": {"name": tool}}
        completions = self.episode.sdk.chat.completions
        if self.stream:
            with completions.stream(**asked) as events:
                answer: Any = events.get_final_completion()
        else:
            answer = completions.create(**asked)
        self.said = [answer.choices[0].message.model_dump(exclude_none=True)]

    @property
    def called(self) -> list[str]:
        return [call["id"] for call in self.said[0].get("tool_calls") or ()]

    def give(self, *call_ids: str) -> None:
        self.sent += [{"role": "tool", "tool_call_id": each, "content": f"result {each}"} for each in call_ids]

    def apart(self, call_ids: Sequence[str]) -> None:
        (message,) = self.said
        for call in message["tool_calls"]:
            self.sent.append({"role": "assistant", "content": None, "tool_calls": [call]})
            self.give(call["id"])


class Items(Talk):
    """Responses, the items sent again."""

    def ask(self, tool: str | None = None) -> None:
        self.said = [item.model_dump(exclude_none=True) for item in self._asked(tool, input=self.sent).output]

    def _asked(self, tool: str | None, **fields: Any) -> Any:
        asked: Any = {"model": "policy", "max_output_tokens": 90} | fields
        asked["tools"] = [{"type": "function"} | each for each in FUNCTIONS]
        if tool:
            asked["tool_choice"] = {"type": "function", "name": tool}
        responses = self.episode.sdk.responses
        if not self.stream:
            return responses.create(**asked)
        with responses.stream(**asked) as events:
            return events.until_done().get_final_response()

    @property
    def called(self) -> list[str]:
        return [item["call_id"] for item in self.said if item["type"] == "function_call"]

    def give(self, *call_ids: str) -> None:
        kind = "function_call_output"
        self.sent += [{"type": kind, "call_id": each, "output": f"result {each}"} for each in call_ids]

    def apart(self, call_ids: Sequence[str]) -> None:
        for item in self.said:
            self.sent.append(item)
            self.give(item["call_id"])


class ById(Items):
    """Responses, each by the id of the one before."""

    previous: str | None = None

    def turn(self, tool: str | None = None) -> list[str]:
        self.ask(tool)
        self.sent = []
        return self.called

    def ask(self, tool: str | None = None) -> None:
        answer = self._asked(tool, input=self.sent, previous_response_id=self.previous)
        self.previous, self.said = answer.id, [item.model_dump() for item in answer.output]


class Blocks(Talk):
    """Messages, all results of an answer in one of them."""

    def ask(self, tool: str | None = None) -> None:
        asked: Any = {"model": "policy", "messages": self.sent, "max_tokens": 90}
        asked["tools"] = [{"name": each["name"], "input_schema": PARAMETERS} for each in FUNCTIONS]
        if tool:
            asked["tool_choice"] = {"type": "tool", "name": tool}
        messages = self.episode.claude.messages
        if self.stream:
            with messages.stream(**asked) as events:
                answer: Any = events.get_final_message()
        else:
            answer = messages.create(**asked)
        self.said = [{"role": "assistant", "content": [block.model_dump() for block in answer.content]}]

    @property
    def called(self) -> list[str]:
        return [block["id"] for block in self.said[0]["content"] if block["type"] == "tool_use"]

    def give(self, *call_ids: str) -> None:
        kind = "tool_result"
        results = [{"type": kind, "tool_use_id": each, "content": f"result {each}"} for each in call_ids]
        self.sent.append({"role": "user", "content": results})

    def apart(self, call_ids: Sequence[str]) -> None:
        for block in self.said[0]["content"]:
            self.sent.append({"role": "assistant", "content": [block]})
            self.give(block["id"])


SENDING_ALL: list[type[Talk]] = [Chat, Items, Blocks]
"""Ways in which the client sends the whole conversation with each request."""
EVERY_WAY = [*SENDING_ALL, ById]


@pytest.fixture(scope="module")
def engine() -> ParallelTools:
    return ParallelTools({"say": ALL_THREE, "look": ("look", "say")})


@pytest.fixture(scope="module")
def served(engine: ParallelTools, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    loop = LoopThread()
    with served_by(loop, engine, tmp_path_factory.mktemp("served")) as running:
        yield running
    loop.close()


def assert_one_timeline(calls: Sequence[RecordedCall]) -> None:
    assert [call.fork_cause for call in calls] == [None] * len(calls)
    for before, call in pairwise(calls):
        held = [*before.prompt_ids, *before.sampled_ids]
        assert call.parent_call_id == before.call_id
        assert call.prompt_ids[: len(held)] == held


def results_in(call: RecordedCall) -> list[str]:
    """The ids of the calls whose results a prompt ends with, in its order."""
    messages = list(call.request["messages"])
    return [message["tool_call_id"] for message in messages if message["role"] == "tool"]


@pytest.mark.parametrize("says", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("way", EVERY_WAY)
def test_results_of_parallel_calls_go_on_token_by_token(
    engine: ParallelTools, served: Served, way: type[Talk], stream: bool, says: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "says", says)
    talk = way(served.claim(), stream=stream)
    for tool, count in (("say", 3), ("look", 2)):
        called = talk.turn(tool)
        assert len(set(called)) == count
        talk.give(*called)
    assert talk.turn() == []
    calls = talk.episode.trace().calls
    assert len(calls) == 3
    assert_one_timeline(calls)
    assert all(len(call.sampled_ids) == len(call.logprobs) == call.versions[-1].end for call in calls)
    message = calls[0].answer["choices"][0]["message"]
    assert [call["function"]["name"] for call in message["tool_calls"]] == list(ALL_THREE)
    assert (message["content"] in ("red", "~der")) == says


@pytest.mark.parametrize("way", EVERY_WAY)
def test_results_may_come_back_in_another_order(served: Served, way: type[Talk]) -> None:
    talk = way(served.claim(), stream=True)
    first, second, third = talk.turn("say")
    talk.give(third, first, second)
    talk.turn()
    calls = talk.episode.trace().calls
    assert_one_timeline(calls)
    assert results_in(calls[1]) == [third, first, second]


@pytest.mark.parametrize("way", EVERY_WAY)
def test_each_result_may_be_a_message_of_its_own(served: Served, way: type[Talk]) -> None:
    talk = way(served.claim(), stream=True)
    for call_id in talk.turn("say"):
        talk.give(call_id)
    talk.turn()
    assert_one_timeline(talk.episode.trace().calls)


@pytest.mark.parametrize("way", EVERY_WAY)
def test_results_may_come_one_by_one_where_the_answers_between_are_kept(served: Served, way: type[Talk]) -> None:
    talk = way(served.claim(), stream=True)
    for call_id in talk.turn("say"):
        talk.give(call_id)
        talk.turn()
    calls = talk.episode.trace().calls
    assert len(calls) == 4
    assert_one_timeline(calls)


@pytest.mark.parametrize("way", SENDING_ALL)
def test_an_answer_that_came_before_the_last_result_and_is_left_out_changes_the_history(
    served: Served, way: type[Talk]
) -> None:
    talk = way(served.claim(), stream=True)
    first, second, third = talk.turn("say")
    talk.give(first)
    talk.ask()
    talk.give(second, third)
    talk.turn()
    called, hasty, last = talk.episode.trace().calls
    assert (hasty.parent_call_id, hasty.fork_cause) == (called.call_id, None)
    assert (last.parent_call_id, last.fork_cause) == (called.call_id, "history_changed")


@pytest.mark.parametrize("way", SENDING_ALL)
def test_results_that_change_places_later_change_the_history(served: Served, way: type[Talk]) -> None:
    talk = way(served.claim(), stream=True)
    called = talk.turn("say")
    begun = list(talk.sent)
    talk.give(*called)
    talk.ask()
    said, talk.sent = talk.said, begun
    talk.give(*reversed(called))
    talk.sent += [*said, {"role": "user", "content": "Repeat blue"}]
    talk.turn()
    first, _, last = talk.episode.trace().calls
    assert (last.parent_call_id, last.fork_cause) == (first.call_id, "history_changed")


@pytest.mark.parametrize("way", SENDING_ALL)
def test_each_result_in_a_request_of_its_own_is_a_branch_and_no_fork(served: Served, way: type[Talk]) -> None:
    talk = way(served.claim(), stream=True)
    called, begun = talk.turn("say"), list(talk.sent)
    for call_id in called:
        talk.sent = list(begun)
        talk.give(call_id)
        talk.ask()
    first, *rest = talk.episode.trace().calls
    assert [(call.parent_call_id, call.fork_cause) for call in rest] == [(first.call_id, None)] * 3


@pytest.mark.parametrize("way", SENDING_ALL)
def test_calls_that_are_sent_back_as_turns_of_their_own_are_an_edited_answer(served: Served, way: type[Talk]) -> None:
    talk = way(served.claim(), stream=True)
    talk.ask("say")
    talk.apart(talk.called)
    talk.turn()
    _, last = talk.episode.trace().calls
    assert (last.parent_call_id, last.fork_cause) == (None, "answer_edited")
    assert [message["role"] for message in last.request["messages"]] == ["user", *["assistant", "tool"] * 3]
