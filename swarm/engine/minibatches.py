"""How the lessons of a batch are cut into minibatches, each of which moves the weights once."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

from foundation.ids import derived_seed
from swarm.engine.lesson import Lesson
from swarm.protocol.runspec import RunSpec


def minibatches(lessons: Sequence[Lesson], spec: RunSpec, step: int) -> list[list[Lesson]]:
    """At most `optimizer.minibatches` parts of nearly equal size.

    Episodes of a group stay together as far as the sizes allow, since they share their prompts; with several parts the
    groups are shuffled, by the run's seed.
    """
    count = min(spec.optimizer.minibatches, len(lessons))
    by_group: dict[int, list[Lesson]] = {}
    for lesson in lessons:
        by_group.setdefault(lesson.group, []).append(lesson)
    groups = list(by_group.values())
    if count > 1:
        random.Random(derived_seed(spec.seed, "minibatches", step)).shuffle(groups)
    ordered = [lesson for group in groups for lesson in group]
    edges = [len(ordered) * number // count for number in range(count + 1)]
    return [ordered[first:last] for first, last in pairwise(edges)]
