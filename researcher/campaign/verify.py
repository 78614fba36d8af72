"""Does a campaign still follow from its records? Every decision's input is made again, and every rule checked.

The numbers of its studies are for `researcher.report.verify`; here each difference is a sentence.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from researcher.campaign.honesty import ALPHA, alpha_of
from researcher.campaign.records import observe
from researcher.campaign.report import REPORT, campaign_page, rendered
from researcher.campaign.seen import Seen
from researcher.models import CONFIRMING, DecisionRecord
from researcher.report.writer import digest
from researcher.store.store import Store
from researcher.study.plan import Plan


def verify_campaign(store: Store, campaign_id: str, folder: Path) -> list[str]:
    """Everything that differs; empty when the campaign holds. folder: of its report."""
    decisions = store.campaigns.decisions(campaign_id)
    found = [line for each in decisions for line in _input(store, campaign_id, each)]
    return [*found, *_alphas(decisions), *_plans(store, decisions), *_report(store, campaign_id, folder)]


def _input(store: Store, campaign_id: str, decision: DecisionRecord) -> Iterator[str]:
    """What the decision saw, made again from the records before it."""
    kept = Seen.model_validate(decision.saw)
    if kept.digest() != decision.saw_digest:
        yield f"decision {decision.seq}: its recorded input no longer has the hash that it was recorded with"
        return
    heard = max((said.seq for said in kept.said), default=0)
    again = observe(store, campaign_id, decision.seq, heard=heard)
    if again.digest() != decision.saw_digest:
        told, made = kept.model_dump(), again.model_dump()
        parts = ", ".join(name for name in told if told[name] != made[name])
        yield f"decision {decision.seq}: the records before it give another input ({parts})"


def _alphas(decisions: list[DecisionRecord]) -> Iterator[str]:
    spent = [each for each in decisions if each.action in CONFIRMING]
    for number, each in enumerate(spent, start=1):
        if each.alpha is None or not math.isclose(each.alpha, alpha_of(number)):
            yield f"decision {each.seq}: confirmation {number} spends {each.alpha}, and the rule gives {alpha_of(number):.6g}"
    if sum(each.alpha or 0.0 for each in spent) > ALPHA:
        yield f"all confirmations together spend more than {ALPHA:g}"


def _plans(store: Store, decisions: list[DecisionRecord]) -> Iterator[str]:
    """Each study ran the plan that its decision froze, on seeds of its own, and a confirmation at its alpha."""
    used: dict[int, str] = {}
    for each in decisions:
        if each.plan is None or each.study_id is None:
            continue
        plan = Plan.model_validate_json(each.plan)
        if store.studies.get(each.study_id).plan_version is not None:
            ran = store.plans.get(each.study_id)
            if ran.digest() != plan.digest():
                yield f"{each.study_id}: it ran another plan than decision {each.seq} froze: amended, and so exploration"
        for seed in {trial.seed for trial in store.trials.all(each.study_id, series=())}:
            if used.setdefault(seed, each.study_id) != each.study_id:
                yield f"{each.study_id}: seed {seed} was used by {used[seed]} before"
        if each.alpha is not None and any(not math.isclose(h.alpha, each.alpha) for h in plan.hypotheses):
            yield f"{each.study_id}: its plan tests at another alpha than its decision spends"


def _report(store: Store, campaign_id: str, folder: Path) -> Iterator[str]:
    written = store.campaigns.events(campaign_id, REPORT)
    if not written:
        yield "no report was written yet; `researcher campaign report` writes one"
        return
    again = rendered(campaign_page(store, campaign_id))
    for name, kept in written[-1].detail["files"].items():
        file = folder / name
        if not file.exists():
            yield f"{name} is missing; `researcher campaign report` writes it again"
        elif digest(file.read_bytes()) != kept:
            yield f"{name} was changed after it was written"
        elif digest(again[name].encode()) != kept:
            yield f"{name} says something else than the records; `researcher campaign report` writes it again"
