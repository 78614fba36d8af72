"""Plans that version 1's planner froze, before studies had specs: they keep their hashes, and what they found verifies.

earlier_plans.jsonl holds one plan a line, as that version stored it and with the hash that it recorded: looks, a race, crossed
factors, a sequence, a balance, two models, equal arms, shares, further roles.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from researcher.analysis.metrics import finals
from researcher.report.verify import verify
from researcher.report.writer import write_report
from researcher.study.plan import Plan, trial_key
from tests.fakes.concluded_study import concluded
from tests.fakes.study import done_trial

EARLIER = [json.loads(line) for line in Path(__file__).with_name("earlier_plans.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("stored", EARLIER, ids=lambda stored: str(stored["plan"]["question"])[:40])
def test_a_stored_plan_keeps_its_hash_and_its_trials_their_keys(stored: dict[str, Any]) -> None:
    text = json.dumps(stored["plan"], ensure_ascii=False, separators=(",", ":"), sort_keys=True)
    plan = Plan.model_validate(stored["plan"])
    assert json.loads(plan.canonical()) == stored["plan"]
    assert plan.canonical() == text
    assert plan.digest() == stored["hash"] == hashlib.sha256(text.encode()).hexdigest()
    again = Plan.model_validate_json(plan.model_dump_json())
    assert again.digest() == stored["hash"]
    arm = plan.arms[-1].name
    assert trial_key(again.digest(), arm, 3) == trial_key(stored["hash"], arm, 3)


def test_what_an_earlier_plan_found_is_reported_as_planned_by_its_planner_and_verifies(tmp_path: Path) -> None:
    plan = Plan.model_validate(EARLIER[0]["plan"])
    last, successes = plan.stages[-1], {"eval_success_before": [0.0, 0.0], "eval_success_after": [0.0, 1.0]}
    trials = [
        done_trial(plan, arm.name, seed, 0.3 * place + 0.01 * (seed % 3), series=successes)
        for place, arm in enumerate(plan.arms)
        for seed in range(last.max_seeds)
    ]
    data = concluded(
        plan,
        [each.model_copy(update={"stage": last.id, "finals": finals(plan.metrics, each.series)}) for each in trials],
    )
    report = write_report(data, tmp_path)
    assert verify(data, report.claims, report.files) == []
    assert "planned by `builtin`" in Path(report.files["markdown"]).read_text()
