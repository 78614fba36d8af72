"""The echo rule over small templates: what keeps the sampled ids, what forks and why."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from swarm.server.gateway.message_form import normal_message
from swarm.server.gateway.token_reuse import EarlierCall, ForkCause, Prompt, TokenReuse
from tests.fakes.template import END, PAIR, Template, decode, encode

pytestmark = pytest.mark.anyio

Message = dict[str, Any]
USER: Message = {"role": "user", "content": "What is cab?"}
AGAIN: Message = {"role": "user", "content": "And now?"}
TOOL: Message = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def assistant(content: str | None, **fields: Any) -> Message:
    return {"role": "assistant", "content": content, **fields}


def spelt(text: str) -> list[int]:
    """Ids as a model may sample them: never as the template's tokeniser would."""
    return [ord(char) for char in text]


class Conversation:
    """An episode as the gateway sees it: asks the rule, then books what was `sampled`."""

    def __init__(self, template: Template | None = None) -> None:
        self.template = template or Template()
        self.rule = TokenReuse(decode)
        self.calls: list[EarlierCall] = []

    async def ask(self, messages: list[Message], agent: str | None = None, tools: list[Any] | None = None) -> Prompt:
        return await self.rule.prompt_for(messages, {"tools": tools}, agent, self.calls, self.template.bound(tools))

    async def turn(
        self,
        messages: list[Message],
        answer: Message,
        sampled: list[int],
        agent: str | None = None,
        tools: list[Any] | None = None,
    ) -> EarlierCall:
        prompt = await self.ask(messages, agent, tools)
        ids = prompt.prompt_ids or self.template.ids(messages, tools=tools)
        call = EarlierCall(
            call_id=f"call-{len(self.calls)}",
            agent=agent,
            sent=tuple(messages),
            messages=prompt.messages,
            answer=answer,
            settings={"tools": tools},
            prompt_ids=ids,
            rendered=prompt.rendered or ids,
            sampled_ids=sampled,
        )
        self.calls.append(call)
        return call


async def first_turn(text: str = "cab", sampled: list[int] | None = None, **options: Any) -> Conversation:
    conversation = Conversation(Template(**options))
    await conversation.turn([USER], assistant(text), sampled or [*spelt(text), END])
    return conversation


async def test_a_first_call_has_no_parent_and_needs_no_render() -> None:
    conversation = Conversation()
    prompt = await conversation.ask([USER])
    assert (prompt.prompt_ids, prompt.parent_call_id, prompt.fork_cause) == (None, None, None)
    assert conversation.template.renders == 0


async def test_sampled_ids_stand_in_the_place_of_the_echo() -> None:
    conversation = await first_turn()
    (first,) = conversation.calls
    assert PAIR in encode("cab")
    assert PAIR not in first.sampled_ids
    prompt = await conversation.ask([USER, assistant("cab"), AGAIN])
    assert prompt.parent_call_id == "call-0"
    expected = [*encode("\n"), *conversation.template.ids([AGAIN])]
    assert prompt.prompt_ids == [*first.prompt_ids, *first.sampled_ids, *expected]


@pytest.mark.parametrize(
    "echo",
    [
        assistant("  cab\n"),
        assistant("cab", refusal=None, tool_calls=None),
        assistant("cab", annotations=[], audio=None),
        {"role": "assistant", "content": [{"type": "text", "text": "cab"}]},
        {"content": "cab", "role": "assistant"},
    ],
)
async def test_an_echo_that_was_only_normalised_is_matched(echo: Message) -> None:
    conversation = await first_turn(" cab", sampled=[*spelt(" cab"), END])
    prompt = await conversation.ask([USER, echo, AGAIN])
    assert prompt.parent_call_id == "call-0"
    assert prompt.fork_cause is None


async def test_four_turns_are_one_timeline() -> None:
    conversation = Conversation()
    messages: list[Message] = [USER]
    for turn in range(4):
        call = await conversation.turn(messages, assistant(f" cab {turn} "), [*spelt(f" cab {turn} "), END])
        if turn:
            before = conversation.calls[turn - 1]
            held = [*before.prompt_ids, *before.sampled_ids]
            assert call.prompt_ids[: len(held)] == held
        messages = [*messages, assistant(f"cab {turn}"), AGAIN]  # the client trims every time
    assert decode(call.prompt_ids).count("<|end|>") == 7


