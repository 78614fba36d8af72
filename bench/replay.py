"""Replays stored planning transcripts, so that planning can be measured without an LLM.

A replay ignores prompt and tools, so a transcript stays valid when these are rewritten.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from researcher.llm.endpoint import LlmRefused, LlmUnusable
from researcher.llm.replies import form_of
from researcher.planner.agent import request_of
from researcher.planner.transcripts import Turn


def read_transcript(path: Path) -> list[Turn]:
    return [Turn.model_validate_json(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


class ReplayEndpoint:
    """An endpoint that answers from transcripts. Several plannings may follow each other; each is found by its question.

    left: unused answers of the current planning.
    """

    def __init__(self, transcripts: Iterable[Path]) -> None:
        """transcripts: files, or folders of `*.jsonl`."""
        files = [file for each in transcripts for file in (sorted(each.glob("*.jsonl")) if each.is_dir() else [each])]
        read = [[turn for turn in read_transcript(file) if turn.asked and not turn.outage] for file in files]
        self._turns = {turns[0].asked: turns for turns in read if turns}
        self.left: list[Turn] = []

    async def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """The next answer. Raises: LlmUnusable if no transcript fits; LlmRefused if the recorded endpoint refused."""
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
