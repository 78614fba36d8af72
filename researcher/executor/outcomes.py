"""What rollouts said of their episodes beside the reward (`Outcome.metrics`), as series of a trial.

Only what the plan's metrics name is kept. An episode that lacks it makes the trial incomplete: a mean over those that happen to
have it would be a mean over something else.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from researcher.executor.errors import EvidenceMissing
from researcher.instruments.instrument import Metric, heldout_outcome, trained_outcome
from swarm.protocol.episodes import DropReason, LedgerEntry

Points = dict[str, list[tuple[int, float]]]


def evaluated(metrics: Sequence[Metric], kept: Mapping[int, LedgerEntry], when: str) -> Points:
    """By index of the held-out episode. kept: one evaluation, by the same index.

    Raises: EvidenceMissing where an episode does not report it.
    """
    return {
        heldout_outcome(name, when): [(index, _value(entry, name, [*kept.values()])) for index, entry in kept.items()]
        for name in _names(metrics)
    }


def trained(metrics: Sequence[Metric], entries: Sequence[LedgerEntry]) -> Points:
    """By step: the mean over the episodes that it trained, or dropped since their group's rewards were equal.

    Raises: EvidenceMissing where one of them does not report it.
    """
    names = _names(metrics)
    by_step: Mapping[int, list[LedgerEntry]] = defaultdict(list)
    for entry in entries if names else ():
        if entry.kind != "train" or entry.reward is None:
            continue
        if entry.step is not None:
            by_step[entry.step].append(entry)
        elif entry.reason is DropReason.ZERO_VARIANCE:  # played for the step that its weights were about to make
            by_step[entry.claimed_step + 1].append(entry)
    return {
        trained_outcome(name): [
            (step, math.fsum(_value(entry, name, batch) for entry in batch) / len(batch))
            for step, batch in sorted(by_step.items())
        ]
        for name in names
    }


def _names(metrics: Sequence[Metric]) -> list[str]:
    return list(dict.fromkeys(metric.reported_as for metric in metrics if metric.kind == "outcome"))


def _value(entry: LedgerEntry, name: str, among: Sequence[LedgerEntry]) -> float:
    found = entry.metrics.get(name)
    if found is not None:
        return found
    lacking = sum(name not in each.metrics for each in among)
    raise EvidenceMissing(
        f"{lacking} of {len(among)} {'held-out' if entry.kind == 'eval' else 'training'} episodes report no {name!r}: have every "
        f"rollout return Outcome(…, metrics={{{name!r}: …}}), or take the metric out of the instrument's declaration"
    )
