"""vLLM shares computed tokens in whole blocks. This decides who shares what is left of equal prompts, with which a group begins.

With blocks of 32 tokens and prompts of 43, each of eight episodes would compute the last eleven anew: a third of all that is
computed for short answers. So a request whose prompt another is computing waits for it, one step, and then begins with a copy of
its keys and values; of the prompt its own is only the last token, from which the first sample is drawn.
Knows nothing of vllm: `tails_connector` brings it to its scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Protocol


class Prompted(Protocol):
    """What this reads of a scheduler's request. num_computed_tokens: also of the steps that are planned and not made yet."""

    @property
    def request_id(self) -> str: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_computed_tokens(self) -> int: ...


@dataclass(slots=True)
class Copies:
    """Blocks to be copied before a step is computed, position by position."""

    sources: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)


class PromptTails:
    """Of the requests that were given blocks: which prompts they hold, and what is to be copied before the next step.

    block_tokens: tokens of a block. runs: whether a request has its blocks; one that had to give them up, as all have when
    weights change, has none until it is computed anew. blocks_of: the blocks of one that has, by its id.
    Keys are equal for requests whose prompts have the same keys and values; None shares nothing.
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
        """How many tokens can be copied behind the first `computed` ones, in whole blocks; None: ask again after this step."""
        wanted = request.num_prompt_tokens - 1 - computed
        holders = self._running(key) if wanted > 0 else []
        if not holders:
            return 0
        return wanted if any(map(_complete, holders)) else None

    def give(self, key: Hashable, request: Prompted, blocks: Sequence[int], copied: int) -> None:
        """The request was given blocks, and holds its prompt from the next step on. copied: tokens, what `available` said, or 0."""
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
        """Its blocks may be given to others at once: what is copied from them is copied before others write there."""
        if (holders := self._holders.get(key)) is not None:
            holders.pop(request.request_id, None)
            if not holders:
                del self._holders[key]

    def take_copies(self) -> Copies:
        """What is to be copied before the step that was planned now."""
        made, self._copies = self._copies, Copies()
        return made

    def _running(self, key: Hashable) -> list[Prompted]:
        return [holder for holder in self._holders.get(key, {}).values() if self._runs(holder)]


def _complete(request: Prompted) -> bool:
    """Whether the whole prompt is computed before the step that is planned now."""
    return request.num_computed_tokens >= request.num_prompt_tokens
