"""The count afterwards: what clients' journals, the server's ledger and the journalled steps say of the same episodes."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swarm.protocol.episodes import LedgerEntry

KEPT_OUT = frozenset({"stale", "zero_variance", "partial_group", "run_ended", "superseded"})
"""Why an episode that was acknowledged may be left out of training. Any other reason would mean that it was lost."""


@dataclass(slots=True)
class Side:
    """What one server says. entries: the whole ledger of the run. batches: episode ids of each step that stands."""

    entries: Sequence[LedgerEntry]
    batches: dict[int, list[str]]


@dataclass(slots=True)
class Balance:
    """acknowledged = trained + ledgered where `faults` is empty."""

    acknowledged: int = 0
    trained: int = 0
    """Of those acknowledged."""
    ledgered: dict[str, int] = field(default_factory=dict)
    """Of those acknowledged, by reason."""
    unheard: int = 0
    """Stored by the server, though the client never got to hear of it."""
    others: dict[str, int] = field(default_factory=dict)
    """Claims that never were ended, by reason."""
    steps: int = 0
    faults: list[str] = field(default_factory=list)


def count(notes: Sequence[dict[str, Any]], sides: Sequence[Side]) -> Balance:
    """notes: of all journals. sides: the one server."""
    ((entries, batches),) = ((side.entries, side.batches) for side in sides)
    said = Balance(steps=len(batches))
    ending = {note["episode_id"]: note["reward"] for note in notes if note["note"] == "ending"}
    heard = Counter(note["episode_id"] for note in notes if note["note"] == "acknowledged")
    by_id = {entry.episode_id: entry for entry in entries}
    said.faults += [f"an answer of another episode in {note}" for note in notes if note["note"] == "leak"]
    said.faults += [f"{name} was acknowledged {n} times" for name, n in heard.items() if n > 1]
    said.faults += [f"{name} was acknowledged and is not in the ledger" for name in heard if name not in by_id]
    if len(by_id) != len(entries):
        said.faults.append(f"{len(entries) - len(by_id)} episodes are in the ledger twice")
    said.acknowledged = len(heard)
    for entry in entries:
        _judge(said, entry, ending, heard)
    _judge_steps(said, by_id, batches)
    if said.acknowledged != said.trained + sum(said.ledgered.values()):
        told = f"{said.trained} trained + {sum(said.ledgered.values())} ledgered"
        said.faults.append(f"{said.acknowledged} acknowledged are not {told}")
    return said


def _judge(said: Balance, entry: LedgerEntry, ending: dict[str, float], heard: Counter[str]) -> None:
    name, reason = entry.episode_id, str(entry.reason)
    if entry.state not in ("trained", "dropped"):
        said.faults.append(f"{name} is still {entry.state}")
    kept = entry.state == "trained" or reason in KEPT_OUT
    if entry.reward is not None and entry.reward != ending.get(name):
        said.faults.append(f"{name} has reward {entry.reward}; its client gave {ending.get(name)}")
    if kept and (entry.metadata != {"of": name} or name not in ending):
        said.faults.append(f"{name} is {entry.state} ({reason}) though no client ended it so: {entry.metadata}")
    if name not in heard:
        said.unheard += kept
        if not kept:
            said.others[reason] = said.others.get(reason, 0) + 1
    elif entry.state == "trained":
        said.trained += 1
    elif kept:
        said.ledgered[reason] = said.ledgered.get(reason, 0) + 1
    else:
        said.faults.append(f"{name} was acknowledged and then dropped as {reason}: {entry.detail}")


def _judge_steps(said: Balance, by_id: dict[str, LedgerEntry], batches: dict[int, list[str]]) -> None:
    if sorted(batches) != list(range(1, len(batches) + 1)):
        said.faults.append(f"steps are missing: {sorted(batches)}")
    times = Counter(name for names in batches.values() for name in names)
    said.faults += [f"{name} was trained {n} times" for name, n in times.items() if n > 1]
    step_of = {name: step for step, names in batches.items() for name in names}
    for name, entry in by_id.items():
        if entry.state == "trained" and entry.step != step_of.get(name):
            said.faults.append(f"{name} is trained in step {entry.step}; the journal has it in {step_of.get(name)}")
        if entry.state != "trained" and name in step_of and entry.reason != "zero_variance":
            said.faults.append(f"{name} is {entry.state} ({entry.reason}) and in step {step_of[name]}")


def batches_of(pool: Path) -> dict[int, list[str]]:
    """The episodes of each step that was done, straight from the pool's file, which no server holds any more."""
    with sqlite3.connect(pool) as database:
        rows = database.execute("SELECT step, batch FROM steps WHERE state = 'done'").fetchall()
    database.close()
    return {step: [name for _, _, names in json.loads(batch) for name in names] for step, batch in rows}
