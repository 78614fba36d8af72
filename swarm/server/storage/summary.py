"""Totals over episodes: counts by outcome, client, version and task, why they were lost, the last failures, and the newest episodes.

Triggers keep the counts of settled episodes in tables, so that a summary does not have to scan a million rows. An episode is counted
when it is settled, and counted anew if a restore or a late failure changes its outcome. The few unsettled episodes are added at query
time.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Callable, Sequence, Sized
from typing import Any

from swarm.protocol.episodes import Cause, TaskProgress
from swarm.protocol.summary import LastFailure, LedgerCount, LedgerFilter, LedgerSummary, LostAttempts
from swarm.server.storage.schema import CAUSE, cause_of, of_body

RECENT = 50
MOST_LOST = 1_000
_SETTLED = "('trained', 'dropped')"
_UNSETTLED = ("state IN ('running', 'ended')", "state = 'prepared'", "state = 'in_step'")
"""Conditions for the unsettled states, spelt as in the indices, so that SQLite uses these."""
_FAILED_REASONS = "reason IN ('aborted', 'expired', 'no_calls')"
_KEYS = ("run_id", "client_id", "client_version", "kind", "mix", "state", "reason", "cause", "tainted")
_TASK_KEYS = ("run_id", "task_id", "mix", "kind", "eval_step", "client_id")
_EXPRESSIONS: dict[str, Callable[[str], str]] = {
    "client_version": lambda row: of_body("client_version", row),
    "mix": lambda row: f"coalesce({row}mix, '')",
    "reason": lambda row: f"coalesce({row}reason, '')",
    "cause": lambda row: f"coalesce({cause_of(row)}, '')",
    "tainted": lambda row: f"coalesce({of_body('tainted', row)}, 0)",
    "eval_step": lambda row: f"CASE {row}kind WHEN 'eval' THEN {row}claimed_step ELSE -1 END",
    "prompt_tokens": lambda row: f"coalesce({of_body('prompt_tokens', row)}, 0)",
    "episodes": lambda row: "1",
    "reward_sum": lambda row: f"coalesce({row}reward, 0.0)",
    "rewarded": lambda row: f"{row}reward IS NOT NULL",
    "last_claim_at": lambda row: f"{row}claimed_at",
    "first_seq": lambda row: f"{row}seq",
}
"""SQL for each key by which episodes are counted and each value that is summed. NULL becomes '', because keys cannot be NULL."""
_SUMS = ("episodes", "reward_sum", "rewarded", "prompt_tokens", "sampled_tokens", "last_claim_at", "first_seq")
_VERSION = of_body("client_version")
_TELLING = f"seq + {1 << 60} * (instr(coalesce(detail, ''), 'Traceback') > 0)"
"""Rank of a failure: failures with a traceback rank above all others, and newer failures above older ones."""
_LOST = {
    "client_id": "client_id",
    "client_version": _VERSION,
    "kind": "kind",
    "mix": "mix",
    "task_id": "task_id",
    "cause": CAUSE,
}
_FAILED = ("client_id", "client_version", "episode_id", "reason", "detail", "claimed_at")
_TASK_SUMS = ("episodes", "first_seq")
_FOLDS = {"last_claim_at": "max", "first_seq": "min"}


def _value(name: str, row: str = "") -> str:
    return _EXPRESSIONS[name](row) if name in _EXPRESSIONS else row + name


def _of(names: Sequence[str], row: str = "") -> str:
    return ", ".join(f"{_value(name, row)} AS {name}" for name in names)


def _counts(row: str = "") -> str:
    """Return an SQL condition: the episode's reward counts for its task."""
    fates = "'no_calls', 'tainted', 'superseded', 'run_ended'"
    return f"{row}reward IS NOT NULL AND ({row}reason IS NULL OR {row}reason NOT IN ({fates}))"


def _add(table: str, keys: Sequence[str], sums: Sequence[str], condition: str) -> str:
    changed = ", ".join(
        f"{name} = {_FOLDS[name]}({name}, excluded.{name})" if name in _FOLDS else f"{name} = {name} + excluded.{name}"
        for name in sums
    )
    return f"""INSERT INTO {table} SELECT {_of((*keys, *sums), "NEW.")} WHERE {condition}
        ON CONFLICT DO UPDATE SET {changed};"""


