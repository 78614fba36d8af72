"""Transactions with fencing: a study's owner can write only while it holds the lease."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from pydantic import ValidationError
from sqlalchemy import Engine, Select, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from foundation.clock import Clock
from foundation.ids import Ids
from foundation.strict import explain
from researcher.store.errors import Ambiguous, LeaseSuperseded, NotFound, Unreadable
from researcher.store.retries import Retries
from researcher.store.tables import Base, EventRow, LeaseRow, OutboxRow, StudyRow
from researcher.study.plan import Plan

Row = TypeVar("Row", bound=Base)


class Transactions:
    """Access to one database for the parts of a store. `tokens` holds the fencing tokens of the studies that it may write to."""

    def __init__(self, engine: Engine, clock: Clock, ids: Ids, retries: Retries, tokens: dict[str, int]) -> None:
        self.engine = engine
        self.clock = clock
        self.ids = ids
        self.retries = retries
        self.tokens = tokens
        self._reader = engine.execution_options(read_only=True)

    @contextmanager
    def reading(self) -> Iterator[Session]:
        with Session(self._reader) as session:
            yield session

    @contextmanager
    def writing(self) -> Iterator[Session]:
        """Open a transaction without fencing, for writes that need no lease (requests, answers, leases, new studies)."""
        with Session(self.engine) as session:
            yield session
            self.retries.commit(session)

    @contextmanager
    def owning(self, study_id: str) -> Iterator[Session]:
        """Open a write transaction for the owner of a study or campaign.

        Raises: LeaseSuperseded when the study is leased and this store does not have the lease's token, or when this store's own
        lease was released.
        """
        with self.writing() as session:
            resource = owned_resource(study_id)
            lease = session.scalar(select(LeaseRow).where(LeaseRow.resource == resource).with_for_update())
            token = self.tokens.get(study_id)
            in_force = None if lease is None or lease.owner is None else lease.token
            if token != in_force:
                raise LeaseSuperseded(resource, token)
            yield session

    def study_row(self, session: Session, study_id: str, *, lock: bool = False) -> StudyRow:
        """Return the study's row. Raises: NotFound."""
        row = session.get(StudyRow, study_id, with_for_update=lock or None)
        if row is None:
            raise NotFound(f"there is no study {study_id!r}; `researcher list` shows all")
        return row

    def note(self, session: Session, study_id: str, kind: str, **detail: Any) -> None:
        """Append a journal entry in the transaction of the event itself."""
        session.add(EventRow(study_id=study_id, at=self.clock.now(), kind=kind, detail=detail))

    def announce(self, session: Session, study_id: str, kind: str, ref: str) -> None:
        """Put a message into the outbox in the transaction of the change itself."""
        session.add(OutboxRow(study_id=study_id, kind=kind, ref=ref, created_at=self.clock.now()))


class Part:
    """One part of the store. Each public method is a transaction, and is `retried` while the database is away."""

    def __init__(self, db: Transactions) -> None:
        self._db = db


CAMPAIGN = "ca"
"""Prefix of campaign ids."""


def owned_resource(subject: str) -> str:
    """Return the resource name under which this study or campaign is leased."""
    return f"{'campaign' if subject.startswith(f'{CAMPAIGN}-') else 'study'}:{subject}"


def resolved(reference: str, known: Sequence[str], prefix: str, kind: str, listing: str) -> str:
    """Return the id that `reference` stands for: `latest`, an id, or the beginning of one, with or without `prefix`.

    Args:
        known: all ids, newest first; not empty.
        prefix: `st-` or `ca-`.
        kind: what the ids belong to (`study` or `campaign`), for error texts.
        listing: the command that lists them, for error texts.
    Raises: NotFound, Ambiguous.
    """
    if reference == "latest":
        return known[0]
    if reference in known:
        return reference
    wanted = reference.removeprefix(prefix)
    found = [name for name in known if reference and name.removeprefix(prefix).startswith(wanted)]
    if not found:
        raise NotFound(f"no {kind} has an id that begins with {reference!r}; `{listing}` shows all")
    if len(found) > 1:
        raise Ambiguous(f"{reference!r} matches {', '.join(found)}; give more of the id")
    return found[0]


def locked(session: Session, chosen: Select[Row], first: Row) -> Row:
    """Return the row, locked until the transaction ends. Insert `first` if there is none."""
    row = session.scalar(chosen.with_for_update())
    if row is None:
        try:
            with session.begin_nested():
                session.add(first)
        except IntegrityError:
            pass  # another process inserted it in between; only possible on PostgreSQL, because SQLite serialises writers
        row = session.scalars(chosen.with_for_update()).one()
    return row


@contextmanager
def readable(what: str) -> Iterator[None]:
    """Raise Unreadable if the body finds invalid JSON in a row, or a value that is invalid for its field.

    `what` names the rows in the error.
    """
    try:
        yield
    except ValidationError as error:
        raise Unreadable(what, "; ".join(str(problem) for problem in explain(error, Plan))) from error
    except ValueError as error:
        raise Unreadable(what, str(error)) from error
