"""A campaign's report: the answer, the best configuration, every hypothesis, every decision, and what it cost.

It depends only on the records, so that `verify` can render it again and compare.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foundation.paths import write_atomically
from researcher.analysis.metrics import MetricMissing, Series, finals
from researcher.campaign.builtin import words_of
from researcher.campaign.goal import Aim, CampaignGoal, changed
from researcher.campaign.new_instrument import WRITTEN, Making
from researcher.campaign.records import JOINED, UNWRITTEN, calls_of, entries_read, fates_of, observe
from researcher.campaign.seen import EffectSeen, Said, Seen, StudySeen, View, key_of
from researcher.instruments.instrument import Metric, MetricKind, Scalar
from researcher.instruments.levels import level_text
from researcher.models import (
    CampaignEvent,
    CampaignRecord,
    CampaignStatus,
    DecisionRecord,
    HypothesisRecord,
    StudyStatus,
    TrialStatus,
)
from researcher.report.writer import digest, html_templates, markdown_templates, tidy, wording
from researcher.store.store import Store
from researcher.study.plan import Verdict

_MAKING = (WRITTEN, UNWRITTEN, "approved", "vetoed", JOINED)
REPORT = "report"
"""Kind of the journal entry with the digests of the written files."""
HELD_OUT = "held_out"
"""Field of that entry: whether the answer says how confirmed arms score on held-out tasks. Reports of earlier versions do not say
so."""
BEGUN = "begun"
"""Field of that entry: whether only trials that began are counted (see `Seen`)."""
WORDING = "wording"
"""Field of that entry: `campaign_wording` of the version that wrote the report. Earlier versions did not record it."""
_SCORES: Mapping[MetricKind, str] = {"heldout_accuracy": "accuracy", "heldout_reward": "reward"}


@dataclass(frozen=True, slots=True)
class Branch:
    """A hypothesis in the tree. `depth` is its number of levels below a root; `fate` and `because` are its status and the reason."""

    hypothesis: HypothesisRecord
    depth: int
    fate: str
    because: str


@dataclass(frozen=True, slots=True)
class Step:
    """A decision in the report.

    Attributes:
        study: what its study has found so far; None if it started none.
        aim: the aim on that study's instrument, or on the first instrument if there is no study.
        on: name of the study's instrument if the campaign has several; empty otherwise, or if there is no study.
        made: progress of the instrument that the decision asks for; empty if it asks for none.
        offers: the judged proposals, the chosen one first.
    """

    decision: DecisionRecord
    study: StudySeen | None
    aim: Aim
    on: str
    made: str
    offers: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Best:
    """The best configuration on an instrument. `on` is the instrument's name if the campaign has several, else empty. `rest`
    describes all other settings."""

    on: str
    words: str
    rest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CampaignPage:
    """Everything in a campaign's report except its wording."""

    record: CampaignRecord
    goal: CampaignGoal
    seen: Seen
    status: CampaignStatus
    reason: str
    answer: list[str]
    tree: list[Branch]
    steps: list[Step]
    unknown: list[str]
    best: list[Best]
    """The best configuration on each instrument."""
    spent: list[tuple[str, str, str]]
    """Resource, amount spent, amount left."""
    calls: list[dict[str, Any]]
    """Calls of the strategist's LLM."""
    said: list[Said]
    """What people said."""


def campaign_page(
    store: Store,
    campaign_id: str,
    *,
    status: CampaignStatus | None = None,
    reason: str | None = None,
    held_out: bool = True,
    begun: bool = True,
) -> CampaignPage:
    """Collect all data of the report. Pass `status` and `reason` if they are about to be recorded. For `held_out` and `begun` see
    `HELD_OUT` and `BEGUN`."""
    record = store.campaigns.get(campaign_id)
    decisions, seen = store.campaigns.decisions(campaign_id), observe(store, campaign_id, begun=begun)
    hypotheses = store.campaigns.hypotheses(campaign_id)
    by_seq = {study.seq: study for study in seen.studies}
    ended = status or record.status
    events = store.campaigns.events(campaign_id, *_MAKING)
    calls = calls_of(decisions, entries_read(store, campaign_id, seen.seq))
    return CampaignPage(
        record=record,
        goal=CampaignGoal.model_validate(record.goal),
        seen=seen,
        status=ended,
        reason=(record.reason if reason is None else reason) or "",
        answer=_answer(seen, decisions, ended, _on_held_out(store, seen) if held_out else {}),
        tree=_tree(hypotheses, seen),
        steps=[_step(each, by_seq.get(each.seq), seen, events) for each in decisions],
        unknown=_unknown(seen),
        best=[Best(view.among, words_of(view.incumbent), _rest(view.aim)) for view in seen.views],
        spent=_spent(seen, calls),
        calls=calls,
        said=[said for said in seen.said if said.kind != UNWRITTEN],
    )


