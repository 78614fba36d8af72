"""Reads the pool, the server's database: only committed data, over a separate connection."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import orjson

from swarm.protocol.episodes import Cause, DropReason, EpisodeState, RecordedCall, TaskProgress
from swarm.protocol.summary import LedgerFilter, LedgerSummary
from swarm.server.state.call_codec import decode
from swarm.server.state.rows import (
    LIVED_AT,
    ConfigRow,
    EpisodeRow,
    GroupRow,
    HeldOutRow,
    MixRow,
    PlannedGroup,
    RunRow,
    Snapshot,
    StepRow,
    TeamRow,
    VersionRow,
    session_note,
)
from swarm.server.storage import schema, summary

T = TypeVar("T")
_STEP_COLUMNS = "run_id, branch, step, state, at, config_version, batch, metrics"


class Reader:
    """Runs queries on the pool. Use it from one thread at a time."""

    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=5.0)
        self._db.execute("PRAGMA query_only = ON")

    def close(self) -> None:
        self._db.close()

    def snapshot(self) -> Snapshot:
        """Read everything that is open, as of one moment."""
        self._db.execute("BEGIN")
        try:
            return self._snapshot()
        finally:
            self._db.execute("COMMIT")

    def _snapshot(self) -> Snapshot:
        run = self._newest_run()
        run_id = run.run_id if run else ""
        step = self._number("SELECT max(step) FROM steps WHERE run_id = ? AND state = 'done'", run_id)
        by_task = self._db.execute("SELECT task_id, count(*) FROM groups WHERE run_id = ? GROUP BY task_id", (run_id,))
        server_id = self._db.execute("SELECT value FROM meta WHERE name = 'server_id'").fetchone()
        return Snapshot(
            server_id=server_id[0] if server_id else None,
            next_episode_seq=self._number("SELECT max(seq) FROM episodes") + 1,
            next_group_seq=self._number("SELECT max(seq) FROM groups") + 1,
            run=run,
            configs=self.configs(run_id),
            step=step,
            journalled=next((row for row in self.steps(run_id, step) if row.state == "journalled"), None),
            groups=self._live_groups(),
            episodes=self._open_episodes(),
            teams=self._open_teams(),
            sessions=self._sessions(run_id),
            groups_by_task=dict(by_task.fetchall()),
            eval_ordinals=self.eval_ordinals(run_id, step),
            versions=self.versions(run_id),
            lived_at=self._lived_at(),
            tokens=self._number("SELECT sum(sampled_tokens) FROM episodes WHERE run_id = ?", run_id),
        )

    def _sessions(self, run_id: str) -> dict[str, str]:
        prefix = session_note(run_id)
        query = "SELECT substr(name, length(:prefix) + 1), value FROM meta WHERE name >= :prefix AND name < :prefix || :last"
        return dict(self._db.execute(query, {"prefix": prefix, "last": "\U0010ffff"}).fetchall())

    def _open_episodes(self) -> list[EpisodeRow]:
        found = self._episodes("state IN ('running', 'ended')", ()) + self._episodes("state = 'prepared'", ())
        return sorted(found, key=lambda row: row.seq)

    def _open_teams(self) -> list[TeamRow]:
        rows = self._db.execute(
            "SELECT teams.body FROM episodes JOIN teams ON teams.seq = episodes.seq WHERE episodes.state = 'prepared'"
        )
        return [TeamRow(**orjson.loads(body)) for (body,) in rows]

    def team(self, seq: int) -> TeamRow | None:
        """Return the team row of the episode with this seq; None if it was never bound to a team."""
        found = self._db.execute("SELECT body FROM teams WHERE seq = ?", (seq,)).fetchone()
        return TeamRow(**orjson.loads(found[0])) if found else None

    def _newest_run(self) -> RunRow | None:
        return _run(self._db.execute("SELECT body FROM runs ORDER BY seq DESC LIMIT 1").fetchone())

    def _live_groups(self) -> list[GroupRow]:
        rows = self._db.execute(
            f"SELECT {', '.join(schema.GROUP_COLUMNS)} FROM groups WHERE state != 'closed' ORDER BY seq"
        )
        return [GroupRow(**dict(zip(schema.GROUP_COLUMNS, row, strict=True))) for row in rows]

    def eval_ordinals(self, run_id: str, step: int) -> list[tuple[str, int]]:
        """Return (task_id, ordinal) of each of the run's evaluations at this step whose result counts."""
        return self._db.execute(
            "SELECT task_id, ordinal FROM episodes WHERE run_id = ? AND kind = 'eval' AND claimed_step = ? "
            "AND reason = 'eval'",
            (run_id, step),
        ).fetchall()

    def run(self, run_id: str) -> RunRow | None:
        return _run(self._db.execute("SELECT body FROM runs WHERE run_id = ?", (run_id,)).fetchone())

    def run_by_key(self, idempotency_key: str) -> RunRow | None:
        query = "SELECT body FROM runs WHERE idempotency_key = ?"
        return _run(self._db.execute(query, (idempotency_key,)).fetchone())

    def configs(self, run_id: str) -> list[ConfigRow]:
        """Return the run's configs, ascending by version."""
        rows = self._db.execute(
            "SELECT run_id, config_version, at, by, patch, spec FROM configs WHERE run_id = ? ORDER BY config_version",
            (run_id,),
        )
        return [
            ConfigRow(
                run_id=row[0],
                config_version=row[1],
                at=row[2],
                by=row[3],
                patch=orjson.loads(row[4]),
                spec=orjson.loads(row[5]),
            )
            for row in rows
        ]

    def steps(self, run_id: str, after: int) -> list[StepRow]:
        """Return the steps later than `after`, ascending, without superseded and abandoned ones."""
        rows = self._db.execute(
            f"SELECT {_STEP_COLUMNS} FROM steps WHERE run_id = ? AND step > ? AND state IN ('journalled', 'done') "
            "ORDER BY step",
            (run_id, after),
        )
        return [_step(row) for row in rows]

    def mixes(self, run_id: str) -> dict[str, str | None]:
        """Return the mix of each group that the run opened."""
        return dict(self._db.execute("SELECT group_id, mix FROM groups WHERE run_id = ?", (run_id,)).fetchall())

    def versions(self, run_id: str) -> list[VersionRow]:
        """Return the run's client versions, in the order of their first groups."""
        query = "SELECT body FROM versions WHERE run_id = ? ORDER BY first_at, mix, client_version"
        return [VersionRow(**orjson.loads(body)) for (body,) in self._db.execute(query, (run_id,))]

    def newest_step(self, run_id: str) -> int:
        """Return the run's newest step that is done; 0 before the first."""
        return self._number("SELECT max(step) FROM steps WHERE run_id = ? AND state = 'done'", run_id)

    def held_out(self, run_id: str) -> list[HeldOutRow]:
        """Return the results of ended eval episodes by step. Only episodes whose tokens all come from one step's weights count."""
        rows = self._db.execute(schema.HELD_OUT, (run_id,))
        return [HeldOutRow(step=step, reward=reward, episodes=episodes) for step, reward, episodes in rows]

    def episode(self, episode_id: str) -> EpisodeRow | None:
        return next(iter(self._episodes("episode_id = ?", (episode_id,))), None)

    def _lived_at(self) -> float:
        found = self._db.execute("SELECT value FROM meta WHERE name = ?", (LIVED_AT,)).fetchone()
        return float(found[0]) if found else 0.0

    def suspected(self, since: float) -> list[tuple[EpisodeRow, list[RecordedCall]]]:
        """Return the episodes whose reward counts and whose client gave up on a call later than `since`, with their calls."""
        return [(row, self.calls(row.seq) or []) for row in self._episodes(schema.SUSPECTED, (since,))]

    def calls(self, seq: int) -> list[RecordedCall] | None:
        """Return the calls of the episode with this seq; None if it has no calls or they were deleted."""
        found = self._db.execute("SELECT body FROM calls WHERE seq = ?", (seq,)).fetchone()
        return decode(found[0]) if found else None

    def batch(self, row: StepRow) -> list[tuple[PlannedGroup, list[tuple[EpisodeRow, list[RecordedCall] | None]]]]:
        """Return the recorded batch of a step, with groups and episodes in the order of the journal."""
        episodes = {
            found.episode_id: found
            for found in self._episodes("run_id = ? AND step = ? AND step IS NOT NULL", (row.run_id, row.step))
        }
        return [
            (group, [(episodes[one], self.calls(episodes[one].seq)) for one in group.episode_ids])
            for group in row.groups
        ]

    def ledger(self, wanted: LedgerFilter, after: int, limit: int) -> list[EpisodeRow]:
        """Return the matching rows with a seq above `after`, ascending. A filter by step finds only the episodes that the step
        trained on, not those it left out."""
        where, values = _matching(wanted)
        return self._episodes(f"{where} AND seq > ?", [*values, after], limit)

    def summary(self, wanted: LedgerFilter) -> LedgerSummary:
        """Return totals over the rows that `ledger` would return."""
        return summary.summarise(self._db, wanted, *_matching(wanted))

    def lost(self, run_id: str) -> dict[Cause, int]:
        """Count the run's lost episodes by cause."""
        return {Cause(cause): episodes for cause, episodes in self._db.execute(schema.LOST_BY_CAUSE, (run_id,))}

    def tasks(self, run_id: str, client_id: str | None, mix: str | None) -> list[TaskProgress]:
        return summary.tasks(self._db, run_id, client_id, mix)

    def _episodes(self, where: str, values: Sequence[Any], limit: int = -1) -> list[EpisodeRow]:
        query = f"SELECT {', '.join(schema.EPISODE_COLUMNS)}, body, {schema.CAUSE} FROM episodes WHERE {where} ORDER BY seq LIMIT ?"
        return [_episode(row) for row in self._db.execute(query, (*values, limit))]

    def _number(self, query: str, *values: Any) -> int:
        return int(self._db.execute(query, values).fetchone()[0] or 0)


