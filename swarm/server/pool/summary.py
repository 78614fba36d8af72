"""Episodes added up in SQL: how many of each fate, client and version, the last failure of each, and the newest ones."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any

from swarm.protocol.summary import LastFailure, LedgerCount, LedgerSummary
from swarm.server.pool.schema import of_body

RECENT = 50
_VERSION = of_body("client_version")
_FATE = f"client_id, {_VERSION} AS client_version, kind, mix, state, reason"
_TELLING = f"seq + {1 << 60} * (instr(coalesce(detail, ''), 'Traceback') > 0)"
"""Failures in order of what they tell."""
_SUMS = ("episodes", "reward_sum", "rewarded", "sampled_tokens", "last_claim_at")
_COUNTED = ("client_id", "client_version", "kind", "mix", "state", "reason", *_SUMS)


def summarise(db: sqlite3.Connection, where: str, values: Sequence[Any]) -> LedgerSummary:
    """The episodes for which the condition `where` holds."""
    counts = db.execute(
        f"SELECT {_FATE}, count(*), total(reward), count(reward), sum(sampled_tokens), max(claimed_at) "
        f"FROM episodes WHERE {where} GROUP BY 1, 2, 3, 4, 5, 6 ORDER BY min(seq)",
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
    failed = ("client_id", "client_version", "episode_id", "reason", "detail", "claimed_at")
    return LedgerSummary(
        counts=[LedgerCount.model_validate(dict(zip(_COUNTED, row, strict=True))) for row in counts],
        failures=[LastFailure.model_validate(dict(zip(failed, row[:-1], strict=True))) for row in failures],
        recent=[row[0] for row in recent],
    )
