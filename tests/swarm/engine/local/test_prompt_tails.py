"""Who waits for whom, and what is copied from one to the other."""

from __future__ import annotations

from dataclasses import dataclass

from swarm.engine.local.prompt_tails import PromptTails

BLOCK = 32


@dataclass(slots=True)
class Asked:
    """A request as a scheduler keeps it."""

    request_id: str
    num_prompt_tokens: int = 43
    num_computed_tokens: int = 0
    runs: bool = True

    def made(self) -> None:
        """The step with its prompt is planned."""
        self.num_computed_tokens = self.num_prompt_tokens


class House:
    """Tails over blocks by request."""

    def __init__(self) -> None:
        self.blocks: dict[str, list[int]] = {}
        self.tails = PromptTails(BLOCK, lambda request: request.runs, self.blocks.__getitem__)  # type: ignore[attr-defined]

    def give(self, request: Asked, blocks: list[int], copied: int = 0, key: object = "prompt") -> None:
        self.blocks[request.request_id] = blocks
        self.tails.give(key, request, blocks, copied)

    def available(self, request: Asked, computed: int = BLOCK, key: object = "prompt") -> int | None:
        return self.tails.available(key, request, computed)

    def copies(self) -> list[tuple[int, int]]:
        copies = self.tails.take_copies()
        return list(zip(copies.sources, copies.targets, strict=True))


def test_mates_wait_for_the_first_and_then_copy_all_but_the_last_token() -> None:
    house, first, mate = House(), Asked("first"), Asked("mate")
    assert house.available(first, 0) == 0
    house.give(first, [5, 6])
    assert house.available(mate) is None
    first.made()
    assert house.available(mate) == 10
    house.give(mate, [5, 9], copied=10)
    assert house.copies() == [(6, 9)]
    assert house.copies() == []


def test_without_whole_blocks_in_common_all_blocks_are_copied() -> None:
    house, first, mate = House(), Asked("first"), Asked("mate")
    house.give(first, [5, 6])
    first.made()
    assert house.available(mate, 0) == 42
    house.give(mate, [8, 9], copied=42)
    assert house.copies() == [(5, 8), (6, 9)]


def test_blocks_of_an_answer_are_not_copied() -> None:
    house, first, mate = House(), Asked("first"), Asked("mate")
    house.give(first, [5, 6, 7, 8])
    first.num_computed_tokens = 120
    house.give(mate, [5, 9], copied=10)
    assert house.copies() == [(6, 9)]


def test_a_prompt_that_whole_blocks_hold_up_to_its_last_token_waits_for_nobody() -> None:
    house = House()
    house.give(Asked("first", BLOCK + 1), [5, 6])
    assert house.available(Asked("mate", BLOCK + 1)) == 0


def test_nothing_is_taken_from_one_that_gave_its_blocks_up_or_is_gone() -> None:
    house, first, mate = House(), Asked("first"), Asked("mate")
    house.give(first, [5, 6])
    first.made()
    first.runs, first.num_computed_tokens = False, 0
    assert house.available(mate) == 0
    first.runs = True
    assert house.available(mate) is None
    first.made()
    house.tails.finish("prompt", first)
    assert house.available(mate) == 0


def test_it_is_taken_from_the_one_that_is_computed() -> None:
    house, first, second, mate = House(), Asked("first"), Asked("second"), Asked("mate")
    house.give(first, [5, 6])
    house.give(second, [5, 7])
    second.made()
    assert house.available(mate) == 10
    house.give(mate, [5, 9], copied=10)
    assert house.copies() == [(7, 9)]


def test_other_keys_and_no_key_share_nothing() -> None:
    house, first = House(), Asked("first")
    house.give(first, [5, 6])
    house.give(Asked("unknown"), [5, 7], key=None)
    first.made()
    assert house.available(Asked("mate"), key="other") == 0
    assert house.available(Asked("mate"), key=None) == 0
    house.tails.finish(None, Asked("unknown"))