class ReadThread:
    """Answers queries one at a time in a thread, over a separate connection."""

    def __init__(self, path: Path, name: str) -> None:
        self._reader = Reader(path)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    async def ask(self, query: Callable[[Reader], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, query, self._reader)

    def close(self) -> None:
        """Wait for the running query to end, and stop the thread."""
        self._thread.shutdown()
        self._reader.close()


def _run(found: tuple[Any, ...] | None) -> RunRow | None:
    if found is None:
        return None
    body = orjson.loads(found[0])
    return RunRow(**{**body, "mix": MixRow(**body.get("mix", {}))})


def _matching(wanted: LedgerFilter) -> tuple[str, list[Any]]:
    """Return the filter as an SQL condition on episodes, and its values."""
    terms, values = ["TRUE"], []  # type: list[str], list[Any]
    for column in ("run_id", "step", "client_id", "task_id", "kind", "reason", "state", "mix"):
        value = getattr(wanted, column)
        if value is not None:
            terms.append(f"{column} = ?")
            values.append(value)
    if wanted.cause is not None:
        terms.append(f"({schema.CAUSE}) IS NOT NULL AND ({schema.CAUSE}) = ?")
        values.append(wanted.cause)
    if wanted.step is not None:
        terms.append("state IN ('in_step', 'trained')")
    return " AND ".join(terms), values


def _episode(row: tuple[Any, ...]) -> EpisodeRow:
    columns = dict(zip([*schema.EPISODE_COLUMNS, "body", "cause"], row, strict=True))
    body = orjson.loads(columns.pop("body"))
    columns["state"] = EpisodeState(columns["state"])
    columns["reason"] = DropReason(columns["reason"]) if columns["reason"] else None
    fields = dict(zip(schema.EPISODE_BODY, body, strict=False))  # an older server wrote fewer fields
    cause = columns.pop("cause")
    fields["cause"] = Cause(cause) if cause else None
    return EpisodeRow(**columns, **fields)


def _step(row: tuple[Any, ...]) -> StepRow:
    run_id, branch, step, state, at, config_version, batch, metrics = row
    return StepRow(
        run_id=run_id,
        branch=branch,
        step=step,
        config_version=config_version,
        groups=[PlannedGroup(group_id=g, task_id=t, episode_ids=ids) for g, t, ids in orjson.loads(batch)],
        values=orjson.loads(metrics),
        state=state,
        at=at,
    )
