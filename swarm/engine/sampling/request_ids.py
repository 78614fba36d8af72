"""Extracts our request ids from vLLM's, and names the argument that says how many choices a request has."""

from __future__ import annotations

import re
from typing import Final

CHOICES: Final = "swarm_choices"
"""Extension argument (`vllm_xargs`) of a request for several choices: their number. vLLM samples each choice as a request of its own."""
_ENGINE_ID = re.compile(r"(?:(?P<choice>\d+)_)?(?:chatcmpl-(?P<chat>.+)|cmpl-(?P<text>.+)-0)-[0-9a-f]{8}")


def own_id(engine_id: str) -> tuple[int, str]:
    """Extract the choice and our request id from an engine's request id.

    `2_chatcmpl-<ours>-<random>` is choice 2 of our request; without a number there is only one choice.
    A text completion is `cmpl-<ours>-0-<random>`: 0 is its first and only prompt.
    """
    match = _ENGINE_ID.fullmatch(engine_id)
    if match is None:
        return 0, engine_id
    return int(match["choice"] or 0), match["chat"] or match["text"]
