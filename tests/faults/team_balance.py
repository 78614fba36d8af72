"""The count afterwards for teams: what clients' journals and two servers' ledgers and steps say of the same teams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from swarm.protocol.episodes import LedgerEntry
from tests.faults.balance import KEPT_OUT, Side


@dataclass(slots=True)
class TeamBalance:
    """Every team counts on both servers or on none where `faults` is empty."""

    both: int = 0
    neither: int = 0
    committed: int = 0
    """Teams that their client knew to count."""
    unheard: int = 0
    """Those that count, though their client never got to hear of it."""
    undecided: int = 0
    """Those that their client was told to be undecided."""
    trained: list[int] = field(default_factory=list)
    """Episodes, by server."""
    faults: list[str] = field(default_factory=list)


def count_teams(notes: Sequence[dict[str, Any]], sides: Sequence[Side]) -> TeamBalance:
    """notes: of all journals. sides: the deciding server, then the other."""
    said = TeamBalance()
    ledgers = [{entry.episode_id: entry for entry in side.entries} for side in sides]
    pairs = {note["episode_id"]: note["other"] for note in notes if note["note"] == "claimed"}
    ending = {note["episode_id"]: note["rewards"] for note in notes if note["note"] == "ending"}
    outcome = {note["episode_id"]: note["note"] for note in notes if note["note"] in _OUTCOMES}
    said.faults += [f"an answer of another episode in {note}" for note in notes if note["note"] == "leak"]
    for one, other in pairs.items():
        members = [ledger.get(name) for ledger, name in zip(ledgers, (one, other), strict=True)]
        _judge(said, one, members, ending.get(one), outcome.get(one))
    named = [set(pairs), set(pairs.values())]
    for ledger, side, names in zip(ledgers, sides, named, strict=True):
        _judge_side(said, ledger, side, names)
    return said


_OUTCOMES = ("committed", "aborted", "undecided")


def _judge(
    said: TeamBalance,
    name: str,
    members: Sequence[LedgerEntry | None],
    rewards: Sequence[float] | None,
    outcome: str | None,
) -> None:
    counts = [entry is not None and entry.reward is not None for entry in members]
    if any(counts) != all(counts):
        told = [entry and f"{entry.episode_id} {entry.state} ({entry.reason}: {entry.detail})" for entry in members]
        said.faults.append(f"team {name} ({outcome}) counts on one server alone: {told}")
        return
    said.both += all(counts)
    said.neither += not any(counts)
    said.committed += outcome == "committed"
    said.undecided += outcome == "undecided"
    said.unheard += all(counts) and outcome != "committed"
    if outcome == "committed" and not all(counts):
        said.faults.append(f"team {name} was committed and counts nowhere")
    if outcome == "aborted" and any(counts):
        said.faults.append(f"team {name} was aborted and counts")
    if all(counts) and [entry.reward for entry in members if entry is not None] != rewards:
        said.faults.append(f"team {name} has other rewards than its client's {rewards}")


def _judge_side(said: TeamBalance, ledger: dict[str, LedgerEntry], side: Side, names: set[str]) -> None:
    if len(ledger) != len(side.entries):
        said.faults.append(f"{len(side.entries) - len(ledger)} episodes are in a ledger twice")
    trained = [name for batch in side.batches.values() for name in batch]
    said.faults += [f"{name} was trained twice" for name in set(trained) if trained.count(name) > 1]
    if sorted(side.batches) != list(range(1, len(side.batches) + 1)):
        said.faults.append(f"steps are missing: {sorted(side.batches)}")
    for name, entry in ledger.items():
        if entry.state not in ("trained", "dropped"):
            said.faults.append(f"{name} is still {entry.state}")
        if entry.reward is not None and name not in names:
            said.faults.append(f"{name} counts, though no client had claimed a team with it")
        if entry.reward is not None and entry.state == "dropped" and entry.reason not in KEPT_OUT:
            said.faults.append(f"{name} was committed and then dropped as {entry.reason}: {entry.detail}")
    said.trained.append(sum(entry.state == "trained" for entry in ledger.values()))
