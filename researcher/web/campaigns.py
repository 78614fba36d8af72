"""Content of the campaigns' pages: the list, and one campaign. `researcher.campaign.report` provides a campaign's results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from researcher.attendance import of_campaign
from researcher.campaign.new_instrument import Making
from researcher.campaign.people import acts_on_words, open_question
from researcher.campaign.records import left_alone
from researcher.campaign.report import Branch, CampaignPage, Step, campaign_page
from researcher.campaign.seen import StudySeen, View
from researcher.home import Home
from researcher.instruments.levels import level_text
from researcher.models import SPOKEN, CampaignEvent, CampaignRecord, CampaignStatus, StudyStatus
from researcher.store.errors import owner_text
from researcher.view import duration
from researcher.web import campaign_drawings
from researcher.web.campaign_drawings import Bar, EffectRow
from researcher.web.sheets import Sheets, SpendingPart

_JOURNAL = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class CampaignLine:
    """A campaign's line in the list."""

    record: CampaignRecord
    studies: int
    asks: bool
    """True if the campaign waits for a person."""
    unattended: str
    """Who will continue a campaign that has no worker; else ""."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectsPart:
    """Drawing of the effects on one instrument.

    `on` is the instrument's name if the campaign has several, else "". `left_out` is the number of earlier effects that are not drawn.
    """

    on: str
    drawing: str
    left_out: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CampaignSheet:
    """Everything that one campaign's page shows."""

    page: CampaignPage
    worker: str
    asks: str
    """What the campaign needs from a person: `approval` of the newest decision's study, or `words`; else ""."""
    study_waits: bool
    """True if the newest decision's study has not ended and can therefore be vetoed."""
    testing: str
    """Hypothesis that the newest decision's study tests; "" if it has none."""
    files: list[tuple[str, str]]
    """Names and texts of the files of a new instrument that waits for approval."""
    next: Step | None
    """The newest decision."""
    earlier: list[Step]
    """The other decisions, newest first."""
    timeline: str
    axis: str
    """Unit of the timeline's axis: `wall time` or `trials`."""
    effects: list[EffectsPart]
    """Drawings of effects, one for each instrument that has any."""
    spending: list[SpendingPart]
    said: list[CampaignEvent]
    """Messages from people, newest first."""
    reported: bool
    can_resume: bool
    example: str
    """An example, in YAML, of a study that a person may request."""
    left_alone: str
    """Factors that people want to keep fixed."""
    acts_on_words: bool
    """True if an LLM leads the campaign, so that it can act on messages."""

    @property
    def record(self) -> CampaignRecord:
        return self.page.record

    def fate(self, branch: Branch) -> str:
        """Return how a hypothesis fared; `being tested` while its study runs."""
        return "being tested" if branch.hypothesis.id == self.testing else branch.fate


class CampaignSheets:
    """Reads what the pages show. Thread-safe."""

    def __init__(self, home: Home, sheets: Sheets) -> None:
        self._home = home
        self._store = home.store
        self._sheets = sheets

    def campaigns(self) -> list[CampaignLine]:
        """Return the list of campaigns, newest first."""
        return self._sheets.shared(
            "list of campaigns", lambda: [self._line(each) for each in self._store.campaigns.all()]
        )

    def campaign(self, campaign_id: str) -> CampaignSheet:
        """Return one campaign. Raises: NotFound."""
        return self._sheets.shared(campaign_id, lambda: self._campaign(campaign_id))

    def forget(self, campaign_id: str) -> None:
        """Drop the cached content of this campaign after changing it."""
        self._sheets.forget(campaign_id)

    def _line(self, record: CampaignRecord) -> CampaignLine:
        asked = None if record.status.ended else open_question(self._store.campaigns.events(record.id))
        return CampaignLine(
            record=record,
            studies=self._store.campaigns.studies(record.id),
            asks=asked is not None,
            unattended=self._unattended(record, asked is not None),
        )

    def _campaign(self, campaign_id: str) -> CampaignSheet:
        page = campaign_page(self._store, campaign_id)
        record, steps = page.record, page.steps
        events = self._store.campaigns.events(campaign_id)
        asked = None if record.status.ended else open_question(events)
        newest = steps[-1] if steps else None
        owner = None if record.status.ended else self._home.worker(campaign_id)
        running = newest is not None and newest.study is not None and not StudyStatus(newest.study.status).ended
        waits = running and not record.status.ended
        return CampaignSheet(
            page=page,
            worker=f"worked on by {owner_text(owner)}" if owner else self._unattended(record, asked is not None),
            asks="" if asked is None else str(asked.detail["needs"]),
            study_waits=waits,
            testing=(newest.decision.hypothesis or "") if waits and newest else "",
            files=_files(events, newest) if asked is not None else [],
            next=newest,
            earlier=steps[-2::-1],
            timeline=_timeline(page),
            axis="trials" if _counts_trials(page) else "wall time",
            effects=[_effects(view) for view in page.seen.views if any(study.effects for study in view.studies)],
            spending=_spending(page),
            said=[each for each in reversed(events) if each.kind in SPOKEN][:_JOURNAL],
            reported=(self._home.studies / campaign_id / "report.html").is_file(),
            can_resume=_can_resume(record, owner),
            example=_example(page),
            left_alone=", ".join(left_alone(events)),
            acts_on_words=acts_on_words(record, [step.decision for step in steps]),
        )

    def _unattended(self, record: CampaignRecord, asks: bool) -> str:
        """Say who will continue the campaign; "" if it has a worker or has ended."""
        if record.status.ended or self._home.worker(record.id):
            return ""
        return of_campaign(self._home, record, asks=asks).text


