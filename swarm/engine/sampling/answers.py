"""vLLM's answers: what we request beyond the client's request, which tokens we record, and what the client sees.

Pure functions over JSON objects.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from swarm.engine.seam import EngineError, RequestRefused, Sampled, SampledChoice, SampledEvent, SampleRequest
from swarm.protocol.episodes import VersionSpan

Masks = Callable[[int, int, int], list[bytes]]
"""(choice, start, end) → the candidates for each of these sampled tokens; empty if unknown."""
Spans = Callable[[int, int, int], list[VersionSpan]]
"""(choice, start, end) → the weights versions of these tokens, with positions counted from `start`."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The optional outputs that the client itself requested."""

    logprobs: bool
    token_ids: bool
    reasoning: bool

    @classmethod
    def by(cls, request: SampleRequest) -> Asked:
        body = request.body
        logprobs = body.get("logprobs")  # a number in a text completion; 0: only of the sampled tokens
        return cls(
            logprobs=logprobs is not None if request.dialect == "completions" else bool(logprobs),
            token_ids=bool(body.get("return_token_ids")),
            reasoning=body.get("include_reasoning") is not False,
        )


@dataclass(frozen=True, slots=True)
class TokenLimits:
    """What distinguishes an answer that a token limit cut from one that the model ended."""

    max_tokens: int | None
    max_model_len: int
    end_ids: Collection[int]
    """Tokens that end an answer."""

    @classmethod
    def of(cls, request: SampleRequest, max_model_len: int, end_ids: Collection[int]) -> TokenLimits:
        body = request.body
        stated = body.get("max_completion_tokens")
        limit = body.get("max_tokens") if stated is None else stated
        return cls(None if limit is None else int(limit), max_model_len, () if body.get("ignore_eos") else end_ids)

    def cut(self, choice: dict[str, Any], prompt_size: int, ids: list[int]) -> bool:
        reached = prompt_size + len(ids) >= self.max_model_len
        reached = reached or (self.max_tokens is not None and len(ids) >= self.max_tokens)
        return reached and choice.get("stop_reason") is None and ids[-1] not in self.end_ids


def chat_body(body: dict[str, Any], *, model: str, request_id: str, prompt_ids: list[int] | None) -> dict[str, Any]:
    """Return the chat completion request for vLLM, with the fields that let us record every token. Raises: RequestRefused."""
    ours = {"model": model, "request_id": request_id, "logprobs": True, "include_reasoning": True}
    if prompt_ids is not None:
        ours["kv_transfer_params"] = {"prompt_token_ids": prompt_ids}
    return _recordable(body) | ours


def text_body(body: dict[str, Any], *, model: str, request_id: str, prompt_ids: list[int] | None) -> dict[str, Any]:
    """Like `chat_body`, but for a text completion."""
    ours = {"model": model, "request_id": request_id, "logprobs": body.get("logprobs") or 0}
    if prompt_ids is not None:
        ours["prompt"] = prompt_ids
    return _recordable(body) | ours


def _recordable(body: dict[str, Any]) -> dict[str, Any]:
    """Return the body without fields that would hide tokens. Raises: RequestRefused for beam search, which does not sample."""
    if body.get("use_beam_search"):
        message = "beam search does not sample, so its tokens cannot be recorded; leave use_beam_search out"
        raise RequestRefused(
            400, {"error": {"message": message, "type": "BadRequestError", "param": None, "code": 400}}
        )
    return {name: value for name, value in body.items() if name not in _NEVER_PASSED} | {"return_token_ids": True}


_NEVER_PASSED = frozenset(
    {
        "kv_transfer_params",
        "ec_transfer_params",
        "return_tokens_as_token_ids",
        "return_prompt_text",
        "instructions",
    }
)
"""Fields that would hide tokens or change the prompt's ids, and `instructions`, which is kept only in the recorded request."""