def write_campaign_report(
    store: Store,
    campaign_id: str,
    reports: Path,
    *,
    status: CampaignStatus | None = None,
    reason: str | None = None,
) -> Path:
    """Write report.md and report.html over earlier ones, record their digests, and return their folder."""
    folder = reports / campaign_id
    folder.mkdir(parents=True, exist_ok=True)
    files = rendered(campaign_page(store, campaign_id, status=status, reason=reason))
    for name, text in files.items():
        write_atomically(folder / name, text.encode())
    digests = {name: digest(text.encode()) for name, text in files.items()}
    earlier = store.campaigns.events(campaign_id, REPORT)
    if not earlier or earlier[-1].detail["files"] != digests:
        made_with = {HELD_OUT: True, BEGUN: True, WORDING: campaign_wording()}
        written = {"files": digests, "status": status, "reason": reason, **made_with}
        store.campaigns.record(campaign_id, REPORT, written)
    return folder


def campaign_wording() -> str:
    """Return a digest of the code and templates that determine the report's text."""
    return wording(Path(__file__).parent)


def rendered(page: CampaignPage) -> dict[str, str]:
    """Render the report's texts, by file name."""
    words: dict[str, Any] = {"page": page, "short": short, "effect": effect_text, "levels": words_of}
    return {
        "report.md": tidy(markdown_templates().get_template("campaign.md.jinja").render(**words)),
        "report.html": html_templates().get_template("campaign.html.jinja").render(**words).lstrip(),
    }


def _answer(
    seen: Seen, decisions: Sequence[DecisionRecord], status: CampaignStatus, held_out: Mapping[str, str]
) -> list[str]:
    """Write the answer for each instrument, in a few plain sentences. `held_out` has a sentence about held-out tasks by study."""
    found: list[str] = []
    for view in seen.views:
        first, *others = _found(view, held_out)
        found += [f"On {view.instrument}: {first}" if seen.others else first, *others]
    found += _held(seen)
    if not status.ended:
        found.append("The campaign continues: this is what is known so far.")
    elif decisions and decisions[-1].action == "conclude":
        found.append(_upper(decisions[-1].because))
    return found


def _found(view: View, held_out: Mapping[str, str]) -> list[str]:
    """Describe the confirmed results on one instrument."""
    tested = [study for study in view.studies if study.confirms and StudyStatus(study.status).ended]
    if (best := view.confirmed) is not None:
        return [
            f"{_upper(words_of(view.incumbent))} is the best that was confirmed.",
            f"{effect_text(best.effects[0], view.aim)} ({best.study}, on seeds that no exploration had used).",
            *([held_out[best.study]] if best.study in held_out else []),
        ]
    if not tested:
        return ["Nothing was confirmed, so no claim is made."]
    last = tested[-1]
    came = (
        f"{effect_text(last.effects[0], view.aim)}: {last.verdict}" if last.effects else "The last one gave no verdict"
    )
    return ["Nothing was confirmed to be better than the default.", f"{came} ({last.study}: {_why(last)})."]


