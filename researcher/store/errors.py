"""The store's errors.

StoreError
├── NotFound            no such study, plan or trial
├── Ambiguous           a prefix that matches several studies
├── LeaseHeld           somebody else owns the study or the server
├── LeaseSuperseded     a write under a token that is no longer in force; nothing was written
├── PlanFrozen          this plan version exists already with other content
├── PlanTampered        a stored plan no longer matches its hash
├── Unreadable          a stored row is corrupt
├── OverBudget          a reservation that does not fit
├── FindingConflict     an imported finding differs from the one stored under its id
├── SinkMissing         no such sink, or its package is not installed
├── MlflowAway          MLflow, a copy of the records, cannot be reached; the records themselves are intact
├── WrongState          a trial, attempt, gate or decision is not in the state that the caller expects
├── DatabaseAway        the database did not answer within the patience
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
    """A lease holder (HOST/PID/START) as text for people: `process 5160 on vm`."""
    host, _, process = owner.partition("/")
    return f"process {process.partition('/')[0]} on {host}"


class LeaseHeld(StoreError):
    def __init__(self, resource: str, owner: str, for_s: float) -> None:
        kind, _, name = resource.partition(":")
        if kind in ("study", "campaign"):
            command = "campaign " if kind == "campaign" else ""
            text = (
                f"{owner_text(owner)} works on {name}: `researcher {command}watch {name}` follows it, `researcher {command}stop {name}` ends it; if that "
                f"process is gone, try again in {for_s:.0f} s"
            )
        else:
            text = f"{resource} is held by {owner}; wait until that ends, or use another server"
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
        super().__init__(f"{what} in the database cannot be read, so they were changed after writing: {problem}")


class OverBudget(StoreError):
    def __init__(self, kind: str, asked: float, left: float) -> None:
        if kind == "wall_s":
            text = "the budget of wall time is spent; the report has the results so far"
        elif kind == "tokens" and left <= 0:
            text = "the budget of tokens is spent; the report has the results so far"
        elif kind == "tokens":
            text = f"another trial takes about {asked:,.0f} tokens, and {left:,.0f} of the budget are left; the report has the results so far"
        else:
            text = f"budget {kind!r}: {asked:g} asked for, {left:g} left"
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
        """Problems by the finding's id."""


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
            f"the records cannot be written: {words}; make room on that disk, then go on with `researcher resume`"
        )


class DatabaseRefused(StoreError):
    pass
