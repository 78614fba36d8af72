"""Shares the last, partial block of equal prompts, such as those of a group; vLLM itself shares only whole blocks.

With blocks of 32 tokens and prompts of 43, each of eight episodes would compute the last eleven tokens again: a third of the
work for short answers. So a request waits one step while another computes the same prompt, and then starts with a copy of the
other's keys and values. It computes only the last prompt token itself, from which its first token is sampled.
Knows nothing of vllm: `tails_connector` connects it to vLLM's scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Protocol


class Prompted(Protocol):
    """The fields of a scheduler's request that we use. `num_computed_tokens` includes steps that are planned but not done yet."""

    @property
    def request_id(self) -> str: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_computed_tokens(self) -> int: ...


@dataclass(slots=True)
class Copies:
    """Blocks to copy before a step: `sources[i]` to `targets[i]`."""

    sources: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)


class PromptTails:
    """Tracks the prompts of requests that have blocks, and the copies due before the next step.

    block_tokens: tokens per block.
    runs: returns whether a request has its blocks. All requests lose theirs when weights change, until they are recomputed.
    blocks_of: returns the blocks of a request that has them, by its id.

    Requests have equal keys if their prompts have the same keys and values; with the key None, nothing is shared.
    """

    def __init__(
        self, block_tokens: int, runs: Callable[[Prompted], bool], blocks_of: Callable[[str], Sequence[int]]
    ) -> None:
        self._block_tokens = block_tokens
        self._runs = runs
        self._blocks_of = blocks_of
        self._holders: dict[Hashable, dict[str, Prompted]] = {}
        self._copies = Copies()

    def available(self, key: Hashable, request: Prompted, computed: int) -> int | None:
        """Return how many tokens after the first `computed` ones (whole blocks) can be copied. None: ask again after this step."""
        wanted = request.num_prompt_tokens - 1 - computed
        holders = self._running(key) if wanted > 0 else []
        if not holders:
            return 0
        return wanted if any(map(_complete, holders)) else None

    def give(self, key: Hashable, request: Prompted, blocks: Sequence[int], copied: int) -> None:
        """Note that the request got blocks and holds its prompt from the next step on. `copied` is the token count from `available`, or
        0."""
        if key is None:
            return
        if copied:
            end = request.num_prompt_tokens - 1
            first, last = (end - copied) // self._block_tokens, -(-end // self._block_tokens)
            source = next(filter(_complete, self._running(key)))
            self._copies.sources += self._blocks_of(source.request_id)[first:last]
            self._copies.targets += blocks[first:last]
        self._holders.setdefault(key, {})[request.request_id] = request

    def finish(self, key: Hashable, request: Prompted) -> None:
        """Forget the request. Its blocks may be reused immediately, because due copies happen before anything writes to them."""
        if (holders := self._holders.get(key)) is not None:
            holders.pop(request.request_id, None)
            if not holders:
                del self._holders[key]

    def take_copies(self) -> Copies:
        """Return the copies to make before the step that has just been planned, and start a new list."""
        made, self._copies = self._copies, Copies()
        return made

    def _running(self, key: Hashable) -> list[Prompted]:
        return [holder for holder in self._holders.get(key, {}).values() if self._runs(holder)]


def _complete(request: Prompted) -> bool:
    """Return whether the whole prompt is computed before the step being planned."""
    return request.num_computed_tokens >= request.num_prompt_tokens