async def test_a_continuation_costs_one_render() -> None:
    conversation = await first_turn()
    await conversation.ask([USER, assistant("cab"), AGAIN])
    before = conversation.template.renders
    await conversation.ask([USER, assistant("cab"), AGAIN])
    assert conversation.template.renders == before + 1


async def test_a_tool_call_with_reordered_arguments_and_another_id_is_matched() -> None:
    arguments = '{"b":2,"a":{"y":[1,2],"x":"cab"}}'
    sampled = [*spelt(f'<tool_call>\n{{"name": "add", "arguments": {arguments}}}\n</tool_call>'), END]
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    conversation = Conversation()
    first = await conversation.turn([USER], assistant(None, tool_calls=[call]), sampled, tools=[TOOL])
    reordered = json.dumps(json.loads(arguments), sort_keys=True, indent=1)
    echo = assistant(
        "", tool_calls=[{"id": "x", "type": "function", "function": {"name": "add", "arguments": reordered}}]
    )
    result = {"role": "tool", "tool_call_id": "x", "content": "3"}
    prompt = await conversation.ask([USER, echo, result], tools=[TOOL])
    assert prompt.parent_call_id == "call-0"
    assert prompt.prompt_ids is not None
    held = [*first.prompt_ids, *first.sampled_ids]
    assert prompt.prompt_ids[: len(held)] == held
    assert decode(prompt.prompt_ids[len(held) :]) == "\n<|start|>tool\n3<|end|>\n<|start|>assistant\n"


async def test_a_truncated_answer_is_closed_by_the_template() -> None:
    conversation = await first_turn("ca", sampled=spelt("ca"))
    (first,) = conversation.calls
    prompt = await conversation.ask([USER, assistant("ca"), AGAIN])
    assert prompt.prompt_ids is not None
    after = prompt.prompt_ids[len(first.prompt_ids) + 2 :]
    assert decode(after) == "<|end|>\n<|start|>user\nAnd now?<|end|>\n<|start|>assistant\n"


async def test_an_answer_cut_within_a_character_is_matched() -> None:
    broken = [*spelt("ca"), ord("�")]
    conversation = await first_turn("ca", sampled=broken)
    prompt = await conversation.ask([USER, assistant("ca"), AGAIN])
    assert prompt.parent_call_id == "call-0"


async def test_a_template_that_trims_keeps_what_was_sampled() -> None:
    conversation = await first_turn("\n cab \n", trims=True)
    prompt = await conversation.ask([USER, assistant("\n cab \n"), AGAIN])
    assert prompt.parent_call_id == "call-0"


async def test_an_edited_answer_forks() -> None:
    conversation = await first_turn()
    prompt = await conversation.ask([USER, assistant("dog"), AGAIN])
    assert (prompt.prompt_ids, prompt.parent_call_id, prompt.fork_cause) == (None, None, ForkCause.ANSWER_EDITED)


async def test_an_answer_that_was_edited_later_forks_where_the_turn_before_it_ends() -> None:
    conversation = await first_turn()
    await conversation.turn([USER, assistant("cab"), AGAIN], assistant("dog"), [*spelt("dog"), END])
    prompt = await conversation.ask([USER, assistant("cab"), AGAIN, assistant("cat"), AGAIN])
    assert (prompt.parent_call_id, prompt.fork_cause) == ("call-0", ForkCause.ANSWER_EDITED)
    other = await conversation.ask([USER, assistant("cab"), AGAIN, AGAIN])
    assert (other.parent_call_id, other.fork_cause) == ("call-0", ForkCause.HISTORY_CHANGED)


async def test_a_second_answer_to_the_same_turn_that_is_continued_is_no_fork() -> None:
    conversation = await first_turn()
    for text in ("dog", "cat"):
        await conversation.turn([USER, assistant("cab"), AGAIN], assistant(text), [*spelt(text), END])
    prompt = await conversation.ask([USER, assistant("cab"), AGAIN, assistant("dog"), AGAIN])
    assert (prompt.parent_call_id, prompt.fork_cause) == ("call-1", None)


