"""Checks that a campaign's decisions still follow from its records: recomputes every decision's input, and checks every rule.

Each difference is reported as a sentence. `researcher.report.verify` checks the numbers of the campaign's studies.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from html import unescape
from itertools import zip_longest
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from researcher.campaign.goal import CampaignGoal
from researcher.campaign.honesty import ALPHA, alpha_of
from researcher.campaign.new_instrument import WRITTEN, Making, code_of
from researcher.campaign.records import JOINED, observe
from researcher.campaign.report import BEGUN, HELD_OUT, REPORT, WORDING, campaign_page, campaign_wording, rendered
from researcher.campaign.seen import Seen
from researcher.models import CONFIRMING, CampaignEvent, DecisionRecord
from researcher.report.writer import digest, numbers_in
from researcher.store.store import Store
from researcher.study.plan import Plan, Verdict

_UNSEEN = re.compile(r"<style\b.*?</style>|<[^>]*>", re.S)
"""Parts of an HTML report that a reader does not see."""
_VERDICT = re.compile(rf"\b(?:{'|'.join(Verdict)})\b")


def verify_campaign(store: Store, campaign_id: str, folder: Path) -> list[str]:
    """Return all differences; empty if there are none. `folder` has the report, which is not checked while a study runs."""
    decisions = store.campaigns.decisions(campaign_id)
    found = [line for each in decisions for line in _input(store, campaign_id, each)]
    found += [*_whole(store, campaign_id, decisions), *_alphas(decisions)]
    found += _plans(store, decisions, store.campaigns.events(campaign_id, JOINED))
    found += _joined(store, campaign_id)
    last = decisions[-1].study_id if decisions else None
    runs = last is not None and not store.studies.get(last).status.ended
    return found if runs else [*found, *_report(store, campaign_id, folder)]


def _whole(store: Store, campaign_id: str, decisions: list[DecisionRecord]) -> Iterator[str]:
    """Check that no decision is missing, every study was decided, and every hypothesis has the goal's metric and margin."""
    if [each.seq for each in decisions] != list(range(1, len(decisions) + 1)):
        yield "decisions are missing: their numbers have gaps"
    decided = {each.study_id for each in decisions}
    for study in store.studies.all():
        if study.campaign_id == campaign_id and study.id not in decided:
            yield f"{study.id}: no decision on record began it"
    seen = observe(store, campaign_id)
    for each in store.campaigns.hypotheses(campaign_id):
        aim = seen.about(each.id).aim
        if (each.metric, each.margin) != (aim.metric, aim.margin):
            yield f"{each.id}: its metric or margin is not the goal's"


def _input(store: Store, campaign_id: str, decision: DecisionRecord) -> Iterator[str]:
    """Derive the decision's input again from the records before it, and compare it with the recorded input."""
    try:
        kept = Seen.model_validate(decision.saw)
    except ValidationError:
        yield f"decision {decision.seq}: this version cannot read its recorded input"
        return
    if kept.digest() != decision.saw_digest:
        yield f"decision {decision.seq}: its recorded input no longer matches the hash it was recorded with"
        return
    again = observe(store, campaign_id, decision.seq, heard=kept.heard, begun=kept.begun)
    if again.digest() != decision.saw_digest:
        told, made = kept.model_dump(), again.model_dump()
        parts = ", ".join(name for name in told | made if told.get(name) != made.get(name))
        yield f"decision {decision.seq}: the records before it give another input ({parts})"


def _joined(store: Store, campaign_id: str) -> Iterator[str]:
    """Check that every further instrument was named by the goal or approved by a person, and is unchanged."""
    events = store.campaigns.events(campaign_id)
    lines = [event for event in events if event.kind == JOINED]
    named = [line.detail for line in lines if "decision" not in line.detail]
    wanted = CampaignGoal.model_validate(store.campaigns.get(campaign_id).goal).instruments[1:]
    for name, line in zip_longest(wanted, named):
        if line is None:
            yield f"{name}: the goal names it, but it did not join"
        elif name is None or not _is_named(name, line):
            yield f"{line['aim']['instrument']}: it joined, but the goal does not name it there and no decision asked for it"
    for event in lines:
        if "decision" in event.detail:
            earlier = [each for each in events if each.seq <= event.seq]
            yield from _approved(event.detail, Making.of(earlier, event.detail["decision"]))


def _is_named(name: str, line: Mapping[str, Any]) -> bool:
    """Return whether an instrument that joined is the one that the goal names, by its name or by its folder."""
    if name == line["aim"]["instrument"] or line["folder"] is None:
        return bool(name == line["aim"]["instrument"])
    folder = Path(line["folder"])
    return Path(name).name in ("", "..", folder.name) or Path(name).resolve() == folder