def _on_held_out(store: Store, seen: Seen) -> dict[str, str]:
    """Say, by study, how the arms of each instrument's last claim score on held-out tasks. Claims whose metric is not measured in
    training are left out."""
    found: dict[str, str] = {}
    for view in seen.views:
        if (study := view.confirmed) is None:
            continue
        effect, metric = study.effects[0], store.plans.get(study.study).metric(view.aim.metric)
        before = "" if metric.part is None else f"{metric.part}/"
        names = [f"{before}eval_{what}_after" for what in ("success", "reward")]
        done = [t for t in store.trials.all(study.study, series=names) if t.status is TrialStatus.DONE]
        arms = (effect.treatment, effect.baseline)
        scores = held_out_text(metric, {arm: [t.series for t in done if t.arm == arm] for arm in arms})
        found |= {study.study: scores} if scores else {}
    return found


def held_out_text(metric: Metric, arms: Mapping[str, Sequence[Series]]) -> str:
    """Write, as a sentence, the mean score of each arm on held-out tasks after training: accuracy if successes were recorded, else
    reward. Empty if neither was recorded, or if the metric itself is not measured in training.

    `metric` is the claim's. `arms` has the series of finished trials, by arm, the treatment first.
    """
    if not metric.on_training or not all(arms.values()):
        return ""
    for kind, word in _SCORES.items():
        asked = Metric(name=word, kind=kind, margin=metric.margin, role=metric.role)
        try:
            means = {
                arm: math.fsum(finals([asked], series)[word] for series in trials) / len(trials)
                for arm, trials in arms.items()
            }
        except MetricMissing:
            continue
        told = " and ".join(f"{short(mean)} with {arm}" for arm, mean in means.items())
        whose = f" of the {metric.role}" if metric.role else ""
        return f"On average over the same trials, held-out {word}{whose} after training is {told}."
    return ""


def _held(seen: Seen) -> list[str]:
    """Say, for each setting that was confirmed as the best on one instrument, whether it held on the others."""
    if not seen.others:
        return []
    found, told = list[str](), set[str]()
    for view in seen.views:
        levels = view.incumbent
        if levels and key_of(levels) not in told:
            told.add(key_of(levels))
            others = [_held_on(other, view.aim, levels) for other in seen.views if other.aim is not view.aim]
            found.append(f"{_upper(words_of(levels))}, confirmed on {view.instrument}, {', '.join(others)}.")
    return found


def _held_on(view: View, own: Aim, levels: Mapping[str, Scalar]) -> str:
    """Say whether a setting confirmed elsewhere held on this instrument. `levels` are the setting's levels that differ from the
    defaults of `own`, the aim on the instrument that confirmed it."""
    if not view.can_set(levels):
        return f"cannot be set on {view.instrument}"
    wanted = changed(view.aim, levels)
    if not wanted:
        return f"is the default of {view.instrument}"
    tests = [study for study in view.tests(wanted) if StudyStatus(study.status).ended]
    if not tests:
        return f"was not tested on {view.instrument}"
    study = next((each for each in reversed(tests) if each.verdict is not None), tests[-1])
    if study.verdict is None:
        return f"has no verdict on {view.instrument} ({study.study}: {study.unfit or study.reason or study.status})"
    if study.supports:
        return f"held on {view.instrument} too ({study.study})"
    return f"was not confirmed on {view.instrument} ({study.study}: {_why(study) or study.verdict})"


def _why(study: StudySeen) -> str:
    """Say why a confirmation supports no claim."""
    apart = study.verdict is Verdict.SUPPORTED and not study.unfit
    return "compared with neither the default nor the best so far" if apart else study.unfit or study.reason


def _rest(aim: Aim) -> str:
    own = [f"{name} {level_text(level)}" for name, level in aim.settings.items()]
    own += [f"{aim.steps} steps"] if aim.steps is not None else []
    own += [f"model {aim.model}"] if aim.model is not None else []
    told = f" but for what the goal says ({', '.join(own)})" if own else ""
    return f"Every other setting is the default of {aim.instrument}{told}."


def effect_text(effect: EffectSeen, aim: Aim) -> str:
    """Write an effect as a sentence without its full stop."""
    way = "rises" if effect.diff > 0 else "falls"
    moves = f"{way} by {short(abs(effect.diff))}" if effect.diff else "does not change"
    level = f"{100 * effect.level:.4g} %"
    return (
        f"{_upper(aim.metric)} {moves} ({level} CI {short(effect.low)} to {short(effect.high)}) "
        f"with {effect.treatment} against {effect.baseline}"
    )


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]


