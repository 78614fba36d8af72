"""Leases of studies and servers, and the budgets of studies.

A lease has an owner, an expiry time, and a fencing token that increases each time it is acquired.
"""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from researcher.models import BudgetState, LeaseInfo
from researcher.store.errors import LeaseHeld, LeaseSuperseded, NotFound, OverBudget
from researcher.store.retries import retried
from researcher.store.tables import BudgetRow, LeaseRow, SpendingRow
from researcher.store.transactions import Part, locked, owned_resource


def server_resource(url: str) -> str:
    return f"server:{url.rstrip('/')}"


class Leases(Part):
    """Leases of studies, campaigns and servers. `owner` names a process (`host/pid/start`); the caller decides whether that
    process is alive."""

    @retried
    def acquire(self, study_id: str, owner: str, ttl_s: float, *, dead_owner: str | None = None) -> int:
        """Lease a study or campaign for `ttl_s` seconds. Return the fencing token for `Store.fenced`.

        If `dead_owner`, which the caller knows to be dead, holds the lease, it is taken over immediately.
        Raises: LeaseHeld while another owner's lease is valid.
        """
        with self._db.writing() as session:
            resource = owned_resource(study_id)
            is_study = resource.startswith("study:")
            if is_study:
                self._db.study_row(session, study_id)
            before = _lease_row(session, resource).owner
            token = self._acquire(session, resource, owner, ttl_s, dead_owner)
            if is_study and before not in (None, owner):
                self._db.note(session, study_id, "taken_over", by=owner, of=before)
            return token

    @retried
    def renew(self, study_id: str, token: int, ttl_s: float) -> None:
        """Extend the lease. Raises: LeaseSuperseded when it was released or has a new owner."""
        self._renew(owned_resource(study_id), token, ttl_s)

    @retried
    def release(self, study_id: str, token: int) -> None:
        """Release the lease. Do nothing if it was superseded."""
        self._release(owned_resource(study_id), token)

    @retried
    def holder(self, study_id: str) -> LeaseInfo | None:
        """Return the study's lease, or None if nobody has it. It may have expired."""
        return self._holder(owned_resource(study_id))

    @retried
    def acquire_server(self, url: str, owner: str, ttl_s: float, *, dead_owner: str | None = None) -> int:
        """Lease a swarm server, so that no two studies use it at the same time."""
        with self._db.writing() as session:
            return self._acquire(session, server_resource(url), owner, ttl_s, dead_owner)

    @retried
    def renew_server(self, url: str, token: int, ttl_s: float) -> None:
        self._renew(server_resource(url), token, ttl_s)

    @retried
    def release_server(self, url: str, token: int) -> None:
        self._release(server_resource(url), token)

    @retried
    def server_holder(self, url: str) -> LeaseInfo | None:
        return self._holder(server_resource(url))

    def _acquire(self, session: Session, resource: str, owner: str, ttl_s: float, dead_owner: str | None) -> int:
        now = self._db.clock.now()
        row = _lease_row(session, resource)
        free = row.owner in (None, owner, dead_owner) or row.expires_at <= now
        if not free:
            raise LeaseHeld(resource, str(row.owner), row.expires_at - now)
        row.owner, row.token, row.expires_at = owner, row.token + 1, now + ttl_s
        session.flush()
        return row.token

    def _renew(self, resource: str, token: int, ttl_s: float) -> None:
        with self._db.writing() as session:
            row = session.scalar(select(LeaseRow).where(LeaseRow.resource == resource).with_for_update())
            if row is None or row.owner is None or row.token != token:
                raise LeaseSuperseded(resource, token)
            row.expires_at = self._db.clock.now() + ttl_s

    def _release(self, resource: str, token: int) -> None:
        with self._db.writing() as session:
            row = session.scalar(select(LeaseRow).where(LeaseRow.resource == resource).with_for_update())
            if row is not None and row.token == token:
                row.owner, row.expires_at = None, 0.0

    def _holder(self, resource: str) -> LeaseInfo | None:
        with self._db.reading() as session:
            row = session.get(LeaseRow, resource)
            if row is None or row.owner is None:
                return None
            return LeaseInfo(owner=row.owner, token=row.token, expires_at=row.expires_at)


