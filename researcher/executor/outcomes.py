"""Values that rollouts report besides the reward (`Outcome.metrics`), as series of a trial.

Only values that the plan's metrics name are kept. If an episode lacks one, the trial is incomplete: a mean over the
others would measure something else.
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
    """Values by index of the held-out episode. kept: the episodes of one evaluation, by index.

    Raises: EvidenceMissing where an episode does not report a value.
    """
    return {
        heldout_outcome(name, when): [(index, _value(entry, name, [*kept.values()])) for index, entry in kept.items()]
        for name in _names(metrics)
    }


def trained(metrics: Sequence[Metric], entries: Sequence[LedgerEntry]) -> Points:
    """Mean per step over its episodes, including those dropped for equal rewards in their group.

    Raises: EvidenceMissing where an episode does not report a value.
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
