"""What the versions of a client's code are rewarded with, and how far each shifted from the one before it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from statistics import fmean, pvariance

from swarm.protocol.status import VersionReport
from swarm.server.state.rows import EpisodeRow, VersionRow

WINDOW = 64
"""So many episodes on either side of a change are compared: few enough that the policy hardly moved meanwhile."""

VersionKey = tuple[str | None, str]
"""mix, client_version: families are rewarded each in its own way, and are not compared with each other."""


class Versions:
    """The versions of one run, in the order of their first groups."""

    def __init__(self, rows: Iterable[VersionRow] = ()) -> None:
        self._rows: dict[VersionKey, VersionRow] = {(row.mix, row.client_version): row for row in rows}

    @property
    def rows(self) -> list[VersionRow]:
        return list(self._rows.values())

    def knows(self, key: VersionKey) -> bool:
        return key in self._rows

    def begin(self, run_id: str, key: VersionKey, at: float) -> VersionRow:
        """A version opens its first group. Returns the row to be written."""
        mix, client_version = key
        row = VersionRow(run_id=run_id, mix=mix, client_version=client_version, first_at=at)
        self._rows[key] = row
        return row

    def rewarded(self, episode: EpisodeRow, at: float) -> VersionRow:
        """A train episode ended. Returns the row to be written."""
        assert episode.reward is not None
        key = (episode.mix, episode.client_version)
        row = self._rows.get(key) or self.begin(episode.run_id, key, at)
        if not row.ended:
            self._compare_with_newest(row)
        row.ended += 1
        row.last_at = at
        row.reward_sum += episode.reward
        row.square_sum += episode.reward * episode.reward
        if len(row.opening) < WINDOW:
            row.opening.append(episode.reward)
        row.recent = [*row.recent[1 - WINDOW :], episode.reward]
        return row

    def _compare_with_newest(self, row: VersionRow) -> None:
        others = [other for other in self._rows.values() if other.mix == row.mix and other.ended]
        if others:
            newest = max(others, key=lambda other: other.last_at)
            row.before, row.baseline = newest.client_version, newest.recent


def shift(row: VersionRow) -> float | None:
    """By how much the mean reward changed with this version; None without a version before it."""
    return fmean(row.opening) - fmean(row.baseline) if row.opening and row.baseline else None


def shifts(rows: Iterable[VersionRow]) -> dict[VersionKey, float | None]:
    return {(row.mix, row.client_version): shift(row) for row in rows}


def reports(rows: Iterable[VersionRow], quarantined: Mapping[str, str]) -> list[VersionReport]:
    """In the protocol's words."""
    return [_report(row, quarantined.get(row.client_version)) for row in rows]


def _report(row: VersionRow, quarantined: str | None) -> VersionReport:
    moved = shift(row)
    mean = row.reward_sum / row.ended if row.ended else None
    return VersionReport(
        client_version=row.client_version,
        mix=row.mix,
        first_at=row.first_at,
        episodes=row.ended,
        reward_mean=mean,
        reward_std=None if mean is None else math.sqrt(max(0.0, row.square_sum / row.ended - mean * mean)),
        before=row.before,
        shift=moved,
        shift_stderr=None if moved is None else math.sqrt(_error(row.opening) + _error(row.baseline)),
        quarantined=quarantined,
    )


def _error(rewards: list[float]) -> float:
    """Squared standard error of the mean."""
    return pvariance(rewards) / len(rewards)
