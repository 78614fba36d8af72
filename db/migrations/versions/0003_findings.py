"""Findings say what they compared and whose they are; imported ones belong to no study of this database.

What earlier findings did not hold (question, levels of both sides, direction, margin, how trials were evaluated) is
read from the frozen plan that they name; where that plan is gone they keep what they had.
"""

from __future__ import annotations

import json
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

TEXT, NUMBER, JSON = sa.Text(), sa.Float(53), sa.JSON()


def upgrade() -> None:
    connection = op.get_bind()
    before = [dict(row) for row in connection.execute(sa.select(_first_table())).mappings()]
    plans = {
        (study, digest): json.loads(canonical)
        for study, digest, canonical in connection.execute(sa.text("SELECT study_id, digest, canonical FROM plans"))
    }
    op.drop_table("findings")
    table = op.create_table(
        "findings",
        *(sa.Column(name, TEXT, nullable=False) for name in ("id", "study_id", "plan_hash", "question", "instrument")),
        *(sa.Column(name, TEXT, nullable=False) for name in ("instrument_version", "model", "factor", "metric")),
        *(sa.Column(name, TEXT, nullable=False) for name in ("statement", "direction")),
        sa.Column("margin", NUMBER, nullable=True),
        sa.Column("baseline", JSON, nullable=False),
        sa.Column("treatment", JSON, nullable=False),
        sa.Column("verdict", TEXT, nullable=False),
        sa.Column("effect", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("scope", JSON, nullable=False),
        sa.Column("at", NUMBER, nullable=False),
        sa.Column("origin", TEXT, nullable=True),
        sa.Column("imported_at", NUMBER, nullable=True),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_findings_instrument", "findings", ["instrument"])
    op.create_index("ix_findings_study_id", "findings", ["study_id"])
    rows = [{**row, **_from_plan(row, plans.get((row["study_id"], row["plan_hash"])))} for row in before]
    if rows:
        op.bulk_insert(table, rows)


def _first_table() -> sa.Table:
    texts = ("id", "study_id", "plan_hash", "instrument", "model", "factor", "metric", "statement", "verdict")
    return sa.Table(
        "findings",
        sa.MetaData(),
        *(sa.Column(name, TEXT) for name in texts),
        sa.Column("effect", sa.JSON(none_as_null=True)),
        sa.Column("scope", JSON),
        sa.Column("at", NUMBER),
    )


def _from_plan(finding: dict[str, Any], plan: dict[str, Any] | None) -> dict[str, Any]:
    """The columns that are new, and the scope as it is written from now on."""
    found: dict[str, Any] = {"question": "", "instrument_version": "", "direction": "increase", "margin": None}
    found |= {"baseline": [], "treatment": [], "origin": None, "imported_at": None}
    asked = {f"{finding['study_id']}/{each['id']}": each for each in (plan or {}).get("hypotheses", [])}
    hypothesis = asked.get(finding["id"])
    if plan is None or hypothesis is None:
        return found
    levels = {arm["name"]: arm["levels"] for arm in plan["arms"]}
    sides = {
        side: [levels[arm] for arm in hypothesis.get(f"{side}_arms") or [hypothesis[side]]]
        for side in ("baseline", "treatment")
    }
    held = ("steps", "run", "task", "heldout_tasks", "heldout_episodes", "heldout_temperature")
    roles = {name: {"model": role["model"], "run": role["run"]} for name, role in plan.get("roles", {}).items()}
    return {
        **found,
        **sides,
        "question": plan["question"],
        "instrument_version": plan["instrument_version"],
        "direction": hypothesis["direction"],
        "margin": hypothesis["margin"],
        "scope": {**{name: plan[name] for name in held}, "roles": roles},
    }