_MOST_EFFECTS = 40


def _files(events: Sequence[CampaignEvent], newest: Step | None) -> list[tuple[str, str]]:
    """Return names and texts of the files of the instrument that was written for the newest decision."""
    if newest is None:
        return []
    making = Making.of(events, newest.decision.seq)
    return list(making.outcome.detail["files"].items()) if making.waits and making.outcome is not None else []


def _example(page: CampaignPage) -> str:
    factor = page.seen.aim.factors[0]
    levels = ", ".join(level_text(level) for level in factor.levels if level != factor.default)
    on = f"instrument: {page.seen.aim.instrument}\n" if page.seen.others else ""
    return f"{on}compare: {{{factor.name}: {{levels: [{levels}]}}}}\nseeds: {{min: 3}}\n"


def _effects(view: View) -> EffectsPart:
    """Draw all effects on one instrument so far, in the order of decisions. Each instrument has its own margin and metric."""
    rows = [
        EffectRow(
            seq=study.seq,
            text=f"{effect.treatment} against {effect.baseline}",
            diff=effect.diff,
            low=effect.low,
            high=effect.high,
            confirms=study.confirms,
            verdict="" if effect.verdict is None else effect.verdict.value,
        )
        for study in view.studies
        for effect in study.effects
    ]
    return EffectsPart(
        on=view.among,
        drawing=campaign_drawings.effects(rows[-_MOST_EFFECTS:], view.aim.margin, view.aim.metric),
        left_out=max(0, len(rows) - _MOST_EFFECTS),
    )


def _counts_trials(page: CampaignPage) -> bool:
    """True if the budget limits only trials, not wall time."""
    return page.seen.left.wall_s is None


def _timeline(page: CampaignPage) -> str:
    left, trials = page.seen.left, _counts_trials(page)

    def spent(study: StudySeen) -> float:
        return float(study.trials) if trials else study.wall_s

    studies: Sequence[StudySeen] = page.seen.studies
    bars = [
        Bar(seq=each.seq, action=each.action, confirms=each.confirms, spent=spent(each), status=each.status)
        for each in studies
    ]
    rest = float(left.trials or 0) if trials else float(left.wall_s or 0.0)
    reserved = min(rest, left.reserved_trials if trials else left.reserved_wall_s)
    return campaign_drawings.timeline(bars, left=rest, reserved=reserved, in_seconds=not trials)


def _spending(page: CampaignPage) -> list[SpendingPart]:
    """Return, for every limit, the amounts spent, left, and reserved for confirmations."""
    left, studies = page.seen.left, page.seen.studies
    calls = page.calls
    llm_tokens = sum(call["prompt_tokens"] + call["completion_tokens"] for call in calls)
    rows: list[tuple[str, float, float | None, float, Any]] = [
        ("wall time", sum(each.wall_s for each in studies), left.wall_s, left.reserved_wall_s, duration),
        ("trials", sum(each.trials for each in studies), left.trials, left.reserved_trials, _number),
        ("tokens of agents' calls", sum(each.tokens for each in studies), left.tokens, 0.0, _number),
        ("tokens of the strategist's LLM", llm_tokens, left.llm_tokens, 0.0, _number),
        ("money for the strategist's LLM", sum(call["cost"] or 0.0 for call in calls), left.money, 0.0, _number),
    ]
    parts = []
    for name, spent, rest, reserved, words in rows:
        if rest is None and not spent:
            continue
        text = f"{words(spent)} spent" + ("" if rest is None else f", {words(rest)} left")
        text += f", {words(min(reserved, rest or 0.0))} of that reserved for confirmations" if reserved and rest else ""
        share = None if rest is None else spent / (spent + rest) if spent + rest else 1.0
        parts.append(SpendingPart(name=name, text=text, share=share))
    return parts


def _number(value: float) -> str:
    return f"{value:g}" if value < 1e6 else f"{value / 1e6:.3g} M"


def _can_resume(record: CampaignRecord, owner: str | None) -> bool:
    """True if `resume` can continue the campaign: it was paused or stopped, it failed, or it has neither a worker nor a daemon."""
    if record.status.ended:
        return record.status is not CampaignStatus.DONE
    asked = record.pause_requested or record.stop_requested
    return asked or (owner is None and not record.schedule.get("carried"))
