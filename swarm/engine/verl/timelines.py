"""Merged timelines: calls of an episode that continue one another share one row. Pure; knows no tensors.

If a call's prompt begins with all of an earlier call (its prompt and what it sampled), both are in one row, and the row's
mask marks what each of them sampled. A row never spans several episodes, forks of an agent, or temperatures. Prefixes that several
rows share are computed in each of them: the tree of the local engine is not available here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from swarm.engine.seam import TrainingRefused
from swarm.engine.tree import Branch, check_provenance


@dataclass(slots=True, kw_only=True)
class Row:
    """Token ids, and for each token the facts that its loss needs. `weight` is 0 for tokens that no call sampled.

    uses: (index of the branch, position of its first sampled token in the row), in order.
    call: index + 1 of the branch that sampled the token; 0 for tokens that no branch sampled.
    """

    temperature: float
    ids: list[int] = field(default_factory=list)
    advantage: list[float] = field(default_factory=list)
    weight: list[float] = field(default_factory=list)
    recorded: list[float] = field(default_factory=list)
    mask: list[float] = field(default_factory=list)
    off_policy: list[float] = field(default_factory=list)
    call: list[int] = field(default_factory=list)
    uses: list[tuple[int, int]] = field(default_factory=list)

    def continues(self, branch: Branch) -> bool:
        """Return whether this branch has the row's temperature, and its prompt begins with the whole row."""
        prompt = branch.call.prompt_ids
        return branch.call.temperature == self.temperature and prompt[: len(self.ids)] == self.ids

    def append(self, index: int, branch: Branch) -> None:
        """Append what the branch saw beyond the row, then what it sampled."""
        call = branch.call
        self._pass(call.prompt_ids[len(self.ids) :])
        self.uses.append((index, len(self.ids)))
        size = len(call.sampled_ids)
        self.ids += call.sampled_ids
        self.advantage += [branch.advantage] * size
        self.weight += [branch.weight] * size
        self.recorded += call.logprobs
        self.mask += [1.0] * size
        self.off_policy += [float(call.off_policy)] * size
        self.call += [index + 1] * size

    def _pass(self, ids: Sequence[int]) -> None:
        self.ids += ids
        for column in (self.advantage, self.weight, self.recorded, self.mask, self.off_policy):
            column += [0.0] * len(ids)
        self.call += [0] * len(ids)


def merged(branches: Sequence[Branch], episodes: Sequence[str]) -> list[Row]:
    """Return the rows of these branches; `episodes` names the episode of each branch.

    Raises: TrainingRefused if a call lacks provenance, or is in the batch twice.
    """
    seen: set[str] = set()
    open_rows: dict[str, list[Row]] = {}
    order = sorted(range(len(branches)), key=lambda index: len(branches[index].call.prompt_ids))
    for index in order:
        branch = branches[index]
        check_provenance(branch.call)
        if branch.call.call_id in seen:
            raise TrainingRefused(f"call {branch.call.call_id} is in the batch twice")
        seen.add(branch.call.call_id)
        rows = open_rows.setdefault(episodes[index], [])
        longest = max((row for row in rows if row.continues(branch)), key=lambda row: len(row.ids), default=None)
        if longest is None:
            longest = Row(temperature=branch.call.temperature)
            rows.append(longest)
        longest.append(index, branch)
    return [row for rows in open_rows.values() for row in rows]


def filled_up(rows: Sequence[Row], multiple: int) -> list[Row]:
    """Add rows without uses until the number of rows is divisible by `multiple`, so that each rank gets equally many."""
    lacking = -len(rows) % multiple
    blank = Row(temperature=rows[0].temperature if rows else 1.0)
    blank._pass([0, 0])
    return [*rows, *[blank] * lacking]


def by_temperature(rows: Sequence[Row]) -> list[list[Row]]:
    """Group the rows by temperature."""
    parts: dict[float, list[Row]] = {}
    for row in rows:
        parts.setdefault(row.temperature, []).append(row)
    return list(parts.values())


def side_by_side(rows: Sequence[Row], *, ranks: int, tokens: int) -> list[list[Row]]:
    """Split the rows into parts. Each rank computes its share of a part together, padded to the longest row.

    `tokens` is the maximum that a rank computes together, padding included; a longer row is computed alone. Rows of similar length
    are in the same part, and the longest rows come first.
    """
    ordered = sorted(rows, key=lambda row: -len(row.ids))
    parts: list[list[Row]] = []
    while ordered:
        count = ranks * max(1, tokens // len(ordered[0].ids))
        parts.append(ordered[:count])
        ordered = ordered[count:]
    return parts