class Budgets(Part):
    """Budgets of studies: an amount is reserved before it is spent. `item` (such as a trial's key) makes reserving and spending
    idempotent."""

    @retried
    def set(self, study_id: str, kind: str, limit: float) -> None:
        with self._db.owning(study_id) as session:
            session.merge(BudgetRow(study_id=study_id, kind=kind, limit=limit))

    @retried
    def reserve(self, study_id: str, kind: str, item: str, amount: float) -> None:
        """Reserve `amount` for `item`, replacing an earlier reservation for it.

        Raises: OverBudget when too little is left; NotFound when the study has no budget of that kind.
        """
        with self._db.owning(study_id) as session:
            budget = _budget(session, study_id, kind)
            row = session.get(SpendingRow, (study_id, kind, item))
            state = _state(session, budget)
            left = budget.limit - state.reserved - state.spent + (0.0 if row is None else row.reserved)
            if amount > left:
                raise OverBudget(kind, amount, left)
            spent = 0.0 if row is None else row.spent
            session.merge(SpendingRow(study_id=study_id, kind=kind, item=item, reserved=amount, spent=spent))

    @retried
    def spend(self, study_id: str, kind: str, item: str, amount: float) -> None:
        """Record the final cost of `item` and end its reservation. Costs above the limit are recorded too."""
        with self._db.owning(study_id) as session:
            _budget(session, study_id, kind)
            session.merge(SpendingRow(study_id=study_id, kind=kind, item=item, reserved=0.0, spent=amount))

    @retried
    def use(self, study_id: str, kind: str, item: str, amount: float) -> None:
        """Record the cost of `item` so far; its reservation shrinks by the increase. The cost never decreases."""
        with self._db.owning(study_id) as session:
            _budget(session, study_id, kind)
            row = session.get(SpendingRow, (study_id, kind, item))
            before, reserved = (0.0, 0.0) if row is None else (row.spent, row.reserved)
            spent = max(before, amount)
            left = max(0.0, reserved - (spent - before))
            session.merge(SpendingRow(study_id=study_id, kind=kind, item=item, reserved=left, spent=spent))

    @retried
    def release(self, study_id: str, kind: str, items: Collection[str]) -> None:
        """End the reservations of these items. Their recorded costs stay."""
        with self._db.owning(study_id) as session:
            chosen = (SpendingRow.study_id == study_id, SpendingRow.kind == kind, SpendingRow.item.in_(items))
            session.execute(update(SpendingRow).where(*chosen).values(reserved=0.0))

    @retried
    def items(self, study_id: str, kind: str) -> dict[str, tuple[float, float]]:
        """Return the reserved and the spent amount of each item."""
        with self._db.reading() as session:
            rows = session.scalars(
                select(SpendingRow).where(SpendingRow.study_id == study_id, SpendingRow.kind == kind)
            )
            return {row.item: (row.reserved, row.spent) for row in rows}

    @retried
    def all(self, study_id: str) -> list[BudgetState]:
        with self._db.reading() as session:
            rows = session.scalars(select(BudgetRow).where(BudgetRow.study_id == study_id).order_by(BudgetRow.kind))
            return [_state(session, row) for row in rows]


def _lease_row(session: Session, resource: str) -> LeaseRow:
    """Return the lease's row, locked. Insert it if it is missing."""
    chosen = select(LeaseRow).where(LeaseRow.resource == resource)
    return locked(session, chosen, LeaseRow(resource=resource, owner=None, token=0, expires_at=0.0))


def _budget(session: Session, study_id: str, kind: str) -> BudgetRow:
    budget = session.get(BudgetRow, (study_id, kind), with_for_update=True)
    if budget is None:
        raise NotFound(f"study {study_id} has no {kind!r} budget; call `budgets.set` first")
    return budget


def _state(session: Session, budget: BudgetRow) -> BudgetState:
    reserved, spent = session.execute(
        select(
            func.coalesce(func.sum(SpendingRow.reserved), 0.0), func.coalesce(func.sum(SpendingRow.spent), 0.0)
        ).where(SpendingRow.study_id == budget.study_id, SpendingRow.kind == budget.kind)
    ).one()
    return BudgetState(kind=budget.kind, limit=budget.limit, reserved=reserved, spent=spent)
