"""A text completion of the echo engine: the same drafts as in chat, told in the form of OpenAI's older endpoint."""

from __future__ import annotations

from typing import Any

from swarm.engine import echo_tokens
from swarm.engine.echo_answer import ChatAnswer, Draft, shown_text


class TextAnswer(ChatAnswer):
    """See `ChatAnswer`. `logprobs` is a number here: how many alternatives to name."""

    id_prefix = "cmpl"

    def __init__(
        self, body: dict[str, Any], prompt_ids: list[int], max_model_len: int, *, created: int, number: int
    ) -> None:
        wanted = body.get("logprobs")
        chat_body = body | {"logprobs": wanted is not None, "top_logprobs": int(wanted or 0)}
        super().__init__(chat_body, prompt_ids, max_model_len, created=created, number=number)

    def whole(self) -> dict[str, Any]:
        """The `text_completion` object."""
        choices = [
            self._choice(draft, draft.text, draft.finish_reason, 0, len(draft.ids) if self._logprobs else None)
            for draft in self.drafts
        ]
        return self._frame("text_completion", choices) | {"usage": self._usage()}

    def openings(self) -> list[dict[str, Any] | None]:
        return [None]

    def chunks(self, draft: Draft, position: int) -> list[dict[str, Any] | None]:
        finish = draft.finish_reason if position == len(draft.ids) - 1 else None
        text = shown_text(draft, position)
        if not (text or finish or self._logprobs):
            return [None]
        choice = self._choice(draft, text, finish, position, position + 1 if self._logprobs else None)
        return [self._frame("text_completion", [choice])]

    def usage_chunk(self) -> dict[str, Any]:
        return self._frame("text_completion", []) | {"usage": self._usage()}

    def _choice(self, draft: Draft, text: str, finish: str | None, start: int, end: int | None) -> dict[str, Any]:
        logprobs = None if end is None else self._text_logprobs(draft, start, end)
        return {"index": draft.index, "text": text, "logprobs": logprobs, "finish_reason": finish} | {
            "stop_reason": draft.stop if finish else None
        }

    def _text_logprobs(self, draft: Draft, start: int, end: int) -> dict[str, Any]:
        content = self._logprob_content(draft, start, end)["content"]
        before = len(echo_tokens.decode(draft.ids[:start]))
        offsets = [before + len(echo_tokens.decode(draft.ids[start:at])) for at in range(start, end)]
        return {
            "text_offset": offsets,
            "tokens": [entry["token"] for entry in content],
            "token_logprobs": [entry["logprob"] for entry in content],
            "top_logprobs": [
                {top["token"]: top["logprob"] for top in [entry, *entry["top_logprobs"]]} for entry in content
            ],
        }
