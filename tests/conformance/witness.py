"""A witness of what vLLM really samples: it stands between the swarm server and vLLM's socket and notes the ids that pass.

It knows nothing of the gateway and of what that records: what it notes is read from vLLM's own answers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Seen:
    """One choice as vLLM sampled it."""

    prompt_ids: Ids
    sampled_ids: Ids


@dataclass(slots=True)
class Witness:
    """Notes of all that passed since `forget`."""

    seen: list[Seen] = field(default_factory=list)

    def forget(self) -> None:
        self.seen = []

    def note(self, body: bytes, *, events: bool) -> None:
        """Take the ids out of one answer, whole or as server-sent events."""
        parts = list(_events(body)) if events else [json.loads(body)]
        prompts: dict[int, Ids] = {}
        sampled: dict[int, list[int]] = {}
        everyones: Ids = ()
        for part in parts:
            everyones = tuple(part.get("prompt_token_ids") or ()) or everyones
            for choice in part.get("choices") or ():
                index = int(choice["index"])
                sampled.setdefault(index, []).extend(choice.get("token_ids") or ())
                if choice.get("prompt_token_ids"):
                    prompts[index] = tuple(choice["prompt_token_ids"])
        self.seen += [Seen(prompts.get(index, everyones), tuple(ids)) for index, ids in sorted(sampled.items())]


def _events(body: bytes) -> Iterator[dict[str, Any]]:
    for line in body.splitlines():
        data = line.removeprefix(b"data: ")
        if data != line and data.strip() != b"[DONE]":
            yield json.loads(data)
