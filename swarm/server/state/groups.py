"""Groups of episodes, of one task, client version and config version, whose rewards are compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from swarm.protocol.runspec import BatchSpec
from swarm.protocol.status import MixStatus
from swarm.server.state.rows import EpisodeRow, GroupRow

EMPTY_PATIENCE_S = 3.0
"""Seconds that a group without an ended episode keeps its place after its last episode was lost. Short, because clients that retry
do so immediately, and an abandoned task must not hold up others."""
GroupKey = tuple[str, str | None, str, int]
"""(task_id, mix, client_version, config_version): what all episodes of a group have in common."""
Kin = tuple[str | None, str, int]
"""A GroupKey without the task, because an ungrouped episode has no task before its end."""


@dataclass(slots=True, kw_only=True)
class Group:
    """An open or ready group. Times are lease time."""

    row: GroupRow
    rules: BatchSpec
    """Batch settings of the group's config version, including patience and partial policy."""
    running: dict[int, str] = field(default_factory=dict)
    """Maps a slot to the id of the episode that holds it."""
    ended: dict[int, EpisodeRow] = field(default_factory=dict)
    """Maps a slot to the episode that filled it."""
    last_end: float | None = None
    last_loss: float | None = None
    """When a slot's episode was last lost to an abort, expiry or an end without calls."""
    watched_until: float | None = None
    """The value of `patience_ends_at` for which a deadline is already set."""
    clients: set[str] = field(default_factory=set)
    """Clients that claimed an episode of this group."""
    left: set[str] = field(default_factory=set)
    """Clients of the group that now run a different version of their code."""
    useless: bool = False
    """Whether the group's episodes will be dropped: it is too stale or quarantined, or its family was removed from the mix."""

    @property
    def key(self) -> GroupKey:
        return self.row.task_id, self.row.mix, self.row.client_version, self.row.config_version

    @property
    def open(self) -> bool:
        return self.row.state == "open"

    @property
    def forsaken(self) -> bool:
        """Whether nobody will claim in the group any more, because all its clients now run a different version."""
        return bool(self.clients) and self.clients <= self.left

    @property
    def counts(self) -> bool:
        """Whether the group takes up room in the pool, so that others may have to wait."""
        return not self.useless and not (self.open and self.forsaken)

    @property
    def expected(self) -> int:
        """Number of episodes that it is expected to contribute to a batch."""
        return self.row.size if self.open else len(self.ended)

    @property
    def full(self) -> bool:
        return len(self.ended) == self.row.size

    @property
    def oldest_step(self) -> int:
        """Step of the weights that sampled its oldest token."""
        return min((row.oldest_step for row in self.ended.values()), default=0)

    @property
    def equal_rewards(self) -> bool:
        """Whether all rewards are equal, for every agent, so that comparing them teaches nothing."""
        seen = [(row.reward, row.agent_rewards) for row in self.ended.values()]
        return all(one == seen[0] for one in seen)

    def free_slot(self, now: float) -> int | None:
        """Return the lowest free slot; None if all are held or filled, patience ran out, or the group is useless or not open."""
        if not self.open or self.useless or self._out_of_patience(now):
            return None
        return next((i for i in range(self.row.size) if i not in self.running and i not in self.ended), None)

    def patience_ends_at(self) -> float | None:
        """Return the lease time at which patience runs out; None while an episode runs, or before any has ended or been lost."""
        if not self.open or self.running:
            return None
        if self.ended:
            return None if self.last_end is None else self.last_end + self.rules.group_patience_s
        patience_s = min(self.rules.group_patience_s, EMPTY_PATIENCE_S)
        return None if self.last_loss is None else self.last_loss + patience_s

    def worth_training(self) -> bool:
        """True if the partial policy would train on the group as it is."""
        return self.rules.partial_groups == "train" and len(self.ended) >= self.rules.partial_min

    def in_slot_order(self) -> list[EpisodeRow]:
        return [self.ended[slot] for slot in sorted(self.ended)]

    def _out_of_patience(self, now: float) -> bool:
        return bool(self.ended) and self.last_end is not None and now >= self.last_end + self.rules.group_patience_s


