"""The store's errors.

StoreError
├── NotFound            no such study, plan or trial
├── Ambiguous           a prefix that matches several studies
├── LeaseHeld           somebody else owns the study or the server
├── LeaseSuperseded     a write with a token that is no longer valid; nothing was written
├── PlanFrozen          this plan version already exists with other content, or is not the next one
├── PlanTampered        a stored plan no longer matches its hash
├── Unreadable          a stored row is corrupt
├── OverBudget          a reservation that exceeds what is left of the budget
├── FindingConflict     an imported finding differs from the one stored under its id
├── SinkMissing         no such sink, or its package is not installed
├── MlflowAway          MLflow, a copy of the records, cannot be reached; the records themselves are intact
├── WrongState          a trial, attempt, gate or decision is not in the state that the caller expects
├── DatabaseAway        the database did not answer within the retry time
├── NoTurns             the database's file system has no locks, so processes cannot wait for each other
├── StorageFailed       the database's disk is full, broken or read-only
└── DatabaseRefused     wrong URL, or a database made by newer code
"""

from __future__ import annotations


class StoreError(Exception):
    """Base class of the store's errors."""


class NotFound(StoreError):
    pass


class Ambiguous(StoreError):
    pass


def owner_text(owner: str) -> str:
    """Describe a lease holder (HOST/PID/START) for people: `process 5160 on vm`."""
    host, _, process = owner.partition("/")
    return f"process {process.partition('/')[0]} on {host}"


class LeaseHeld(StoreError):
    def __init__(self, resource: str, owner: str, for_s: float) -> None:
        kind, _, name = resource.partition(":")
        if kind in ("study", "campaign"):
            command = "campaign " if kind == "campaign" else ""
            text = (
                f"{owner_text(owner)} is working on {name}: `researcher {command}watch {name}` follows it, `researcher {command}stop {name}` stops it; if that "
                f"process is gone, try again in {for_s:.0f} s"
            )
        else:
            text = f"{resource} is in use by {owner}; wait until it is free, or use another server"
        super().__init__(text)
        self.owner = owner
        self.for_s = for_s


class LeaseSuperseded(StoreError):
    def __init__(self, resource: str, token: int | None) -> None:
        held = "without a lease" if token is None else f"with token {token}"
        super().__init__(f"{resource} is owned by another process; this one, {held}, must stop writing")


class PlanFrozen(StoreError):
    pass


class PlanTampered(StoreError):
    pass


class Unreadable(StoreError):
    def __init__(self, what: str, problem: str) -> None:
        super().__init__(f"{what} in the database cannot be read; the data was changed after it was written: {problem}")


class OverBudget(StoreError):
    def __init__(self, kind: str, asked: float, left: float) -> None:
        if kind == "wall_s":
            text = "the wall-time budget is spent; the report has the results so far"
        elif kind == "tokens" and left <= 0:
            text = "the token budget is spent; the report has the results so far"
        elif kind == "tokens":
            text = f"another trial needs about {asked:,.0f} tokens, but the budget has only {left:,.0f} left; the report has the results so far"
        else:
            text = f"budget {kind!r}: {asked:g} requested, but only {left:g} left"
        super().__init__(text)
        self.kind = kind
        self.left = left


class MlflowAway(StoreError):
    pass


class WrongState(StoreError):
    pass


class FindingConflict(StoreError):
    def __init__(self, problems: dict[str, str]) -> None:
        super().__init__("; ".join(f"{id} {problem}" for id, problem in problems.items()))
        self.problems = problems
        """The problem with each conflicting finding, by the finding's id."""


class SinkMissing(StoreError):
    pass


class DatabaseAway(StoreError):
    def __init__(self, waited_s: float, words: str) -> None:
        super().__init__(f"the database has not answered for {waited_s:.0f} s ({words}); try again when it is back")


class NoTurns(StoreError):
    pass


class StorageFailed(StoreError):
    def __init__(self, words: str) -> None:
        super().__init__(
            f"the records cannot be written: {words}; make room on that disk, then continue with `researcher resume`"
        )


class DatabaseRefused(StoreError):
    pass
