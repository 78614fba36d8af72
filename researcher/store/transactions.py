"""Transactions with fencing: a study's owner can write only while its lease is valid."""

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
    """One database as the parts of a store use it. tokens: fencing tokens of the studies that it may write."""

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
        """One transaction, outside the fence: for what people and newcomers may do (requests, answers, leases, new studies)."""
        with Session(self.engine) as session:
            yield session
            self.retries.commit(session)

    @contextmanager
    def owning(self, study_id: str) -> Iterator[Session]:
        """One transaction of the owner of a study or campaign.

        Raises: LeaseSuperseded when it is leased and this store does not carry that lease's token.
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
        """Raises: NotFound."""
        row = session.get(StudyRow, study_id, with_for_update=lock or None)
        if row is None:
            raise NotFound(f"there is no study {study_id!r}; `researcher list` shows all")
        return row

    def note(self, session: Session, study_id: str, kind: str, **detail: Any) -> None:
        """A line of the journal, in the transaction of what it is about."""
        session.add(EventRow(study_id=study_id, at=self.clock.now(), kind=kind, detail=detail))

    def announce(self, session: Session, study_id: str, kind: str, ref: str) -> None:
        """Put something into the outbox, in the transaction of the change itself."""
        session.add(OutboxRow(study_id=study_id, kind=kind, ref=ref, created_at=self.clock.now()))


class Part:
    """One part of the store. Its public methods are transactions, each `retried` while the database is away."""

    def __init__(self, db: Transactions) -> None:
        self._db = db


CAMPAIGN = "ca"
"""What a campaign's id begins with."""


def owned_resource(subject: str) -> str:
    """What is leased by the one who works on this study or campaign."""
    return f"{'campaign' if subject.startswith(f'{CAMPAIGN}-') else 'study'}:{subject}"


def resolved(reference: str, known: Sequence[str], prefix: str, kind: str, listing: str) -> str:
    """The id that `latest`, an id, or the beginning of one means, with or without its prefix (`st-`).

    known: ids, the newest first; not empty. kind, listing: what they are, and the command that shows them.
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
        raise Ambiguous(f"{reference!r} fits {', '.join(found)}; give more of the id")
    return found[0]


def locked(session: Session, chosen: Select[Row], first: Row) -> Row:
    """The row, locked until the transaction ends; `first` is inserted if there is none."""
    row = session.scalar(chosen.with_for_update())
    if row is None:
        try:
            with session.begin_nested():
                session.add(first)
        except IntegrityError:
            pass  # another process made it in between; PostgreSQL says so, SQLite lets nobody in between
        row = session.scalars(chosen.with_for_update()).one()
    return row


@contextmanager
def readable(what: str) -> Iterator[None]:
    """Raises: Unreadable where a row holds no JSON, or a value that its field cannot hold."""
    try:
        yield
    except ValidationError as error:
        raise Unreadable(what, "; ".join(str(problem) for problem in explain(error, Plan))) from error
    except ValueError as error:
        raise Unreadable(what, str(error)) from error
