"""What the gateway keeps for episodes: all of what is open, and in the long run nothing of what has passed."""

from __future__ import annotations

import pytest

from swarm.server.gateway.open_episodes import LEAST_SWEPT, OpenEpisodes
from swarm.server.gateway.retries import Retries

pytestmark = pytest.mark.anyio


def test_what_is_kept_is_in_proportion_to_what_is_open() -> None:
    still_open = {f"open-{number}" for number in range(10)}
    open_episodes: OpenEpisodes[list[int]] = OpenEpisodes(lambda episode_id: episode_id in still_open, list)
    for episode_id in still_open:
        open_episodes.of(episode_id).append(1)
    for number in range(5_000):
        open_episodes.of(f"passed-{number}").append(2)
        assert len(open_episodes) <= LEAST_SWEPT
    assert all(open_episodes.of(episode_id) == [1] for episode_id in still_open)


def test_however_many_are_open_none_of_them_is_forgotten() -> None:
    open_episodes: OpenEpisodes[list[int]] = OpenEpisodes(lambda episode_id: True, list)
    for number in range(10_000):
        open_episodes.of(f"episode-{number}").append(number)
    assert len(open_episodes) == 10_000
    assert open_episodes.of("episode-0") == [0]


async def test_a_retry_gets_its_answer_while_thousands_of_other_episodes_are_open() -> None:
    retries = Retries(lambda episode_id: True)
    body, key = {"messages": []}, {"idempotency-key": "k-1"}
    attempt, answered = await retries.begin("episode-0", "chat.completions", None, body, key)
    assert answered is None
    attempt.answer = {"id": "answer-1"}
    attempt.over.set()
    for number in range(1, 6_000):
        await retries.begin(f"episode-{number}", "chat.completions", None, body, {})
    _, answered = await retries.begin("episode-0", "chat.completions", None, body, key)
    assert answered == {"id": "answer-1"}
