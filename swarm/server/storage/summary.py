"""Episodes added up in SQL: how many of each fate, client and version, who lost them, the last failure, and the newest ones."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Sequence, Sized
from typing import Any

from swarm.protocol.episodes import Cause
from swarm.protocol.summary import LastFailure, LedgerCount, LedgerSummary, LostAttempts
from swarm.server.storage.schema import CAUSE, of_body

RECENT = 50
MOST_LOST = 1_000
_VERSION = of_body("client_version")
_TELLING = f"seq + {1 << 60} * (instr(coalesce(detail, ''), 'Traceback') > 0)"
"""Failures in order of what they tell."""
_KEYS = {
    "client_id": "client_id",
    "client_version": _VERSION,
    "kind": "kind",
    "mix": "mix",
    "state": "state",
    "reason": "reason",
    "cause": CAUSE,
    "tainted": f"coalesce({of_body('tainted')}, 0)",
}
_SUMS = {
    "episodes": "count(*)",
    "reward_sum": "total(reward)",
    "rewarded": "count(reward)",
    "sampled_tokens": "sum(sampled_tokens)",
    "last_claim_at": "max(claimed_at)",
}
_LOST = {
    "client_id": "client_id",
    "client_version": _VERSION,
    "kind": "kind",
    "mix": "mix",
    "task_id": "task_id",
    "cause": CAUSE,
}
_FAILED = ("client_id", "client_version", "episode_id", "reason", "detail", "claimed_at")


def summarise(db: sqlite3.Connection, where: str, values: Sequence[Any]) -> LedgerSummary:
    """The episodes for which the condition `where` holds."""
    counts = db.execute(
        f"SELECT {', '.join((*_KEYS.values(), *_SUMS.values()))} FROM episodes WHERE {where} "
        f"GROUP BY {_numbers(_KEYS)} ORDER BY min(seq)",
        values,
    ).fetchall()
    # With a lone max() SQLite takes the other columns from the row that has it: the last failure that brought a traceback,
    # if there is one. What a client gave back when it ended says nothing of why it failed.
    failures = db.execute(
        f"SELECT client_id, {_VERSION} AS client_version, episode_id, reason, detail, claimed_at, "
        f"max({_TELLING}) "
        f"FROM episodes WHERE ({where}) AND reason IN ('aborted', 'expired', 'no_calls') GROUP BY 1, 2 "
        f"ORDER BY max({_TELLING}) DESC",
        values,
    ).fetchall()
    recent = db.execute(
        f"SELECT episode_id FROM episodes WHERE ({where}) AND sampled_tokens > 0 ORDER BY seq DESC LIMIT {RECENT}",
        values,
    ).fetchall()
    found = [LedgerCount.model_validate(dict(zip((*_KEYS, *_SUMS), row, strict=True))) for row in counts]
    return LedgerSummary(
        counts=found,
        causes=_causes(found),
        lost=_lost(db, where, values),
        failures=[LastFailure.model_validate(dict(zip(_FAILED, row[:-1], strict=True))) for row in failures],
        recent=[row[0] for row in recent],
    )


def _causes(counts: Sequence[LedgerCount]) -> dict[Cause, int]:
    """The most first."""
    found: Counter[Cause] = Counter()
    for count in counts:
        if count.cause is not None:
            found[count.cause] += count.episodes
    return dict(found.most_common())


def _lost(db: sqlite3.Connection, where: str, values: Sequence[Any]) -> list[LostAttempts]:
    rows = db.execute(
        f"SELECT {', '.join(_LOST.values())}, count(*) FROM episodes WHERE ({where}) AND ({CAUSE}) IS NOT NULL "
        f"GROUP BY {_numbers(_LOST)} ORDER BY count(*) DESC, min(seq) LIMIT {MOST_LOST}",
        values,
    )
    return [LostAttempts.model_validate(dict(zip((*_LOST, "episodes"), row, strict=True))) for row in rows]


def _numbers(columns: Sized) -> str:
    """Of the first columns of a query, as GROUP BY takes them."""
    return ", ".join(str(number + 1) for number in range(len(columns)))
