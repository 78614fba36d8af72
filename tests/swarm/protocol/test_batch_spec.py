"""The pool holds what steps need."""

from __future__ import annotations

from swarm.protocol.quantities import MOST
from swarm.protocol.runspec import BatchSpec


def test_a_pool_that_is_not_sized_holds_two_steps_whatever_their_size() -> None:
    assert BatchSpec().max_pool_episodes == 4096
    assert BatchSpec(tasks=4096, group_size=1024).max_pool_episodes == 2 * 4096 * 1024
    assert BatchSpec(rule="episodes", episodes=5000).max_pool_episodes == 10_000
    assert BatchSpec(tasks=MOST).max_pool_episodes == MOST
    assert BatchSpec(tasks=8, group_size=8, max_pool_episodes=64).max_pool_episodes == 64
