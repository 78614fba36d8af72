"""The older completions dialect (OpenAI): text or token ids in, text out; one request can hold several prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from swarm.protocol.episodes import RecordedCall
from swarm.server.gateway.chat import DONE, ChatStream, check_tools
from swarm.server.gateway.dialect import Dialect, check_numbers, check_sampling, data_frame
from swarm.server.gateway.errors import bad_request
from swarm.server.gateway.forms import JsonObject, TextForm

_NOT_PASSED = ("echo", "stream_options")
"""Fields that the gateway handles itself and does not pass to the engine."""
_MOST_ID = 2**31 - 1
"""The largest token id that a record can hold; no vocabulary comes close."""


class Completions(Dialect):
    """`/v1/completions`. A request with several prompts becomes several requests to the engine, answered as one."""

    name = "completions"
    form = TextForm()

    def check(self, body: JsonObject) -> None:
        prompts = prompts_of(body)
        check_sampling(body, prompts=len(prompts))
        check_numbers(body, "logprobs")
        check_tools(body)
        if body.get("prompt_embeds") is not None or body.get("prompt_logprobs") is not None:
            raise bad_request("prompt_embeds and prompt_logprobs are not supported: send text or token ids", "prompt")
        if body.get("echo"):
            if not all(isinstance(prompt, str) for prompt in prompts):
                raise bad_request("echo works only with text prompts: leave it out when you send token ids", "echo")
            if body.get("logprobs") is not None or body.get("max_tokens") == 0:
                raise bad_request(
                    "this server does not score prompts: with echo, leave out logprobs and sample at least one token",
                    "echo",
                )

    def check_end(self, body: JsonObject) -> None:
        """Accept every request: any text may be continued."""

    def requests(self, body: JsonObject, earlier: Sequence[RecordedCall]) -> list[JsonObject]:
        plain = {name: value for name, value in body.items() if name not in _NOT_PASSED}
        return [plain | {"prompt": prompt} for prompt in prompts_of(body)]

    def answer(self, body: JsonObject, asked: JsonObject, answer: JsonObject) -> JsonObject:
        if not body.get("echo"):
            return answer
        choices = [
            choice | {"text": _prompt_of(body, choice["index"]) + choice["text"]} for choice in answer["choices"]
        ]
        return answer | {"choices": choices}

    def stream(self, body: JsonObject, asked: JsonObject) -> TextStream:
        return TextStream(body)


class TextStream(ChatStream):
    """Sends chunks as they arrive, under one id; then the total usage of all prompts, if the request asks for it, and `[DONE]`."""

    def __init__(self, body: JsonObject) -> None:
        self._body = body
        self._head: JsonObject = {}
        self._begun: set[int] = set()

    def frames(self, chunk: JsonObject, prompt_tokens: int) -> list[bytes]:
        if not chunk.get("choices"):
            return []
        self._head = self._head or {name: chunk.get(name) for name in ("id", "object", "created", "model")}
        if self._body.get("echo"):
            chunk = chunk | {"choices": [self._with_prompt(choice) for choice in chunk["choices"]]}
        return [data_frame(chunk | {"id": self._head["id"]})]

    def end(self, answer: JsonObject) -> list[bytes]:
        if not (self._body.get("stream_options") or {}).get("include_usage"):
            return [DONE]
        return [data_frame(self._head | {"choices": [], "usage": answer["usage"]}), DONE]

    def _with_prompt(self, choice: JsonObject) -> JsonObject:
        if choice["index"] in self._begun:
            return choice
        self._begun.add(choice["index"])
        return choice | {"text": _prompt_of(self._body, choice["index"]) + choice["text"]}


def prompts_of(body: JsonObject) -> list[str | list[int]]:
    """Return the prompts of a request, given as a string, token ids, or a list of either. Raises: RequestRefused for anything else."""
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if _are_ids(prompt):
            return [prompt]
        if all(isinstance(each, str) or (isinstance(each, list) and each and _are_ids(each)) for each in prompt):
            return list(prompt)
    raise bad_request("prompt must be a string, a list of token ids, or a list of strings or of id lists", "prompt")


def _are_ids(prompt: list[Any]) -> bool:
    return all(isinstance(token, int) and not isinstance(token, bool) and 0 <= token <= _MOST_ID for token in prompt)


def _prompt_of(body: JsonObject, index: int) -> str:
    """Return the prompt of a choice, by the choice's index in the whole answer."""
    return str(prompts_of(body)[index // Completions.form.choices(body)])
