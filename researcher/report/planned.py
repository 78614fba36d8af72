"""Claims of what was planned: the study with its counts, its budget, its stages, and what was known beforehand. No wording."""

from __future__ import annotations

from researcher.report.claims import Ledger, Style
from researcher.report.expressions import call
from researcher.report.parts import Claims, KnownPart
from researcher.study.plan import Known, Stage, StageKind


def study_claims(ledger: Ledger) -> Claims:
    """Of the whole: plan, and how many trials, verdicts and findings there are of each kind."""
    asked = {
        "plan_hash": (call("plan_hash"), Style.WORD),
        "version": (call("plan", "version"), Style.COUNT),
        "steps": (call("plan", "steps"), Style.COUNT),
        "heldout_tasks": (call("plan", "heldout_tasks"), Style.COUNT),
        "heldout_episodes": (call("plan", "heldout_episodes"), Style.COUNT),
        "heldout_temperature": (call("plan", "heldout_temperature"), Style.PLAIN),
        "power": (call("plan", "power"), Style.PERCENT),
        "sigma_confidence": (call("plan", "sigma_confidence"), Style.PERCENT),
        "hypotheses": (call("count_hypotheses"), Style.COUNT),
        "tested": (call("count_tested"), Style.COUNT),
        "trials": (call("count_trials"), Style.COUNT),
    }
    for status in ("done", "failed", "open"):
        asked[status] = (call("count_trials", status=status), Style.COUNT)
    for verdict in ("supported", "refuted", "equivalent", "inconclusive", "invalid"):
        asked[verdict] = (call("count_verdicts", verdict), Style.COUNT)
    for severity in ("invalid", "warning", "unchecked"):
        asked[f"findings_{severity}"] = (call("count_findings", severity), Style.COUNT)
    return {name: ledger.claim(f"study.{name}", text, style) for name, (text, style) in asked.items()}


def budget_claims(ledger: Ledger) -> Claims:
    """What the plan allows, by kind."""
    styles = {"wall_s": Style.SECONDS, "trials": Style.COUNT}
    return {kind: ledger.claim(f"budget.{kind}", call("budget", kind), style) for kind, style in styles.items()}


def stage_claims(ledger: Ledger, stage: Stage) -> Claims:
    """Its seeds, its trials, what it may spend of alpha where it is a look, and the first fresh seed after a screen."""
    claims = {
        name: ledger.claim(f"stage.{stage.id}.{name}", f"{call('stage', stage.id)}.{name}", Style.COUNT)
        for name in ("seeds", "max_seeds", "first_seed")
    }
    if stage.spends is not None:
        spends = f"{call('stage', stage.id)}.spends"
        claims["spends"] = ledger.claim(f"stage.{stage.id}.spends", spends, Style.PLAIN)
    if stage.kind is StageKind.SCREEN:
        after = f"{call('stage', stage.id)}.first_seed + {call('stage', stage.id)}.max_seeds"
        claims["fresh"] = ledger.claim(f"stage.{stage.id}.fresh", after, Style.COUNT)
    made = call("count_trials", stage=stage.id)
    return {**claims, "trials": ledger.claim(f"stage.{stage.id}.trials", made, Style.COUNT)}


_KNOWN = {
    "verdict": Style.WORD,
    "diff": Style.PLAIN,
    "low": Style.PLAIN,
    "high": Style.PLAIN,
    "level": Style.PERCENT,
    "n_baseline": Style.COUNT,
    "n_treatment": Style.COUNT,
}


def known_part(ledger: Ledger, known: Known) -> KnownPart:
    """An earlier finding, and what this study's verdicts say to it."""
    name = f"known.{known.id}"
    claims = {
        field: ledger.claim(f"{name}.{field}", f"{call('known', known.id)}.{field}", style)
        for field, style in _KNOWN.items()
    }
    agreements = [
        (hypothesis, ledger.claim(f"{name}.{hypothesis}", call("agreement", known.id, hypothesis), Style.WORD))
        for hypothesis in known.same_as
    ]
    return KnownPart(known=known, claims=claims, agreements=agreements)
