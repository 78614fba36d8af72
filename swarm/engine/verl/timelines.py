"""Merged timelines: the calls of an episode that continue one another, as one row each. Pure; knows no tensors.

Where a call's prompt begins with all of an earlier call (its prompt and what it sampled), both stand in one row, and the row's
mask holds what each of them sampled. Rows never reach over episodes, agents' forks or temperatures. Prefixes that several
rows share are computed in each of them: the tree of the local engine is not available here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from swarm.engine.seam import TrainingRefused
from swarm.engine.tree import Branch, check_provenance


@dataclass(slots=True, kw_only=True)
class Row:
    """Token ids, and per token what the loss knows of it; `weight` 0 where a token is no use of any call.

    uses: (index of the branch, position of its first sampled token in the row), in order. call: which branch sampled the token, as its
    index + 1; 0 for tokens that no branch sampled.
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
        """Whether this branch's prompt begins with the whole row."""
        prompt = branch.call.prompt_ids
        return branch.call.temperature == self.temperature and prompt[: len(self.ids)] == self.ids

    def append(self, index: int, branch: Branch) -> None:
        """What the branch saw beyond the row, then what it sampled."""
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
    """The rows of these branches; `episodes` names the episode of each.

    Raises: TrainingRefused when a call lacks provenance, or stands in the batch twice.
    """
    seen: set[str] = set()
    open_rows: dict[str, list[Row]] = {}
    order = sorted(range(len(branches)), key=lambda index: len(branches[index].call.prompt_ids))
    for index in order:
        branch = branches[index]
        check_provenance(branch.call)
        if branch.call.call_id in seen:
            raise TrainingRefused(f"call {branch.call.call_id} stands in the batch twice")
        seen.add(branch.call.call_id)
        rows = open_rows.setdefault(episodes[index], [])
        longest = max((row for row in rows if row.continues(branch)), key=lambda row: len(row.ids), default=None)
        if longest is None:
            longest = Row(temperature=branch.call.temperature)
            rows.append(longest)
        longest.append(index, branch)
    return [row for rows in open_rows.values() for row in rows]


def filled_up(rows: Sequence[Row], multiple: int) -> list[Row]:
    """The rows, and as many without any use as make their number divisible: each rank gets equally many."""
    lacking = -len(rows) % multiple
    blank = Row(temperature=rows[0].temperature if rows else 1.0)
    blank._pass([0, 0])
    return [*rows, *[blank] * lacking]


def by_temperature(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows, those of one temperature together."""
    parts: dict[float, list[Row]] = {}
    for row in rows:
        parts.setdefault(row.temperature, []).append(row)
    return list(parts.values())


def side_by_side(rows: Sequence[Row], *, ranks: int, tokens: int) -> list[list[Row]]:
    """The rows in parts, of which each rank computes its share at once, padded to the longest.

    tokens: so many a rank computes at once, padding included; a row that is longer is computed alone. Rows of about one length
    come together, the longest first.
    """
    ordered = sorted(rows, key=lambda row: -len(row.ids))
    parts: list[list[Row]] = []
    while ordered:
        count = ranks * max(1, tokens // len(ordered[0].ids))
        parts.append(ordered[:count])
        ordered = ordered[count:]
    return parts
