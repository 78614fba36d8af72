"""Transactions, and the fence: a write of an orchestrator goes through only under the lease that is in force."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any, TypeVar

from sqlalchemy import Engine, Select, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from foundation.clock import Clock
from foundation.ids import Ids
from researcher.store.errors import LeaseSuperseded, NotFound
from researcher.store.outages import Line, patient
from researcher.store.tables import Base, EventRow, LeaseRow, OutboxRow, StudyRow


def study_resource(study_id: str) -> str:
    return f"study:{study_id}"


Row = TypeVar("Row", bound=Base)


def locked(session: Session, chosen: Select[Row], first: Row) -> Row:
    """The row, locked until the transaction ends; `first` is put there where there is none yet."""
    row = session.scalar(chosen.with_for_update())
    if row is None:
        try:
            with session.begin_nested():
                session.add(first)
        except IntegrityError:
            pass  # another process made it in between; PostgreSQL says so, SQLite lets nobody in between
        row = session.scalars(chosen.with_for_update()).one()
    return row


class Sessions:
    """What every part of the store stands on. `tokens` are the fencing tokens of the studies that it may write.

    A public method of a part is one transaction, or several of which each may be repeated; it is tried again when the
    database goes away meanwhile.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name, method in list(vars(cls).items()):
            if isinstance(method, FunctionType) and not name.startswith("_"):
                setattr(cls, name, patient(method))

    def __init__(
        self, engine: Engine, clock: Clock, ids: Ids, tokens: dict[str, int] | None = None, line: Line | None = None
    ) -> None:
        self._line = line or Line(engine, clock, ids)
        self._engine = engine
        self._reader = engine.execution_options(read_only=True)
        self._clock = clock
        self._ids = ids
        self._tokens = tokens or {}

    @contextmanager
    def _reading(self) -> Iterator[Session]:
        with Session(self._reader) as session:
            yield session

    @contextmanager
    def _writing(self) -> Iterator[Session]:
        """One transaction, outside the fence: for what people and newcomers may do (requests, leases, new studies)."""
        with Session(self._engine) as session:
            yield session
            self._line.commit(session)

    @contextmanager
    def _owning(self, study_id: str) -> Iterator[Session]:
        """One transaction of the study's owner.

        Raises: LeaseSuperseded when the study is leased and this store does not carry that lease's token.
        """
        with self._writing() as session:
            resource = study_resource(study_id)
            lease = session.scalar(select(LeaseRow).where(LeaseRow.resource == resource).with_for_update())
            token = self._tokens.get(study_id)
            in_force = None if lease is None or lease.owner is None else lease.token
            if token != in_force:
                raise LeaseSuperseded(resource, token)
            yield session

    def _study_row(self, session: Session, study_id: str) -> StudyRow:
        row = session.get(StudyRow, study_id)
        if row is None:
            raise NotFound(f"there is no study {study_id!r}; `researcher list` shows all")
        return row

    def _journal(self, session: Session, study_id: str, kind: str, **detail: Any) -> None:
        """A line of the journal, in the transaction of what it tells of."""
        session.add(EventRow(study_id=study_id, at=self._clock.now(), kind=kind, detail=detail))

    def _tell(self, session: Session, study_id: str, kind: str, ref: str) -> None:
        """Put something into the outbox, in the transaction of the change itself."""
        session.add(OutboxRow(study_id=study_id, kind=kind, ref=ref, created_at=self._clock.now()))
