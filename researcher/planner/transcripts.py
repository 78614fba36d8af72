"""Planning transcripts: JSON lines that people can read and that `bench.replay` plays back as answers.

Each line is one request: purpose, form, new messages, and the raw answer or error. The prompt and tools are written again only when
they change.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from researcher.llm.replies import form_of
from researcher.models import LlmCall
from researcher.planner.agent import request_of


class Turn(BaseModel):
    """One request of a transcript.

    `asked` is the topic with fixed fields and people's answers; empty if the request is not about planning. `prompt` holds the
    messages before `new`, and `fields` the rest of the request, each only if different from the previous turn. `outage` is true if
    the same request was sent again.
    """

    purpose: str
    model: str = ""
    form: str
    asked: str
    prompt: list[dict[str, Any]] = []
    fields: dict[str, Any] = {}
    new: list[dict[str, Any]] = []
    answer: dict[str, Any] | None = None
    error: str | None = None
    outage: bool = False


def save_transcript(path: Path, calls: Sequence[LlmCall]) -> None:
    """Write the LLM calls of one planning conversation to a file. Requests without messages are stored whole in `fields`."""
    lines = list[str]()
    before, fields = list[dict[str, Any]](), dict[str, Any]()
    for call, after in zip(calls, [*calls[1:], None], strict=True):
        messages, rest = call.request.get("messages", []), {k: v for k, v in call.request.items() if k != "messages"}
        goes_on = len(before) > 0 and messages[: len(before)] == before
        known = len(before) if goes_on else min(2, len(messages))
        turn = Turn(
            purpose=call.purpose,
            model=call.model,
            form=form_of(call.request),
            asked=request_of(messages) or "",
            prompt=[] if goes_on else messages[:known],
            fields=rest if rest != fields or not messages else {},
            new=messages[known:],
            answer=call.answer,
            error=call.error,
            outage=call.answer is None and after is not None and after.request == call.request,
        )
        before, fields = messages, rest
        lines.append(turn.model_dump_json(exclude_defaults=True))
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