async def test_a_field_that_the_template_does_not_write_may_change_in_any_turn() -> None:
    conversation = await first_turn()
    messages = [USER, assistant("cab"), AGAIN]
    await conversation.turn(messages, assistant("bad", reasoning="hm"), [*spelt("bad"), END])
    prompt = await conversation.ask([*messages, assistant("bad"), AGAIN])
    assert (prompt.parent_call_id, prompt.fork_cause) == ("call-1", None)


async def test_a_field_that_the_template_does_not_write_may_change() -> None:
    conversation = Conversation()
    await conversation.turn([USER], assistant("cab", reasoning="hm"), [*spelt("cab"), END])
    prompt = await conversation.ask([USER, assistant("cab"), AGAIN])
    assert prompt.parent_call_id == "call-0"


async def test_reasoning_that_the_template_strips_forks_because_history_is_rewritten() -> None:
    conversation = await first_turn("<think>hm</think>cab", strip_reasoning=True)
    prompt = await conversation.ask([USER, assistant("<think>hm</think>cab"), AGAIN])
    assert prompt.fork_cause == ForkCause.TEMPLATE_REWRITES_HISTORY
    assert prompt.prompt_ids is None


async def test_reasoning_that_the_template_keeps_while_tools_run_does_not_fork() -> None:
    conversation = await first_turn("<think>hm</think>cab", strip_reasoning=True)
    result = {"role": "tool", "tool_call_id": "x", "content": "3"}
    prompt = await conversation.ask([USER, assistant("<think>hm</think>cab"), result])
    assert prompt.parent_call_id == "call-0"


async def test_an_answer_that_says_less_than_was_sampled_forks() -> None:
    conversation = await first_turn("cab", sampled=[*spelt("cab, and more"), END])
    prompt = await conversation.ask([USER, assistant("cab"), AGAIN])
    assert prompt.fork_cause == ForkCause.TEMPLATE_CHANGES_MESSAGE


async def test_an_answer_that_was_cut_at_a_stop_string_forks_and_says_so() -> None:
    talk = await first_turn("ca", spelt("ca\n##"))
    talk.calls[0] = replace(talk.calls[0], stopped=True)
    prompt = await talk.ask([USER, assistant("ca"), AGAIN])
    assert (prompt.parent_call_id, prompt.fork_cause) == (None, ForkCause.STOP_STRING_CUT)


async def test_a_stop_string_of_one_token_is_not_in_the_next_prompt() -> None:
    talk = await first_turn("ca", spelt("ca#"))
    talk.calls[0] = replace(talk.calls[0], stopped=True)
    prompt = await talk.ask([USER, assistant("ca"), AGAIN])
    assert (prompt.parent_call_id, prompt.fork_cause) == (None, ForkCause.STOP_STRING_CUT)


@pytest.mark.parametrize("sampled", [[*spelt("ca"), END], spelt("ca#")])
async def test_a_stop_that_the_template_writes_too_or_that_the_agent_sends_back_is_no_fork(sampled: list[int]) -> None:
    shown = decode(sampled).removesuffix("<|end|>")
    talk = await first_turn(shown, sampled)
    talk.calls[0] = replace(talk.calls[0], stopped=True)
    prompt = await talk.ask([USER, assistant(shown), AGAIN])
    assert (prompt.parent_call_id, prompt.fork_cause) == ("call-0", None)


async def test_other_tools_fork() -> None:
    conversation = await first_turn()
    prompt = await conversation.ask([USER, assistant("cab"), AGAIN], tools=[TOOL])
    assert prompt.fork_cause == ForkCause.TOOLS_CHANGED


async def test_a_removed_answer_and_a_shortened_history_fork() -> None:
    conversation = await first_turn()
    await conversation.turn([USER, assistant("cab"), AGAIN], assistant("dog"), [*spelt("dog"), END])
    removed = await conversation.ask([USER, AGAIN, AGAIN])
    assert removed.fork_cause == ForkCause.HISTORY_CHANGED
    shortened = await conversation.ask([AGAIN, assistant("dog"), USER])
    assert shortened.fork_cause == ForkCause.HISTORY_CHANGED