def _remove(table: str, keys: Sequence[str], sums: Sequence[str], condition: str) -> str:
    changed = ", ".join(f"{name} = {name} - ({_value(name, 'OLD.')})" for name in sums if name not in _FOLDS)
    same = " AND ".join(f"{name} = {_value(name, 'OLD.')}" for name in keys)
    return f"""UPDATE {table} SET {changed} WHERE {condition} AND {same};
        DELETE FROM {table} WHERE episodes = 0 AND {same};"""


def _fold(names: Sequence[str]) -> str:
    return ", ".join(f"{_FOLDS.get(name, 'sum')}({name}) AS {name}" for name in names)


def _table(name: str, keys: Sequence[str], sums: Sequence[str], condition: str) -> str:
    settled = f"SELECT {_of((*keys, *sums))} FROM episodes WHERE state IN {_SETTLED} AND {condition}"
    return f"""CREATE TABLE {name} ({", ".join((*keys, *sums))}, PRIMARY KEY ({", ".join(keys)})) WITHOUT ROWID;
    INSERT INTO {name} SELECT {", ".join(keys)}, {_fold(sums)} FROM ({settled}) GROUP BY {_numbers(keys)};"""


def tallies() -> str:
    """Return SQL that creates the tables and their triggers, replacing those of an older server, and counts all settled episodes.

    Run it in one transaction.
    """
    into = _add("tallies", _KEYS, _SUMS, "true") + _add("task_tallies", _TASK_KEYS, _TASK_SUMS, _counts("NEW."))
    out = _remove("tallies", _KEYS, _SUMS, "true") + _remove("task_tallies", _TASK_KEYS, _TASK_SUMS, _counts("OLD."))
    return f"""
    DROP TRIGGER IF EXISTS tally_new; DROP TRIGGER IF EXISTS tally_moved; DROP TRIGGER IF EXISTS tally_settled;
    DROP TABLE IF EXISTS tallies; DROP TABLE IF EXISTS task_tallies;
    CREATE INDEX IF NOT EXISTS episodes_in_step ON episodes (state) WHERE state = 'in_step';
    CREATE INDEX IF NOT EXISTS episodes_failed ON episodes (run_id) WHERE {_FAILED_REASONS};
    {_table("tallies", _KEYS, _SUMS, "true")}
    {_table("task_tallies", _TASK_KEYS, _TASK_SUMS, _counts())}
    CREATE TRIGGER tally_new AFTER INSERT ON episodes WHEN NEW.state IN {_SETTLED} BEGIN {into} END;
    CREATE TRIGGER tally_moved AFTER UPDATE ON episodes WHEN OLD.state IN {_SETTLED} BEGIN {out} END;
    CREATE TRIGGER tally_settled AFTER UPDATE ON episodes WHEN NEW.state IN {_SETTLED} BEGIN {into} END;
    """


def _all(table: str, names: Sequence[str], condition: str = "true") -> str:
    """Return SQL for a table of tallies with the unsettled episodes added."""
    unsettled = [f"SELECT {_of(names)} FROM episodes WHERE {state} AND {condition}" for state in _UNSETTLED]
    return f"(SELECT {', '.join(names)} FROM {table} UNION ALL {' UNION ALL '.join(unsettled)})"


def tasks(db: sqlite3.Connection, run_id: str, client_id: str | None, mix: str | None) -> list[TaskProgress]:
    """Count the run's episodes whose reward counts, by task and, for evaluations, by step of the weights."""
    rows = db.execute(
        f"SELECT task_id, nullif(mix, ''), kind, nullif(eval_step, -1), sum(episodes) "
        f"FROM {_all('task_tallies', (*_TASK_KEYS, *_TASK_SUMS), _counts())} "
        "WHERE run_id = :run_id AND (:client_id IS NULL OR client_id = :client_id) AND (:mix IS NULL OR mix = :mix) "
        "GROUP BY 1, mix, 3, eval_step ORDER BY min(first_seq)",
        {"run_id": run_id, "client_id": client_id, "mix": mix},
    )
    return [TaskProgress(task_id=r[0], mix=r[1], kind=r[2], step=r[3], ended=r[4]) for r in rows]


