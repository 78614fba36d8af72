"""What AgentJet's own client sent, recorded once, and sent again to our server.

`requests/*.json` hold requests alone: in them `CLIENT 1` stands for a client's uuid, and `EPISODE n` for the id that the nth claim got.
Calls of the model are those of a small agent beside the client.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Json = dict[str, Any]
REQUESTS = Path(__file__).parent / "requests"


class Replay:
    """The requests of one recording, filled in with what our server answers."""

    def __init__(self, name: str) -> None:
        self._requests = json.loads((REQUESTS / f"{name}.json").read_text())["requests"]
        self.claims: list[Json] = []
        """Answers that granted an episode."""
        self.answers: list[tuple[str, Json]] = []

    def __iter__(self) -> Iterator[tuple[str, str, Json | None, str]]:
        """Method, path, body and api key of each request. Give `heard` its answer before the next is taken."""
        for each in self._requests:
            if "get" in each:
                yield "GET", each["get"], None, ""
                continue
            key = self.claims[-1]["openai_api_key"] if each["post"].startswith("/v1/") else ""
            yield "POST", each["post"], self._filled(each["json"]), key

    def heard(self, path: str, answer: Json) -> None:
        self.answers.append((path, answer))
        if path == "/claim_episode" and answer["success"]:
            self.claims.append(answer)

    def _filled(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {name: self._filled(inner) for name, inner in value.items()}
        if isinstance(value, list):
            return [self._filled(inner) for inner in value]
        if isinstance(value, str) and value.startswith("EPISODE "):
            return self.claims[int(value.removeprefix("EPISODE ")) - 1]["episode_uuid"]
        return value