@dataclass(slots=True)
class Openings:
    """Caches which families may open a group. Every waiting claim needs to know, and the answer rarely changes."""

    asked: tuple[object, ...] = ()
    """The values on which the cached answer is based."""
    families: frozenset[str] = frozenset()
    full: bool = False
    """Whether the pool is full."""
    held_up: set[str | None] = field(default_factory=set)
    """Families that were refused because it was not their turn, since `families` was computed."""


class Groups:
    """The groups that are in no journalled batch, in the order in which they were opened."""

    def __init__(self, revision: int = 0) -> None:
        self._by_id: dict[str, Group] = {}
        self._by_key: dict[GroupKey, list[Group]] = {}
        self._by_version: Counter[str] = Counter()
        self._ungrouped: Counter[Kin] = Counter()
        self.openings = Openings()
        self.revision = revision
        """Increases with every change that may affect claims."""

    def __iter__(self) -> Iterator[Group]:
        return iter(list(self._by_id.values()))

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def ungrouped(self) -> int:
        """Number of open train episodes that join a group only at their end."""
        return self._ungrouped.total()

    def expect(self, row: EpisodeRow) -> None:
        """Start counting an ungrouped episode."""
        self._ungrouped[_kin(row)] += 1
        self.touch()

    def expect_no_more(self, row: EpisodeRow) -> None:
        """Stop counting an ungrouped episode that is over or joins a group."""
        self._ungrouped -= Counter([_kin(row)])
        self.touch()

    def awaits(self, group: Group) -> bool:
        """True if an open ungrouped episode may still join the group."""
        return group.open and _kin(group.row) in self._ungrouped

    def left_alone_by(self, row: EpisodeRow) -> list[Group]:
        """Return the open groups that no ungrouped episode can join any more, now that this one has ended."""
        kin = _kin(row)
        if kin in self._ungrouped:
            return []
        return [group for group in self._by_id.values() if group.open and _kin(group.row) == kin]

    def has_other(self, client_version: str) -> bool:
        """True if any group has a different client version."""
        return len(self._by_version) > (client_version in self._by_version)

    def get(self, group_id: str) -> Group | None:
        return self._by_id.get(group_id)

    def touch(self) -> None:
        """Note a change that may affect claims."""
        self.revision += 1

    def add(self, group: Group) -> None:
        """Add a group. Call this in the order of `seq`."""
        self.touch()
        self._by_id[group.row.group_id] = group
        self._by_key.setdefault(group.key, []).append(group)
        self._by_version[group.row.client_version] += 1

    def remove(self, group: Group) -> None:
        self.touch()
        group.row.state = "closed"
        del self._by_id[group.row.group_id]
        mates = self._by_key[group.key]
        mates.remove(group)
        if not mates:
            del self._by_key[group.key]
        version = group.row.client_version
        self._by_version[version] -= 1
        if not self._by_version[version]:
            del self._by_version[version]

    def offer(self, key: GroupKey, now: float) -> tuple[Group, int] | None:
        """Return the first group of this key with a free slot, and that slot; None if there is none."""
        for group in self._by_key.get(key, ()):
            slot = group.free_slot(now)
            if slot is not None:
                return group, slot
        return None

    def ready(self) -> list[Group]:
        return [group for group in self._by_id.values() if not group.open]

    def by_mix(self) -> dict[str, MixStatus]:
        found: dict[str, MixStatus] = {}
        for group in self._by_id.values():
            if group.row.mix is not None:
                status = found.setdefault(group.row.mix, MixStatus())
                status.running += len(group.running)
                status.ended += len(group.ended)
        return found


def _kin(row: EpisodeRow | GroupRow) -> Kin:
    return row.mix, row.client_version, row.config_version