def book_answer(answer: dict[str, Any], asked: Asked, spans: Spans, masks: Masks, limits: TokenLimits) -> Sampled:
    """Extract the tokens of a complete answer. Raises: EngineError if tokens and log-probabilities do not match.

    vLLM reports an answer with a tool call as `tool_calls` even if a token limit cut it. We report `length`, as in a stream.
    """
    prompt_ids = _prompt_ids(answer)
    if not prompt_ids:
        raise EngineError("the inference engine returned no prompt ids")
    choices = []
    for choice in answer["choices"]:
        ids, logprobs = _tokens(choice)
        versions = spans(choice["index"], 0, len(ids))
        if choice.get("finish_reason") == "tool_calls" and ids and limits.cut(choice, len(prompt_ids), ids):
            choice["finish_reason"] = "length"
        choices.append(
            SampledChoice(
                index=choice["index"],
                sampled_ids=ids,
                logprobs=logprobs,
                masks=masks(choice["index"], 0, len(ids)),
                finish_reason=choice.get("finish_reason"),
                versions=versions,
            )
        )
        _strip(choice, asked)
        if not asked.reasoning and "message" in choice:
            choice["message"]["reasoning"] = None
    if not asked.token_ids and "prompt_token_ids" in answer:
        answer["prompt_token_ids"] = None
    return Sampled(prompt_ids=list(prompt_ids), choices=choices, answer=answer)


class StreamBook:
    """Extracts the tokens from a stream's chunks, and decides what the client sees of each chunk."""

    def __init__(self, asked: Asked, spans: Spans, masks: Masks) -> None:
        self._asked = asked
        self._spans = spans
        self._masks = masks
        self._booked: dict[int, int] = {}

    def event(self, chunk: dict[str, Any]) -> SampledEvent:
        """Process a chunk. Raises: EngineError if tokens and log-probabilities do not match."""
        asked, booked = self._asked, list[SampledChoice]()
        prompt_ids = _prompt_ids(chunk)
        if not asked.token_ids and "prompt_token_ids" in chunk:
            chunk["prompt_token_ids"] = None
        shown = asked.token_ids or asked.logprobs or not chunk["choices"]
        for choice in chunk["choices"]:
            made = self._choice(choice)
            if made is not None:
                booked.append(made)
            # Hide a chunk that contains only our additions.
            shown = shown or choice.get("delta") or choice.get("text") or choice.get("finish_reason")
        return SampledEvent(data=chunk if shown else None, prompt_ids=prompt_ids, choices=booked)

    def _choice(self, choice: dict[str, Any]) -> SampledChoice | None:
        ids, logprobs = _tokens(choice)
        finish = choice.get("finish_reason")
        _strip(choice, self._asked)
        if not self._asked.reasoning and "delta" in choice:
            choice["delta"].pop("reasoning", None)
        if not ids and finish is None:
            return None
        index = choice["index"]
        start = self._booked.get(index, 0)
        end = self._booked[index] = start + len(ids)
        return SampledChoice(
            index=index,
            sampled_ids=ids,
            logprobs=logprobs,
            masks=self._masks(index, start, end),
            finish_reason=finish,
            versions=self._spans(index, start, end),
        )


def _tokens(choice: dict[str, Any]) -> tuple[list[int], list[float]]:
    ids = choice.get("token_ids") or []
    given = choice.get("logprobs")
    logprobs: list[float] = []
    if given:
        content = given.get("content")
        said = [entry["logprob"] for entry in content] if content else given.get("token_logprobs") or ()
        logprobs = [float(logprob) for logprob in said]
    if len(logprobs) != len(ids):
        raise EngineError(
            f"the inference engine returned {len(ids)} sampled ids, but {len(logprobs)} log-probabilities"
        )
    return ids, logprobs


def _prompt_ids(data: dict[str, Any]) -> list[int] | None:
    """Return the prompt's ids; a chat has them next to the choices, a text completion within each choice."""
    ids = data.get("prompt_token_ids")
    for choice in data.get("choices") or () if ids is None else ():
        ids = ids or choice.get("prompt_token_ids")
    return ids


def _strip(choice: dict[str, Any], asked: Asked) -> None:
    if not asked.logprobs:
        choice["logprobs"] = None
    if not asked.token_ids:
        for name in _IDS:
            if name in choice:
                choice[name] = None


_IDS = ("token_ids", "prompt_token_ids")
