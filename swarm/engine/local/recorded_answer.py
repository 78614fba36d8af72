"""vLLM's chat answers: what we ask for beyond the client's request, what we book of it, what the client gets to see.

Pure functions over JSON objects.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from swarm.engine.seam import EngineError, RequestRefused, Sampled, SampledChoice, SampledEvent
from swarm.protocol.episodes import VersionSpan

Spans = Callable[[int, int, int], list[VersionSpan]]
"""(choice, start, end) → weights versions of these tokens, counted from `start`."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What the client itself asked to see."""

    logprobs: bool
    token_ids: bool
    reasoning: bool

    @classmethod
    def by(cls, body: dict[str, Any]) -> Asked:
        return cls(
            logprobs=bool(body.get("logprobs")),
            token_ids=bool(body.get("return_token_ids")),
            reasoning=body.get("include_reasoning") is not False,
        )


def recording_body(
    body: dict[str, Any], *, model: str, request_id: str, prompt_ids: list[int] | None
) -> dict[str, Any]:
    """The request as vLLM gets it, so that every token can be booked.

    Raises: RequestRefused for what cannot be recorded: beam search does not sample.
    """
    if body.get("use_beam_search"):
        message = "beam search does not sample, so its tokens cannot be recorded; leave use_beam_search out"
        raise RequestRefused(
            400, {"error": {"message": message, "type": "BadRequestError", "param": None, "code": 400}}
        )
    ours: dict[str, Any] = {
        "model": model,
        "request_id": request_id,
        "logprobs": True,
        "return_token_ids": True,
        "include_reasoning": True,
    }
    if prompt_ids is not None:
        ours["kv_transfer_params"] = {"prompt_token_ids": prompt_ids}
    return {name: value for name, value in body.items() if name not in _NEVER_PASSED} | ours


_NEVER_PASSED = frozenset(
    {"kv_transfer_params", "ec_transfer_params", "return_tokens_as_token_ids", "return_prompt_text"}
)


def book_answer(answer: dict[str, Any], asked: Asked, spans: Spans) -> Sampled:
    """Take the tokens out of a whole answer. Raises: EngineError when tokens and log-probabilities do not agree."""
    prompt_ids = answer.get("prompt_token_ids")
    if not prompt_ids:
        raise EngineError("the inference engine did not say which prompt ids it saw")
    choices = []
    for choice in answer["choices"]:
        ids, logprobs = _tokens(choice)
        versions = spans(choice["index"], 0, len(ids))
        choices.append(
            SampledChoice(
                index=choice["index"],
                sampled_ids=ids,
                logprobs=logprobs,
                finish_reason=choice.get("finish_reason"),
                versions=versions,
            )
        )
        _strip(choice, asked)
        if not asked.reasoning:
            choice["message"]["reasoning"] = None
    if not asked.token_ids:
        answer["prompt_token_ids"] = None
    return Sampled(prompt_ids=list(prompt_ids), choices=choices, answer=answer)


class StreamBook:
    """Takes the tokens out of a stream's chunks, and says what of each chunk the client sees."""

    def __init__(self, asked: Asked, spans: Spans) -> None:
        self._asked = asked
        self._spans = spans
        self._booked: dict[int, int] = {}

    def event(self, chunk: dict[str, Any]) -> SampledEvent:
        """Raises: EngineError when tokens and log-probabilities do not agree."""
        prompt_ids = chunk.get("prompt_token_ids")
        if prompt_ids is not None and not self._asked.token_ids:
            chunk["prompt_token_ids"] = None
        booked = [made for choice in chunk["choices"] if (made := self._choice(choice)) is not None]
        shown = not chunk["choices"] or any(self._shows(choice) for choice in chunk["choices"])
        return SampledEvent(data=chunk if shown else None, prompt_ids=prompt_ids, choices=booked)

    def _choice(self, choice: dict[str, Any]) -> SampledChoice | None:
        ids, logprobs = _tokens(choice)
        finish = choice.get("finish_reason")
        _strip(choice, self._asked)
        if not self._asked.reasoning:
            choice["delta"].pop("reasoning", None)
        if not ids and finish is None:
            return None
        index = int(choice["index"])
        start = self._booked.get(index, 0)
        self._booked[index] = start + len(ids)
        versions = self._spans(index, start, start + len(ids))
        return SampledChoice(index=index, sampled_ids=ids, logprobs=logprobs, finish_reason=finish, versions=versions)

    def _shows(self, choice: dict[str, Any]) -> bool:
        """Chunks that carry our additions alone would not be there without us."""
        return bool(choice["delta"] or choice.get("finish_reason") or self._asked.token_ids or self._asked.logprobs)


def _tokens(choice: dict[str, Any]) -> tuple[list[int], list[float]]:
    ids = list(choice.get("token_ids") or ())
    content = (choice.get("logprobs") or {}).get("content") or ()
    if len(content) != len(ids):
        raise EngineError(f"the inference engine gave {len(ids)} sampled ids, but {len(content)} log-probabilities")
    return ids, [float(entry["logprob"]) for entry in content]


def _strip(choice: dict[str, Any], asked: Asked) -> None:
    if not asked.logprobs:
        choice["logprobs"] = None
    if not asked.token_ids and "token_ids" in choice:
        choice["token_ids"] = None
