"""Transcripts of plannings: what was asked and answered, in a JSON-lines file that a person can read, and that can be replayed.

One line per answer: its purpose and form, the messages that were new in its request (of the first, only what was asked for), and the raw
answer, or why the endpoint refused. The prompt's own words are not kept: it may be rewritten, and the transcripts still hold.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from researcher.llm.endpoint import LlmRefused, LlmUnusable
from researcher.models import LlmCall
from researcher.planner.graph import request_of
from researcher.planner.replies import form_of


class Turn(BaseModel):
    """asked: the request without the prompt's own words: topic, fixed fields, answers of people."""

    purpose: str
    model: str = ""
    form: str
    asked: str
    new: list[dict[str, Any]] = []
    answer: dict[str, Any] | None = None
    refused: str | None = None


def save_transcript(path: Path, calls: Sequence[LlmCall]) -> None:
    """The calls of one planning. Outages that were waited out are left out; so are calls with another purpose than to plan."""
    planned = [call for call in calls if request_of(call.request["messages"]) is not None]
    kept = [call for call, after in zip(planned, [*planned[1:], None], strict=True) if not _is_outage(call, after)]
    before, lines = list[dict[str, Any]](), list[str]()
    for call in kept:
        messages = call.request["messages"]
        known = len(before) if messages[: len(before)] == before else 2
        turn = Turn(
            purpose=call.purpose,
            model=call.model,
            form=form_of(call.request),
            asked=request_of(messages) or "",
            new=messages[max(known, 2) :],
            answer=call.answer,
            refused=call.error,
        )
        before = messages
        lines.append(turn.model_dump_json(exclude_none=True))
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def read_transcript(path: Path) -> list[Turn]:
    return [Turn.model_validate_json(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


class ReplayEndpoint:
    """Answers from transcripts; nobody is asked. Several plannings may follow each other, each found by what it asks.

    left: answers of the planning under way that nobody has asked for.
    """

    def __init__(self, transcripts: Iterable[Path]) -> None:
        """transcripts: files, or folders of `*.jsonl`."""
        files = [file for each in transcripts for file in (sorted(each.glob("*.jsonl")) if each.is_dir() else [each])]
        self._turns = {turns[0].asked: turns for file in files if (turns := read_transcript(file))}
        self.left: list[Turn] = []

    async def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Raises: LlmUnusable where no transcript fits; LlmRefused where the endpoint refused then."""
        messages = request["messages"]
        asked, form = request_of(messages) or "", form_of(request)
        begins = len(messages) == 2 and not (self.left and self.left[0].asked == asked and self.left[0].form == form)
        if begins:
            self.left = list(self._turns.get(asked, ()))
        if not self.left:
            raise LlmUnusable("no transcript answers this request: its topic, options or answers are others")
        turn = self.left.pop(0)
        roles = [
            [message["role"] for message in each] for each in (turn.new, messages[len(messages) - len(turn.new) :])
        ]
        if (turn.asked, turn.form) != (asked, form) or roles[0] != roles[1]:
            raise LlmUnusable(
                f"the transcript differs from here on ({turn.purpose}): it has {turn.form} after {roles[0]}, "
                f"and the request is {form} after {roles[1]}"
            )
        if turn.answer is None:
            raise LlmRefused(turn.refused or "refused")
        return turn.answer


def _is_outage(call: LlmCall, after: LlmCall | None) -> bool:
    """Whether the same request was put again."""
    return call.answer is None and after is not None and json.dumps(after.request) == json.dumps(call.request)
