"""SQL for the tables, and the statements that use them. We refuse files of a different version."""

from __future__ import annotations

from operator import attrgetter

SCHEMA_VERSION = 1

SCHEMA = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE runs (
    seq INTEGER PRIMARY KEY,
    run_id TEXT NOT NULL UNIQUE,
    idempotency_key TEXT UNIQUE,
    body BLOB NOT NULL
);
CREATE TABLE configs (
    run_id TEXT NOT NULL,
    config_version INTEGER NOT NULL,
    at REAL NOT NULL,
    by TEXT NOT NULL,
    patch BLOB NOT NULL,
    spec BLOB NOT NULL,
    PRIMARY KEY (run_id, config_version)
) WITHOUT ROWID;
CREATE TABLE groups (
    seq INTEGER PRIMARY KEY,
    group_id TEXT NOT NULL,
    run_id TEXT NOT NULL,
    task_id TEXT NOT NULL,
    mix TEXT,
    client_version TEXT NOT NULL,
    config_version INTEGER NOT NULL,
    ordinal INTEGER NOT NULL,
    size INTEGER NOT NULL,
    state TEXT NOT NULL
);
CREATE INDEX groups_by_run ON groups (run_id, task_id);
CREATE INDEX groups_live ON groups (state) WHERE state != 'closed';
CREATE TABLE episodes (
    seq INTEGER PRIMARY KEY,
    episode_id TEXT NOT NULL UNIQUE,
    run_id TEXT NOT NULL,
    kind TEXT NOT NULL,
    task_id TEXT NOT NULL,
    mix TEXT,
    client_id TEXT NOT NULL,
    group_id TEXT,
    slot INTEGER,
    ordinal INTEGER NOT NULL,
    claimed_step INTEGER NOT NULL,
    claimed_at REAL NOT NULL,
    state TEXT NOT NULL,
    reason TEXT,
    detail TEXT,
    step INTEGER,
    reward REAL,
    sampled_tokens INTEGER NOT NULL,
    body BLOB NOT NULL
);
CREATE INDEX episodes_by_run ON episodes (run_id);
CREATE INDEX episodes_by_step ON episodes (run_id, step) WHERE step IS NOT NULL;
CREATE INDEX episodes_open ON episodes (state) WHERE state IN ('running', 'ended');
CREATE TABLE calls (seq INTEGER PRIMARY KEY, body BLOB NOT NULL);
CREATE TABLE steps (
    run_id TEXT NOT NULL,
    branch INTEGER NOT NULL,
    step INTEGER NOT NULL,
    state TEXT NOT NULL,
    at REAL NOT NULL,
    config_version INTEGER NOT NULL,
    batch BLOB NOT NULL,
    metrics BLOB NOT NULL,
    PRIMARY KEY (run_id, branch, step)
) WITHOUT ROWID;
"""

ADDED = """
CREATE TABLE IF NOT EXISTS versions (
    run_id TEXT NOT NULL,
    mix TEXT NOT NULL,
    client_version TEXT NOT NULL,
    first_at REAL NOT NULL,
    body BLOB NOT NULL,
    PRIMARY KEY (run_id, mix, client_version)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS teams (seq INTEGER PRIMARY KEY, body BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS episodes_held_out ON episodes (run_id, claimed_step) WHERE kind = 'eval';
CREATE INDEX IF NOT EXISTS episodes_prepared ON episodes (state) WHERE state = 'prepared';
CREATE INDEX IF NOT EXISTS steps_by_number ON steps (run_id, step);
"""
"""Tables and indices that may be missing from a pool of this version if an older server created it."""

EPISODE_COLUMNS = (
    "seq", "episode_id", "run_id", "kind", "task_id", "mix", "client_id", "group_id", "slot", "ordinal", "claimed_step",
    "claimed_at", "state", "reason", "detail", "step", "reward", "sampled_tokens",
)  # fmt: skip
GROUP_COLUMNS = (
    "seq", "group_id", "run_id", "task_id", "mix", "client_version", "config_version", "ordinal", "size", "state",
)  # fmt: skip
columns_of, group_columns_of = attrgetter(*EPISODE_COLUMNS), attrgetter(*GROUP_COLUMNS)
PUT_EPISODE = f"""
INSERT INTO episodes ({", ".join(EPISODE_COLUMNS)}, body) VALUES ({", ".join("?" * (len(EPISODE_COLUMNS) + 1))})
ON CONFLICT (seq) DO UPDATE SET task_id = excluded.task_id, group_id = excluded.group_id, slot = excluded.slot,
    ordinal = excluded.ordinal, state = excluded.state, reason = excluded.reason, detail = excluded.detail,
    step = excluded.step, reward = excluded.reward, sampled_tokens = excluded.sampled_tokens, body = excluded.body
"""
PUT_GROUP = f"INSERT OR REPLACE INTO groups VALUES ({', '.join('?' * len(GROUP_COLUMNS))})"
PUT_VERSION = "INSERT OR REPLACE INTO versions VALUES (?, ?, ?, ?, ?)"
SET_FATE = """
UPDATE episodes SET state = ?, reason = ?, step = coalesce(?, step), detail = coalesce(?, detail) WHERE episode_id = ?
"""
KEEP_STEPS = """
UPDATE episodes SET state = 'trained' WHERE run_id = ? AND step > ? AND step <= ? AND state = 'in_step'
"""
DROP_UNKEPT = """
UPDATE episodes SET state = 'dropped', reason = 'run_ended', detail = ?
WHERE run_id = ? AND step > ? AND state = 'in_step'
"""
SUPERSEDE_EPISODES = """
UPDATE episodes SET state = 'dropped', reason = 'superseded', detail = :detail
WHERE run_id = :run_id AND step > :step AND state IN ('in_step', 'trained')
"""
SUPERSEDE_EVALS = """
UPDATE episodes SET reason = 'superseded', detail = :detail
WHERE run_id = :run_id AND kind = 'eval' AND claimed_step > :step AND reason = 'eval'
"""
SUPERSEDE_STEPS = "UPDATE steps SET state = 'superseded' WHERE run_id = :run_id AND step > :step"
ABANDON_STEPS = "UPDATE steps SET state = 'abandoned' WHERE run_id = ? AND state = 'journalled'"
FREE_CALLS = """
DELETE FROM calls WHERE seq < :traces_from AND EXISTS (
    SELECT 1 FROM episodes WHERE episodes.seq = calls.seq AND state IN ('trained', 'dropped')
      AND (run_id != :run_id OR step IS NULL OR step <= :through)
)
"""
"""Scans only the calls and looks up their episodes, because there may be a thousand times as many episodes without calls."""
EPISODE_BODY = (
    "client_version",
    "config_version",
    "lease_digest",
    "agent_rewards",
    "success",
    "metrics",
    "metadata",
    "calls",
    "prompt_tokens",
    "oldest_step",
    "step_tokens",
    "end_digest",
    "end_key",
    "ended_at",
    "cause",
    "tainted",
    "despite",
    "suspected",
    "api_key_digest",
    "restricted_tokens",
)
"""Fields of an episode that have no column, in the order in which its body holds them. Append new fields at the end, because the
pools of older servers lack them."""
body_of = attrgetter(*EPISODE_BODY)


def of_body(name: str, row: str = "") -> str:
    """Return SQL for a field of an episode's body. In a trigger, `row` is `OLD.` or `NEW.`."""
    return f"json_extract(CAST({row}body AS TEXT), '$[{EPISODE_BODY.index(name)}]')"


_SUSPECTED_AT = f"json_extract(CAST(body AS TEXT), '$[{EPISODE_BODY.index('suspected')}].at')"
BY_SUSPICION = f"""
CREATE INDEX IF NOT EXISTS episodes_suspected ON episodes ({_SUSPECTED_AT}) WHERE {_SUSPECTED_AT} IS NOT NULL;
"""
SUSPECTED = (
    f"{_SUSPECTED_AT} IS NOT NULL AND {_SUSPECTED_AT} > ? AND (state IN ('ended', 'prepared') OR reason = 'eval')"
)
"""SQL condition on episodes: the reward counts, and the client gave up on a call later than the given time."""


def cause_of(row: str = "") -> str:
    """Return SQL for who is to blame for losing an episode; NULL if it was not lost. In a trigger, `row` is `OLD.` or `NEW.`.

    Older servers recorded no cause: their aborted and expired episodes stay without one, because it could be any of them.
    """
    older = f"""CASE WHEN {row}reason = 'server_restarted' THEN 'server' WHEN {row}reason = 'no_calls' THEN 'rollout'
    WHEN {row}reason IN ('run_ended', 'superseded') AND {row}reward IS NULL THEN 'server' END"""
    return f"CASE WHEN {row}state = 'dropped' AND {row}reason != 'eval' THEN coalesce({of_body('cause', row)}, {older}) END"


CAUSE = cause_of()
BY_CAUSE = f"""
CREATE INDEX IF NOT EXISTS episodes_lost ON episodes (run_id, ({CAUSE})) WHERE ({CAUSE}) IS NOT NULL;
"""
"""An index of lost episodes only, so that it costs nothing if there are none."""
LOST_BY_CAUSE = f"""
SELECT {CAUSE}, count(*) FROM episodes WHERE run_id = ? AND ({CAUSE}) IS NOT NULL GROUP BY 1
"""

HELD_OUT = f"""
SELECT claimed_step, avg(reward), count(*) FROM episodes
WHERE run_id = ? AND kind = 'eval' AND reason = 'eval' AND reward IS NOT NULL
  AND {of_body("calls")} > 0 AND {of_body("oldest_step")} = claimed_step AND {of_body("step_tokens")} = claimed_step * sampled_tokens
GROUP BY claimed_step ORDER BY claimed_step
"""
"""Counts only episodes whose tokens all come from their step's weights, and no episodes that a person played by hand."""
