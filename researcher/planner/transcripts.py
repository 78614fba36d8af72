"""Transcripts of plannings: what was asked and answered, in a JSON-lines file that a person can read, and that can be replayed.

One line per request: its purpose and form, the messages that are new in it, and the raw answer, or why there was none. The prompt and
the tools stand where they change, so that every request is kept whole; a replay looks at neither: both may be rewritten, and the
transcript still holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from researcher.llm.endpoint import LlmRefused, LlmUnusable
from researcher.models import LlmCall
from researcher.planner.graph import request_of
from researcher.planner.replies import form_of


class Turn(BaseModel):
    """asked: topic, fixed fields, answers of people; empty where the request plans nothing. prompt, fields: the messages before those
    in `new`, and the rest of the request, where they are others than the turn's before. outage: the same was asked again."""

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


def save_transcript(path: Path, calls: Sequence[LlmCall], *, prompts: bool = True) -> None:
    """The calls of one planning, whatever became of it. A request without messages stands whole in `fields`. prompts: leave them out for what is only replayed."""
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
            prompt=messages[:known] if prompts and not goes_on else [],
            fields=rest if prompts and (rest != fields or not messages) else {},
            new=messages[known:],
            answer=call.answer,
            error=call.error,
            outage=call.answer is None and after is not None and after.request == call.request,
        )
        before, fields = messages, rest
        lines.append(turn.model_dump_json(exclude_defaults=True))
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
        read = [[turn for turn in read_transcript(file) if turn.asked and not turn.outage] for file in files]
        self._turns = {turns[0].asked: turns for turns in read if turns}
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
            raise LlmRefused(turn.error or "refused")
        return turn.answer