def _approved(line: Mapping[str, Any], making: Making) -> Iterator[str]:
    """Check that an LLM-written instrument joined only after a person approved it, and that it is the approved one."""
    name = line["aim"]["instrument"]
    if not making.approved or making.outcome is None or making.outcome.kind != WRITTEN:
        yield f"{name}: it joined without a person's approval"
        return
    made = making.outcome.detail
    if any(made.get(part) != line.get(part) for part in ("aim", "folder", "code")) or not line["aim"]["generated"]:
        yield f"{name}: what joined is not what was written"
    elif code_of(made["files"]) != line.get("code"):
        yield f"{name}: the text that a person approved is not the code that joined"


def _alphas(decisions: list[DecisionRecord]) -> Iterator[str]:
    spent = [each for each in decisions if each.action in CONFIRMING]
    for number, each in enumerate(spent, start=1):
        if each.alpha is None or not math.isclose(each.alpha, alpha_of(number)):
            yield f"decision {each.seq}: confirmation {number} spends {each.alpha}, but the rule gives {alpha_of(number):.6g}"
    if sum(each.alpha or 0.0 for each in spent) > ALPHA:
        yield f"all confirmations together spend more than {ALPHA:g}"


def _plans(store: Store, decisions: list[DecisionRecord], joined: list[CampaignEvent]) -> Iterator[str]:
    """Check that each study ran the plan that its decision froze, on unused seeds, and each confirmation at its alpha."""
    used: dict[int, str] = {}
    approved = {line.detail["aim"]["instrument"]: line.detail.get("code") for line in joined}
    scored: dict[str, int] = {}
    for each in decisions:
        if each.plan is None or each.study_id is None:
            continue
        plan = Plan.model_validate_json(each.plan)
        if store.studies.get(each.study_id).plan_version is not None:
            ran = store.plans.get(each.study_id)
            if ran.digest() != plan.digest():
                yield f"{each.study_id}: it ran another plan than decision {each.seq} froze: the plan was amended, so it only explored"
        if (code := approved.get(plan.instrument)) is not None and plan.instrument_code != code:
            yield f"{each.study_id}: it ran other code of {plan.instrument} than a person approved"
        for seed in {trial.seed for trial in store.trials.all(each.study_id, series=())}:
            if used.setdefault(seed, each.study_id) != each.study_id:
                yield f"{each.study_id}: seed {seed} was used by {used[seed]} before"
        if each.alpha is None:
            scored[plan.instrument] = max(scored.get(plan.instrument, 0), plan.heldout_upto)
        elif plan.heldout_from and plan.heldout_from < scored.get(plan.instrument, 0):
            yield f"{each.study_id}: it confirms on held-out tasks that an exploration scored before"
        if each.alpha is not None and any(not math.isclose(h.alpha, each.alpha) for h in plan.hypotheses):
            yield f"{each.study_id}: its plan tests at a different alpha than its decision spends"


def _report(store: Store, campaign_id: str, folder: Path) -> Iterator[str]:
    """Check that the report is unchanged and follows from the records. Another version of this program may have worded it differently,
    but with the same numbers and verdicts in the same order."""
    written = store.campaigns.events(campaign_id, REPORT)
    if not written:
        yield "no report was written yet; `researcher campaign report` writes one"
        return
    reworded = written[-1].detail.get(WORDING) != campaign_wording()
    held_out, begun = (bool(written[-1].detail.get(name)) for name in (HELD_OUT, BEGUN))
    again = rendered(campaign_page(store, campaign_id, held_out=held_out, begun=begun))
    for name, kept in written[-1].detail["files"].items():
        file = folder / name
        if not file.exists():
            yield f"{name} is missing; `researcher campaign report` writes it again"
        elif digest(file.read_bytes()) != kept:
            yield f"{name} was changed after it was written"
        elif name not in again or (
            digest(again[name].encode()) != kept
            and not (reworded and _states(name, file.read_text("utf-8", "replace")) == _states(name, again[name]))
        ):
            yield f"{name} does not match the records; `researcher campaign report` writes it again"


def _states(name: str, text: str) -> tuple[list[str], list[str]]:
    """Return the numbers and the verdicts that a reader of this file sees, each in order."""
    seen = unescape(_UNSEEN.sub(" ", text)) if name.endswith(".html") else text
    return numbers_in(seen), _VERDICT.findall(seen)
