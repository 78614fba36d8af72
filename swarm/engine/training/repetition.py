"""How much answers repeat themselves and one another, because reward hacking often shows as repetition.

Measured on token ids, over a bounded part of the batch: the first `LONGEST` tokens of each answer, of at most
`EPISODES` episodes that are spread over the tasks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import chain, zip_longest
from statistics import fmean

from swarm.engine.seam import TrainBatch, TrainEpisode

EPISODES, LONGEST = 64, 2048
WITHIN, ACROSS = 4, 8
"""n-gram lengths in tokens: short ones detect loops within an answer; across answers, short ones would match by chance."""
_Ngrams = list[tuple[int, ...]]


def repetition_metrics(batch: TrainBatch) -> dict[str, float]:
    """Return two shares from 0 to 1; answers too short for an n-gram count as 0.

    repetition_within: share of an answer's 4-grams that occurred in it before, mean over answers (seq-rep-4 of Welleck et al. 2019,
        arXiv 1908.04319, eq. 10).
    repetition_across: share of an episode's 8-grams that an episode of another task has too, mean over episodes.
    """
    sampled = list(_spread(batch))
    answers = [call.sampled_ids[:LONGEST] for _, episode in sampled for call in episode.calls]
    within = [1.0 - len(set(found)) / len(found) if (found := _ngrams(ids, WITHIN)) else 0.0 for ids in answers]
    said = [
        (task, list(chain.from_iterable(_ngrams(call.sampled_ids[:LONGEST], ACROSS) for call in episode.calls)))
        for task, episode in sampled
    ]
    tasks: dict[tuple[int, ...], set[str]] = defaultdict(set)
    for task, found in said:
        for ngram in found:
            tasks[ngram].add(task)
    across = [fmean(len(tasks[ngram]) > 1 for ngram in found) if found else 0.0 for _, found in said]
    return {
        "repetition_within": fmean(within) if within else 0.0,
        "repetition_across": fmean(across) if across else 0.0,
    }


def _spread(batch: TrainBatch) -> Iterator[tuple[str, TrainEpisode]]:
    """Return episodes with their tasks: the first of each group, then the second, and so on up to the limit."""
    columns = zip_longest(*([(group.task_id, episode) for episode in group.episodes] for group in batch.groups))
    found = (each for column in columns for each in column if each is not None)
    return (each for each, _ in zip(found, range(EPISODES), strict=False))


def _ngrams(ids: list[int], length: int) -> _Ngrams:
    return list(zip(*(ids[start:] for start in range(length)), strict=False))