def summarise(db: sqlite3.Connection, wanted: LedgerFilter, where: str, values: Sequence[Any]) -> LedgerSummary:
    """Summarise the wanted episodes. `where` and `values` are the same filter, as an SQL condition with its values."""
    found = _tallied(db, wanted) if wanted.step is None and wanted.task_id is None else _counted(db, where, values)
    # With a single max(), SQLite takes the other columns from the row with the maximum: the last failure with a traceback, if
    # there is one. Episodes that a client gave back when it stopped do not tell us why it failed.
    failures = db.execute(
        f"SELECT client_id, {_VERSION} AS client_version, episode_id, reason, detail, claimed_at, "
        f"max({_TELLING}) "
        f"FROM episodes INDEXED BY episodes_failed WHERE ({where}) AND {_FAILED_REASONS} GROUP BY 1, 2 "
        f"ORDER BY max({_TELLING}) DESC",
        values,
    ).fetchall()
    recent = db.execute(
        f"SELECT episode_id FROM episodes WHERE ({where}) AND sampled_tokens > 0 ORDER BY seq DESC LIMIT {RECENT}",
        values,
    ).fetchall()
    return LedgerSummary(
        counts=found,
        causes=_causes(found),
        lost=_lost(db, where, values),
        failures=[LastFailure.model_validate(dict(zip(_FAILED, row[:-1], strict=True))) for row in failures],
        recent=[row[0] for row in recent],
    )


_COUNT_NAMES = (*_KEYS[1:], *_SUMS[:-1])


def _tallied(db: sqlite3.Connection, wanted: LedgerFilter) -> list[LedgerCount]:
    given = {name: value for name, value in wanted.model_dump(exclude_none=True).items() if name in _KEYS}
    where = " AND ".join(["true", *(f"{name} = :{name}" for name in given)])
    return _grouped(db, _all("tallies", (*_KEYS, *_SUMS)), where, given)


def _counted(db: sqlite3.Connection, where: str, values: Sequence[Any]) -> list[LedgerCount]:
    return _grouped(db, f"(SELECT {_of((*_KEYS, *_SUMS))} FROM episodes WHERE {where})", "true", values)


def _grouped(db: sqlite3.Connection, source: str, where: str, values: Any) -> list[LedgerCount]:
    rows = db.execute(
        f"SELECT {', '.join(_KEYS[1:])}, {_fold(_SUMS)} FROM {source} WHERE {where} "
        f"GROUP BY {_numbers(_KEYS[1:])} ORDER BY {_fold(('first_seq',)).partition(' ')[0]}",
        values,
    )
    optional = ("mix", "reason", "cause")
    counts = (dict(zip(_COUNT_NAMES, row[:-1], strict=True)) for row in rows)
    return [LedgerCount.model_validate(count | {name: count[name] or None for name in optional}) for count in counts]


def _causes(counts: Sequence[LedgerCount]) -> dict[Cause, int]:
    """Count lost episodes by cause, the most frequent cause first."""
    found: Counter[Cause] = Counter()
    for count in counts:
        if count.cause is not None:
            found[count.cause] += count.episodes
    return dict(found.most_common())


def _lost(db: sqlite3.Connection, where: str, values: Sequence[Any]) -> list[LostAttempts]:
    rows = db.execute(
        f"SELECT {', '.join(_LOST.values())}, count(*) FROM episodes INDEXED BY episodes_lost WHERE ({where}) AND ({CAUSE}) IS NOT NULL "
        f"GROUP BY {_numbers(_LOST)} ORDER BY count(*) DESC, min(seq) LIMIT {MOST_LOST}",
        values,
    )
    return [LostAttempts.model_validate(dict(zip((*_LOST, "episodes"), row, strict=True))) for row in rows]


def _numbers(columns: Sized) -> str:
    """Return the numbers of a query's first columns, for GROUP BY."""
    return ", ".join(str(number + 1) for number in range(len(columns)))