def short(value: float | None) -> str:
    """Format a number with three significant digits, or None as a dash."""
    return "–" if value is None else f"{value:.3g}"


def _tree(hypotheses: Sequence[HypothesisRecord], seen: Seen) -> list[Branch]:
    """Arrange the hypotheses as a tree, each below its parent."""
    fates = fates_of(hypotheses, seen.studies)
    below: dict[str | None, list[HypothesisRecord]] = {}
    for each in hypotheses:
        below.setdefault(each.parent, []).append(each)
    found: list[Branch] = []

    def add(parent: str | None, depth: int) -> None:
        for each in below.get(parent, []):
            fate, because = fates.get(each.id, (each.status, each.because))
            if each.status == "dropped":
                fate, because = "dropped", each.because
            found.append(Branch(each, depth, "not tested" if fate == "open" else fate, because))
            add(each.id, depth + 1)

    add(None, 0)
    return found


def _step(decision: DecisionRecord, study: StudySeen | None, seen: Seen, events: Sequence[CampaignEvent]) -> Step:
    view = seen.on() if study is None else seen.of(study)
    made = Making.of(events, decision.seq).text() if decision.action == "new_instrument" else ""
    return Step(decision, study, view.aim, "" if study is None else view.among, made, _offers(decision))


def _offers(decision: DecisionRecord) -> list[dict[str, Any]]:
    """Return the proposals, the chosen one first and then by rank, highest first."""
    return sorted(decision.proposals, key=lambda each: (not each["chosen"], -each["rank"]))


def _unknown(seen: Seen) -> list[str]:
    """List the campaign's open questions."""
    found = [line for view in seen.views for line in _not_tried(view)]
    unfit = [f"{study.study} ({study.unfit})" for study in seen.studies if study.unfit]
    found += [f"Results that support no claim: {'; '.join(unfit)}."] if unfit else []
    misled = [study.study for study in seen.studies if any(effect.misleads for effect in study.effects)]
    found += [f"Why held-out tasks got worse where training looked better: {', '.join(misled)}."] if misled else []
    names = " and ".join(f"{name}'s" for name in seen.instruments)
    found.append(f"Whether the answer holds on another model, instrument or length of training than {names}.")
    return found


def _not_tried(view: View) -> list[str]:
    """List the factors and levels that were never tried on one instrument."""
    varied = {name for study in view.studies for arm in study.arms for name in arm.levels}
    idle = [factor.name for factor in view.aim.factors if factor.name not in varied]
    partly = [
        f"{factor.name} at {', '.join(level_text(level) for level in factor.levels if level not in _tried(view, factor.name, factor.default))}"
        for factor in view.aim.factors
        if factor.name in varied and set(factor.levels) - _tried(view, factor.name, factor.default)
    ]
    at = f" on {view.among}" if view.among else ""
    found = [f"Never varied{at}: {', '.join(idle)}."] if idle else []
    return found + ([f"Levels in reach that no trial{at} had: {'; '.join(partly)}."] if partly else [])


def _tried(view: View, name: str, default: Any) -> set[Any]:
    return {default} | {arm.levels[name] for study in view.studies for arm in study.arms if name in arm.levels}


def _spent(seen: Seen, calls: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    llm = sum(call["prompt_tokens"] + call["completion_tokens"] for call in calls)
    wall, trials = sum(study.wall_s for study in seen.studies), sum(study.trials for study in seen.studies)
    left = seen.left
    rows = [
        ("wall time of trials", f"{wall / 60:.1f} min", "" if left.wall_s is None else f"{left.wall_s / 60:.1f} min"),
        ("trials", str(trials), "" if left.trials is None else str(left.trials)),
        ("tokens of the strategist's LLM", str(llm), "" if left.llm_tokens is None else f"{left.llm_tokens:.0f}"),
    ]
    if tokens := sum(study.tokens for study in seen.studies):
        rows.append(("tokens of agents' calls", f"{tokens:.0f}", "" if left.tokens is None else f"{left.tokens:.0f}"))
    return rows