async def test_another_agents_first_call_is_no_fork() -> None:
    conversation = await first_turn()
    examples = [{"role": "system", "content": "Judge."}, {"role": "user", "content": "x"}, assistant("y"), USER]
    prompt = await conversation.ask(examples, agent="judge")
    assert (prompt.parent_call_id, prompt.fork_cause) == (None, None)


async def test_the_same_question_again_is_no_fork() -> None:
    conversation = await first_turn()
    prompt = await conversation.ask([USER])
    assert (prompt.parent_call_id, prompt.fork_cause) == (None, None)


async def test_of_several_answers_the_one_sent_back_is_continued() -> None:
    conversation = await first_turn("one")
    second = await conversation.turn([USER], assistant("two"), [*spelt("two"), END])
    await conversation.turn([USER], assistant("three"), [*spelt("three"), END])
    prompt = await conversation.ask([USER, assistant("two"), AGAIN])
    assert prompt.parent_call_id == second.call_id


async def test_images_fork_because_their_ids_are_not_text() -> None:
    conversation = await first_turn()
    picture = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}
    prompt = await conversation.ask([USER, assistant("cab"), picture])
    assert prompt.fork_cause == ForkCause.NOT_ONLY_TEXT


def calling(arguments: str, call_id: str = "c") -> Message:
    call = {"id": call_id, "type": "function", "function": {"name": "run", "arguments": arguments}}
    return assistant(None, tool_calls=[call])


@pytest.mark.parametrize(("before", "after"), [("X _ O\n1 2", "X _O\n12"), ("a  b", "a b"), ('[ "x y" ]', '["xy"]')])
@pytest.mark.parametrize("role", ["system", "user", "tool"])
async def test_white_space_within_an_earlier_message_is_part_of_what_was_sent(
    before: str, after: str, role: str
) -> None:
    conversation = Conversation()
    await conversation.turn([{"role": role, "content": before}, USER], assistant("cab"), [*spelt("cab"), END])
    sent = [{"role": role, "content": after}, USER, assistant("cab"), AGAIN]
    prompt = await conversation.ask(sent)
    assert (prompt.prompt_ids, prompt.fork_cause) == (None, ForkCause.HISTORY_CHANGED)
    assert prompt.messages == tuple(sent)
    around = [{"role": role, "content": f" {before}\n"}, *sent[1:]]
    assert (await conversation.ask(around)).parent_call_id == "call-0"


async def test_white_space_within_a_message_between_answers_is_part_of_what_was_sent() -> None:
    conversation = await first_turn()
    board = {"role": "user", "content": "cells: 1 11"}
    await conversation.turn([USER, assistant("cab"), board], assistant("dog"), [*spelt("dog"), END])
    sent = [USER, assistant("cab"), {"role": "user", "content": "cells: 11 1"}, assistant("dog"), AGAIN]
    prompt = await conversation.ask(sent)
    assert (prompt.parent_call_id, prompt.messages) == ("call-0", tuple(sent))
    assert prompt.fork_cause == ForkCause.HISTORY_CHANGED


async def test_a_later_answer_without_the_turn_before_it_is_a_changed_history() -> None:
    conversation = await first_turn()
    messages: list[Message] = [USER, assistant("cab")]
    for text in ("dog", "cat"):
        messages.append({"role": "user", "content": f"What is {text}?"})
        await conversation.turn(messages, assistant(text), [*spelt(text), END])
        messages.append(assistant(text))
    window = await conversation.ask([*messages[:2], *messages[4:], AGAIN])
    assert (window.parent_call_id, window.fork_cause) == ("call-0", ForkCause.HISTORY_CHANGED)


async def test_an_answer_that_the_client_wrote_itself_is_no_changed_history() -> None:
    conversation = await first_turn()
    await conversation.turn([USER, assistant("cab"), AGAIN], assistant("dog"), [*spelt("dog"), END])
    prompt = await conversation.ask([USER, assistant("cab"), USER, assistant("Noted."), AGAIN])
    assert (prompt.parent_call_id, prompt.fork_cause) == ("call-0", None)


