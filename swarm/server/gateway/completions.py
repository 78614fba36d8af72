"""The older completions dialect (OpenAI): text or ids in, text out, several prompts in one request.

Pure functions over JSON objects; what vLLM serves is kept as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from swarm.engine.seam import Dialect as EngineDialect
from swarm.protocol.episodes import RecordedCall
from swarm.server.gateway.chat import DONE, check_tools
from swarm.server.gateway.dialect import (
    Form,
    JsonObject,
    check_choices,
    check_no_thinking_budget,
    check_numbers,
    check_objects,
    check_stops,
    data_frame,
)
from swarm.server.gateway.errors import ErrorAnswer, bad_request
from swarm.server.gateway.forms import ChunkAssembly

_OURS_TO_TELL = ("echo", "stream_options")
_MOST_ID = 2**31 - 1
"""No record has room for a larger one, and no vocabulary has it."""
_LOGPROBS = ("text_offset", "token_logprobs", "tokens", "top_logprobs")


class TextForm:
    """The engine's text completions: one prompt, `n` choices."""

    engine_dialect: EngineDialect = "completions"

    def choices(self, body: JsonObject) -> int:
        return int(body.get("n") or 1)

    def assembly(self, body: JsonObject) -> TextAssembly:
        return TextAssembly(self.choices(body))

    def choice_of(self, answer: JsonObject, index: int) -> JsonObject:
        return answer | {"choices": [choice for choice in answer["choices"] if choice["index"] == index]}

    def joined(self, answers: Sequence[JsonObject]) -> JsonObject:
        if len(answers) == 1:
            return answers[0]
        choices = [choice for answer in answers for choice in answer["choices"]]
        counts = ("prompt_tokens", "completion_tokens", "total_tokens")
        usage = {name: sum(answer["usage"][name] for answer in answers) for name in counts}
        numbered = [choice | {"index": number} for number, choice in enumerate(choices)]
        return answers[0] | {"choices": numbered, "usage": usage}

    def replay(self, answer: JsonObject, body: JsonObject) -> Iterator[JsonObject]:
        head = {name: answer.get(name) for name in ("id", "object", "created", "model")}
        for choice in answer["choices"]:
            yield head | {"choices": [choice]}


class Completions:
    """`/v1/completions`. A request of several prompts is several requests to the engine, told as one answer."""

    name = "completions"
    form: Form = TextForm()

    def check(self, body: JsonObject) -> None:
        check_choices(body, prompts=len(prompts_of(body)))
        check_stops(body, "stop")
        check_numbers(body, "temperature", "top_p", "top_k", "seed", "max_tokens", "logprobs")
        check_objects(body, "response_format", "stream_options", "logit_bias")
        check_objects(body.get("response_format") or {}, "json_schema")
        check_no_thinking_budget(body)
        check_tools(body)
        if body.get("prompt_embeds") is not None or body.get("prompt_logprobs") is not None:
            raise bad_request("prompts are recorded as ids: send text or ids, and ask for no prompt_logprobs", "prompt")
        if body.get("echo"):
            if not all(isinstance(prompt, str) for prompt in prompts_of(body)):
                raise bad_request("echo is served for prompts of text; you have the ids already", "echo")
            if body.get("logprobs") is not None or body.get("max_tokens") == 0:
                raise bad_request("echo does not score a prompt here; leave out logprobs, and sample a token", "echo")

    def check_end(self, body: JsonObject) -> None:
        """A text has no end that is not the client's."""

    def requests(self, body: JsonObject, earlier: Sequence[RecordedCall]) -> list[JsonObject]:
        plain = {name: value for name, value in body.items() if name not in _OURS_TO_TELL}
        return [plain | {"prompt": prompt} for prompt in prompts_of(body)]

    def answer(self, body: JsonObject, asked: JsonObject, answer: JsonObject) -> JsonObject:
        if not body.get("echo"):
            return answer
        choices = [
            choice | {"text": _echoed(body, self.form, choice["index"]) + choice["text"]}
            for choice in answer["choices"]
        ]
        return answer | {"choices": choices}

    def stream(self, body: JsonObject, asked: JsonObject) -> TextStream:
        return TextStream(body, self.form)


def prompts_of(body: JsonObject) -> list[str | list[int]]:
    """The prompts of a request: a text, ids, or a list of either. Raises: RequestRefused for anything else."""
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if _are_ids(prompt):
            return [prompt]
        if all(isinstance(each, str) or (isinstance(each, list) and each and _are_ids(each)) for each in prompt):
            return list(prompt)
    raise bad_request("prompt must be a text, a list of token ids, or a list of texts or of lists of ids", "prompt")


def _are_ids(prompt: list[Any]) -> bool:
    return all(isinstance(token, int) and not isinstance(token, bool) and 0 <= token <= _MOST_ID for token in prompt)


def _echoed(body: JsonObject, form: Form, index: int) -> str:
    return str(prompts_of(body)[index // form.choices(body)])


class TextStream:
    """Chunks as they come, under one id; then the usage of all prompts together, where it is asked for, and `[DONE]`."""

    def __init__(self, body: JsonObject, form: Form) -> None:
        self._body = body
        self._form = form
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

    def broken(self, error: ErrorAnswer) -> list[bytes]:
        return [data_frame(error.body)]

    def _with_prompt(self, choice: JsonObject) -> JsonObject:
        if choice["index"] in self._begun:
            return choice
        self._begun.add(choice["index"])
        return choice | {"text": _echoed(self._body, self._form, choice["index"]) + choice["text"]}


class TextAssembly(ChunkAssembly):
    """Chunks put together to a `text_completion`."""

    kind = "text_completion"

    def _begun(self) -> JsonObject:
        return {"text": "", "logprobs": None, "finish_reason": None}

    def _grow(self, choice: JsonObject, chunk: JsonObject) -> None:
        choice["text"] += chunk.get("text") or ""
        if logprobs := chunk.get("logprobs"):
            choice["logprobs"] = choice["logprobs"] or {name: [] for name in _LOGPROBS}
            for name in _LOGPROBS:
                choice["logprobs"][name] += logprobs.get(name) or ()
