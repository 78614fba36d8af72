"""Minibatches: every lesson once, sizes even, drawn by the seed."""

from __future__ import annotations

from swarm.engine.lesson import Lesson
from swarm.engine.minibatches import minibatches
from swarm.protocol.runspec import RunSpec


def lessons() -> list[Lesson]:
    return [
        Lesson(episode_id=f"{group}-{slot}", group=group, calls=[], advantages=[])
        for group in range(4)
        for slot in range(3)
    ]


def spec(count: int, seed: int = 0) -> RunSpec:
    return RunSpec.model_validate({"optimizer": {"minibatches": count}, "seed": seed})


def names(parts: list[list[Lesson]]) -> list[list[str]]:
    return [[lesson.episode_id for lesson in part] for part in parts]


def test_every_lesson_is_in_one_part_and_groups_stay_together() -> None:
    parts = minibatches(lessons(), spec(4), step=1)
    assert sorted(name for part in names(parts) for name in part) == sorted(lesson.episode_id for lesson in lessons())
    assert all(len({lesson.group for lesson in part}) == 1 for part in parts)


def test_the_order_follows_from_seed_and_step() -> None:
    assert names(minibatches(lessons(), spec(2), 1)) == names(minibatches(lessons(), spec(2), 1))
    drawn = [names(minibatches(lessons(), spec(2, seed), step)) for seed in range(4) for step in (1, 2)]
    assert any(other != drawn[0] for other in drawn)


def test_there_are_no_more_parts_than_lessons() -> None:
    assert len(minibatches(lessons()[:2], spec(8), 1)) == 2
    assert names(minibatches(lessons()[:2], spec(1), 1)) == [["0-0", "0-1"]]