@pytest.mark.parametrize(
    ("said", "echo"),
    [
        (assistant("a b"), assistant("ab")),
        (assistant("todo [ ] x"), assistant("todo [] x")),
        (assistant('{"a": "b c"}'), assistant('{"a": "bc"}')),
        (calling('{"cmd": "~fr-"}'), calling('{"cmd": "~ fr-"}')),
        (calling('{"cmd": "[1, 2]"}'), calling('{"cmd": "[1,2]"}')),
        (calling("[1, NaN]"), calling("[1, Infinity]")),
        (calling("[1, true]"), calling("[1, 1]")),
    ],
)
async def test_white_space_within_an_answer_is_part_of_it(said: Message, echo: Message) -> None:
    conversation = Conversation()
    await conversation.turn([USER], said, [*spelt("x"), END])
    sent = [USER, echo, AGAIN]
    prompt = await conversation.ask(sent)
    assert (prompt.prompt_ids, prompt.fork_cause) == (None, ForkCause.ANSWER_EDITED)
    assert prompt.messages == tuple(sent)


@pytest.mark.parametrize(
    ("said", "echo"),
    [
        (assistant('{"b": 1, "a": [1, 2]}'), assistant(' {"a":[1,2],"b":1}\n')),
        (calling('{"cmd": "a b'), calling(' {"cmd": "a b\n')),
        (calling('{"b": 1, "a": [1, 2]}'), calling('{"a":[1,2],"b":1}')),
        (calling("[1, NaN]"), calling("[1,NaN]")),
        (calling("[1, NaN]"), calling("[1, null]")),
    ],
)
def test_what_is_written_anew_as_json_is_the_same(said: Message, echo: Message) -> None:
    assert normal_message(echo) == normal_message(said)


@pytest.mark.parametrize(("said", "echo"), [('{"cmd": "a b', '{"cmd": "ab'), ("[1e400]", "[Infinity]"), ("1 1", "11")])
def test_arguments_that_are_no_json_are_compared_as_text(said: str, echo: str) -> None:
    assert normal_message(calling(echo)) != normal_message(calling(said))


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("echo", ["cab", " cab"])
async def test_of_answers_equal_but_for_white_space_the_one_that_is_sent_back_is_continued(
    order: int, echo: str
) -> None:
    conversation = Conversation()
    for text in ["cab", " cab"][::order]:
        await conversation.turn([USER], assistant(text), [*spelt(text), END], agent=text.strip())
    prompt = await conversation.ask([USER, assistant(echo), AGAIN])
    (own,) = [call for call in conversation.calls if call.answer["content"] == echo]
    assert prompt.parent_call_id == own.call_id


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("agent", ["one", "other"])
async def test_of_equal_answers_the_agents_own_is_continued(order: int, agent: str) -> None:
    conversation = Conversation()
    for name in ["one", "other"][::order]:
        await conversation.turn([USER], assistant("cab"), [*spelt("cab"), END], agent=name)
    prompt = await conversation.ask([USER, assistant("cab"), AGAIN], agent=agent)
    (own,) = [call for call in conversation.calls if call.agent == agent]
    assert prompt.parent_call_id == own.call_id


@pytest.mark.parametrize("order", [1, -1])
async def test_of_equal_calls_the_one_with_the_same_id_is_continued(order: int) -> None:
    conversation = Conversation()
    for call_id in ["c1", "c2"][::order]:
        sampled = [*spelt('<tool_call>\n{"name": "run", "arguments": {}}\n</tool_call>'), END]
        await conversation.turn([USER], calling("{}", call_id), sampled)
    result = {"role": "tool", "tool_call_id": "c1", "content": "3"}
    prompt = await conversation.ask([USER, calling("{}", "c1"), result])
    (own,) = [call for call in conversation.calls if call.answer["tool_calls"][0]["id"] == "c1"]
    assert prompt.parent_call_id == own.call_id
